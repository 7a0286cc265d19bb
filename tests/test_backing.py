"""tests/backing.py: numbers that no row holds are found, and rounded ones are not."""

from dataclasses import dataclass

import pytest

from tests.backing import unbacked
from vitlens.report.document import Document, Says, Section, Sentence
from vitlens.report.numbers import in_time
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class _Row:
    name: str
    value: float
    epsilon: float


ROW = _Row("class 7 of 10", 0.98765, 2 / 255)
ESTIMATE = Estimate(0.798, 0.787, 0.809, n=5000)


def _faults(text: str, *rows: object, says: Says = "result") -> list[str]:
    return list(unbacked(Document("t", (Section("S", (Sentence(text, rows, says),)),))))


@pytest.mark.parametrize(
    "text",
    [
        "Top-1 accuracy 79.8 % (78.7 to 80.9, n = 5,000).",
        "At 2/255 it is 98.8 %, that is 0.988, in L3.H7 of vit-16 (Rollout, Abnar & Zuidema 2020), as `--limit 12`.",
        "class 7 of 10: 1 of 2 rows, with its 95 % interval.",
    ],
)
def test_numbers_of_the_rows_are_backed(text: str) -> None:
    assert _faults(text, ROW, ESTIMATE) == []


@pytest.mark.parametrize("text", ["Top-1 accuracy 79.9 %.", "3 of them.", "At 3/255.", "p = 1.2e-05."])
def test_other_numbers_are_not(text: str) -> None:
    assert len(_faults(text, ROW, ESTIMATE)) == 1


@pytest.mark.parametrize("seconds", [0.4, 9.96, 59.6, 88.06, 3599.4, 3600.0, 7530.2])
def test_a_time_is_that_of_its_seconds(seconds: float) -> None:
    assert _faults(f"It took {in_time(seconds)}.", seconds) == []


@pytest.mark.parametrize("text", ["It took 1 min 27 s.", "It took 2 min 28 s.", "It took 1 h 28 min."])
def test_another_time_is_not(text: str) -> None:
    assert len(_faults(text, 88.06)) == 1


def test_a_number_of_ten_to_the_minus_is_read_whole() -> None:
    row = _Row("x", 1.234e-05, 0.0)
    assert _faults("p = 1.23e-05.", row) == []
    assert len(_faults("p = 1.23e-04.", row)) == 1


def test_the_name_of_a_class_may_be_a_digit() -> None:
    row = _Row("7", 0.5, 0.0)
    assert _faults("Class 7, as (7), 50.0 %.", row) == []
    assert len(_faults("Class 7 with 77 % and 7.7.", row)) == 2


def test_a_result_without_rows_is_not_backed_and_a_definition_needs_none() -> None:
    assert len(_faults("It is larger.")) == 1
    assert _faults("The mean of 12 steps.", says="method") == []
