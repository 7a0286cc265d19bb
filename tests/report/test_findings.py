"""Findings are ranked by one rule; an effect that is not clear of its reference is none."""

import pytest

from vitlens.report.claims import MOST, WEIGHTS, Kind, finding, ranked
from vitlens.uncertainty import Estimate

LEVELS: tuple[tuple[Kind, float], ...] = (("answer", 0.01), ("comparison", 0.01), ("fact", 0.001))


def effect(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half, 100, "points")


@pytest.mark.parametrize(
    ("estimate", "kind", "reference", "rank"),
    [
        (effect(3.0, 1.0), "fact", 0.0, 3.0),
        (effect(3.0, 1.0), "comparison", 0.0, 4.5),
        (effect(-3.0, 1.0), "hidden fault", 0.0, 4.5),
        (effect(3.0, 1.0), "expected fact", 1.0, 1.0),
        (effect(1.7, 1.0), "fact", 0.0, 1.7),  # just clear
        (effect(1.4, 1.0), "answer", 0.0, 28.0),
        (effect(50.0, 1.0), "fact", 0.0, 10.0),  # capped
        (effect(1.0, 0.0), "fact", 0.0, 10.0),
    ],
)
def test_rank(estimate: Estimate, kind: Kind, reference: float, rank: float) -> None:
    found = finding("It differs.", estimate, kind=kind, reference=reference)
    assert found is not None
    assert found.rank == pytest.approx(rank)
    assert found.effect is estimate


def test_what_may_be_chance_is_no_finding() -> None:
    for estimate in (effect(1.0, 1.0), effect(0.5, 1.0), effect(1.3, 1.0), effect(-1.3, 1.0), Estimate(5.0)):
        for kind in WEIGHTS:
            assert finding("It differs.", estimate, kind=kind) is None


def test_an_uncertain_test_is_no_finding() -> None:
    for kind, level in LEVELS:
        assert finding("It differs.", effect(4.0, 1.0), kind=kind, p=1.1 * level) is None
        assert finding("It differs.", effect(4.0, 1.0), kind=kind, p=level) is not None
    assert finding("It differs.", effect(1.6, 1.0), kind="fact") is None
    assert finding("It differs.", effect(-1.6, 1.0), kind="comparison") is not None


def test_the_margin_goes_by_the_end_on_the_side_of_the_reference() -> None:
    """A share of 1.0 whose interval reaches down to 0.8 alone: half its width would count twice."""
    all_of_them = Estimate(1.0, 0.8, 1.0, 15)
    assert finding("All.", all_of_them, kind="fact", reference=0.7) is None
    assert finding("All.", all_of_them, kind="fact", reference=0.6) is not None


def test_the_largest_ranks_come_first_and_at_most_seven() -> None:
    found = [finding(f"Fact {size}.", effect(float(size), 1.0), kind="fact") for size in range(1, 10)]
    first = ranked([None, *found])
    assert len(first) == MOST
    assert [each.effect.value for each in first] == [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0]
