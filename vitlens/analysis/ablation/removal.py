"""Accuracy and loss as units are removed one after another, in several orders."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.ablation.effects import JointEffects, Unit
from vitlens.analysis.ablation.joint import measure_jointly
from vitlens.analysis.ablation.replacements import MeanOutputs
from vitlens.analysis.answers.evaluate import accuracy
from vitlens.analysis.answers.paired import resampled_means
from vitlens.errors import InputError
from vitlens.lens.replay import DEFAULT_BUDGET
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import Estimate

_ROUNDING = 1e-9  # points: 78 % - 77 % is 1 point


@dataclass(frozen=True)
class AblationCurve:
    """Every image's loss and prediction without the first units of an order.

    order: the units, first removed first; removed: how many of them, for each row of outcomes (0 is the unchanged
    model); outcomes: loss, correct (removed, n), per image, so that curves can be compared in pairs.
    """

    order: tuple[Unit, ...]
    removed: tuple[int, ...]
    outcomes: JointEffects

    def accuracy(self, *, groups: Tensor | None = None) -> list[Estimate]:
        """The accuracy after each removal, with Wilson's interval (or a bootstrap over groups)."""
        return [accuracy(right, groups=groups) for right in self.outcomes.correct]

    @property
    def loss(self) -> Float[Tensor, " removed"]:
        """The mean cross-entropy after each removal, nats."""
        return self.outcomes.loss.mean(1)

    @classmethod
    def join(cls, parts: Sequence["AblationCurve"]) -> "AblationCurve":
        """The curve of one order from those of several batches. Raises InputError where their removals differ."""
        return changed(parts[0], outcomes=JointEffects.join([part.outcomes for part in parts]))


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
    model: Model,
    images: Images,
    labels: Labels,
    orders: Mapping[str, Sequence[Unit]],
    *,
    removed: Sequence[int] | None = None,
    replace: Replacement = "mean",
    means: MeanOutputs | None = None,
    donors: Images | None = None,
    seed: int = 0,
    offset: int = 0,
    budget: int = DEFAULT_BUDGET,
    advance: Callable[[int], object] = lambda _: None,
) -> dict[str, AblationCurve]:
    """The curves of several orders on one batch, from one clean pass; join those of one name over batches.

    orders: by name ("least first", "most first", "random 0" ...); removed: after how many removals to measure (None:
    after each; those beyond an order's length are left out); advance: called with the number of distinct sets just
    measured. The replacement of a removed unit is that of the unchanged model. Other arguments as measure_effects; the
    cost is divided evenly among the curves.
    """
    counts = {name: _counts(len(order), removed) for name, order in orders.items()}
    removed_units = {name: [tuple(order[:count]) for count in counts[name]] for name, order in orders.items()}
    # all orders share their first and last set
    distinct = {frozenset(each): each for sets in removed_units.values() for each in sets}
    joint = measure_jointly(
        model,
        images,
        labels,
        list(distinct.values()),
        replace=replace,
        means=means,
        donors=donors,
        seed=seed,
        offset=offset,
        budget=budget,
        advance=advance,
    )
    place = {each: row for row, each in enumerate(distinct)}
    cost = joint.forward_equivalents / max(1, len(orders))
    curves = {}
    for name, order in orders.items():
        rows = [place[frozenset(each)] for each in removed_units[name]]
        outcomes = changed(
            joint,
            units=tuple(removed_units[name]),
            loss=joint.loss[rows],
            correct=joint.correct[rows],
            forward_equivalents=cost,
        )
        curves[name] = AblationCurve(tuple(order), counts[name], outcomes)
    return curves


def share_removable(
    curve: AblationCurve, *, points: float = 1.0, groups: Tensor | None = None, seed: int = 0
) -> Estimate:
    """The share of the units that can be removed, in this order, before accuracy falls by more than `points`.

    The greatest measured number of removals up to which no accuracy is lower than that, with its 95 % bootstrap
    interval over images (or groups; none for fewer than 2). Raises InputError where the curve does not start at 0.
    """
    if not curve.removed or curve.removed[0] != 0:
        raise InputError(f"expected a curve from 0 removed units on, found {curve.removed[:1]}")
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


def removal_matters(curve: AblationCurve, *, points: float = 1.0, groups: Tensor | None = None) -> bool:
    """Whether removing all units of a curve significantly lowers accuracy, by more than `points`.

    By the upper end of the last accuracy's 95 % interval. If it does not, the share that can be removed says nothing
    about the units.
    """
    accuracies = curve.accuracy(groups=groups)
    first, last = accuracies[0], accuracies[-1]
    return last.high is not None and last.high < first.value - points / 100


def _counts(length: int, removed: Sequence[int] | None) -> tuple[int, ...]:
    if not length:
        raise InputError("expected units to remove, found none")
    counts = range(length + 1) if removed is None else sorted(set(removed))
    if any(count < 0 for count in counts):
        raise InputError(f"expected numbers of removed units from 0 to {length}, found {min(counts)}")
    return tuple(count for count in counts if count <= length)
