"""What a study concludes from its numbers: statements of the literature, the discussion, the decision table."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

import vitlens
from tests.backing import unbacked
from vitlens.commands.study.report.whole.discussion import discussion
from vitlens.commands.study.report.whole.learned import learned
from vitlens.report.document import Document
from vitlens.uncertainty import Estimate

REPORTS = Path(vitlens.__file__).parents[1] / "reports"


@dataclass
class _Study:
    """A study of two models of which only metrics are known."""

    metrics: dict[str, Estimate]
    pair: tuple[str, str] | None = ("v", "c")
    vits: tuple[str, ...] = ("v",)
    record: "_Study" = field(init=False)

    def __post_init__(self) -> None:
        self.record = self

    def of(self, word: str):
        return iter(())

    def rows(self, table) -> tuple[()]:
        return ()

    def metric(self, name: str) -> Estimate | None:
        return self.metrics.get(name)


def _estimate(value: float, half: float = 0.01, unit: str = "fraction") -> Estimate:
    return Estimate(value, value - half, value + half, 100, unit)


@pytest.mark.parametrize(("gain", "state"), [(-5.8, "confirmed"), (5.8, "contradicted"), (0.5, "not decided")])
def test_the_statement_on_accuracy_follows_the_paired_difference(gain, state):
    study = _Study({"accuracy_difference/v/c": _estimate(gain, 2.0, "points")})
    section = learned(study)
    (row,) = section.tables[0].rows
    assert row[2] == state
    assert list(unbacked(Document("t", (section,)))) == []


@pytest.mark.parametrize(
    ("vit", "cnn", "state"), [(0.6, 0.3, "confirmed"), (0.3, 0.6, "contradicted"), (0.6, 0.6, "not decided")]
)
def test_the_statement_on_occlusion_needs_intervals_apart(vit, cnn, state):
    study = _Study(
        {f"hardened_accuracy/{alias}/occlusion/0.5": _estimate(value) for alias, value in (("v", vit), ("c", cnn))}
    )
    (row,) = learned(study).tables[0].rows
    assert row[2] == state


def test_nothing_measured_says_nothing():
    assert learned(_Study({})) is None
    assert list(discussion(_Study({}, pair=None))) == []


def test_the_decision_table_prefers_a_model_only_beyond_the_intervals():
    metrics = {
        "accuracy/v": _estimate(0.92), "accuracy/c": _estimate(0.98),
        "accuracy_difference/v/c": _estimate(-6.0, 2.0, "points"),
        "latency/v/1": _estimate(2.0, 0.5, "ms"), "latency/c/1": _estimate(2.2, 0.5, "ms"),
        "parameters/v": Estimate(10.0, unit=""), "parameters/c": Estimate(5.0, unit=""),
    }  # fmt: skip
    sections = list(discussion(_Study(metrics)))
    decisions = {row[0]: row[1] for row in sections[-1].tables[0].rows}
    assert decisions == {"correct answers": "c", "speed": "either", "few parameters": "c"}
    assert list(unbacked(Document("t", tuple(sections)))) == []
