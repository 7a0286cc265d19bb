"""The decision of a comparison: the cheapest point within the margin, none seen, or inconclusive; and by share."""

from dataclasses import dataclass, field

import pytest

from tests.backing import unbacked
from vitlens.commands.study.kinds import KINDS
from vitlens.commands.study.record import (
    AGAINST_BEST,
    DESIGN,
    DIFFERENCES,
    POINTS,
    ComparisonRow,
    DesignRow,
    PointRow,
)
from vitlens.commands.study.report.decision import MARGIN, SEEN, decide, decision_section
from vitlens.commands.study.untested import UNTESTED
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate

FLOPS = {"vit": 40, "swin": 20, "swin-no-shift": 20, "cnn": 80}
HIGH = Estimate(0.9, 0.88, 0.92, 450)
Gap = tuple[float, float, float, float]


@dataclass
class _Study:
    """A study whose best point is the last of flops; gaps: of the others, in points, with their ends and p (Holm)."""

    gaps: dict[str, Gap]
    seeds: int = 3
    detectable: float | None = None
    flops: dict[str, int] = field(default_factory=lambda: FLOPS)
    parameters: dict[str, int] = field(default_factory=dict)
    best: Estimate = HIGH
    pairs: tuple[ComparisonRow, ...] = ()
    kind: str = "swin"

    def rows(self, table) -> tuple:
        if table is POINTS:
            return tuple(
                PointRow(
                    label, label, "p", float(label.split("-")[1]) if self.pairs else None,
                    self.parameters.get(label, 1000), flops, 10, int(label.split("-")[1]) if self.pairs else 100,
                    50.0, 2.0, 8 * flops,
                )
                for label, flops in self.flops.items()
            )  # fmt: skip
        if table is DESIGN:
            return (DesignRow(self.kind, 6, self.seeds, 1000, 10, (32, 32)),)
        if table is DIFFERENCES:
            return self.pairs
        assert table is AGAINST_BEST
        best = list(self.flops)[-1]
        return tuple(ComparisonRow(label, best, p / 2, p, self.detectable) for label, (*_, p) in self.gaps.items())

    def metric(self, name: str) -> Estimate:
        if name.startswith("accuracy"):
            return self.best
        return Estimate(*self.gaps[name.split("/")[1]][:3], 450, "points")


WORSE = (-9.0, -12.0, -6.0, 0.001)
WITHIN = (-0.5, -1.5, 0.5, 0.5)
OPEN = (-3.0, -7.0, 1.0, 0.2)
BETTER = (-1.0, -5.0, 3.0, 0.9)
LITTLE = (-1.0, -1.8, -0.2, 0.01)  # shown to be worse, and shown to be within the margin
OTHERS = ("vit", "swin", "swin-no-shift")


def section_of(study):
    (section,) = decision_section(study)
    assert list(unbacked(Document("t", (section,)))) == []
    return section


@pytest.mark.parametrize(
    ("gaps", "outcome", "chosen", "within", "left"),
    [
        ((WORSE, WORSE, WORSE), "best", "cnn", (), ()),
        ((WITHIN, WORSE, WORSE), "cheaper", "vit", ("vit",), ()),
        ((LITTLE, WORSE, WORSE), "cheaper", "vit", ("vit",), ()),
        ((WITHIN, WITHIN, WORSE), "cheaper", "swin", ("vit", "swin"), ()),
        ((OPEN, WITHIN, WORSE), "cheaper", "swin", ("swin",), ("vit",)),  # dearer, and not better by the margin
        ((WITHIN, OPEN, WORSE), "inconclusive", None, ("vit",), ("swin",)),  # cheaper than what would be chosen
        ((BETTER, WITHIN, WORSE), "inconclusive", None, ("swin",), ("vit",)),
        ((OPEN, OPEN, OPEN), "inconclusive", None, (), OTHERS),
    ],
)
def test_the_cheapest_within_the_margin_unless_another_is_open(gaps, outcome, chosen, within, left):
    study = _Study(dict(zip(OTHERS, gaps)))
    decision = decide(study)
    assert (decision.outcome, decision.best, decision.chosen) == (outcome, "cnn", chosen)
    assert (decision.within, decision.open) == (within, left)
    assert set(decision.worse) == {label for label, gap in study.gaps.items() if gap == WORSE}
    section = section_of(study)
    assert bool(section.tables) == (chosen is not None)
    assert f"**{chosen}**" in section.sentences[0].text or chosen is None


@pytest.mark.parametrize(
    ("detectable", "outcome", "chosen"),
    [(SEEN, "no-difference", "swin"), (SEEN + 0.1, "inconclusive", None), (None, "inconclusive", None)],
)
def test_points_are_alike_only_where_a_difference_would_have_been_seen(detectable, outcome, chosen):
    study = _Study(dict(zip(OTHERS, (OPEN, OPEN, WORSE))), detectable=detectable)
    decision = decide(study)
    assert (decision.outcome, decision.chosen, decision.cheapest) == (outcome, chosen, "swin")
    assert decision.detectable == detectable
    words = section_of(study).sentences[0].text
    assert "`cnn`, `vit` and `swin`" in words
    assert "0.25 times the operations of `cnn`" in words
    assert (f"{SEEN:.1f} points" in words) == (outcome == "no-difference")


def test_of_equal_operations_parameters_decide_and_then_the_order():
    flops = dict.fromkeys(("none", "sine", "learned"), 40)
    gaps = {"none": OPEN, "sine": OPEN}
    fewer = _Study(gaps, detectable=4.0, flops=flops, parameters={"sine": 900})
    assert decide(fewer).chosen == "sine"
    assert "0.9 times the parameters of `learned`" in section_of(fewer).sentences[0].text
    same = _Study(gaps, detectable=4.0, flops=flops)
    assert decide(same).chosen == "none"
    assert "at the cost of `learned`" in section_of(same).sentences[0].text


def test_costs_are_multiples_of_each_other_point():
    section = section_of(_Study({"vit": WORSE, "swin": WITHIN, "swin-no-shift": WORSE}))
    rows = {row[0]: row[1:] for row in section.tables[0].rows}
    assert set(rows) == {"vit", "swin-no-shift", "cnn"}
    assert rows["cnn"] == ("1", "0.25", "1", "0.25")


def test_one_seed_and_guessing_decide_nothing_and_without_comparisons_there_is_no_decision():
    one = decide(_Study({"vit": WITHIN}, seeds=1, detectable=1.0))
    assert (one.outcome, one.chosen) == ("one-seed", None)
    section_of(_Study({"vit": WITHIN}, seeds=1))
    guessing = _Study({"vit": WITHIN}, best=Estimate(0.12, 0.1, 0.14, 450))
    assert (decide(guessing).outcome, decide(guessing).chosen) == ("guessing", None)
    assert not section_of(guessing).tables
    assert decide(_Study({"vit": WITHIN}, best=Estimate(0.12, 0.101, 0.14, 450))).outcome == "cheaper"
    assert decide(_Study({})) is None
    assert list(decision_section(_Study({}))) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_rule_what_was_not_tested_and_what_would_have_been_seen_are_said(kind):
    words = " ".join(
        sentence.text for sentence in section_of(_Study({"vit": WORSE}, detectable=3.3, kind=kind)).sentences
    )
    assert f"{MARGIN:g} points" in words
    assert UNTESTED[kind] in words
    assert "from 3.3 points on" in words
    assert "100 training images of 32x32 px" in words


def test_each_share_has_its_own_answer():
    """The CNN wins at 5 %, nothing is seen at 50 %, the ViT wins at 100 %; half of the images are enough."""
    flops = {"cnn-5": 80, "vit-5": 40, "cnn-50": 80, "vit-50": 40, "cnn-100": 80, "vit-100": 40}
    gaps = {"cnn-5": (9.0, 6.0, 12.0, 0.001), "cnn-50": OPEN, "cnn-100": WORSE, "vit-50": WITHIN, "vit-5": WORSE}
    pairs = tuple(ComparisonRow(f"cnn-{n}", f"vit-{n}", 0.01, p, 6.0) for n, p in ((5, 0.001), (50, 0.2), (100, 0.001)))
    assert decide(_Study({"vit-50": WITHIN, "vit-5": WORSE, "cnn-5": WORSE, "cnn-100": WORSE}, flops=flops, pairs=pairs,
                         kind="data")).chosen == "vit-50"  # fmt: skip
    few = {"vit-50": WITHIN, "cnn-5": WITHIN, "vit-5": WORSE}  # fewer images count before fewer operations
    assert decide(_Study(few, flops=flops, pairs=pairs, kind="data")).chosen == "cnn-5"
    section = section_of(_Study(gaps, flops=flops, pairs=pairs, kind="data"))
    shares = [sentence.text for sentence in section.sentences if sentence.text.startswith("With ")][:3]
    assert shares[0].startswith("With 5 training images take `cnn-5`: cnn-5 minus vit-5 9.0 points")
    assert "no difference" in shares[1]
    assert "6.0 points" in shares[1]
    assert shares[1].endswith("the cheaper is `vit-50`.")
    assert shares[2].startswith("With 100 training images take `vit-100`")


@pytest.mark.parametrize(("detectable", "said"), [(14.94, "from 14.9 points on"), (523.0, "from over 100 points on")])
def test_no_difference_above_a_hundred_points_is_promised(detectable, said):
    section = section_of(_Study(dict(zip(OTHERS, (OPEN, OPEN, OPEN))), detectable=detectable))
    assert said in " ".join(sentence.text for sentence in section.sentences)
