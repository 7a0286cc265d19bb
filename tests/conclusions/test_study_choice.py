"""The model that a study recommends: the cheapest within the margin, or none."""

from dataclasses import replace

import pytest

from tests.kit.select import values_of
from vitlens.commands.study.kinds.record import ComparisonRow, DesignRow, RecipeRow, VariantRow
from vitlens.commands.study.kinds.report import decision
from vitlens.commands.study.kinds.variants.record import VariantsRecord
from vitlens.commands.study.report import REPORT
from vitlens.report.claims import Claim
from vitlens.uncertainty import Estimate

HIGH = Estimate(0.9, 0.88, 0.92, 450)
WORSE = (-9.0, -12.0, -6.0, 0.001)
FAR = (-50.0, -70.0, -30.0, 0.06)  # few seeds: not significant after Holm, but far below
WITHIN = (-0.5, -1.5, 0.5, 0.5)
OPEN = (-3.0, -7.0, 1.0, 0.2)
BETTER = (-1.0, -5.0, 3.0, 0.9)
LITTLE = (-1.0, -1.8, -0.2, 0.01)  # shown to be worse, and shown to be within the margin
COSTS = {"vit": 40, "swin": 20, "shiftless": 20}


def study(gaps, *, detectable=None, costs=COSTS, trained=None) -> VariantsRecord:
    """Return a study whose best model costs 80 operations.

    gaps: of the other models, in points, with their ends and their p-value after Holm.
    """

    def point(name, operations):
        parameters = (trained or {}).get(name, 100)
        return VariantRow(
            name, name, name, "", True, HIGH, 0.1, 100, 100, parameters, operations, 6, 30, 9.0, 3.0
        )

    rows = [
        ComparisonRow(
            "best",
            name,
            "cnn",
            name,
            "cnn",
            Estimate(*gap[:3], 450, "points"),
            gap[3],
            gap[3],
            detectable,
        )
        for name, gap in zip(costs, gaps)
    ]
    points = [*(point(name, costs[name]) for name in costs), point("cnn", 80)]
    design = DesignRow("pooling", 6, 3, 100, 450, 10, (32, 32))
    recipe = RecipeRow("all", "adamw", 1e-3, 64, 6, "none", "")
    return VariantsRecord(
        design=(design,), points=tuple(points), comparisons=tuple(rows), recipes=(recipe,)
    )


def said(record) -> Claim:
    claim, *_ = REPORT(record).claims
    assert (claim.question, claim.kind) == ("choice", "answer")
    return claim


@pytest.mark.parametrize(
    ("gaps", "outcome", "chosen", "within", "left"),
    [
        ((WORSE, WORSE, WORSE), "best", "cnn", "", ""),
        ((WITHIN, WORSE, WORSE), "cheaper", "vit", "vit", ""),
        ((LITTLE, WORSE, WORSE), "cheaper", "vit", "vit", ""),
        ((WITHIN, FAR, WORSE), "cheaper", "vit", "vit", ""),
        ((WITHIN, WITHIN, WORSE), "cheaper", "swin", "vit swin", ""),
        # dearer, and not better by the margin
        (
            (OPEN, WITHIN, WORSE),
            "cheaper",
            "swin",
            "swin",
            "vit",
        ),
        # cheaper than what would be chosen
        (
            (WITHIN, OPEN, WORSE),
            "inconclusive",
            None,
            "vit",
            "swin",
        ),
        ((BETTER, WITHIN, WORSE), "inconclusive", None, "swin", "vit"),
        ((OPEN, OPEN, OPEN), "inconclusive", None, "", "vit swin shiftless"),
    ],
)
def test_the_cheapest_within_the_margin_unless_another_is_open(gaps, outcome, chosen, within, left):
    record = study(gaps)
    choice = decision(record)
    claim = said(record)
    assert (choice.outcome, choice.best.name) == (outcome, "cnn")
    assert chosen is None or choice.cheapest.name == chosen
    assert values_of(choice.within, "name") == within.split()
    assert values_of(choice.undecided, "name") == left.split()
    worse = [name for name, gap in zip(COSTS, gaps) if gap in (WORSE, FAR)]
    assert values_of(choice.worse, "name") == worse
    assert claim.state == ("" if chosen else "inconclusive")
    assert chosen is None or (f"**{chosen}**" in claim.says and chosen in claim.title)
    table = " ".join(line.text for section in REPORT(record).sections for line in section.sentences)
    for name in worse:
        assert f"**{name}**" in table


@pytest.mark.parametrize(
    ("detectable", "outcome"),
    [(5.0, "no difference"), (5.1, "inconclusive"), (None, "inconclusive")],
)
def test_candidates_are_alike_only_where_a_difference_would_have_been_seen(detectable, outcome):
    record = study((OPEN, OPEN, WORSE), detectable=detectable)
    choice = decision(record)
    assert (choice.outcome, choice.cheapest.name, choice.detectable) == (
        outcome,
        "swin",
        detectable,
    )
    assert "**cnn**, **vit** and **swin**" in said(record).says
    assert "0.25 times the operations of **cnn**" in said(record).says


def test_a_variant_of_which_a_training_failed_is_not_chosen():
    record = study((WITHIN, OPEN, WORSE))
    assert decision(record).outcome == "inconclusive"
    vit, swin, *others = record.points
    record = replace(record, points=(vit, replace(swin, failed=1), *others))
    choice = decision(record)
    assert (choice.outcome, choice.cheapest.name) == ("cheaper", "vit")
    assert "1 of **swin**" in " ".join(claim.says for claim in REPORT(record).claims)


def test_of_equal_costs_the_next_decides_and_no_difference_above_a_hundred_points_is_promised():
    costs = dict.fromkeys(COSTS, 80)
    fewer = study((OPEN, OPEN, WORSE), detectable=4.0, costs=costs, trained={"swin": 90})
    assert decision(fewer).cheapest.name == "swin"
    assert "0.9 times the trained parameters of **cnn**" in said(fewer).says
    same = study((OPEN, OPEN, WORSE), detectable=4.0, costs=costs)
    assert decision(same).cheapest.name == "vit"
    assert "times" not in said(same).says

    def unknown(detectable: float | None) -> str:
        record = study((WITHIN, WORSE, WORSE), detectable=detectable)
        return " ".join(line.text for line in REPORT(record).first.unknown)

    assert "below 14.9 points" in unknown(14.94)
    assert "below over 100 points" in unknown(523.0)
    assert "may have been missed" not in unknown(None)


def test_names_with_commas_are_joined_by_semicolons():
    costs = {"vit, 5 %": 40, "swin, 5 %": 20, "shiftless": 20}
    assert (
        "**cnn**; **vit, 5 %**; and **swin, 5 %**"
        in said(study((OPEN, OPEN, WORSE), costs=costs)).says
    )
