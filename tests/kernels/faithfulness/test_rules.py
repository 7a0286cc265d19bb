"""By which numbers a method's maps pass, fail or are inconclusive: the rules of the cascade and of stability."""

import pytest

from tests.kit.map_rows import FALLING, STAGES, STAYING
from vitlens.analysis.faithfulness.checks import Judgement, Stage, judged_cascade, judged_stability
from vitlens.uncertainty import Estimate, wilson


def judged(*means: float, kept: float | None = None, n: int = 32, names: tuple[str, ...] = STAGES) -> Judgement:
    known = [Estimate(mean, mean - 0.02, mean + 0.02, n, "") for mean in means]
    return judged_cascade([Stage(name, own, kept) for name, own in zip(names, known)])


@pytest.mark.parametrize(
    ("means", "state", "decisive"),
    [
        (FALLING, "pass", 2),
        (STAYING, "fail", 2),  # below 0.5 only in the lower half; the least down to the middle block decides
        ((1.0, 0.4, 0.9, 0.9, 0.2, 0.0), "pass", 1),
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.6), "fail", 5),  # all weights random, and the maps are the old ones
        ((0.9, 0.8, 0.49, 0.1, 0.1, 0.0), "inconclusive", 2),  # its interval holds 0.5
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.49), "inconclusive", 0),
    ],
)
def test_the_rule_of_the_cascade(means, state, decisive):
    found = judged(*means)
    assert (found.state, found.value.value) == (state, means[decisive])


def test_a_cascade_that_could_not_have_failed_and_the_least_similarity_down_to_the_middle_block():
    for means in (FALLING, STAYING):
        assert {judged(*means, n=n, kept=kept).state for n, kept in ((9, None), (32, 0.9))} == {"inconclusive"}
    for names in (("head", "block 1", "block 0", "embedding"), ("head", "block 0")):
        assert judged(0.9, 0.89, 0.88, 0.87, names=names).value.value == 0.89


@pytest.mark.parametrize(
    ("correlation", "jumped", "state"),
    [
        (Estimate(0.9, 0.8, 0.95), wilson(0, 16), "pass"),
        (Estimate(0.9, 0.8, 0.95), wilson(12, 16), "fail"),
        (Estimate(0.3, 0.2, 0.4), wilson(0, 16), "fail"),
        (Estimate(0.9, 0.8, 0.95), wilson(4, 16), "inconclusive"),
        (Estimate(0.6, 0.4, 0.8), wilson(0, 16), "inconclusive"),
        (Estimate(0.9, 0.8, 0.95), wilson(9, 9), "inconclusive"),  # few images
        (None, None, "inconclusive"),
    ],
)
def test_the_rule_of_stability(correlation, jumped, state):
    assert judged_stability(correlation, jumped).state == state
