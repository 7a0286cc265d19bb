"""Every check on every method, for one model and its images: rows, metrics and curves of the league."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy, answers
from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.faithfulness.agreement import map_iou, spearman, top_overlap
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks, Settings, checks_in, league
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.analysis.faithfulness.resampled import on_grid, removal_grid
from vitlens.attribution.explain import explain, methods_for, require_method
from vitlens.commands.explain.measure.counterfactuals import searched_sets, set_shares, write_counterfactuals
from vitlens.commands.explain.measure.verdict import evidence, masked_groups, verdict
from vitlens.commands.explain.record import (
    AGREEMENT,
    CHECKS,
    CURVES,
    FORWARDS,
    SECONDS,
    LeagueArrays,
    LeagueRow,
    LeagueSettingsRow,
    MethodAgreementRow,
)
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import Engine
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class CheckedMethods:
    """The rows of one model: the league, the greatest insertion minus deletion first; pairs of methods; settings."""

    league: tuple[LeagueRow, ...]
    agreements: tuple[MethodAgreementRow, ...]
    settings: LeagueSettingsRow


def check_methods(
    folder: RunFolder,
    model: Model,
    split: Split,
    targets: Tensor | None,
    *,
    methods: Sequence[str] | None = None,
    made: Mapping[str, tuple[Tensor, float]] | None = None,
    settings: Settings | None = None,
    engine: Engine = "vitlens",
    options: RunOptions,
) -> CheckedMethods:
    """Run every check on every method and write metrics and arrays; returns the rows.

    targets: class indices (n,), None: the predictions; methods: names of the registry (None: all that are defined for
    the model); made: maps that were computed before, with the seconds for each image. Raises UnsupportedError or
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
    classes = targets.to(model.device)
    masks = None if split.masks is None else split.masks.to(model.device)
    functions: dict[str, Explain] = {name: _function(name, settings, engine) for name in names}
    with progress("Checking explanations", checks_in(len(names)), unit="checks", quiet=options.quiet) as advance:
        checked = league(
            model, images, classes, functions, masks=masks, computed=made, settings=settings, advance=advance
        )
    searched = searched_sets(model, images, settings) if settings.counterfactuals else None
    rows = _league_rows(folder, checked, split, settings, model.alias)
    agreements = _agreement_rows(folder, checked, model, split)
    if searched is not None:
        write_counterfactuals(folder, checked, searched, split, model)
    folder.save(CURVES, _curves(checked), model=model.alias)
    used = LeagueSettingsRow(model.alias, **asdict(settings), images=len(split), randomised=_randomised(checked))
    return CheckedMethods(rows, agreements, used)


def _function(name: str, settings: Settings, engine: Engine) -> Explain:
    def maps(model: Model, images: Tensor, targets: Tensor) -> Tensor:
        size, seed = settings.batch_size, settings.seed
        return explain(model, images, targets=targets, method=name, engine=engine, batch_size=size, seed=seed)

    return maps


def _curves(checked: Sequence[MethodChecks]) -> LeagueArrays:
    return LeagueArrays(
        methods=np.array([one.name for one in checked]),
        shares=checked[0].fidelity.deletion.shares.numpy(),
        inserted=checked[0].fidelity.insertion.shares.numpy(),
        deletion=np.stack([one.fidelity.deletion.probability.mean(0).numpy() for one in checked]),
        insertion=np.stack([one.fidelity.insertion.probability.mean(0).numpy() for one in checked]),
    )


def _randomised(checked: Sequence[MethodChecks]) -> int:
    """The number of images of the randomisation check."""
    return max((len(one.randomisation.last) for one in checked if one.randomisation is not None), default=0)


def _league_rows(
    folder: RunFolder, checked: Sequence[MethodChecks], split: Split, settings: Settings, alias: str
) -> tuple[LeagueRow, ...]:
    """The metrics of every method, and its row, the greatest insertion minus deletion first."""
    means = _estimates(checked, split, settings)
    for one in checked:
        for column, estimate in means[one.name].items():
            folder.metric(CHECKS[column](model=alias, method=one.name), estimate)
        folder.metric(SECONDS(model=alias, method=one.name), Estimate(one.seconds, n=len(one.maps), unit="s"))
        if one.forwards is not None:
            folder.metric(FORWARDS(model=alias, method=one.name), Estimate(one.forwards, unit="forwards"))
    by_name = {one.name: one for one in checked}
    rows = [_league_row(alias, one, means[one.name], by_name, split) for one in checked]
    return tuple(sorted(rows, key=lambda row: -row.gap))


def _league_row(
    alias: str, checks: MethodChecks, means: Mapping[str, Estimate], by_name: Mapping[str, MethodChecks], split: Split
) -> LeagueRow:
    columns = {column: round(means[column].value, 6) if column in means else None for column in CHECKS}
    baseline = checks.name in BASELINES
    result = None if baseline else evidence(checks, by_name, split)
    return LeagueRow(
        model=alias,
        method=checks.name,
        baseline=baseline,
        **columns,  # type: ignore[arg-type]
        by_stage=_by_stage(checks),
        seconds=checks.seconds,
        forwards=checks.forwards,
        faults=checks.faults.words,
        flagged=result is not None and result.flagged,
        verdict="does not depend on the model" if result is None else verdict(result),
    )


def _by_stage(checks: MethodChecks) -> dict[str, float | None] | None:
    if checks.randomisation is None:
        return None
    means = checks.randomisation.correlation.nanmean(1).tolist()
    return {
        name: None if np.isnan(value) else round(value, 4) for name, value in zip(checks.randomisation.stages, means)
    }


def _estimates(checked: Sequence[MethodChecks], split: Split, settings: Settings) -> dict[str, dict[str, Estimate]]:
    """The mean of every check with its interval, by method and column of the league."""
    means: dict[str, dict[str, Estimate]] = {one.name: {} for one in checked}
    for column, values, groups in _columns(checked, split):
        for one, estimate in zip(checked, estimates(values, groups=groups, unit="fraction")):
            means[one.name][column] = estimate
    groups = masked_groups(split)
    for one in checked:
        if "pointing" in one.scores:
            means[one.name]["pointing"] = accuracy(one.scores["pointing"] > 0.5, groups=groups)
        if one.randomisation is not None and len(one.randomisation.last):
            means[one.name]["randomisation"] = one.randomisation.estimate(seed=settings.seed)
    return means


def _columns(checked: Sequence[MethodChecks], split: Split) -> list[tuple[str, Tensor, Tensor | None]]:
    """Columns that are averaged over images, with values (methods, n) and groups; methods share bootstrap draws."""

    def values(read: Callable[[MethodChecks], Tensor]) -> Tensor:
        return torch.stack([read(one).float() for one in checked])

    columns = {
        "deletion": values(lambda one: one.fidelity.deletion.areas),
        "insertion": values(lambda one: one.fidelity.least_first.areas),
        "gap": values(lambda one: one.fidelity.gaps),
        "deletion_accuracy": values(lambda one: one.fidelity.deletion.kept_areas),
        "insertion_accuracy": values(lambda one: one.fidelity.least_first.kept_areas),
    }
    if all(one.road is not None for one in checked):
        columns["road"] = values(lambda one: one.road.gaps)  # type: ignore[union-attr]
    if all(one.counterfactuals is not None for one in checked):
        columns["size"] = values(lambda one: set_shares(one.counterfactuals))  # type: ignore[arg-type]
    scores = {
        name: values(lambda one, name=name: one.scores[name])  # type: ignore[misc]
        for name in checked[0].scores
        if name != "pointing"
    }
    masked = masked_groups(split)
    return [
        *((name, column, split.groups) for name, column in columns.items()),
        *((name, column, masked) for name, column in scores.items()),
    ]


def _agreement_rows(
    folder: RunFolder, checked: Sequence[MethodChecks], model: Model, split: Split
) -> tuple[MethodAgreementRow, ...]:
    """How similar the maps of each pair of methods are, on the grid of the checks; writes Spearman's correlation.

    A constant map has no ranks: its correlation with any other counts as 0.
    """
    grid = removal_grid(model)
    maps = {one.name: on_grid(one.maps, grid) for one in checked if one.name not in BASELINES}
    pairs = list(combinations(maps, 2))
    if not pairs:
        return ()
    measures = {"spearman": spearman, "top_overlap": top_overlap, "iou": map_iou}
    columns: dict[str, list[Estimate]] = {}
    for name, measure in measures.items():
        values = torch.stack([measure(maps[first], maps[second]).nan_to_num(0.0) for first, second in pairs])
        columns[name] = estimates(values, groups=split.groups, unit="" if name == "spearman" else "fraction")
    rows = []
    for place, (first, second) in enumerate(pairs):
        folder.metric(AGREEMENT(model=model.alias, first=first, second=second), columns["spearman"][place])
        means = {name: round(column[place].value, 4) for name, column in columns.items()}
        rows.append(MethodAgreementRow(model.alias, first, second, **means, n=len(split)))
    return tuple(rows)
