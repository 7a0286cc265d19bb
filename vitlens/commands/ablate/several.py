"""Several heads removed at once: one after another in the order of their importance, and in pairs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.effects import Effects, Unit
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
from vitlens.commands.ablate.bench import Bench, estimate_of, finite, name_of
from vitlens.commands.ablate.record import (
    FIRST_ORDER,
    HeadPairRow,
    RedundancyArrays,
    RemovalRow,
    fewest_images,
)
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.uncertainty import Estimate

POINTS: Final = 9  # of a removal curve
REMOVAL_IMAGES: Final = 256  # images of curves and of pairs, at most: every point costs most of a forward pass
RANDOM_ORDERS: Final = 2
RERANKINGS: Final = 12  # of a greedy order
SIMILAR: Final = 0.5  # linear CKA of two heads' outputs, from which on they are removed together
_FEWEST: Final = 10  # images to rank on, and to test on; for fewer than twice as many images, both sets are all images


@dataclass(frozen=True)
class UnitEffects:
    """The effects of all units on all images, with one replacement. first_order: (units, n)."""

    effects: Effects
    first_order: Tensor
    importance: Importance


@dataclass(frozen=True)
class RemovalCurves:
    """curves: by order; removable: the share of heads that can be removed at a cost of one point of accuracy, None
    where the accuracy without any head is not shown to be lower; greedy: the order of --greedy."""

    curves: dict[str, AblationCurve]
    removable: Estimate | None
    greedy: Greedy | None


def heads_removed_in_order(bench: Bench, effects: UnitEffects, means: MeanOutputs | None) -> RemovalCurves:
    """Heads removed in the orders of the importance, ranked on one half of the images and measured on the other."""
    count = len(bench.split)
    halved = count >= 2 * _FEWEST
    ranked, tested = (torch.arange(count)[0::2], torch.arange(count)[1::2]) if halved else (torch.arange(count),) * 2
    tested = tested[:REMOVAL_IMAGES]
    orders = dict(_orders(bench, effects, ranked))
    greedy = _greedy(bench, ranked[:REMOVAL_IMAGES], means) if bench.options.greedy else None
    if greedy is not None:
        orders["greedy"] = greedy.order
    curves = _curves(bench, orders, tested, means)
    groups, least = bench.groups(tested), curves["least first"]
    removable = (
        share_removable(least, groups=groups, seed=bench.run.seed) if removal_matters(least, groups=groups) else None
    )
    return RemovalCurves(curves, removable, greedy)


def _orders(bench: Bench, measured: UnitEffects, ranked: Tensor) -> Iterator[tuple[str, tuple[Unit, ...]]]:
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
        yield f"random {number}", random_order(bench.heads, seed=bench.run.seed + number)


def _greedy(bench: Bench, chosen: Tensor, means: MeanOutputs | None) -> Greedy:
    heads, device = bench.heads, bench.model.device
    (batch,) = bench.split.pick(chosen).batches(len(chosen), device=device)
    labels, every = bench.labels[chosen].to(device), max(1, len(heads) // RERANKINGS)
    with progress("Ranking heads again", len(heads), unit="heads", quiet=bench.run.quiet) as advance:
        return greedy_order(
            bench.model, batch.images, labels, heads, every=every, replace=bench.replacement, means=means,
            advance=advance,
        )  # fmt: skip


def _curves(
    bench: Bench, orders: dict[str, tuple[Unit, ...]], tested: Tensor, means: MeanOutputs | None
) -> dict[str, AblationCurve]:
    """The curve of each order on the images tested, gathered from all processes."""
    removed = steps(len(bench.heads), points=POINTS)
    parts: dict[str, list[AblationCurve]] = {}
    total = len(bench.share(tested)) * len(orders) * len(removed)
    with progress("Removing heads in order", total, unit="removals", quiet=bench.run.quiet) as advance:
        for batch in bench.batches(tested):
            curves = removal_curves(
                bench.model, batch.images, batch.labels, orders, removed=removed, replace=bench.replacement,
                means=means, donors=batch.donors, seed=bench.run.seed, offset=batch.offset,
                advance=lambda points: advance(points * len(batch.images)),  # noqa: B023
            )  # fmt: skip
            for name, curve in curves.items():
                parts.setdefault(name, []).append(curve)
    joined = {name: AblationCurve.join(batches) for name, batches in parts.items()}
    return {
        name: AblationCurve(curve.order, curve.removed, curve.outcomes.gathered(bench.processes))
        for name, curve in joined.items()
    }


def curve_rows(removal: RemovalCurves) -> Iterator[RemovalRow]:
    """Every point of the curves."""
    for name, curve in removal.curves.items():
        for count, right, loss in zip(curve.removed, curve.accuracy(), curve.loss.tolist()):
            yield RemovalRow(name, count, count / len(curve.order), right, loss)


def head_redundancy(bench: Bench) -> Redundancy:
    """The similarity of the outputs of each pair of heads."""
    stream = RedundancyStream(bench.model)
    for batch in bench.batches(torch.arange(len(bench.split))[:REMOVAL_IMAGES]):
        stream.add(batch.images)
    stream.join(bench.processes.total)
    return stream.result()


def similar_pairs(redundancy: Redundancy, images: int, *, most: int) -> list[tuple[Unit, Unit]]:
    """The pairs of heads with the most similar outputs, which may each do the work of the other; none for so few images
    that no test of these pairs can be significant."""
    if images < fewest_images(max(most, 1)):
        return []
    above = redundancy.matrix.triu(1).nan_to_num(nan=0.0)
    order = above.flatten().argsort(descending=True, stable=True)[:most].tolist()
    places = [divmod(index, len(redundancy.units)) for index in order]
    return [(redundancy.units[one], redundancy.units[two]) for one, two in places if float(above[one, two]) >= SIMILAR]


def _paired_for_importance(importance: Importance, count: int) -> tuple[Unit, ...]:
    """The heads that are removed in pairs for their importance; none where heads are not ranked."""
    return importance.ranking("head")[: max(2, count)] if importance.is_ranked("head") else ()


def head_synergy(
    bench: Bench, importance: Importance, redundancy: Redundancy, means: MeanOutputs | None
) -> Synergy | None:
    """The effects of removing in pairs the most important heads, where heads are ranked, and the heads of the most
    similar outputs; None where there are neither."""
    top = _paired_for_importance(importance, bench.options.pairs)
    alike = similar_pairs(redundancy, len(bench.split), most=bench.options.pairs)
    units = tuple(dict.fromkeys((*top, *(unit for pair in alike for unit in pair))))
    places = {unit: index for index, unit in enumerate(units)}
    wanted = [tuple(sorted((places[one], places[two]))) for one, two in (*combinations(top, 2), *alike)]
    pairs = [(one, two) for one, two in dict.fromkeys(wanted)]
    if not pairs:
        return None
    chosen = torch.arange(len(bench.split))[:REMOVAL_IMAGES]
    total = len(bench.share(chosen)) * (len(units) + len(pairs))
    parts = []
    with progress("Removing pairs of heads", total, unit="removals", quiet=bench.run.quiet) as advance:
        for batch in bench.batches(chosen):
            parts.append(
                pairwise(
                    bench.model, batch.images, batch.labels, units, pairs=pairs,
                    replace=bench.replacement, means=means, donors=batch.donors, seed=bench.run.seed,
                    offset=batch.offset, advance=lambda pairs: advance(pairs * len(batch.images)),  # noqa: B023
                )
            )  # fmt: skip
    joined = Pairs.join(parts)
    gathered = Pairs(joined.units, joined.pairs, joined.outcomes.gathered(bench.processes))
    return synergy(gathered, groups=bench.groups(chosen), seed=bench.run.seed)


def pair_rows(
    bench: Bench, importance: Importance, pairs: Synergy | None, redundancy: Redundancy | None
) -> Iterator[HeadPairRow]:
    """The pairs that were removed; none where there are none."""
    if pairs is None or redundancy is None:
        return
    heads = list(redundancy.units)
    important = set(_paired_for_importance(importance, bench.options.pairs))
    for index, pair in enumerate(pairs.pairs):
        one, two = sorted(pair, key=lambda place: (pairs.units[place].layer, pairs.units[place].head))
        first, second = pairs.units[one], pairs.units[two]
        alike = redundancy.matrix[heads.index(first), heads.index(second)] if {first, second} <= set(heads) else None
        yield HeadPairRow(
            first=name_of(first),
            second=name_of(second),
            pair=f"{name_of(first)} and {name_of(second)}",
            chosen="importance" if {first, second} <= important else "similarity",
            first_alone=float(pairs.alone[one]),
            second_alone=float(pairs.alone[two]),
            both=float(pairs.both[index]),
            synergy=estimate_of(pairs.change, index, pairs.n, "nats"),
            p=finite(pairs.change.p_holm[index]),
            similarity=None if alike is None else finite(alike),
        )


def redundancy_arrays(redundancy: Redundancy) -> RedundancyArrays:
    """The similarities as they are written."""
    return RedundancyArrays(np.array([name_of(unit) for unit in redundancy.units]), redundancy.matrix.numpy())
