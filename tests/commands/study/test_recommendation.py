"""The ViT or the CNN: the cheaper where it is better or within the margin, the better one, none seen, inconclusive."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.backing import unbacked
from vitlens.commands.shared.pairs import PairRow
from vitlens.commands.shared.trainings import TRAINING
from vitlens.commands.study.report.whole import recommendation as module
from vitlens.commands.study.report.whole.recommendation import choose_model, recommendation_section
from vitlens.report.document import Document, Sentence
from vitlens.uncertainty import Estimate


@dataclass
class _Study:
    """v, the ViT, takes twice the operations of c, the CNN; only: images that v alone and c alone predict correctly."""

    only: tuple[int, int]
    p: float
    gain: tuple[float, float, float]  # v minus c, points
    images: int = 500
    flops: tuple[float, float] = (2e6, 1e6)
    pair: tuple[str, str] | None = ("v", "c")
    record: "_Study" = field(init=False)

    def __post_init__(self) -> None:
        self.record = self

    def of(self, word: str):
        return iter([SimpleNamespace(record=self)] if word == "evaluate" else [])

    def rows(self, table) -> tuple:
        assert table is TRAINING
        return ()

    @property
    def pairs(self) -> tuple[PairRow, ...]:
        first, second = self.only
        return (PairRow("v", "c", self.images - first - second - 10, first, second, 10, self.p, self.p),)

    def metric(self, name: str) -> Estimate | None:
        if name == "accuracy_difference/v/c":
            return Estimate(*self.gain, self.images, "points")
        known = {"flops/v": self.flops[0], "flops/c": self.flops[1], "accuracy/v": 0.9, "accuracy/c": 0.92}
        return Estimate(known[name], n=self.images) if name in known else None


@pytest.fixture(autouse=True)
def data(monkeypatch):
    monkeypatch.setattr(module, "data_sentences", lambda _: [Sentence("the images.", (1,))])


@pytest.mark.parametrize(
    ("study", "outcome", "chosen"),
    [
        (_Study((5, 40), 0.001, (-7.0, -9.5, -4.5)), "better", "c"),  # cheaper and better
        (_Study((40, 5), 0.001, (7.0, 4.5, 9.5)), "better", "v"),  # dearer and better
        (_Study((8, 2), 0.05, (1.2, 0.1, 1.9)), "cheaper", "c"),  # significantly worse, by at most 2 points
        (_Study((5, 4), 1.0, (0.2, -1.0, 1.4)), "cheaper", "c"),
        (_Study((30, 25), 0.6, (1.0, -1.9, 3.9)), "no-difference", "c"),
        (_Study((30, 25), 0.6, (5.0, -9.5, 19.5), images=100), "inconclusive", None),
    ],
)
def test_the_rule(study, outcome, chosen):
    choice = choose_model(study)
    assert (choice.outcome, choice.chosen, choice.cheaper) == (outcome, chosen, "c")
    assert choice.gain.value == -study.gain[0]
    (section,) = recommendation_section(study)
    assert list(unbacked(Document("t", (section,)))) == []
    assert (f"**{chosen}**" in section.sentences[0].text) == (chosen is not None)
    assert f"{0.5 if chosen != 'v' else 2} times the operations" in section.sentences[0].text


def test_what_would_have_been_seen_is_that_of_paired_answers():
    """55 of 500 answers differ, 30 against 25: variance 55/500 - (5/500)^2 of one difference (a)."""
    choice = choose_model(_Study((30, 25), 0.6, (1.0, -1.9, 3.9)))
    error = 100 * ((55 / 500 - (5 / 500) ** 2) / 499) ** 0.5
    assert choice.detectable == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)
    assert choose_model(_Study((0, 0), 1.0, (0.0, 0.0, 0.0))).detectable is None


def test_equal_operations_are_decided_by_parameters_and_without_costs_the_vit_stands_first():
    study = _Study((5, 4), 1.0, (0.2, -1.0, 1.4), flops=(1e6, 1e6))
    assert choose_model(study).cheaper == "v"


def test_nothing_is_recommended_without_a_pair():
    assert choose_model(_Study((5, 4), 1.0, (0.2, -1.0, 1.4), pair=None)) is None
    assert list(recommendation_section(_Study((5, 4), 1.0, (0.2, -1.0, 1.4), pair=("v", "other")))) == []
