"""Units removed one after another: curves of loss and accuracy in several orders, and a greedy order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.ablation.bench import Bench, Outcomes, Some
from vitlens.analysis.ablation.units import Removal, Unit
from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.evaluation.intervals import resampled_means
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate

_ROUNDING = 1e-9  # points: 78 % - 77 % is 1 point


@dataclass(frozen=True)
class Curve:
    """Every image's loss and prediction without the first units of an order, the first removed first.

    outcomes: by how many are removed (0 is the unchanged model), per image, so that curves can be compared in pairs.
    """

    order: tuple[Unit, ...]
    outcomes: Outcomes

    @property
    def removed(self) -> tuple[int, ...]:
        """How many units each set of the outcomes has."""
        return tuple(map(len, self.outcomes.sets))

    def accuracy(self, *, groups: Tensor | None = None) -> list[Estimate]:
        """The accuracy after each removal, with Wilson's interval (or a bootstrap over groups)."""
        return [accuracy(right, groups=groups) for right in self.outcomes.correct]

    @property
    def loss(self) -> Float[Tensor, " removed"]:
        """The mean cross-entropy after each removal, nats."""
        return self.outcomes.loss.mean(1)


def steps(count: int, *, points: int = 13) -> tuple[int, ...]:
    """At most `points` numbers of removed units, evenly from 0 to count, both included."""
    if count < 1 or points < 2:
        raise InputError(f"expected at least 1 unit and 2 points of a curve, found {count} and {points}")
    return tuple(sorted({round(count * point / (points - 1)) for point in range(points)}))


def random_order(units: Sequence[Unit], *, seed: int) -> tuple[Unit, ...]:
    """The units in a seeded random order."""
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))
    return tuple(units[index] for index in order.tolist())


def removal_curves(
    bench: Bench,
    orders: Mapping[str, Sequence[Unit]],
    *,
    points: int = 13,
    images: Some | None = None,
    what: str = "Removing units in order",
) -> dict[str, Curve]:
    """The curves of several orders, by name, at `steps`; images: some of the bench's (None: all).

    A set of units that several orders share, as their first and last, is measured once. The replacement of a removed
    unit is that of the unchanged model.
    """
    prefixes = {
        name: [tuple(order[:count]) for count in steps(len(order), points=points)] for name, order in orders.items()
    }
    distinct = {frozenset(each): each for sets in prefixes.values() for each in sets}
    outcomes = bench.without(list(distinct.values()), images, what=what)
    row = {each: number for number, each in enumerate(distinct)}
    return {
        name: Curve(tuple(order), outcomes.rows([row[frozenset(each)] for each in prefixes[name]]))
        for name, order in orders.items()
    }


@dataclass(frozen=True)
class Greedy:
    """order: the first removed first; forward_equivalents: full forward passes spent an image."""

    order: tuple[Unit, ...]
    forward_equivalents: float


def greedy_order(
    bench: Bench,
    units: Sequence[Unit],
    *,
    every: int = 1,
    advance: Callable[[int], object] = lambda _: None,
) -> Greedy:
    """Remove the unit whose removal raises the loss least, rank the others again without it, and so on.

    every: units removed before ranking again; advance: called with the number of units removed. Each round's clean pass
    is that of the model without the units removed so far, so every candidate takes a replay from its own layer: for h
    heads about h²/2 replays of half a forward pass, so h²/4 passes an image instead of h²/2; `every` divides the cost.
    """
    if every < 1 or not units:
        raise InputError(f"expected units, and at least 1 removed in a round, found {len(units)} and {every}")
    spent = 1.0 if bench.replacement == "mean" and bench.means is None else 0.0  # a pass for the means
    removed: Removal = ()
    candidates = list(units)
    while candidates:
        outcomes = bench.without([(unit,) for unit in candidates], given=removed)
        spent += outcomes.forward_equivalents
        order = outcomes.loss.sum(1).argsort(stable=True).tolist()
        candidates = [candidates[index] for index in order]
        advance(len(candidates[:every]))
        removed, candidates = (*removed, *candidates[:every]), candidates[every:]
    return Greedy(removed, spent)


def share_removable(curve: Curve, *, points: float = 1.0, groups: Tensor | None = None, seed: int = 0) -> Estimate:
    """The share of the units that can be removed, in this order, before accuracy falls by more than `points`.

    The greatest measured number of removals up to which no accuracy is lower than that, with its 95 % bootstrap
    interval over images (or groups; none for fewer than 2).
    """
    right = curve.outcomes.correct.double()
    shares = torch.tensor(curve.removed, dtype=torch.float64) / len(curve.order)

    def removable(accuracies: Float[Tensor, "draws removed"]) -> Float[Tensor, " draws"]:
        tolerated = 100 * (accuracies[:, :1] - accuracies) <= points + _ROUNDING
        return shares[tolerated.long().cumprod(1).sum(1) - 1]

    value, n = float(removable(right.mean(1)[None])[0]), right.shape[1]
    if (n if groups is None else len(groups.unique())) < 2:
        return Estimate(value, n=n)
    drawn = removable(resampled_means(right, groups=groups, seed=seed))
    low, high = (float(drawn.quantile(end)) for end in (0.025, 0.975))
    return Estimate(value, low, high, n)


def removal_matters(curve: Curve, *, points: float = 1.0, groups: Tensor | None = None) -> bool:
    """Whether removing all units of a curve significantly lowers accuracy, by more than `points`.

    By the upper end of the last accuracy's 95 % interval. If it does not, the share that can be removed says nothing
    about the units.
    """
    accuracies = curve.accuracy(groups=groups)
    first, last = accuracies[0], accuracies[-1]
    return last.high is not None and last.high < first.value - points / 100
