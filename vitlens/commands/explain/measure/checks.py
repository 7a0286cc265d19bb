"""Every check on every method, for one model and its images: rows, metrics and curves of the league."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.faithfulness.agreement import map_iou, spearman, top_overlap
from vitlens.analysis.faithfulness.counterfactual import Counterfactuals, by_search
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks, Settings, checks_in, league
from vitlens.analysis.faithfulness.localisation import pointing_rate
from vitlens.analysis.faithfulness.resampled import on_grid, removal_grid
from vitlens.commands.explain.measure.subject import Subject
from vitlens.commands.explain.measure.verdict import Evidence, evidence, masked_groups, verdict
from vitlens.commands.explain.record import (
    AGREEMENT,
    CHECKS,
    COUNTERFACTUALS,
    CURVES,
    FORWARDS,
    SEARCH,
    SECONDS,
    SIZE_SEARCHED,
    TURNED,
    CounterfactualArrays,
    LeagueArrays,
    LeagueRow,
    LeagueSettingsRow,
    MethodAgreementRow,
)
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.shared.maps.measured import map_checks, on_object_rows
from vitlens.commands.shared.maps.on_object import OnObjectRow
from vitlens.data.identity import sources
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.uncertainty import Estimate

SEARCHED: Final = 32  # images of the greedy search, at most
_DRAWN: Final = 5  # images whose counterfactuals are drawn
_UNITS: Final = {"relevance_gain": "logits"}  # of columns that are no fractions


@dataclass(frozen=True)
class CheckedMethods:
    """The rows of one model: the league, the best first; pairs of methods; settings;
    on_object: ROC-AUC, mass and pointing of each method, where masks are known; results: of the checks, image by image.
    """

    league: tuple[LeagueRow, ...]
    agreements: tuple[MethodAgreementRow, ...]
    settings: LeagueSettingsRow
    on_object: list[OnObjectRow]
    results: tuple[MethodChecks, ...]


def check_methods(
    folder: RunFolder,
    checked: Subject,
    *,
    made: Mapping[str, tuple[Tensor, float]] | None = None,
    options: RunOptions,
) -> CheckedMethods:
    """Run every check on every method and write metrics and arrays; returns the rows.

    made: maps that were computed before, with the seconds for each image.
    """
    model, split, settings, images = checked.model, checked.split, checked.settings, checked.images
    total = checks_in(len(checked.functions))
    with progress("Checking explanations", total, unit="checks", quiet=options.quiet) as advance:
        results = league(
            model,
            images,
            checked.classes,
            checked.functions,
            masks=checked.masks,
            computed=made,
            settings=settings,
            advance=advance,
        )
    searched = _searched_sets(model, images, settings) if settings.counterfactuals else None
    on_object = _on_object_rows(checked, results)
    rows = _league_rows(folder, results, split, on_object, settings, model.alias)
    agreements = _agreement_rows(folder, results, model, split)
    if searched is not None:
        _write_counterfactuals(folder, results, searched, split, model)
    folder.save(CURVES, _curves(results), model=model.alias)
    used = LeagueSettingsRow(model.alias, **asdict(settings), images=len(split), randomised=_randomised(results))
    return CheckedMethods(rows, agreements, used, on_object, results)


def _curves(checked: Sequence[MethodChecks]) -> LeagueArrays:
    return LeagueArrays(
        methods=np.array([checks.name for checks in checked]),
        shares=checked[0].fidelity.deletion.shares.numpy(),
        inserted=checked[0].fidelity.insertion.shares.numpy(),
        deletion=np.stack([checks.fidelity.deletion.probability.mean(0).numpy() for checks in checked]),
        insertion=np.stack([checks.fidelity.insertion.probability.mean(0).numpy() for checks in checked]),
    )


def _randomised(checked: Sequence[MethodChecks]) -> int:
    """The number of images of the randomisation check."""
    return max((len(checks.randomisation.last) for checks in checked if checks.randomisation is not None), default=0)


def _league_rows(
    folder: RunFolder,
    checked: Sequence[MethodChecks],
    split: Split,
    on_object: Sequence[OnObjectRow],
    settings: Settings,
    alias: str,
) -> tuple[LeagueRow, ...]:
    """The metrics of every method, and its row, the best first: by ROAD, or insertion minus deletion without it."""
    means = _estimates(checked, split, settings)
    for checks in checked:
        for column, estimate in means[checks.name].items():
            folder.metric(CHECKS[column](model=alias, method=checks.name), estimate)
        folder.metric(SECONDS(model=alias, method=checks.name), Estimate(checks.seconds, n=len(checks.maps), unit="s"))
        if checks.forwards is not None:
            folder.metric(FORWARDS(model=alias, method=checks.name), Estimate(checks.forwards, unit="forwards"))
    by_name = {checks.name: checks for checks in checked}
    rows = map_checks(checked, alias, groups=split.groups, seed=settings.seed)
    localised = {row.maps: row for row in on_object if row.score == "roc_auc"}
    league_rows = []
    for checks in checked:
        name = checks.name
        found = None if name in BASELINES else evidence(checks, by_name, split.groups, localised.get(name))
        league_rows.append(replace(_league_row(alias, checks, means[name], found), check=rows.get(name)))
    return tuple(sorted(league_rows, key=lambda row: -(row.gap if row.road is None else row.road)))


def _on_object_rows(checked: Subject, results: Sequence[MethodChecks]) -> list[OnObjectRow]:
    """Where the maps of each method lie, beside maps that ignore the image; none without masks."""
    if checked.masks is None:
        return []
    named = [(checks.name, checks.maps) for checks in results if checks.name not in BASELINES]
    alias, masks, split = checked.model.alias, checked.masks.cpu(), checked.split
    scores, seed = ("roc_auc", "mass", "pointing"), checked.settings.seed
    photographs = sources(split)
    return [
        row
        for score in scores
        for row in on_object_rows(alias, named, score, masks, groups=split.groups, sources=photographs, seed=seed)
    ]


def _league_row(alias: str, checks: MethodChecks, means: Mapping[str, Estimate], result: Evidence | None) -> LeagueRow:
    columns = {column: round(means[column].value, 6) if column in means else None for column in CHECKS}
    return LeagueRow(
        model=alias,
        method=checks.name,
        baseline=checks.name in BASELINES,
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
    means: dict[str, dict[str, Estimate]] = {checks.name: {} for checks in checked}
    for column, values, groups in _columns(checked, split):
        for checks, estimate in zip(checked, estimates(values, groups=groups, unit=_UNITS.get(column, "fraction"))):
            means[checks.name][column] = estimate
    groups = masked_groups(split)
    for checks in checked:
        if "pointing" in checks.scores:
            means[checks.name]["pointing"] = pointing_rate(checks.scores["pointing"], groups=groups)
        if checks.randomisation is not None and len(checks.randomisation.last):
            means[checks.name]["randomisation"] = checks.randomisation.estimate(seed=settings.seed)
            means[checks.name]["cascade"] = checks.randomisation.whole(seed=settings.seed)
    return means


def _columns(checked: Sequence[MethodChecks], split: Split) -> list[tuple[str, Tensor, Tensor | None]]:
    """Columns that are averaged over images, with values (methods, n) and groups; methods share bootstrap draws."""

    def values(read: Callable[[MethodChecks], Tensor]) -> Tensor:
        return torch.stack([read(checks).float() for checks in checked])

    columns = {
        "deletion": values(lambda checks: checks.fidelity.deletion.areas),
        "insertion": values(lambda checks: checks.fidelity.least_first.areas),
        "gap": values(lambda checks: checks.fidelity.gaps),
        "relevance_gain": values(lambda checks: checks.fidelity.relevance_gains),
        "deletion_accuracy": values(lambda checks: checks.fidelity.deletion.kept_areas),
        "insertion_accuracy": values(lambda checks: checks.fidelity.least_first.kept_areas),
    }
    if all(checks.road is not None for checks in checked):
        columns["road"] = values(lambda checks: checks.road.gaps)  # type: ignore[union-attr]
    if all(checks.counterfactuals is not None for checks in checked):
        columns["size"] = values(lambda checks: _set_shares(checks.counterfactuals))  # type: ignore[arg-type]
    scores = {
        name: values(lambda checks, name=name: checks.scores[name])  # type: ignore[misc]
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
    maps = {checks.name: on_grid(checks.maps, grid) for checks in checked if checks.name not in BASELINES}
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


def _searched_sets(model: Model, images: Images, settings: Settings) -> Counterfactuals | None:
    """The sets that the greedy search finds on the first images; None where there is no image."""
    searched = images[:SEARCHED]
    return by_search(model, searched, substrate=settings.substrate) if len(searched) else None


def _write_counterfactuals(
    folder: RunFolder, checked: Sequence[MethodChecks], searched: Counterfactuals, split: Split, model: Model
) -> None:
    """Write whether and with how many patches the prediction changes, and the sets of the images that are drawn."""
    count = len(searched.prediction)
    by_map = {checks.name: checks.counterfactuals for checks in checked if checks.counterfactuals is not None}
    for name, own in by_map.items():
        folder.metric(TURNED(model=model.alias, method=name), accuracy(own.found, groups=split.groups))
    shares = {name: _set_shares(own)[:count] for name, own in by_map.items()} | {SEARCH: _set_shares(searched)}
    groups = None if split.groups is None else split.groups[:count]
    for name, size in zip(shares, estimates(torch.stack(list(shares.values())), groups=groups)):
        folder.metric(SIZE_SEARCHED(model=model.alias, method=name), size)
    shown = torch.arange(min(_DRAWN, count))
    orders = {**by_map, SEARCH: searched}
    arrays = CounterfactualArrays(
        images=split.source.read(shown).numpy(),
        methods=np.array(list(orders)),
        removed=np.stack([own.removed[: len(shown)].numpy() for own in orders.values()], 1),
        turned=np.stack([own.turned[: len(shown)].numpy() for own in orders.values()], 1),
        prediction=searched.prediction[: len(shown)].numpy(),
        classes=np.array(model.classes),
    )
    folder.save(COUNTERFACTUALS, arrays, model=model.alias)


def _set_shares(own: Counterfactuals) -> Tensor:
    """The share of the patches in each image's set; all of them where no removal changes the prediction."""
    return own.sizes.float() / own.removed[0].numel()
