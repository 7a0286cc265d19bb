"""`vitlens.read` gives the content of a folder, and refuses what `vitlens report` refuses."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import vitlens
from tests.kit.select import values_of
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import report
from vitlens.errors import InputError, UnknownNameError
from vitlens.record import SCHEMA

REPORTS = Path(__file__).parents[2] / "reports"
FOLDERS = sorted(  # those that are not older than the records
    path.parent.name
    for path in REPORTS.glob("*/results.json")
    if json.loads(path.read_text())["schema"] == SCHEMA
)


@pytest.fixture
def folder(golden, tmp_path):
    return Path(shutil.copytree(golden("ablate").folder, tmp_path / "run"))


def results_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_committed_report_is_read_as_it_was_written(name):
    run = vitlens.read(REPORTS / name)
    results = results_of(REPORTS / name)
    assert (run.command, run.status, run.report.name) == (results["command"], "done", "report.md")
    assert {key: estimate.value for key, estimate in run.metrics.items()} == {
        key: value["value"] for key, value in results["metrics"].items()
    }
    declared = COMMANDS[run.command].record_class(run.config.options).contents().tables
    assert set(run.tables) == set(declared)
    for table, kind in declared.items():
        # a folder of an earlier version lacks tables that are newer
        assert len(run.table(table)) == len(results["tables"].get(table, ()))
        for row in run.table(table):
            assert type(row) is kind


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        ("pooling-digits", {"points", "position_order"}),
        ("transfer-deit-tiny", {"points", "curves"}),
        ("pretraining-shapes", {"points", "likeness"}),
        ("study-digits", {"chapters", "training"}),
    ],
)
def test_a_study_has_the_tables_of_its_kind_alone(name, tables):
    other_tables = {
        "points",
        "position_order",
        "curves",
        "likeness",
        "chapters",
        "training",
    } - tables
    read = set(vitlens.read(REPORTS / name).tables)
    assert tables <= read
    assert not other_tables & read


def test_arrays_and_names_are_those_that_were_written(folder):
    config = json.loads((folder / "config.json").read_text())
    config["models"][0]["name"] = "a*b`c"
    (folder / "config.json").write_text(json.dumps(config))
    run = vitlens.read(str(folder))
    assert run.config.models[0].name == "a*b`c"
    for file in run.arrays:
        with np.load(folder / "arrays" / f"{file}.npz") as archive:
            assert set(run.arrays[file]) == set(archive.files)


def test_a_table_as_pandas_has_a_column_for_each_field_and_four_for_an_interval():
    run = vitlens.read(REPORTS / "ablate-deit-tiny")
    table = run.to_pandas("curves")
    rows = run.table("curves")
    accuracy = {"accuracy", "accuracy_low", "accuracy_high", "accuracy_n"}
    assert set(table.columns) == set(asdict(rows[0])) | accuracy
    assert list(table["loss"]) == values_of(rows, "loss")
    assert list(table["accuracy_low"]) == values_of(rows, "accuracy.low")


def test_an_empty_table_as_pandas_has_its_columns():
    run = vitlens.read(REPORTS / "ablate-deit-tiny")
    empty = next(name for name in run.tables if not run.table(name))
    table = run.to_pandas(empty)
    assert len(table) == 0
    assert len(table.columns) > 0


def test_pandas_that_is_not_installed_is_named(monkeypatch):
    run = vitlens.read(REPORTS / "ablate-deit-tiny")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        run.to_pandas("curves")


def test_the_verdicts_are_those_of_the_report_in_its_order():
    run = vitlens.read(REPORTS / "audit-vit-shortcut")
    stored = results_of(REPORTS / "audit-vit-shortcut")["verdicts"]
    assert [asdict(verdict) for verdict in run.verdicts] == stored
    states = {(verdict.question, verdict.state) for verdict in run.verdicts}
    assert {("accuracy", "pass"), ("calibration", "fail")} <= states
    assert vitlens.read(REPORTS / "look-deit-tiny").verdicts == ()


def test_unknown_names_are_told_with_the_nearest(folder):
    run = vitlens.read(folder)
    for ask, typed, near in (
        (run.metrics.__getitem__, "acuracy/tiny", "accuracy/tiny"),
        (run.table, "curve", "curves"),
        (run.to_pandas, "curve", "curves"),
        (run.arrays.__getitem__, "efects-mean", "effects-mean"),
    ):
        with pytest.raises(UnknownNameError, match=f"did you mean.*'{near}'"):
            ask(typed)
    assert (run.metrics.get("none"), run.arrays.get("none", 3)) == (None, 3)


def with_results(**changes: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "results.json").write_text(
        json.dumps({**results_of(folder), **changes})
    )


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_is_read_only_when_asked(folder, status):
    with_results(status=status, tables={})(folder)
    with pytest.raises(InputError, match="unfinished=True"):
        vitlens.read(folder)
    run = vitlens.read(folder, unfinished=True)
    assert run.status == status
    for name in run.tables:
        assert run.table(name) == []


def edit(folder: Path, pattern: str, text: str, *, name: str = "results.json") -> None:
    """Replace the first match of a pattern, which there must be, in a file of the folder."""
    content, count = re.subn(pattern, text, (folder / name).read_text(), count=1)
    assert count == 1
    (folder / name).write_text(content)


DAMAGED: dict[str, Callable[[Path], object]] = {  # more: tests/contracts/test_folders.py
    "schema 1": with_results(schema=1),
    "a text for a number": with_results(metrics={"accuracy/tiny": {"value": "high"}}),
    "a table that is no list": with_results(tables={"curves": 1}),
    "another command": with_results(command="models"),
    "a number beyond all floats": lambda folder: edit(
        folder, r'"value": [-\d.e]+', '"value": 1e999'
    ),
    "an option beyond all floats": lambda folder: edit(
        folder, r'"seed": \d+', '"seed": -1e999', name="config.json"
    ),
    "lists without end": lambda folder: (folder / "results.json").write_text("[" * 10**6),
    "a verdict that is a number": with_results(verdicts=[3]),
    "no JSON": lambda folder: (folder / "results.json").write_text("{"),
    "a link": lambda folder: (folder / "progress").symlink_to(folder / "arrays"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_folder_is_refused_as_by_report(folder, how):
    DAMAGED[how](folder)
    with pytest.raises(InputError) as raised:
        vitlens.read(folder)
    with pytest.raises(InputError) as reported:
        report(folder)
    assert str(raised.value) == str(reported.value)
    assert "\n" not in str(raised.value)
