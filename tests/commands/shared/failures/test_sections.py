"""The words on failures follow their rows: a cause is named only where its test supports it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.backing import unbacked
from vitlens.analysis.failures.taxonomy import CATEGORIES, NOT_EXPLAINED, TESTS
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.shared.failures.rows import (
    FAILURE_ARRAYS,
    FAILURE_EXAMPLES,
    FAILURE_TABLES,
    FAILURES,
    REPAIRS,
    FailureExampleArrays,
    FailureExampleRow,
    FailureRow,
    RepairRow,
)
from vitlens.commands.shared.failures.sections import failure_sections, findings_of
from vitlens.records import Contents, Record
from vitlens.report.document import Document, Section
from vitlens.report.layout import laid_out

ALIAS = "vit"
SUPPORTED = RepairRow(
    ALIAS, "elsewhere", "remove marked patches", 40, 31, 0.775, 0.625, 0.877, 4, 0.1, 0.04, 0.231, 0.675, 0.48, 0.79,
    1e-6, 2.5e-6, "supported",
)  # fmt: skip
UNSUPPORTED = replace(SUPPORTED, corrected=5, corrected_rate=0.125, p_holm=1.0, verdict="not supported")
FEW = replace(SUPPORTED, category="small", test="enlarge", n=7, corrected=7, control=0, p_holm=1.0, verdict="too few")


def row(category: str, **changes: object) -> FailureRow:
    known = FailureRow(
        ALIAS, category, 60, 0.5, 0.38, 0.62, 340, 0.1, 0.07, 0.14, 0.4, 0.27, 0.52, more_frequent=False, explains=False
    )
    return replace(known, **changes)  # type: ignore[arg-type]


NUMBERS = ("failure_rate", "success_rate", "difference")
ENDS = ("failure_low", "failure_high", "success_low", "success_high", "difference_low", "difference_high")
UNKNOWN = {"failures": 0, "successes": 0, **dict.fromkeys((*NUMBERS, *ENDS))}
ROWS = (*(row(category) for category in CATEGORIES), row(NOT_EXPLAINED, successes=0, success_rate=None))


def recorded(
    out: Path, rows: tuple[FailureRow, ...] = ROWS, tests: tuple[RepairRow, ...] = (), *, truth: str = "cat"
) -> Record:
    with RunFolder.create("evaluate", out=out, config={"models": [{"alias": ALIAS}]}) as folder:
        folder.write(FAILURES, rows)
        folder.write(REPAIRS, tests)
        tested = FailureExampleRow(ALIAS, "small", "enlarge", 3, "a.png", truth, "dog", 0.8, truth, 0.6)
        bare = replace(tested, category="cut", test="", changed_prediction=None, changed_probability=None)
        folder.write(FAILURE_EXAMPLES, [tested, bare])
        pixels = np.full((2, 3, 16, 16), 90, np.uint8)
        maps = np.random.default_rng(0).uniform(0, 1, (2, 4, 4)).astype(np.float32)
        folder.save(FAILURE_ARRAYS, FailureExampleArrays(pixels, maps, pixels, pixels[:, 0] > 0), model=ALIAS)
        return Record(folder.record(), Contents(tables=FAILURE_TABLES, arrays=(FAILURE_ARRAYS,)))


def section(record: Record) -> Section:
    [found] = failure_sections(record, {ALIAS: "relevance"})
    return found


def results(record: Record) -> str:
    return " ".join(each.text for each in section(record).sentences if each.says == "result")


def backed(record: Record) -> bool:
    return not list(unbacked(laid_out(Document("", (section(record),)))))


def test_a_cause_is_named_where_its_test_supports_it(tmp_path):
    record = recorded(tmp_path / "a", tests=(SUPPORTED, FEW))
    first = section(record).sentences[0]
    assert "because of" in first.text
    assert CATEGORIES["elsewhere"].because in first.text
    assert "31 of 40" in first.text
    assert first.rows == (SUPPORTED,)
    assert backed(record)
    [found] = [each for each in findings_of(record) if each is not None]
    assert (found.effect.value, found.p) == (SUPPORTED.gain, SUPPORTED.p_holm)
    assert found.figure in {figure.name for figure in section(record).figures}


@pytest.mark.parametrize("tests", [(), (UNSUPPORTED,), (FEW,), (UNSUPPORTED, FEW)])
def test_no_cause_is_named_otherwise(tmp_path, tests):
    frequent = tuple(replace(each, more_frequent=each.category == "elsewhere") for each in ROWS)
    record = recorded(tmp_path / "a", frequent, tests)
    assert "because" not in results(record)
    said = (
        "No causal test shows a cause of the errors of **vit**." if tests else "No causal test of the errors of **vit**"
    )
    assert results(record).startswith(said)
    assert backed(record)
    [found] = [each for each in findings_of(record) if each is not None]
    assert "because" not in found.claim.text
    assert (found.effect.value, found.p) == (0.4, None)


def test_nothing_frequent_and_nothing_supported_is_no_finding(tmp_path):
    assert not [each for each in findings_of(recorded(tmp_path / "a", tests=(UNSUPPORTED, FEW))) if each is not None]


def test_no_failure_at_all(tmp_path):
    none = tuple(replace(each, **{**UNKNOWN, "successes": 400}) for each in ROWS)
    record = recorded(tmp_path / "a", none)
    assert results(record) == "**vit** misclassifies none of these images, so there is nothing to explain."
    assert backed(record)


def test_what_the_data_cannot_tell_is_said(tmp_path):
    rows = tuple(replace(each, **UNKNOWN) if each.category in ("small", "cut") else each for each in ROWS)
    record = recorded(tmp_path / "a", rows)
    assert "Not tested on these images: small, occluded or cut (needs object masks)." in results(record)
    methods = " ".join(each.text for each in section(record).sentences if each.says == "method")
    assert CATEGORIES["small"].rule not in methods
    assert TESTS["enlarge"].change not in methods
    assert CATEGORIES["elsewhere"].rule in methods


def test_every_category_is_in_the_table_and_every_test_in_the_second(tmp_path):
    first, second = section(recorded(tmp_path / "a", tests=(SUPPORTED, FEW))).tables
    assert [cells[0] for cells in first.rows] == [*(known.title for known in CATEGORIES.values()), NOT_EXPLAINED]
    verdicts = {str(cells[0]): cells[-1] for cells in first.rows}
    assert verdicts["attends elsewhere"] == "supported"
    assert verdicts["small"] == "too few"
    assert verdicts["look-alike class"] == "no test"
    assert [cells[2] for cells in second.rows] == ["remove marked patches", "enlarge"]
    assert first.rows[0][1] == "30 of 60, 50.0 % (38.0 to 62.0)"


def test_every_rule_test_and_reason_is_defined_once(tmp_path):
    text = " ".join(each.text for each in section(recorded(tmp_path / "a")).sentences if each.says == "method")
    for known in CATEGORIES.values():
        assert known.rule in text
        assert known.untestable in text
    for test in TESTS.values():
        assert text.count(test.change) == text.count(test.control) == 1


def test_names_with_markup_are_drawn_and_leave_the_text_alone(tmp_path):
    record = recorded(tmp_path / "a", tests=(SUPPORTED,), truth="<b>$x^2$</b> | `cat`")
    [figure] = [spec.draw() for spec in section(record).figures]
    words = {axes.get_xlabel() for axes in figure.axes}
    assert any("<b>$x^" in word for word in words)
    assert "<b>" not in results(record)


def test_an_older_folder_has_no_section(tmp_path):
    record = recorded(tmp_path / "a", ())
    assert not list(failure_sections(record, {ALIAS: "relevance"}))
    assert not list(findings_of(record))
