"""The coverage of nominal 95 % intervals, by simulation: 92 to 98 % if data are not extreme.

Exceptions are stated where they are made: Wilson's interval is discrete at small n, so at extreme
shares it may hold less or more; the interval of a median, Newcombe's and those of a difference of
accuracies are conservative, so they may hold the truth in up to 100 %. Of skewed data (exponential)
fewer than 16 values hold less, as for every method.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from vitlens import uncertainty as ours
from vitlens.analysis.evaluation.intervals import (
    Moments,
    accuracy_over_seeds,
    difference_over_seeds,
    estimates,
    mean_test,
)
from vitlens.uncertainty import Estimate

pytestmark = pytest.mark.slow

RUNS = 1500
MOST = 100.0  # of intervals that are conservative
LEAST_GROUPS = (
    [8] * 5,
    [8] * 10,
    [1, 1, 2, 2, 4, 4, 8, 8, 16, 16],
    [40] + [5] * 7,
    [100, 20, 5, 1, 1, 1, 1, 1],
)

Draw = Callable[[np.random.Generator], tuple[Estimate, float]]


def coverage(draw: Draw, *, runs: int = RUNS, seed: int = 0) -> float:
    """Return the percentage of intervals that hold the true value."""
    generator = np.random.default_rng(seed)
    held = 0
    for _ in range(runs):
        estimate, truth = draw(generator)
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low - 1e-12 <= truth <= estimate.high + 1e-12
    return 100 * held / runs


SAMPLES = {
    "normal": (lambda generator, n: generator.normal(size=n), 0.0),
    "exponential": (lambda generator, n: generator.exponential(size=n), 1.0),
    "shares": (lambda generator, n: generator.beta(8, 2, size=n), 0.8),
}


@pytest.mark.parametrize(
    ("kind", "n", "least"),
    [
        *(("normal", n, 92) for n in (2, 3, 5, 6, 8, 16, 50)),
        *(("shares", n, 92) for n in (3, 8, 16, 50)),
        *(("exponential", n, 92) for n in (30, 100)),
        ("exponential", 8, 88),
    ],
)
@pytest.mark.parametrize("function", [ours.bootstrap_mean, ours.student_mean])
def test_of_a_mean(function, kind, n, least):
    sample, truth = SAMPLES[kind]
    more = {"draws": 2000} if function is ours.bootstrap_mean else {}
    if kind == "shares":
        more |= {"least": 0.0, "most": 1.0}
    covered = coverage(lambda generator: (function(sample(generator, n), **more), truth))
    assert least - 0.5 <= covered <= 98


def grouped(generator: np.random.Generator, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    members = np.repeat(np.arange(len(sizes)), sizes)
    return generator.normal(size=len(sizes))[members] + generator.normal(size=len(members)), members


@pytest.mark.parametrize("sizes", LEAST_GROUPS, ids=str)
@pytest.mark.parametrize("which", ["bootstrap", "student", "moments", "rows"])
def test_of_a_mean_over_groups(which, sizes):
    """The most unequal groups are worth so few that the degrees of freedom, and the width, are
    conservative.
    """

    def draw(generator: np.random.Generator) -> tuple[Estimate, float]:
        values, members = grouped(generator, sizes)
        if which == "bootstrap":
            return ours.bootstrap_mean(values, groups=members, draws=2000), 0.0
        if which == "student":
            return ours.student_mean(values, groups=members), 0.0
        if which == "rows":
            return estimates(torch.from_numpy(values[None]), groups=torch.from_numpy(members))[
                0
            ], 0.0
        moments = Moments(clusters=len(sizes))
        moments.add(
            {("x", 0): torch.from_numpy(values[:, None])},
            len(values),
            groups=torch.from_numpy(members),
        )
        return moments.estimate(("x", 0), 0, ""), 0.0

    covered = coverage(draw, runs=400 if which == "rows" else RUNS)
    assert 91 <= covered <= (99.8 if len(set(sizes)) > 1 else 98)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("within", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("groups", "size"), [(10, 8), (30, 8), (60, 4)])
def test_of_an_accuracy_over_groups(groups, size, within, share):
    """within: the correlation of two images of a source. At 0.9 few groups are wrong, and the share
    is discrete.
    """
    scale = (1 - within) / within
    members = np.repeat(np.arange(groups), size)

    def draw(generator: np.random.Generator) -> tuple[Estimate, float]:
        rates = generator.beta(share * scale, (1 - share) * scale, groups)
        return ours.share_of(
            generator.random(groups * size) < rates[members], groups=members
        ), share

    assert (88 if share == 0.9 else 92) <= coverage(draw) <= 99.5


@pytest.mark.parametrize(
    ("n", "share", "least"), [(10, 0.5, 92), (50, 0.5, 92), (50, 0.9, 92), (200, 0.98, 91)]
)
def test_of_a_share(n, share, least):
    """Exactly, over all counts: Wilson's is discrete."""
    held = []
    for count in range(n + 1):
        interval = ours.wilson(count, n)
        if interval.low <= share <= interval.high:
            held.append(stats.binom.pmf(count, n, share))
    assert least <= 100 * sum(held) <= 99


@pytest.mark.parametrize("n", [20, 100])
def test_of_a_difference_of_accuracies(n):
    def paired(generator: np.random.Generator) -> tuple[Estimate, float]:
        both = generator.random((2, n)) < np.array([[0.8], [0.7]])
        return ours.accuracy_difference(*both), 10.0

    def independent(generator: np.random.Generator) -> tuple[Estimate, float]:
        counts = generator.binomial(n, 0.8), generator.binomial(n, 0.7)
        return ours.difference_of(*(ours.wilson(int(count), n) for count in counts)), 10.0

    assert 92 <= coverage(paired, runs=500) <= MOST
    assert 92 <= coverage(independent) <= MOST


@pytest.mark.parametrize("n", [6, 10, 31])
def test_of_a_median(n):
    covered = coverage(
        lambda generator: (ours.median_of(generator.exponential(size=n)), float(np.log(2)))
    )
    assert 92 <= covered <= MOST  # exact, conservative


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 9), (5, 5)])
def test_of_welchs_difference(first, second):
    def draw(generator: np.random.Generator) -> tuple[Estimate, float]:
        gap, _ = ours.welch(generator.normal(1, 3, first), generator.normal(0, 1, second), unit="")
        return gap, 1.0

    assert 92 <= coverage(draw) <= 98


def seeded(
    generator: np.random.Generator, seeds: int, of_images: np.ndarray, spread: float
) -> np.ndarray:
    """Draw answers of seeds to images: a logit is that of the image plus that of the seed."""
    logits = of_images + spread * generator.normal(size=(seeds, 1)) + 1.5
    return generator.random(logits.shape) < 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize(("seeds", "spread"), [(1, 0.0), (2, 0.0), (3, 0.2), (5, 0.2), (5, 0.5)])
def test_of_an_accuracy_over_seeds(seeds, spread):
    """Two seeds that differ much tell too little of other seeds: 89 % at a spread of 0.5, so they
    are left out.
    """
    values = 1.5 * stats.norm.ppf((np.arange(2000) + 0.5) / 2000)
    total = np.sqrt(1.5**2 + spread**2) / 1.5
    truth = float((1 / (1 + np.exp(-(values * total + 1.5)))).mean())

    def draw(generator: np.random.Generator) -> tuple[Estimate, float]:
        of_images = 1.5 * generator.normal(size=300)
        return accuracy_over_seeds(seeded(generator, seeds, of_images, spread)), truth

    covered = coverage(draw)
    assert 91.5 <= covered <= 98.5


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_of_a_difference_over_seeds(seeds):
    """Of equal models on the same images: conservative for few seeds."""

    def draw(generator: np.random.Generator) -> tuple[Estimate, float]:
        of_images = 1.5 * generator.normal(size=300)
        first = seeded(generator, seeds, of_images, 0.2)
        second = seeded(generator, seeds, of_images, 0.2)
        return difference_over_seeds(first, second).estimate, 0.0

    assert 92 <= coverage(draw) <= MOST


@pytest.mark.parametrize("n", [5, 10, 30, 100])
def test_a_detectable_effect_is_found_with_the_power_that_it_says(n):
    generator = np.random.default_rng(0)
    detections = 0
    for _ in range(RUNS):
        power = ours.power_of(generator.normal(size=n))
        assert power is not None
        ratio = power.detectable / power.error  # of the error that is known
        detections += ours.student_test(generator.normal(ratio / np.sqrt(n), 1, n)) <= 0.05
    assert 76 <= 100 * detections / RUNS <= 88


@pytest.mark.parametrize("n", [8, 16, 50])
@pytest.mark.parametrize(("kind", "most"), [("normal", 6.0), ("exponential", 7.5)])
def test_false_alarms_of_changes_of_mean_zero(kind, n, most):
    sample, truth = SAMPLES[kind]
    rows = sample(np.random.default_rng(n), (3000, n)) - truth
    p = mean_test(torch.from_numpy(rows))
    assert 100 * float((p <= 0.05).double().mean()) <= most
