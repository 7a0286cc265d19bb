"""Whether the ranking of methods depends on what replaces a removed patch: rank correlation, and pairs that swap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate, Side, beyond, widened

PerImage = Float[Tensor, " batch"]


@dataclass(frozen=True)
class SwappedPair:
    """Two methods that change places: first, second: the mean paired differences (better minus worse) with the one and
    the other substrate; their intervals, as wide as all pairs of methods require, lie above and below 0."""

    better: str
    worse: str
    first: Estimate
    second: Estimate


@dataclass(frozen=True)
class RankAgreement:
    """The rankings of the same methods by two checks. tau: Kendall's, of the mean results, 1 for the same order and -1
    for the reverse; swapped: pairs of methods that significantly change places; n: images."""

    tau: float
    swapped: tuple[SwappedPair, ...]
    n: int


def rank_agreement(
    first: Mapping[str, PerImage], second: Mapping[str, PerImage], *, groups: Tensor | None = None, seed: int = 0
) -> RankAgreement:
    """How far two checks agree about the ranking of methods.

    first, second: the result of every method for each image (n,), greater is better. Raises InputError for other
    methods in the second or fewer than two.
    """
    names = list(first)
    if names != list(second) or len(names) < 2:
        raise InputError(f"expected the same two methods or more, found {names} and {list(second)}")
    pairs = list(combinations(range(len(names)), 2))
    values = [torch.stack([results[name].double() for name in names]) for results in (first, second)]
    looks = len(pairs)
    by_pair = [
        [widened(each, looks) for each in estimates(_differences(own, pairs), groups=groups, seed=seed, unit="")]
        for own in values
    ]
    swapped = []
    for (one, other), in_first, in_second in zip(pairs, *by_pair):
        sides = beyond(in_first, 0.0), beyond(in_second, 0.0)
        if sides == (Side.ABOVE, Side.BELOW):
            swapped.append(SwappedPair(names[one], names[other], in_first, in_second))
        elif sides == (Side.BELOW, Side.ABOVE):
            swapped.append(SwappedPair(names[other], names[one], _negative(in_first), _negative(in_second)))
    return RankAgreement(_tau(*(own.mean(1) for own in values)), tuple(swapped), values[0].shape[1])


def _differences(values: Float[Tensor, "methods batch"], pairs: Sequence[tuple[int, int]]) -> Tensor:
    return torch.stack([values[one] - values[other] for one, other in pairs])


def _negative(estimate: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (estimate.high, estimate.low))
    return Estimate(-estimate.value, low, high, estimate.n, estimate.unit)


def _tau(first: Float[Tensor, " methods"], second: Float[Tensor, " methods"]) -> float:
    """Kendall's tau-b; 0 where one of the two ranks nothing."""
    from scipy import stats  # takes half a second to import

    found = float(stats.kendalltau(first.numpy(), second.numpy()).statistic)
    return found if found == found else 0.0
