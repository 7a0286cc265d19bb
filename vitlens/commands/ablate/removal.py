"""Several heads removed at once: in an order, and in pairs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, Literal

import torch
from torch import Tensor

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.ablation.outcomes import Outcomes
from vitlens.analysis.ablation.several import (
    greedy_order,
    pairwise,
    removal_curves,
    share_removable,
)
from vitlens.analysis.ablation.units import Unit
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.commands.ablate.ablation_setup import AblationSetup, name_of
from vitlens.commands.ablate.record import FIRST_ORDER, HeadPairRow, RemovalRow
from vitlens.uncertainty import Estimate, fewest_images, finite

# most images for curves and pairs, each point of which costs most of a forward pass
REMOVAL_IMAGES: Final = 256
_POINTS: Final = 9  # points of a removal curve
_LEAST_FIRST: Final = "least first"  # name of the order of rising importance
_RANDOM_ORDERS: Final = 2  # orders that the others are compared with
_RERANKINGS: Final = 12  # times that a greedy order ranks the remaining heads
_SIMILAR: Final = 0.5  # linear CKA of two heads' outputs from which they are removed together
# images to rank on and to measure on; with fewer than twice as many, all images serve for both
_FEWEST: Final = 10


@dataclass(frozen=True)
class RemovalCurves:
    """The accuracy as heads are removed one after another.

    removable: the share of heads that can be removed within one point of accuracy, None if accuracy
        without any head is not shown to be lower.
    greedy_forwards: forward passes an image that the greedy order took, None without it.
    """

    points: tuple[RemovalRow, ...] = ()
    removable: Estimate | None = None
    greedy_forwards: float | None = None


@dataclass(frozen=True)
class HeadPairs:
    """Heads removed in pairs, and a remark on the measurement, or ""."""

    rows: tuple[HeadPairRow, ...] = ()
    remark: str = ""


def measure_curves(setup: AblationSetup, ranking: Tensor, first_order: Tensor) -> RemovalCurves:
    """Remove heads in the orders of their importance, which is ranked on half of the images, and
    measure on the rest.

    ranking, first_order: (units, n), the exact and the estimated effect of each unit on each image.
    """
    ranked_on, measured_on = _halves(setup.images)
    measured_on = measured_on[:REMOVAL_IMAGES]
    effects = ranking[:, ranked_on].mean(1)
    estimates = first_order[:, ranked_on].mean(1)
    orders = dict(_orders(setup, effects, estimates))
    greedy_forwards = None
    if setup.run.options.greedy:
        orders["greedy"], greedy_forwards = _greedy_order(setup, ranked_on[:REMOVAL_IMAGES])
    analysis = setup.for_replacement(setup.replacement)
    curves = removal_curves(
        analysis, orders, points=_POINTS, images=measured_on, what="Removing heads in order"
    )
    groups = setup.groups(measured_on)
    return RemovalCurves(
        points=tuple(_points(setup, curves, groups)),
        removable=share_removable(curves[_LEAST_FIRST], groups=groups, seed=setup.seed),
        greedy_forwards=greedy_forwards,
    )


def _halves(count: int) -> tuple[Tensor, Tensor]:
    """Return the indices to rank on, and those to measure on.

    They are every second image each, or all images for both if there are few.
    """
    images = torch.arange(count)
    if count < 2 * _FEWEST:
        return images, images
    return images[0::2], images[1::2]


def _orders(
    setup: AblationSetup, effects: Tensor, estimates: Tensor
) -> Iterator[tuple[str, tuple[Unit, ...]]]:
    """Yield the orders of removal by name.

    effects: the exact effect of each unit, a mean over images (units,).
    estimates: its first-order estimate (units,).
    """
    heads = [index for index, unit in enumerate(setup.units) if unit.kind == "head"]

    def ascending(values: Tensor) -> tuple[Unit, ...]:
        ordered = sorted(heads, key=lambda index: float(values[index]))
        return tuple(setup.units[index] for index in ordered)

    least_first = ascending(effects)
    yield _LEAST_FIRST, least_first
    yield "most first", least_first[::-1]
    if not estimates[heads].isnan().any():
        yield FIRST_ORDER, ascending(estimates)
    for number in range(_RANDOM_ORDERS):
        generator = torch.Generator().manual_seed(setup.seed + number)
        shuffled = torch.randperm(len(heads), generator=generator).tolist()
        yield f"random {number}", tuple(setup.heads[index] for index in shuffled)


def _greedy_order(setup: AblationSetup, images: Tensor) -> tuple[tuple[Unit, ...], float]:
    """Return the order that ranks the remaining heads again after removals, and the forward passes
    it took.
    """
    analysis = setup.for_replacement(setup.replacement)
    subset = replace(
        analysis, images=analysis.images[images], labels=analysis.labels[images], groups=None
    )
    removals_per_ranking = max(1, len(setup.heads) // _RERANKINGS)
    with setup.run.progress("Ranking heads again", len(setup.heads), "heads") as advance:
        return greedy_order(subset, setup.heads, every=removals_per_ranking, advance=advance)


def _points(
    setup: AblationSetup, curves: Mapping[str, Outcomes], groups: Tensor | None
) -> Iterator[RemovalRow]:
    for order, curve in curves.items():
        for removed, correct, loss in zip(curve.sets, curve.correct, curve.loss):
            yield RemovalRow(
                order=order,
                removed=len(removed),
                share=len(removed) / len(setup.heads),
                accuracy=accuracy(correct, groups=groups),
                loss=float(loss.mean()),
            )


def measure_pairs(setup: AblationSetup, importance: Importance, similarity: Tensor) -> HeadPairs:
    """Remove heads in pairs: the most important ones, and those whose outputs are most similar.

    The most important heads are paired only if heads are ranked significantly, similar ones only if
    the images suffice for a significant test. similarity: (heads, others), from `head_similarity`.
    """
    important: tuple[Unit, ...] = ()
    if importance.is_ranked("head"):
        # at least two heads, which make one pair
        important = importance.ranking("head")[: max(2, setup.run.options.pairs)]
    pairs = _pairs_to_remove(setup, important, similarity)
    if not pairs:
        return HeadPairs()
    units = _units_of(pairs)
    images = setup.first_images(REMOVAL_IMAGES)
    effects = pairwise(
        setup.for_replacement(setup.replacement),
        units,
        [(units.index(first), units.index(second)) for first, second in pairs],
        images,
        what="Removing pairs of heads",
    )
    loss_without = dict(zip(units, effects.single.tolist()))
    rows = []
    for index, (first, second) in enumerate(pairs):
        is_important = first in important and second in important
        chosen: Literal["importance", "similarity"] = "importance" if is_important else "similarity"
        row = HeadPairRow(
            first=name_of(first),
            second=name_of(second),
            pair=f"{name_of(first)} and {name_of(second)}",
            chosen=chosen,
            first_alone=loss_without[first],
            second_alone=loss_without[second],
            both=float(effects.both[index]),
            synergy=effects.synergy.estimate(index, len(images), "nats"),
            p=finite(effects.synergy.p_holm[index]),
            similarity=finite(similarity[setup.heads.index(first), setup.heads.index(second)]),
        )
        rows.append(row)
    return HeadPairs(tuple(rows), effects.note)


def _pairs_to_remove(
    setup: AblationSetup, important: Sequence[Unit], similarity: Tensor
) -> list[tuple[Unit, Unit]]:
    """Return pairs of important heads, then pairs of similar ones: each once, the earlier head
    first.
    """
    pairs: list[tuple[Unit, Unit]] = []
    for pair in combinations(important, 2):
        first, second = sorted(pair, key=setup.heads.index)
        pairs.append((first, second))
    pairs += _similar_pairs(setup, similarity)
    return list(dict.fromkeys(pairs))


def _similar_pairs(setup: AblationSetup, similarity: Tensor) -> Iterator[tuple[Unit, Unit]]:
    """Yield the pairs with the most similar outputs, if the images suffice for a significant
    test."""
    most = setup.run.options.pairs
    if setup.images < fewest_images(max(most, 1)):
        return
    heads = setup.heads
    upper = similarity.triu(1).nan_to_num(nan=0.0)  # (heads, heads), each pair once
    order = upper.flatten().argsort(descending=True, stable=True)
    for index in order[:most].tolist():
        first, second = divmod(index, len(heads))  # row and column of the matrix
        if float(upper[first, second]) >= _SIMILAR:
            yield heads[first], heads[second]


def _units_of(pairs: Sequence[tuple[Unit, Unit]]) -> tuple[Unit, ...]:
    """Return the units of the pairs, each once."""
    units: list[Unit] = []
    for pair in pairs:
        units += pair
    return tuple(dict.fromkeys(units))
