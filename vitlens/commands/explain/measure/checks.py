"""Every check on every method, for one model and its images: rows, metrics and curves of the league."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy, answers
from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks, Settings, checks_in, league
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.attribution.explain import explain, methods_for, require_method
from vitlens.commands.explain.measure.agreement import agreement_rows
from vitlens.commands.explain.measure.counterfactuals import searched_sets, set_shares, write_counterfactuals
from vitlens.commands.explain.measure.verdict import evidence, masked_groups, verdict
from vitlens.commands.explain.record import (
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

    targets: class indices (n,), None: the predictions; methods: names of the registry (None: all that the model
    has); made: maps that are there already, with the seconds an image took. Raises UnsupportedError or
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
    agreements = agreement_rows(folder, checked, model, split)
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
    """Images of the randomisation check."""
    return max((len(one.randomisation.last) for one in checked if one.randomisation is not None), default=0)


def _league_rows(
    folder: RunFolder, checked: Sequence[MethodChecks], split: Split, settings: Settings, alias: str
) -> tuple[LeagueRow, ...]:
    """The metrics of every method, and its row, the greatest insertion minus deletion first."""
    found = _estimates(checked, split, settings)
    for one in checked:
        for column, estimate in found[one.name].items():
            folder.metric(CHECKS[column](model=alias, method=one.name), estimate)
        folder.metric(SECONDS(model=alias, method=one.name), Estimate(one.seconds, n=len(one.maps), unit="s"))
        if one.forwards is not None:
            folder.metric(FORWARDS(model=alias, method=one.name), Estimate(one.forwards, unit="forwards"))
    by_name = {one.name: one for one in checked}
    rows = [_league_row(alias, one, found[one.name], by_name, split) for one in checked]
    return tuple(sorted(rows, key=lambda row: -row.gap))


def _league_row(
    alias: str, checks: MethodChecks, found: Mapping[str, Estimate], by_name: Mapping[str, MethodChecks], split: Split
) -> LeagueRow:
    means = {column: round(found[column].value, 6) if column in found else None for column in CHECKS}
    baseline = checks.name in BASELINES
    known = None if baseline else evidence(checks, by_name, split)
    return LeagueRow(
        model=alias,
        method=checks.name,
        baseline=baseline,
        **means,  # type: ignore[arg-type]
        by_stage=_by_stage(checks),
        seconds=checks.seconds,
        forwards=checks.forwards,
        faults=checks.faults.words,
        flagged=known is not None and known.flagged,
        verdict="does not depend on the model" if known is None else verdict(known),
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
    found: dict[str, dict[str, Estimate]] = {one.name: {} for one in checked}
    for column, values, groups in _columns(checked, split):
        for one, estimate in zip(checked, estimates(values, groups=groups, unit="fraction")):
            found[one.name][column] = estimate
    groups = masked_groups(split)
    for one in checked:
        if "pointing" in one.scores:
            found[one.name]["pointing"] = accuracy(one.scores["pointing"] > 0.5, groups=groups)
        if one.randomisation is not None and len(one.randomisation.last):
            found[one.name]["randomisation"] = one.randomisation.estimate(seed=settings.seed)
    return found


def _columns(checked: Sequence[MethodChecks], split: Split) -> list[tuple[str, Tensor, Tensor | None]]:
    """Columns that are averaged over images, with values (methods, n) and groups: one draw of the images serves all."""

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
