"""Which model to choose for what follows from claims; a need without a claim says so."""

from dataclasses import replace

import numpy as np

from tests.kit.planted_answers import answers, compare_record, needs
from tests.kit.reliance_rows import reliance_row
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
        ("predictions that no wrong cue decides", "vitlens compare"),
    ):
        model, evidence, *_ = rows[need]
        assert model == "no evidence"
        assert command in evidence


def test_cues_that_were_changed_and_mislead_no_model_are_evidence():
    cues = (("fine-detail", "low-pass"), ("layout", "tiles"))
    rows = tuple(reliance_row(alias, *cue, 0.2, 0.1) for alias in ("vit", "cnn") for cue in cues)
    record = replace(recorded(0.4, 0.1), reliance=rows)
    model, evidence, validity, _ = rows_of(record)["predictions that no wrong cue decides"]
    assert model == "no difference shown"
    assert "2 cues" in evidence
    assert validity.startswith(f"{rows[0].n} images")


def test_every_need_has_claims_that_can_be_its_evidence():
    assert all(need.questions for need in needs())
