"""Which model to choose for what follows from claims; a need without a claim says so."""

import numpy as np

from tests.kit.planted_answers import answers, compare_record
from vitlens.commands.compare.record import CompareRecord
from vitlens.commands.compare.report import REPORT

DRAWS = np.random.default_rng(0)


def recorded(first: float, second: float) -> CompareRecord:
    models = {
        name: answers(DRAWS.random(600) >= errors, 0.9)
        for name, errors in (("vit", first), ("cnn", second))
    }
    return compare_record(models)


def rows_of(record: CompareRecord) -> dict[str, tuple[str, ...]]:
    (section,) = (each for each in REPORT(record).sections if "choose" in each.title)
    (table,) = section.tables
    assert table.columns == ("need", "model", "evidence", "valid for", "not tested")
    return {str(row[0]): tuple(map(str, row[1:])) for row in table.rows}


def test_the_better_model_is_chosen_with_its_claim_and_the_number_of_images():
    rows = rows_of(recorded(0.4, 0.1))
    model, evidence, validity, _ = rows["accuracy on such images"]
    assert model == "cnn"
    assert "**cnn**" in evidence
    assert "600 images" in validity


def test_without_a_difference_none_is_chosen():
    model, *_ = rows_of(recorded(0.2, 0.2))["accuracy on such images"]
    assert model == "no difference shown"


def test_needs_that_were_not_measured_say_so_with_the_command_that_measures_them():
    rows = rows_of(recorded(0.4, 0.1))
    for need, command in (
        ("robustness to attacks", "vitlens attack"),
        ("short computing time", "vitlens profile"),
        ("few training images", "vitlens study --kind data"),
    ):
        model, evidence, *_ = rows[need]
        assert model == "no evidence"
        assert command in evidence
