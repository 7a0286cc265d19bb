"""The attribution methods of `vitlens compare`: candidates, their checks, and the best one of each
model.
"""

from collections.abc import Sequence
from typing import Final

import torch

from vitlens.analysis.evaluation.evaluate import fitting_batch_size, predicted_logits
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import CHECKS, Settings, league
from vitlens.analysis.faithfulness.maps import Explain
from vitlens.attribution.explain import explain, preferred_methods, require_method
from vitlens.attribution.registry import attribution
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.maps.measure import CheckedMaps
from vitlens.commands.shared.maps.record import MapCheckRow, judged_maps
from vitlens.data.identity import sources
from vitlens.data.split import Split, balanced
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

_PREFERRED: Final = 2  # methods of a model's family that are checked
_STEPS: Final = 8  # steps of the removal curves; `vitlens explain` takes 20


def candidate_methods(requested: Sequence[str], models: Sequence[Model]) -> list[tuple[str, ...]]:
    """Return the methods that are checked for each model.

    Raises InputError for more than two, UnknownNameError and UnsupportedError like the registry.

    requested: the methods of --method: one for both models, or one for each. If there are none, the
        preferred ones of each family are checked.
    """
    if len(requested) > 2:
        raise InputError(
            f"expected --method A or A,B (the first model's, the second's), found {len(requested)} "
            "methods"
        )
    for name in requested:
        attribution(name)
    candidates: list[tuple[str, ...]] = []
    for index, model in enumerate(models):
        if requested:
            # the last one is for both models if there is only one
            candidates.append((requested[min(index, len(requested) - 1)],))
        else:
            candidates.append(tuple(preferred_methods(model, _PREFERRED)))
    for model, names in zip(models, candidates):
        for name in names:
            require_method(model, name)
    return candidates


def check_methods(
    run: Run[CompareOptions], model: Model, split: Split, methods: Sequence[str]
) -> tuple[MapCheckRow, ...]:
    """Check the methods of a model on a seeded, class-balanced subset of at most --checked images.

    The maps explain the logit of the target class. Without --checked there are no rows.
    """
    if run.options.checked == 0:
        return ()
    options = run.run_options
    indices = balanced(len(split), split.labels, run.options.checked, options.seed)
    subset = split.pick(indices)
    batch_size = options.batch_size or fitting_batch_size(model)
    images = torch.cat([batch.images for batch in subset.batches(batch_size, device=model.device)])
    all_targets = chosen_targets(run.options.target, model, split)
    if all_targets is None:  # the predictions
        targets = predicted_logits(model, subset, batch_size=batch_size).argmax(-1)
    else:
        targets = all_targets[indices]
    targets = targets.to(model.device)
    functions = {name: _explainer(name, options) for name in methods}
    settings = Settings(
        steps=_STEPS, counterfactuals=False, seed=options.seed, batch_size=batch_size
    )
    count = CHECKS * (len(methods) + len(BASELINES))
    with run.progress(f"checking maps of {model.alias}", count, "checks") as advance:
        results = league(model, images, targets, functions, settings=settings, advance=advance)
    checked_maps = CheckedMaps(
        model=model,
        images=images,
        targets=targets,
        functions=functions,
        results=results,
        settings=settings,
        groups=subset.groups,
        sources=sources(subset),
        quiet=options.quiet,
    )
    return tuple(checked_maps.rows())


def _explainer(method: str, options: RunOptions) -> Explain:
    """Return a function that explains images by a method with the settings of the run."""

    def explain_targets(model: Model, images: Images, targets: Labels) -> Maps:
        return explain(
            model,
            images,
            targets=targets,
            method=method,
            batch_size=options.batch_size,
            seed=options.seed,
        )

    return explain_targets


def best_method(candidates: Sequence[str], checks: Sequence[MapCheckRow]) -> str:
    """Return the method with the best verdict; among equal verdicts, the highest ROAD decides.

    Without checks, or if no verdict is better than inconclusive, it is the preferred method, which
    is the first candidate and the first checked.
    """
    if not checks:
        return candidates[0]
    best = judged_maps(checks)[0]  # sorted by verdict, then by ROAD
    if best.state in ("pass", "warn"):
        return best.method
    return checks[0].method
