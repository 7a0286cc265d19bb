"""One choice among several: the cheapest within the margin, none seen, or inconclusive."""

import pytest

from vitlens.commands.study.kinds.choose import SEEN, Candidate, choose, claim_of, missed, others
from vitlens.uncertainty import Estimate

HIGH = Estimate(0.9, 0.88, 0.92, 450)
WORSE = (-9.0, -12.0, -6.0, 0.001)
WITHIN = (-0.5, -1.5, 0.5, 0.5)
OPEN = (-3.0, -7.0, 1.0, 0.2)
BETTER = (-1.0, -5.0, 3.0, 0.9)
LITTLE = (-1.0, -1.8, -0.2, 0.01)  # shown to be worse, and shown to be within the margin
COSTS = {"vit": 40, "swin": 20, "shiftless": 20}


def candidates(gaps, *, detectable=None, costs=COSTS, parameters=()):
    """The best costs 80; gaps: of the others, in points, with their ends and p (Holm)."""
    found = [
        Candidate(
            name, HIGH, {"operations": costs[name], "parameters": dict(parameters).get(name, 100)},
            Estimate(*gap[:3], 450, "points"), gap[3], detectable,
        )
        for name, gap in zip(costs, gaps)
    ]  # fmt: skip
    return [*found, Candidate("cnn", HIGH, {"operations": 80, "parameters": 100})]


def said(choice):
    return claim_of(choice, "swin")


@pytest.mark.parametrize(
    ("gaps", "outcome", "chosen", "within", "left"),
    [
        ((WORSE, WORSE, WORSE), "best", "cnn", "", ""),
        ((WITHIN, WORSE, WORSE), "cheaper", "vit", "vit", ""),
        ((LITTLE, WORSE, WORSE), "cheaper", "vit", "vit", ""),
        ((WITHIN, WITHIN, WORSE), "cheaper", "swin", "vit swin", ""),
        ((OPEN, WITHIN, WORSE), "cheaper", "swin", "swin", "vit"),  # dearer, and not better by the margin
        ((WITHIN, OPEN, WORSE), "inconclusive", None, "vit", "swin"),  # cheaper than what would be chosen
        ((BETTER, WITHIN, WORSE), "inconclusive", None, "swin", "vit"),
        ((OPEN, OPEN, OPEN), "inconclusive", None, "", "vit swin shiftless"),
    ],
)
def test_the_cheapest_within_the_margin_unless_another_is_open(gaps, outcome, chosen, within, left):
    choice = choose(candidates(gaps))
    assert (choice.outcome, choice.best.name) == (outcome, "cnn")
    assert chosen is None or choice.cheapest.name == chosen
    assert [each.name for each in choice.within] == within.split()
    assert [each.name for each in choice.open] == left.split()
    assert [each.name for each in choice.worse] == [name for name, gap in zip(COSTS, gaps) if gap == WORSE]
    claim = said(choice)
    assert (claim.state, claim.kind) == ("" if chosen else "inconclusive", "answer")
    assert chosen is None or (f"**{chosen}**" in claim.says and chosen in claim.title)
    assert all(f"**{each.name}**" in others(choice) for each in choice.worse)


@pytest.mark.parametrize(
    ("detectable", "outcome"), [(SEEN, "no difference"), (SEEN + 0.1, "inconclusive"), (None, "inconclusive")]
)
def test_candidates_are_alike_only_where_a_difference_would_have_been_seen(detectable, outcome):
    choice = choose(candidates((OPEN, OPEN, WORSE), detectable=detectable))
    assert (choice.outcome, choice.cheapest.name, choice.detectable) == (outcome, "swin", detectable)
    assert "**cnn**, **vit** and **swin**" in said(choice).says
    assert "0.25 times the operations of **cnn**" in said(choice).says


def test_of_equal_costs_the_next_decides_and_then_the_order():
    costs = dict.fromkeys(COSTS, 80)
    fewer = choose(candidates((OPEN, OPEN, WORSE), detectable=4.0, costs=costs, parameters={"swin": 90}))
    assert fewer.cheapest.name == "swin"
    assert "0.9 times the parameters of **cnn**" in said(fewer).says
    same = choose(candidates((OPEN, OPEN, WORSE), detectable=4.0, costs=costs))
    assert same.cheapest.name == "vit"
    assert "times" not in said(same).says


@pytest.mark.parametrize(("detectable", "says"), [(14.94, "below 14.9 points"), (523.0, "below over 100 points")])
def test_no_difference_above_a_hundred_points_is_promised(detectable, says):
    assert says in missed(choose(candidates((OPEN, OPEN, OPEN), detectable=detectable)))
    assert missed(choose(candidates((OPEN, OPEN, OPEN)))) == ""
