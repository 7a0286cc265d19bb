"""Several heads removed at once: one after another in the order of their importance, and in pairs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.ablation.greedy import Greedy, greedy_order
from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.ablation.pairs import Pairs, Redundancy, RedundancyStream, Synergy, pairwise, synergy
from vitlens.analysis.ablation.removal import (
    AblationCurve,
    random_order,
    removal_curves,
    removal_matters,
    share_removable,
    steps,
)
from vitlens.analysis.ablation.replacements import MeanOutputs
from vitlens.commands.ablate.judgement import fewest_images
from vitlens.commands.ablate.measure.effects import UnitEffects
from vitlens.commands.ablate.measure.work import AblationRun, finite
from vitlens.commands.ablate.record import (
    CURVES,
    FIRST_ORDER,
    FORWARDS,
    PAIRS,
    REDUNDANCY,
    REDUNDANCY_ARRAYS,
    REMOVABLE,
)
from vitlens.commands.ablate.record.arrays import RedundancyArrays
from vitlens.commands.ablate.record.rows import HeadPairRow, RedundancyRow, RemovalRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.uncertainty import Estimate

POINTS: Final = 9  # of a removal curve
REMOVAL_IMAGES: Final = 256  # images of curves and of pairs, at most: every point costs most of a forward pass
RANDOM_ORDERS: Final = 2
RERANKINGS: Final = 12  # of a greedy order
SIMILAR: Final = 0.5  # linear CKA of two heads' outputs, from which on they are removed together
_FEWEST: Final = 10  # images to rank on, and to test on; for fewer than twice as many images, both sets are all images


@dataclass(frozen=True)
class RemovalCurves:
    """curves: by order; removable: the share of heads that can be removed at a cost of one point of accuracy, None
    where the accuracy without any head is not shown to be lower; greedy: the order of --greedy."""

    curves: dict[str, AblationCurve]
    removable: Estimate | None
    greedy: Greedy | None


def heads_removed_in_order(ablation: AblationRun, effects: UnitEffects, means: MeanOutputs | None) -> RemovalCurves:
    """Heads removed in the orders of the importance, ranked on one half of the images and measured on the other."""
    count = len(ablation.split)
    halved = count >= 2 * _FEWEST
    ranked, tested = (torch.arange(count)[0::2], torch.arange(count)[1::2]) if halved else (torch.arange(count),) * 2
    tested = tested[:REMOVAL_IMAGES]
    orders = dict(_orders(ablation, effects, ranked))
    greedy = _greedy(ablation, ranked[:REMOVAL_IMAGES], means) if ablation.options.greedy else None
    if greedy is not None:
        orders["greedy"] = greedy.order
    curves = _curves(ablation, orders, tested, means)
    groups, least = ablation.groups(tested), curves["least first"]
    removable = (
        share_removable(least, groups=groups, seed=ablation.run.seed) if removal_matters(least, groups=groups) else None
    )
    return RemovalCurves(curves, removable, greedy)


def _greedy(ablation: AblationRun, chosen: Tensor, means: MeanOutputs | None) -> Greedy:
    heads, device = ablation.heads, ablation.model.device
    (batch,) = ablation.split.pick(chosen).batches(len(chosen), device=device)
    labels, every = ablation.labels[chosen].to(device), max(1, len(heads) // RERANKINGS)
    with progress("Ranking heads again", len(heads), unit="heads", quiet=ablation.run.quiet) as advance:
        return greedy_order(
            ablation.model, batch.images, labels, heads, every=every, replace=ablation.replacement, means=means,
            advance=advance,
        )  # fmt: skip


def _curves(
    ablation: AblationRun, orders: dict[str, tuple[Unit, ...]], tested: Tensor, means: MeanOutputs | None
) -> dict[str, AblationCurve]:
    """The curve of each order on the images tested, gathered from all processes."""
    removed = steps(len(ablation.heads), points=POINTS)
    parts: dict[str, list[AblationCurve]] = {}
    total = len(ablation.share(tested)) * len(orders) * len(removed)
    with progress("Removing heads in order", total, unit="removals", quiet=ablation.run.quiet) as advance:
        for batch in ablation.batches(tested):
            curves = removal_curves(
                ablation.model, batch.images, batch.labels, orders, removed=removed, replace=ablation.replacement,
                means=means, donors=batch.donors, seed=ablation.run.seed, offset=batch.offset,
                advance=lambda points: advance(points * len(batch.images)),  # noqa: B023
            )  # fmt: skip
            for name, curve in curves.items():
                parts.setdefault(name, []).append(curve)
    joined = {name: AblationCurve.join(batches) for name, batches in parts.items()}
    return {
        name: AblationCurve(curve.order, curve.removed, curve.outcomes.gathered(ablation.processes))
        for name, curve in joined.items()
    }


def _orders(ablation: AblationRun, measured: UnitEffects, ranked: Tensor) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    units, effects = measured.effects.units, measured.effects.delta_loss[:, ranked].mean(1)
    estimates = measured.first_order[:, ranked].mean(1)
    heads = [index for index, unit in enumerate(units) if unit.kind == "head"]
    by_effect = sorted(heads, key=lambda index: float(effects[index]))
    yield "least first", tuple(units[index] for index in by_effect)
    yield "most first", tuple(units[index] for index in reversed(by_effect))
    if not estimates[heads].isnan().any():
        by_estimate = sorted(heads, key=lambda index: float(estimates[index]))
        yield FIRST_ORDER, tuple(units[index] for index in by_estimate)
    for number in range(RANDOM_ORDERS):
        yield f"random {number}", random_order(ablation.heads, seed=ablation.run.seed + number)


def write_curves(folder: RunFolder, alias: str, removal: RemovalCurves | None) -> None:
    """Write every point of the curves, and the share of heads that can be removed; no rows where none was removed."""
    curves = {} if removal is None else removal.curves
    folder.write(CURVES, [row for name, curve in curves.items() for row in _curve_rows(name, curve)])
    if removal is None:
        return
    if removal.removable is not None:
        folder.metric(REMOVABLE(model=alias), removal.removable)
    if removal.greedy is not None:
        cost = Estimate(removal.greedy.forward_equivalents, unit="forwards")
        folder.metric(FORWARDS(model=alias, what="greedy"), cost)


def _curve_rows(name: str, curve: AblationCurve) -> Iterator[RemovalRow]:
    for count, right, loss in zip(curve.removed, curve.accuracy(), curve.loss.tolist()):
        yield RemovalRow(
            order=name,
            removed=count,
            share=count / len(curve.order),
            accuracy=right.value,
            low=right.low,
            high=right.high,
            n=right.n or 0,
            loss=loss,
        )


def head_redundancy(ablation: AblationRun) -> Redundancy:
    """The similarity of the outputs of each pair of heads."""
    stream = RedundancyStream(ablation.model)
    for batch in ablation.batches(torch.arange(len(ablation.split))[:REMOVAL_IMAGES]):
        stream.add(batch.images)
    stream.join(ablation.processes.total)
    return stream.result()


def important_heads(importance: Importance, count: int) -> tuple[Unit, ...]:
    """The heads that are removed in pairs for their importance; none where heads are not ranked."""
    return importance.ranking("head")[: max(2, count)] if importance.is_ranked("head") else ()


def similar_pairs(redundancy: Redundancy, images: int, *, most: int) -> list[tuple[Unit, Unit]]:
    """The pairs of heads with the most similar outputs, which may each do the work of the other; none for so few images
    that no test of these pairs can be significant."""
    if images < fewest_images(max(most, 1)):
        return []
    above = redundancy.matrix.triu(1).nan_to_num(nan=0.0)
    order = above.flatten().argsort(descending=True, stable=True)[:most].tolist()
    places = [divmod(index, len(redundancy.units)) for index in order]
    return [(redundancy.units[one], redundancy.units[two]) for one, two in places if float(above[one, two]) >= SIMILAR]


def head_synergy(
    ablation: AblationRun, importance: Importance, redundancy: Redundancy, means: MeanOutputs | None
) -> Synergy | None:
    """The effects of removing in pairs the most important heads, where heads are ranked, and the heads of the most
    similar outputs; None where there are neither."""
    top = important_heads(importance, ablation.options.pairs)
    alike = similar_pairs(redundancy, len(ablation.split), most=ablation.options.pairs)
    units = tuple(dict.fromkeys((*top, *(unit for pair in alike for unit in pair))))
    places = {unit: index for index, unit in enumerate(units)}
    wanted = [tuple(sorted((places[one], places[two]))) for one, two in (*combinations(top, 2), *alike)]
    pairs = [(one, two) for one, two in dict.fromkeys(wanted)]
    if not pairs:
        return None
    chosen = torch.arange(len(ablation.split))[:REMOVAL_IMAGES]
    total = len(ablation.share(chosen)) * (len(units) + len(pairs))
    parts = []
    with progress("Removing pairs of heads", total, unit="removals", quiet=ablation.run.quiet) as advance:
        for batch in ablation.batches(chosen):
            parts.append(
                pairwise(
                    ablation.model, batch.images, batch.labels, units, pairs=pairs,
                    replace=ablation.replacement, means=means, donors=batch.donors, seed=ablation.run.seed,
                    offset=batch.offset, advance=lambda pairs: advance(pairs * len(batch.images)),  # noqa: B023
                )
            )  # fmt: skip
    joined = Pairs.join(parts)
    gathered = Pairs(joined.units, joined.pairs, joined.outcomes.gathered(ablation.processes))
    return synergy(gathered, groups=ablation.groups(chosen), seed=ablation.run.seed)


def write_pairs(
    folder: RunFolder, redundancy: Redundancy | None, pairs: Synergy | None, important: Sequence[Unit]
) -> None:
    """Write similarities and synergies; no rows for what was not measured. important: the heads that were paired for
    their importance."""
    folder.write(REDUNDANCY, [] if redundancy is None else [RedundancyRow(redundancy.images, len(redundancy.units))])
    if redundancy is not None:
        units = np.array([unit.name for unit in redundancy.units])
        layers = np.array([unit.layer for unit in redundancy.units])
        folder.save(REDUNDANCY_ARRAYS, RedundancyArrays(units, layers, redundancy.matrix.numpy()))
    rows = [] if pairs is None or redundancy is None else list(_pair_rows(pairs, redundancy, important))
    folder.write(PAIRS, rows)


def _pair_rows(pairs: Synergy, redundancy: Redundancy, important: Sequence[Unit]) -> Iterator[HeadPairRow]:
    change, heads = pairs.change, list(redundancy.units)
    for index, (one, two) in enumerate(pairs.pairs):
        first, second = pairs.units[one], pairs.units[two]
        alike = redundancy.matrix[heads.index(first), heads.index(second)] if {first, second} <= set(heads) else None
        yield HeadPairRow(
            first=first.name,
            second=second.name,
            both=float(pairs.both[index]),
            synergy=float(change.mean[index]),
            low=finite(change.low[index]),
            high=finite(change.high[index]),
            p_holm=finite(change.p_holm[index]),
            n=pairs.n,
            chosen="importance" if {first, second} <= set(important) else "similarity",
            similarity=None if alike is None else finite(alike),
            first_alone=float(pairs.alone[one]),
            second_alone=float(pairs.alone[two]),
        )
