"""Which heads work together: what removing two at once does beyond what removing each does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.ablation.effects import Together, Unit
from vitlens.analysis.ablation.importance import Change, changes
from vitlens.analysis.ablation.joint import measure_together
from vitlens.analysis.ablation.redundancy import Redundancy as Redundancy
from vitlens.analysis.ablation.redundancy import RedundancyStream as RedundancyStream
from vitlens.analysis.ablation.redundancy import redundancy as redundancy
from vitlens.analysis.ablation.replacements import Means
from vitlens.errors import InputError
from vitlens.lens.replay import DEFAULT_BUDGET
from vitlens.models.model import Model
from vitlens.names import Replacement
from vitlens.shapes import Images, Labels


@dataclass(frozen=True)
class Pairs:
    """Every image's loss without each of some units, and without each pair of them.

    units: the k units; pairs: (first, second) as indices of units; outcomes: rows are the k units, then the pairs.
    """

    units: tuple[Unit, ...]
    pairs: tuple[tuple[int, int], ...]
    outcomes: Together

    @classmethod
    def join(cls, parts: Sequence["Pairs"]) -> "Pairs":
        """Pairs measured on several batches as one. Raises InputError unless they are of the same units."""
        return changed(parts[0], outcomes=Together.join([part.outcomes for part in parts]))


@dataclass(frozen=True)
class Synergy:
    """Effect of both minus the sum of the effects, change of loss in nats, for each pair.

    Positive: one stands in for the other (both are missed more than each alone); negative: they need each other (once
    one is gone, the other is of less use). units, pairs: as in Pairs; change: mean, low, high, p, p_holm (pairs,); both
    (pairs,): mean effect of removing both; n: images; note: what a report must say, or "".
    """

    units: tuple[Unit, ...]
    pairs: tuple[tuple[int, int], ...]
    change: Change
    both: Float[Tensor, " pairs"]
    n: int
    note: str = ""

    def matrix(self) -> Float[Tensor, "units others"]:
        """The synergies as a symmetric matrix, NaN on its diagonal."""
        table = torch.full((len(self.units), len(self.units)), torch.nan, dtype=torch.float64)
        for (one, two), value in zip(self.pairs, self.change.mean):
            table[one, two] = table[two, one] = value
        return table


def pairwise(
    model: Model,
    images: Images,
    labels: Labels,
    units: Sequence[Unit],
    *,
    replace: Replacement = "mean",
    means: Means | None = None,
    donors: Images | None = None,
    seed: int = 0,
    offset: int = 0,
    budget: int = DEFAULT_BUDGET,
    advance: Callable[[int], object] = lambda _: None,
) -> Pairs:
    """Remove each of the units, and each two of them, on one batch; join over batches, then `synergy`.

    advance: told the number of removals just done, k (k + 1) / 2 in all. The rest as measure_effects.
    """
    if len(units) < 2 or len(set(units)) < len(units):
        raise InputError(f"expected at least 2 different units to pair, found {[unit.name for unit in units]}")
    pairs = tuple(combinations(range(len(units)), 2))
    found = measure_together(
        model,
        images,
        labels,
        [*((unit,) for unit in units), *((units[one], units[two]) for one, two in pairs)],
        replace=replace,
        means=means,
        donors=donors,
        seed=seed,
        offset=offset,
        budget=budget,
        advance=advance,
    )
    return Pairs(tuple(units), pairs, found)


def synergy(pairs: Pairs, *, groups: Tensor | None = None, seed: int = 0) -> Synergy:
    """Interval and test of each pair's synergy, paired over images (or groups), Holm over the pairs."""
    effect, count = pairs.outcomes.delta_loss, len(pairs.units)
    first, second = (list(each) for each in zip(*pairs.pairs))
    both = effect[count:]
    beyond = both - effect[first] - effect[second]
    (change,) = changes((beyond,), families=[0] * len(beyond), groups=groups, seed=seed)
    n = len(pairs.outcomes)
    few = "" if change.low.isfinite().all() else "no intervals and no tests: they need at least 2 images (or groups)"
    note = "; ".join(filter(None, (pairs.outcomes.note, few)))
    return Synergy(pairs.units, pairs.pairs, change, both.mean(1), n, note)
