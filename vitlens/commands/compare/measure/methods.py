"""The attribution method of each model's maps: those that were asked for, or the best of a few that are checked."""

from collections.abc import Sequence
from typing import Final

import torch

from vitlens.analysis.answers.evaluate import answers, fitting_batch_size
from vitlens.analysis.faithfulness.league import Settings, checks_in, league
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.attribution.explain import explain, preferred_methods, require_method
from vitlens.attribution.registry import attribution
from vitlens.commands.compare.measure.maps import sample
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.maps.judged import judged_maps
from vitlens.commands.shared.maps.measured import map_checks
from vitlens.commands.shared.maps.rows import MapCheck
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps

CANDIDATES: Final = 2  # methods of a model of which the best is taken
STEPS: Final = 8  # of the removal curves; vitlens explain has 20


def candidates(method: Sequence[str], models: Sequence[Model]) -> tuple[tuple[str, ...], ...]:
    """The methods of each model that are checked: the one of `method`, or the first and second of two, else the
    preferred ones of its family.

    Raises InputError for more than two, UnknownNameError and UnsupportedError as the registry does.
    """
    if len(method) > 2:
        raise InputError(f"expected --method A or A,B (the first model's, the second's), found {len(method)} methods")
    for name in method:
        attribution(name)
    chosen = (
        [(name,) for name in [*method, *method][:2]] if method else [preferred_methods(m, CANDIDATES) for m in models]
    )
    for model, names in zip(models, chosen):
        for name in names:
            require_method(model, name)
    return tuple(chosen)


def checked_methods(
    model: Model, split: Split, names: Sequence[str], *, most: int, target: str, options: RunOptions
) -> tuple[MapCheck, ...]:
    """The checks of a model's methods on a seeded, class-balanced subset of at most so many images, of the target
    class's logit."""
    chosen = sample(split, most, seed=options.seed)
    part = split.pick(chosen)
    size = options.batch_size or fitting_batch_size(model)
    images = torch.cat([batch.images for batch in part.batches(size, device=model.device)])
    targets = chosen_targets(target, model, split)
    classes = answers(model, part, batch_size=size).argmax(-1) if targets is None else targets[chosen]
    functions: dict[str, Explain] = {name: _function(name, options) for name in names}
    settings = Settings(steps=STEPS, counterfactuals=False, seed=options.seed, batch_size=size)
    with progress(
        f"checking maps of {model.alias}", checks_in(len(names)), unit="checks", quiet=options.quiet
    ) as advance:
        checked = league(model, images, classes.to(model.device), functions, settings=settings, advance=advance)
    rows = map_checks(checked, model.alias, groups=part.groups, seed=options.seed)
    return tuple(rows[name] for name in names)


def best_method(checks: Sequence[MapCheck]) -> str:
    """The method of the best verdict, then of the greatest ROAD; where no verdict is better than
    inconclusive, the first, which is the preferred one."""
    best = judged_maps(checks)[0]
    return best.check.method if best.state in ("pass", "warn") else checks[0].method


def _function(name: str, options: RunOptions) -> Explain:
    def maps(model: Model, images: Images, targets: Labels) -> Maps:
        return explain(model, images, targets=targets, method=name, batch_size=options.batch_size, seed=options.seed)

    return maps
