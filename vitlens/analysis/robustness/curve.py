"""Robust accuracy over epsilon, from the smallest epsilon that broke each image: intervals, medians, pairs.

One number per image determines all of these: an image is robust at epsilon if the model predicts it correctly and no
attempt up to epsilon changed that. So an image broken at one epsilon is broken at every larger one, and no curve rises.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate, accuracy_difference, holm, mcnemar, median_of

ROUNDING = 1e-6  # pixel units: by how much a stored epsilon may differ from the one tried

PerImage = Float[Tensor, " batch"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attack on one model and n images.

    name: the attack with its norm ("pgd-linf"); epsilons: those tried, pixel units, ascending, without 0; clean: which
    images the model predicts correctly before the attack; broken_at: the smallest epsilon at which each is predicted
    wrongly, 0 where it was wrong before, infinite where all failed; groups: (n,) what images share, or None.
    """

    name: str
    alias: str
    epsilons: tuple[float, ...]
    clean: Bool[Tensor, " batch"]
    broken_at: PerImage
    groups: Tensor | None = None

    def robust(self, epsilon: float) -> Bool[Tensor, " batch"]:
        """Which images are predicted correctly up to this epsilon; at 0, those that are before the attack."""
        return self.clean & (self.broken_at > epsilon + ROUNDING)

    def accuracies(self, *, seed: int = 0) -> list[Estimate]:
        """Robust accuracy at each epsilon, with its interval over images (or over groups of them)."""
        return [accuracy(self.robust(epsilon), groups=self.groups, seed=seed) for epsilon in self.epsilons]

    def median_distance(self, *, unit: float = 1.0) -> Estimate | None:
        """The median, over the images predicted correctly before, of the smallest epsilon that broke each; in units.

        None where no image is predicted correctly, or at least half of them are never broken: the median then lies
        beyond all epsilons tried. An upper end beyond these is left out.
        """
        distances = self.broken_at[self.clean].double().numpy()
        if not len(distances):
            return None
        beyond = 1 + 2 * max([*self.epsilons, *distances[np.isfinite(distances)].tolist()], default=1.0)
        middle = median_of(np.where(np.isfinite(distances), distances, beyond), unit="")
        if middle.value >= beyond / 2:  # also where it lies between a broken image and one that was never broken
            return None
        ends = [None if end is None or end >= beyond else end / unit for end in (middle.low, middle.high)]
        return replace(middle, value=middle.value / unit, low=ends[0], high=ends[1])


@dataclass(frozen=True)
class PairedOutcome:
    """Two models under one attack at one epsilon (0: before the attack).

    only_first, only_second: images on which this model alone is robust; difference: robust accuracy of the first minus
    the second's, points, paired; p: McNemar's exact test, p_holm: corrected for all tests of the call.
    """

    name: str
    epsilon: float
    first: str
    second: str
    only_first: int
    only_second: int
    difference: Estimate
    p: float
    p_holm: float


def paired(outcomes: Iterable[tuple[Outcome, Outcome]], *, seed: int = 0) -> tuple[PairedOutcome, ...]:
    """Paired tests of the two models of each pair at every epsilon, with Holm's correction over all of them.

    A pair is two models under the same attack on the same images. The clean images are tested once for two models.
    Raises InputError for another pair.
    """
    tests: list[PairedOutcome] = []
    clean: set[tuple[str, str]] = set()
    for first, second in outcomes:
        if (first.name, first.epsilons) != (second.name, second.epsilons) or len(first.clean) != len(second.clean):
            raise InputError(f"expected two models under one attack on the same images, found {first} and {second}")
        both = first.alias, second.alias
        for epsilon in (*(() if both in clean else (0.0,)), *first.epsilons):
            tests.append(_tested(first, second, epsilon, seed))
        clean.add(both)
    adjusted = holm([test.p for test in tests])
    return tuple(replace(test, p_holm=p) for test, p in zip(tests, adjusted))


def _tested(first: Outcome, second: Outcome, epsilon: float, seed: int) -> PairedOutcome:
    robust_first, robust_second = first.robust(epsilon), second.robust(epsilon)
    only_first = int((robust_first & ~robust_second).sum())
    only_second = int((~robust_first & robust_second).sum())
    difference = accuracy_difference(robust_first, robust_second, groups=first.groups, seed=seed)
    p = mcnemar(only_first, only_second)
    name = "clean" if epsilon == 0 else first.name
    return PairedOutcome(name, epsilon, first.alias, second.alias, only_first, only_second, difference, p, p)


def halving_epsilon(outcomes: Sequence[Outcome]) -> float:
    """The smallest epsilon at which the robust accuracy of every model is at most half its clean accuracy.

    The largest epsilon where there is none. Raises InputError without any epsilon.
    """
    if not outcomes or not outcomes[0].epsilons:
        raise InputError("expected an attack with at least one epsilon, found none")
    for epsilon in outcomes[0].epsilons:
        if all(2 * int(outcome.robust(epsilon).sum()) <= int(outcome.clean.sum()) for outcome in outcomes):
            return epsilon
    return outcomes[0].epsilons[-1]
