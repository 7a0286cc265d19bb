"""The decision of a comparison: the cheapest point within the margin, and nothing where another is left open."""

from dataclasses import dataclass

import pytest

from tests.backing import unbacked
from vitlens.commands.study.kinds import KINDS
from vitlens.commands.study.record import AGAINST_BEST, DESIGN, POINTS, ComparisonRow, DesignRow, PointRow
from vitlens.commands.study.report.decision import MARGIN, decide, decision_section
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate

FLOPS = {"vit": 40, "swin": 20, "swin-no-shift": 20, "cnn": 80}


@dataclass
class _Study:
    """A study whose best point is the CNN; gaps: of the others, in points, with their ends and p (Holm)."""

    gaps: dict[str, tuple[float, float, float, float]]
    seeds: int = 3

    def rows(self, table) -> tuple:
        if table is POINTS:
            return tuple(
                PointRow(label, label, "p", None, 1000, flops, 10, 100, 50.0, 2.0, 8 * flops)
                for label, flops in FLOPS.items()
            )
        if table is DESIGN:
            return (DesignRow("swin", 6, self.seeds, 1000, 10, (32, 32)),)
        assert table is AGAINST_BEST
        return tuple(ComparisonRow(label, "cnn", p / 2, p) for label, (*_, p) in self.gaps.items())

    def metric(self, name: str) -> Estimate:
        if name.startswith("accuracy"):
            return Estimate(0.9, 0.88, 0.92, 450)
        return Estimate(*self.gaps[name.split("/")[1]][:3], 450, "points")


WORSE = (-9.0, -12.0, -6.0, 0.001)
WITHIN = (-0.5, -1.5, 0.5, 0.5)
OPEN = (-3.0, -7.0, 1.0, 0.2)
BETTER = (-1.0, -5.0, 3.0, 0.9)


@pytest.mark.parametrize(
    ("gaps", "chosen", "within", "left"),
    [
        ((WORSE, WORSE, WORSE), "cnn", (), ()),
        ((WITHIN, WORSE, WORSE), "vit", ("vit",), ()),
        ((WITHIN, WITHIN, WORSE), "swin", ("vit", "swin"), ()),
        ((OPEN, WITHIN, WORSE), "swin", ("swin",), ("vit",)),  # dearer than the chosen, and not better by the margin
        ((WITHIN, OPEN, WORSE), None, ("vit",), ("swin",)),  # cheaper than what would be chosen
        ((BETTER, WITHIN, WORSE), None, ("swin",), ("vit",)),
        ((OPEN, OPEN, OPEN), None, (), ("vit", "swin", "swin-no-shift")),
    ],
)
def test_the_cheapest_within_the_margin_unless_another_is_open(gaps, chosen, within, left):
    study = _Study(dict(zip(("vit", "swin", "swin-no-shift"), gaps)))
    decision = decide(study)
    assert (decision.best, decision.chosen, decision.within, decision.open) == ("cnn", chosen, within, left)
    assert set(decision.worse) == {label for label, gap in study.gaps.items() if gap == WORSE}
    (section,) = decision_section(study)
    assert bool(section.tables) == (chosen is not None)
    assert list(unbacked(Document("t", (section,)))) == []


def test_costs_are_multiples_of_each_other_point():
    (section,) = decision_section(_Study({"vit": WORSE, "swin": WITHIN, "swin-no-shift": WORSE}))
    rows = {row[0]: row[1:] for row in section.tables[0].rows}
    assert set(rows) == {"vit", "swin-no-shift", "cnn"}
    assert rows["cnn"] == ("1", "0.25", "1", "0.25")


def test_one_seed_decides_nothing_and_other_kinds_do_not_decide():
    assert decide(_Study({"vit": WITHIN}, seeds=1)).chosen is None
    assert decide(_Study({})) is None
    assert list(decision_section(_Study({}))) == []


def test_the_margin_and_what_was_not_tested_are_said():
    (section,) = decision_section(_Study({"vit": WORSE}))
    words = " ".join(sentence.text for sentence in section.sentences)
    assert f"{MARGIN:g} points" in words
    assert KINDS["swin"].untested in words
