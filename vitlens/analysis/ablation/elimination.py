"""Selection of the k units that change the loss most, measuring successively fewer units on more images.

Successive accepts and rejects (Bubeck, Wang and Viswanathan 2013) in a few rounds within a stated cost: after each, the
half of the units furthest from the selection boundary, in standard errors of the paired difference, is measured no
further. The final inference uses paired differences over the images that two units share: Student's t with fewer
degrees of freedom for heavy tails (Satterthwaite, by the kurtosis of all units together), the finite population
correction (no uncertainty once all images are measured), and Bonferroni over all pairs and rounds. Where a cheap
estimate of each effect is known for all images, effects are adjusted by regression on it (Cochran 1977).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from vitlens.analysis.ablation.effects import Effects, PerUnit, Unit, UnitsByImage
from vitlens.errors import InputError
from vitlens.names import Replacement

LIMIT = 1 / 3  # of the cost of measuring everything
ROUNDS = 3  # after each, all intervals hold simultaneously
FEWEST = 12  # images before a slope is fitted or a unit is eliminated

Measure = Callable[[tuple[Unit, ...], Tensor], Effects]  # units, indices of images -> their effects
Square = Float[Tensor, "units others"]


@dataclass(frozen=True)
class Adaptive:
    """The most important units, and the confidence in them.

    units: all candidates; ranking: their indices, the k chosen first, and within and after them the most important (by
    change of loss) first; mean, low, high (units,): change of loss over all n images, nats, estimated from the images
    each was measured on, with intervals that hold for all units and rounds simultaneously at `confidence`; images
    (units,): how many those were; n: all images; settled (units,): whether a unit belongs to the k, or does not, at
    `confidence`; the others overlap. forward_equivalents: full forward passes spent on each of the n images;
    exact_cost: the cost of measuring all units on all of them; note: a remark for a report, or "".
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
        """Whether the set of the k is certain at `confidence`."""
        return bool(self.settled.all())

    @property
    def overlapping(self) -> tuple[Unit, ...]:
        """The units that may or may not belong to the k, the most important first."""
        return tuple(self.units[index] for index in self.ranking if not self.settled[index])


@dataclass(frozen=True)
class Costs:
    """Full forward passes an image: units (units,): for removing each; every: for the clean pass of a measurement;
    before: already spent on each of all images; exact: for measuring all units on all images."""

    units: PerUnit
    every: float = 1.0
    before: float = 0.0
    exact: float | None = None

    @property
    def whole(self) -> float:
        """The cost of measuring all units on all images."""
        return self.every + float(self.units.sum()) if self.exact is None else self.exact


@dataclass(frozen=True)
class PairedEffects:
    """mean, error, freedom (units,): changes of the loss over all images, standard errors, degrees of freedom; apart,
    apart_error, apart_freedom (units, units): the paired difference of a row's unit and a column's."""

    mean: PerUnit
    error: PerUnit
    freedom: PerUnit
    apart: Square
    apart_error: Square
    apart_freedom: Square

    def above(self, confidence: float) -> Bool[Tensor, "units others"]:
        """Which units (rows) change the loss more than others (columns), simultaneously at `confidence`."""
        count = len(self.mean)
        level = (1 - confidence) / (max(1, count * (count - 1) // 2) * ROUNDS)
        return self.apart > _quantile(level, self.apart_freedom) * self.apart_error

    def half_width(self, confidence: float) -> PerUnit:
        """Half the width of the simultaneous intervals of all means."""
        return _quantile((1 - confidence) / (2 * len(self.mean) * ROUNDS), self.freedom) * self.error


class Measurements:
    """The measurements: values (units, n) in the order of drawing, and the number of images measured for each unit."""

    def __init__(self, units: int, n: int, estimate: UnitsByImage | None) -> None:
        self.n, self.estimate = n, estimate
        self.values = torch.full((units, n), torch.nan, dtype=torch.float64)
        self.images = torch.zeros(units, dtype=torch.long)

    def add(self, units: Sequence[int], start: int, effects: UnitsByImage) -> None:
        """Add the effects of units on the images after the first `start`."""
        stop = start + effects.shape[1]
        self.values[units, start:stop] = effects
        self.images[units] = stop

    def compare(self) -> PairedEffects:
        """Every unit's change of the loss, and every two units' difference over the images that both have."""
        count = len(self.images)
        single = torch.zeros(3, count, dtype=torch.float64)
        double = torch.zeros(3, count, count, dtype=torch.float64)
        parts = {images: self._adjusted(images) for images in self.images.unique().tolist()}
        tails = self._kurtosis({images: left for images, (_, left) in parts.items()})
        for images, (mean, left) in parts.items():
            have = (self.images >= images).nonzero().flatten()
            degrees = max(1.0, images - 1.0 - (2 if self._adjusts(images) else 0))
            # a variance is less certain where tails are heavy (Satterthwaite)
            freedom = torch.full_like(mean, max(1.0, min(degrees, 2 * images / max(tails - 1, 1.0))))
            scale = (1 - images / self.n) / images / degrees
            square = left.square().sum(1)
            between = (square[:, None] + square - 2 * left @ left.T).clamp_min(0)
            own = self.images[have] == images
            single[:, have[own]] = torch.stack([mean, (square * scale).sqrt(), freedom])[:, own]
            pair = own[:, None] | own
            rows, columns = (have[axis] for axis in pair.nonzero().unbind(1))
            apart = torch.stack([mean[:, None] - mean, (between * scale).sqrt(), freedom.expand(len(have), -1)])
            double[:, rows, columns] = apart[:, pair]
        return PairedEffects(*single, *double)

    def _kurtosis(self, parts: Mapping[int, Tensor]) -> float:
        """The kurtosis of all units together, each over its own images, scaled to its own variance; 3 if normal."""
        ratios = []
        for images, left in parts.items():
            own = left[self.images[self.images >= images] == images]
            square = own.square().mean(1)
            ratios.append((own.pow(4).mean(1) / square.square())[square > 0])
        every = torch.cat(ratios)
        return float(every.mean()) if len(every) else 3.0

    def _adjusts(self, images: int) -> bool:
        return self.estimate is not None and images >= FEWEST

    def _adjusted(self, images: int) -> tuple[Tensor, Tensor]:
        """Of the units measured on this many images: estimated means over all n images, and the residuals.

        The residuals (units, images) are leave-one-out ones, as a regression on few images with heavy tails overfits.
        """
        have = self.images >= images
        own = self.values[have, :images]
        mean = own.mean(1, keepdim=True)
        if self.estimate is None or not self._adjusts(images):
            return mean[:, 0], own - mean
        known = self.estimate[have]
        centre = known[:, :images].mean(1, keepdim=True)
        away = known[:, :images] - centre
        scale = away.square().sum(1, keepdim=True).clamp_min(1e-300)
        slope = (away * own).sum(1, keepdim=True) / scale
        left = (own - mean - slope * away) / (1 - 1 / images - away.square() / scale).clamp_min(1e-3)
        return (mean - slope * (centre - known.mean(1, keepdim=True)))[:, 0], left


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

    measure: returns the effects of the given units on the images of the given indices; costs: of these measurements;
    estimate (units, n): a cheap number correlated with the effect (first_order's), or None; order (n,): the random
    order in which images are drawn (None: seeded); limit: the greatest cost, a share of that of measuring everything
    (exceeded where FEWEST images cost more). Raises InputError unless 1 <= k <= units.
    """
    if not 1 <= k <= len(units) or n < 1 or not 0 < confidence < 1:
        raise InputError(f"expected k from 1 to {len(units)} units and an image, found k = {k} and {n} images")
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(seed)) if order is None else order
    values = Measurements(len(units), n, None if estimate is None else estimate[:, drawn].double())
    active, spent, measured = list(range(len(units))), costs.before * n, 0
    accepted: list[int] = []
    replace: Replacement = "mean"
    for rounds_left in range(ROUNDS, 0, -1):
        each = costs.every + float(costs.units[active].sum())
        share = (limit * costs.whole * n - spent) / rounds_left / each
        more = min(n - measured, max(int(share), 0 if measured else FEWEST))
        if more > 0:
            effects = measure(tuple(units[index] for index in active), drawn[measured : measured + more])
            values.add(active, measured, effects.delta_loss)
            spent, measured, replace = spent + effects.forward_equivalents * more, measured + more, effects.replace
        compared = values.compare()
        chosen = _chosen(compared, accepted, active, k)
        settled = _settled(compared, chosen, confidence)
        if rounds_left == 1 or measured == n or bool(settled.all()):
            break
        contested = _contested(compared, chosen, active)[: max(2, len(active) // 2)]
        accepted += [index for index in active if index in chosen and index not in contested]
        active = sorted(contested)
    return _result(values, compared, chosen, settled, confidence, units, replace, spent / n, costs.whole)


def _result(
    values: Measurements,
    compared: PairedEffects,
    chosen: Sequence[int],
    settled: Bool[Tensor, " units"],
    confidence: float,
    units: Sequence[Unit],
    replace: Replacement,
    spent: float,
    exact_cost: float,
) -> Adaptive:
    half, mean, k = compared.half_width(confidence), compared.mean, len(chosen)
    overlapping = int((~settled).sum())
    return Adaptive(
        units=tuple(units),
        ranking=tuple(sorted(range(len(units)), key=lambda index: (index not in chosen, -float(mean[index])))),
        k=k,
        mean=mean,
        low=mean - half,
        high=mean + half,
        images=values.images,
        settled=settled,
        n=values.n,
        confidence=confidence,
        replace=replace,
        forward_equivalents=spent,
        exact_cost=exact_cost,
        note=f"{overlapping} of {len(units)} overlap with the boundary of the {k}" if overlapping else "",
    )


def _chosen(compared: PairedEffects, accepted: Sequence[int], active: Sequence[int], k: int) -> list[int]:
    """The k units: those accepted before, and the active ones of greatest effect."""
    best = sorted(active, key=lambda index: -float(compared.mean[index]))
    return [*accepted, *best[: k - len(accepted)]]


def _contested(compared: PairedEffects, chosen: Sequence[int], active: Sequence[int]) -> list[int]:
    """The active units, the nearest to the boundary (the weakest chosen, the strongest not chosen) first."""
    mean = compared.mean.tolist()
    inside = [index for index in active if index in chosen]
    outside = [index for index in active if index not in chosen]
    if not inside or not outside:
        return sorted(active, key=mean.__getitem__, reverse=not inside)
    last, first = min(inside, key=mean.__getitem__), max(outside, key=mean.__getitem__)
    gap = compared.apart.abs() / compared.apart_error.clamp_min(1e-300)
    return sorted(active, key=lambda index: float(gap[index, first if index in chosen else last]))


def _settled(compared: PairedEffects, chosen: Sequence[int], confidence: float) -> Bool[Tensor, " units"]:
    """Which units certainly belong to the k (above all but k - 1 others) or certainly do not (k are above)."""
    above = compared.above(confidence)
    count, k = len(above), len(chosen)
    inside = torch.zeros(count, dtype=torch.bool)
    inside[list(chosen)] = True
    return torch.where(inside, above.sum(1) >= count - k, above.sum(0) >= k)


def _quantile(level: float, freedom: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(stats.t.isf(level, freedom.numpy())))
