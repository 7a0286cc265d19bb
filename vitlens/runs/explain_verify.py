"""`vitlens explain --verify`: the league of methods for one model and some images, kept in the run's folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy, answers
from vitlens.analysis.answers.paired import estimates as estimates_of
from vitlens.analysis.faithfulness.counterfactual import by_search
from vitlens.analysis.faithfulness.league import MethodChecks, Settings, checks_in, league
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.attribution.explain import explain, methods_for, require_method
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.runs.explain_verdict import league_row, masked_groups
from vitlens.runs.explain_verify_more import SEARCHED, keep_agreement, keep_counterfactuals, named, shares_gone
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class _Column:
    """One number an image and method, to be averaged: a metric's name without the method, values (methods, n)."""

    name: str
    values: Tensor
    groups: Tensor | None
    unit: str = "fraction"


def keep_league(
    folder: RunFolder,
    model: Model,
    split: Split,
    targets: Tensor | None,
    *,
    methods: Sequence[str] | None = None,
    alias: str | None = None,
    made: Mapping[str, tuple[Tensor, float]] | None = None,
    settings: Settings | None = None,
    engine: Engine = "vitlens",
    options: RunOptions,
) -> dict[str, list[dict[str, object]]]:
    """Run every check on every method and write metrics and arrays of the league into a run's folder.

    targets: class indices (n,), None: the predictions; methods: names of the registry (None: all that the model
    has); alias: of the model, where the run has several; made: maps that are there already, with the seconds an
    image took. Returns the rows of the tables league, league_settings and agreement, to be kept beside those of other
    models; `tell_league` and `draw_league` make sections and figures of all that. Raises UnsupportedError or
    UnknownNameError before any work.
    """
    names = tuple(methods or methods_for(model, engine=engine))
    for name in names:
        require_method(model, name, engine=engine)
    settings = settings or Settings(seed=options.seed, batch_size=options.batch_size)
    require_substrate(model, settings.substrate)
    images = torch.cat([batch.images for batch in split.batches(256, device=model.device)])
    if targets is None:
        targets = answers(model, split, batch_size=options.batch_size).argmax(-1)
    asked = targets.to(model.device)
    masks = None if split.masks is None else split.masks.to(model.device)
    functions: dict[str, Explain] = {name: _explain(name, settings, engine) for name in names}
    with progress("Checking explanations", checks_in(len(names)), unit="checks", quiet=options.quiet) as advance:
        marks = league(model, images, asked, functions, masks=masks, made=made, settings=settings, advance=advance)
    some = min(SEARCHED, len(images)) if settings.counterfactuals else 0
    searched = by_search(model, images[:some], substrate=settings.substrate) if some else None
    tables = {
        "league": _keep_numbers(folder, marks, split, settings, alias),
        "agreement": keep_agreement(folder, marks, model, split, alias),
        "league_settings": [{**asdict(settings), "images": len(split), "randomised": _randomised(marks)}],
    }
    keep_counterfactuals(folder, marks, searched, split, model, alias)
    shares = marks[0].fidelity.deletion.shares
    folder.arrays(
        f"league-{model.alias}",
        methods=np.array([mark.name for mark in marks]),
        shares=shares.numpy(),
        inserted=marks[0].fidelity.insertion.shares.numpy(),
        deletion=np.stack([mark.fidelity.deletion.probability.mean(0).numpy() for mark in marks]),
        insertion=np.stack([mark.fidelity.insertion.probability.mean(0).numpy() for mark in marks]),
    )
    for row in (row for rows in tables.values() for row in rows):
        row["model"] = model.alias
    return tables


def _explain(name: str, settings: Settings, engine: Engine) -> Explain:
    def maps(model: Model, images: Tensor, targets: Tensor) -> Tensor:
        size, seed = settings.batch_size, settings.seed
        return explain(model, images, targets=targets, method=name, engine=engine, batch_size=size, seed=seed)

    return maps


def _keep_numbers(
    folder: RunFolder, marks: Sequence[MethodChecks], split: Split, settings: Settings, alias: str | None
) -> list[dict[str, object]]:
    """The metrics of every method; the rows of the league with their verdicts, the most faithful first."""
    estimates: dict[str, dict[str, Estimate]] = {mark.name: {} for mark in marks}
    for column in _columns(marks, split):
        for mark, found in zip(marks, estimates_of(column.values, groups=column.groups, unit=column.unit)):
            estimates[mark.name][column.name] = found
    groups = masked_groups(split)
    for mark in marks:
        own = estimates[mark.name]
        if "pointing" in mark.scores:
            own["localisation/pointing"] = accuracy(mark.scores["pointing"] > 0.5, groups=groups)
        if mark.randomisation is not None and len(mark.randomisation.last):
            own["randomisation"] = mark.randomisation.estimate(seed=settings.seed)
        own["cost/seconds"] = Estimate(mark.seconds, n=len(mark.maps), unit="s")
        if mark.forwards is not None:
            own["cost/forwards"] = Estimate(mark.forwards, unit="forwards")
        for name, estimate in own.items():
            folder.metric(named(name, mark.name, alias), estimate)
    rows = [league_row(mark, marks, estimates, split) for mark in marks]
    return sorted(rows, key=lambda row: -float(str(row["gap"])))


def _columns(marks: Sequence[MethodChecks], split: Split) -> list[_Column]:
    """What is averaged over images, for all methods at once: one draw of the images serves all."""

    def column(name: str, read: Callable[[MethodChecks], Tensor], groups: Tensor | None = split.groups) -> _Column:
        return _Column(name, torch.stack([read(mark).float() for mark in marks]), groups)

    found = [
        column("faithfulness/deletion", lambda mark: mark.fidelity.deletion.areas),
        column("faithfulness/insertion", lambda mark: mark.fidelity.least_first.areas),
        column("faithfulness/gap", lambda mark: mark.fidelity.gaps),
        column("faithfulness/deletion_accuracy", lambda mark: mark.fidelity.deletion.kept_areas),
        column("faithfulness/insertion_accuracy", lambda mark: mark.fidelity.least_first.kept_areas),
    ]
    if all(mark.road is not None for mark in marks):
        found.append(column("faithfulness/road", lambda mark: mark.road.gaps))  # type: ignore[union-attr]
    if all(mark.counterfactuals is not None for mark in marks):
        found.append(column("counterfactual/size", lambda mark: shares_gone(mark.counterfactuals)))  # type: ignore[arg-type]
    if split.masks is not None:
        masked = masked_groups(split)
        for name in marks[0].scores:
            if name != "pointing":
                found.append(column(f"localisation/{name}", lambda mark, name=name: mark.scores[name], masked))  # type: ignore[misc]
    return found


def _randomised(marks: Sequence[MethodChecks]) -> int:
    return max((len(mark.randomisation.last) for mark in marks if mark.randomisation is not None), default=0)
