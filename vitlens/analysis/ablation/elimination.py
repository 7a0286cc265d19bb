"""Which k of some units change the loss most, told by measuring ever fewer of them on ever more images.

Successive accepts and rejects (Bubeck, Wang and Viswanathan 2013) in a few rounds within a stated cost: after each, the
half that is furthest from the boundary between in and out, in standard errors of the paired difference, is measured no
further. What is certain at the end, and what only the best guess, is told by the bounds of `race`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.analysis.ablation.effects import Effects, PerUnit, Unit, UnitsByImage
from vitlens.analysis.ablation.few_images import FEWEST, LOOKS, Compared, Race
from vitlens.errors import InputError
from vitlens.names import Replacement

LIMIT = 1 / 3  # of the cost of measuring everything

Measure = Callable[[tuple[Unit, ...], Tensor], Effects]  # units, indices of images -> their effects


@dataclass(frozen=True)
class Adaptive:
    """The units that were found to matter most, and how surely.

    units: all candidates; ranking: their indices, the k chosen first, and within and after them the most important (by
    change of loss) first; mean, low, high (units,): change of loss over all n images, nats, as estimated from the
    images each was measured on, with intervals that hold for all units and rounds at once at `confidence`; images
    (units,): how many those were; n: images there are; settled (units,): whether it is certain at `confidence` that it
    is one of the k, or none of them; the others overlap. forward_equivalents: full forwards spent, for each of the n
    images; exact_cost: what measuring all units on all of them would have spent; note: what a report must say, or "".
    """

    units: tuple[Unit, ...]
    ranking: tuple[int, ...]
    k: int
    mean: PerUnit
    low: PerUnit
    high: PerUnit
    images: Int[Tensor, " units"]
    settled: Bool[Tensor, " units"]
    n: int
    confidence: float
    replace: Replacement
    forward_equivalents: float
    exact_cost: float
    note: str = ""

    @property
    def top(self) -> tuple[Unit, ...]:
        """The k most important units, the most important first."""
        return tuple(self.units[index] for index in self.ranking[: self.k])

    @property
    def resolved(self) -> bool:
        """Whether the set of the k is certain at the confidence."""
        return bool(self.settled.all())

    @property
    def overlapping(self) -> tuple[Unit, ...]:
        """The units that may or may not belong to the k, the most important first."""
        return tuple(self.units[index] for index in self.ranking if not self.settled[index])


@dataclass(frozen=True)
class Costs:
    """Full forwards an image: units (units,): of removing each; every: of each measurement beside (the clean pass);
    before: spent on each of all images already; exact: of measuring everything on all images."""

    units: PerUnit
    every: float = 1.0
    before: float = 0.0
    exact: float | None = None

    @property
    def whole(self) -> float:
        """Of measuring all units on all images."""
        return self.every + float(self.units.sum()) if self.exact is None else self.exact


def eliminate(
    measure: Measure,
    units: Sequence[Unit],
    n: int,
    *,
    k: int,
    costs: Costs,
    estimate: UnitsByImage | None = None,
    order: Int[Tensor, " batch"] | None = None,
    confidence: float = 0.95,
    limit: float = LIMIT,
    seed: int = 0,
) -> Adaptive:
    """The k units whose absence changes the loss most over n images, without measuring all units on all of them.

    measure: the effects of some units on some images, by index; costs: what it will cost; estimate (units, n): a cheap
    number for each image that goes with the effect (first_order's), or None; order (n,): in which images are drawn,
    random (None: seeded); limit: the greatest cost, a share of that of measuring everything (exceeded where FEWEST
    images cost more). Raises InputError unless 1 <= k <= units.
    """
    if not 1 <= k <= len(units) or n < 1 or not 0 < confidence < 1:
        raise InputError(f"expected k from 1 to {len(units)} units and an image, found k = {k} and {n} images")
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) if order is None else order
    race = Race(len(units), n, None if estimate is None else estimate[:, drawn].double())
    active, spent, seen = list(range(len(units))), costs.before * n, 0
    taken: list[int] = []
    replace: Replacement = "mean"
    for left in range(LOOKS, 0, -1):
        each = costs.every + float(costs.units[active].sum())
        share = (limit * costs.whole * n - spent) / left / each
        more = min(n - seen, max(int(share), 0 if seen else FEWEST))
        if more > 0:
            effects = measure(tuple(units[index] for index in active), drawn[seen : seen + more])
            race.values[active, seen : seen + more], replace = effects.delta_loss, effects.replace
            spent, seen = spent + effects.forward_equivalents * more, seen + more
            race.images[active] = seen
        found = race.compare()
        chosen = _chosen(found, taken, active, k)
        settled = _settled(found, chosen, confidence)
        if left == 1 or seen == n or bool(settled.all()):
            break
        contested = _contested(found, chosen, active)[: max(2, len(active) // 2)]
        taken += [index for index in active if index in chosen and index not in contested]
        active = sorted(contested)
    half = found.half_width(confidence)
    mean = found.mean.tolist()
    ranking = sorted(range(len(units)), key=lambda index: (index not in chosen, -mean[index]))
    return Adaptive(
        tuple(units),
        tuple(ranking),
        k,
        found.mean,
        found.mean - half,
        found.mean + half,
        race.images,
        settled,
        n,
        confidence,
        replace,
        spent / n,
        costs.whole,
        "" if settled.all() else f"{int((~settled).sum())} of {len(units)} overlap with the boundary of the {k}",
    )


def _chosen(found: Compared, taken: Sequence[int], active: Sequence[int], k: int) -> list[int]:
    """The k: those taken before, and the greatest of the active."""
    best = sorted(active, key=lambda index: -float(found.mean[index]))
    return [*taken, *best[: k - len(taken)]]


def _contested(found: Compared, chosen: Sequence[int], active: Sequence[int]) -> list[int]:
    """The active units, the nearest to the boundary first: to the last that is in, or the first that is out."""
    mean = found.mean.tolist()
    inside = [index for index in active if index in chosen]
    outside = [index for index in active if index not in chosen]
    if not inside or not outside:
        return sorted(active, key=mean.__getitem__, reverse=not inside)
    last, first = min(inside, key=mean.__getitem__), max(outside, key=mean.__getitem__)
    gap = found.apart.abs() / found.apart_error.clamp_min(1e-300)
    return sorted(active, key=lambda index: float(gap[index, first if index in chosen else last]))


def _settled(found: Compared, chosen: Sequence[int], confidence: float) -> Bool[Tensor, " units"]:
    """Which units are surely in (above all others but k - 1 at most) or surely out (k are above it)."""
    above = found.above(confidence)
    count, k = len(above), len(chosen)
    inside = torch.zeros(count, dtype=torch.bool)
    inside[list(chosen)] = True
    return torch.where(inside, above.sum(1) >= count - k, above.sum(0) >= k)
