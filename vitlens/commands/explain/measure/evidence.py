"""Evidence beyond the league: other substrates, stability under shifts, and what the comparisons can see."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from vitlens.analysis.answers.paired import estimates
from vitlens.analysis.faithfulness.defaults import OTHER_IMAGES, OTHER_STEPS
from vitlens.analysis.faithfulness.deletion import faithfulness
from vitlens.analysis.faithfulness.league import BASELINES, MethodChecks
from vitlens.analysis.faithfulness.masking import require_substrate
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.analysis.faithfulness.stability import Stability, stability
from vitlens.analysis.faithfulness.steadiness import STEADY_IMAGES
from vitlens.analysis.faithfulness.substrates import rank_agreement
from vitlens.commands.explain.evidence_record import (
    DETECTABLE,
    IMPUTED,
    POWER,
    SHIFTS,
    STABILITY,
    STEADY,
    SUBSTRATE_AGREEMENTS,
    SUBSTRATE_GAP,
    SUBSTRATE_TAU,
    SUBSTRATES,
    SWAPPED,
    PowerRow,
    StabilityRow,
    SubstrateAgreementRow,
    SubstrateRow,
    SwappedPairRow,
)
from vitlens.commands.explain.measure.subject import Subject
from vitlens.commands.explain.measure.verdict import masked_groups
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.errors import UnsupportedError
from vitlens.records import TableOf
from vitlens.uncertainty import Estimate, power_of

EvidenceRows: TypeAlias = dict[TableOf[Any], list[Any]]


def evidence_rows(
    folder: RunFolder,
    checked: Subject,
    results: Sequence[MethodChecks],
    *,
    substrates: Sequence[str],
    steadiness: bool,
    options: RunOptions,
) -> EvidenceRows:
    """Write the metrics of the evidence on one model's maps; returns its rows by table. substrates: in which deletion
    and insertion are repeated, as far as the model has them; steadiness: whether images are disturbed."""
    rows = _substrate_rows(folder, checked, results, substrates, options)
    rows[POWER] = list(_power_rows(folder, checked, results))
    rows[STABILITY] = list(_stability_rows(folder, checked, results, options)) if steadiness else []
    return rows


def _substrate_rows(
    folder: RunFolder, checked: Subject, results: Sequence[MethodChecks], substrates: Sequence[str], options: RunOptions
) -> EvidenceRows:
    """Insertion minus deletion by substrate, and how far each pair of substrates agrees about the methods."""
    alias, part = checked.model.alias, checked.first(OTHER_IMAGES)
    groups, seed = part.split.groups, checked.settings.seed
    gaps = _gaps(part, results, substrates, options)
    rows: EvidenceRows = {SUBSTRATES: [], SUBSTRATE_AGREEMENTS: [], SWAPPED: []}
    for substrate, by_method in gaps.items() if len(gaps) > 1 else ():
        means = estimates(torch.stack(list(by_method.values())), groups=groups, seed=seed, unit="")
        for method, mean in zip(by_method, means):
            folder.metric(SUBSTRATE_GAP(model=alias, substrate=substrate, method=method), mean)
            own = SubstrateRow(alias, method, method in BASELINES, substrate, round(mean.value, 6), mean.n or 0)
            rows[SUBSTRATES].append(own)
    methods = [checks.name for checks in results if checks.name not in BASELINES]
    for first, second in combinations(gaps, 2) if len(methods) > 1 else ():
        found = rank_agreement(
            *({name: gaps[substrate][name] for name in methods} for substrate in (first, second)),
            groups=groups,
            seed=seed,
        )
        folder.metric(SUBSTRATE_TAU(model=alias, first=first, second=second), Estimate(found.tau, n=found.n, unit=""))
        tau = round(found.tau, 4)
        rows[SUBSTRATE_AGREEMENTS].append(
            SubstrateAgreementRow(alias, first, second, tau, len(methods), len(found.swapped), found.n)
        )
        rows[SWAPPED].extend(
            SwappedPairRow(alias, first, second, pair.better, pair.worse, pair.first, pair.second)
            for pair in found.swapped
        )
    return rows


def _gaps(
    part: Subject, results: Sequence[MethodChecks], substrates: Sequence[str], options: RunOptions
) -> dict[str, Mapping[str, Tensor]]:
    """Insertion minus deletion of every method by substrate, image by image: the league's own, the others, ROAD's."""
    count, settings = len(part.images), part.settings
    gaps: dict[str, Mapping[str, Tensor]] = {
        settings.substrate: {checks.name: checks.fidelity.gaps[:count] for checks in results}
    }
    maps = [checks.maps[:count] for checks in results]
    others: list[Any] = [name for name in dict.fromkeys(substrates) if name not in gaps and _has(part, name)]
    with progress("Checking on other substrates", count * len(others), quiet=options.quiet) as advance:
        for other in others:
            curves = faithfulness(
                part.model,
                part.images,
                part.classes,
                maps,
                substrate=other,
                steps=OTHER_STEPS,
                grid=removal_grid(part.model),
                seed=settings.seed,
                batch_size=settings.batch_size,
                advance=advance,
            )
            gaps[other] = {checks.name: each.gaps for checks, each in zip(results, curves)}
    if all(checks.road is not None for checks in results):
        gaps[IMPUTED] = {checks.name: checks.road.gaps[:count] for checks in results}  # type: ignore[union-attr]
    return gaps


def _has(part: Subject, substrate: str) -> bool:
    try:
        require_substrate(part.model, substrate)
    except UnsupportedError:
        return False
    return True


def _power_rows(folder: RunFolder, checked: Subject, results: Sequence[MethodChecks]) -> Iterator[PowerRow]:
    """What paired comparisons of the best method with the others can see, in each check that has a value an image."""
    alias, groups = checked.model.alias, checked.split.groups
    methods = [checks for checks in results if checks.name not in BASELINES]
    judge = "gap" if any(checks.road is None for checks in methods) else "road"
    columns = {judge: ({checks.name: checks.judged for checks in methods}, groups)}
    for score in ("roc_auc", "pointing"):
        if all(score in checks.scores for checks in methods):
            by_name = {checks.name: checks.scores[score] for checks in methods}
            columns[score] = by_name, masked_groups(checked.split)
    for check, (values, own_groups) in columns.items():
        best = max(values, key=lambda name: float(values[name].mean()))
        others = [values[best].double() - values[name].double() for name in values if name != best]
        known = [power_of(other, groups=own_groups) for other in others]
        found = [power for power in known if power is not None and power.error > 0]
        if found:
            error, detectable = (median(getattr(power, each) for power in found) for each in ("error", "detectable"))
            folder.metric(DETECTABLE(model=alias, check=check), Estimate(detectable, n=found[0].n))
            yield PowerRow(alias, check, best, error, detectable, found[0].n, found[0].groups)


def _stability_rows(
    folder: RunFolder, checked: Subject, results: Sequence[MethodChecks], options: RunOptions
) -> Iterator[StabilityRow]:
    """Whether the maps of each method follow shifts of the images, and a flip."""
    part = checked.first(STEADY_IMAGES)
    known = {checks.name: checks for checks in results}
    with progress("Disturbing images", len(checked.functions), unit="methods", quiet=options.quiet) as advance:
        for name, explain in checked.functions.items():
            sound = not bool(known[name].faults.not_finite.any())
            maps = known[name].maps[: len(part.images)] if sound else None  # broken ones are zeros in the results
            found = stability(part.model, part.images, part.classes, explain, maps=maps)
            yield from _rows_of(folder, part.model.alias, name, found, checked.settings.seed)
            advance(1)


def _rows_of(folder: RunFolder, alias: str, method: str, found: Stability, seed: int) -> Iterator[StabilityRow]:
    state = found.state(seed=seed)
    each: list[tuple[str, Estimate | None, Estimate | None]] = [(SHIFTS, *found.overall(seed=seed))]
    names = [disturbance.name for disturbance in found.disturbances]
    each += zip(names, found.correlations(seed=seed), found.jumps())
    for disturbance, correlation, jumped in each:
        values = {"correlation": correlation, "jumped": jumped}
        means = {score: None if value is None else round(value.value, 4) for score, value in values.items()}
        yield StabilityRow(alias, method, disturbance, **means, n=int(found.usable.sum()), state=state)
        for score, value in values.items():
            if value is not None:
                folder.metric(STEADY(model=alias, score=score, disturbance=disturbance, method=method), value)
