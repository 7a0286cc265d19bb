"""`vitlens.read` gives what the JSON and the arrays of a folder hold, and refuses what `vitlens report` refuses."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import vitlens
from tests.contracts.test_committed_reports import is_older
from vitlens.commands.registry import COMMANDS
from vitlens.commands.run.publish import report
from vitlens.errors import InputError, UnknownNameError
from vitlens.record import read_run

REPORTS = Path(__file__).parents[2] / "reports"
FOLDERS = sorted(path.parent.name for path in REPORTS.glob("*/results.json") if not is_older(read_run(path.parent)))


@pytest.fixture
def folder(golden, tmp_path):
    return Path(shutil.copytree(golden("ablate").folder, tmp_path / "run"))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_committed_report_is_read_as_it_was_written(name):
    run, results = vitlens.read(REPORTS / name), json.loads((REPORTS / name / "results.json").read_text())
    assert (run.command, run.status) == (results["command"], "done")
    assert {key: value["value"] for key, value in results["metrics"].items()} == {
        key: estimate.value for key, estimate in run.metrics.items()
    }
    for table, kind in COMMANDS[run.command].contents.tables.items():
        assert len(run.table(table)) == len(results["tables"][table])
        assert all(type(row) is kind for row in run.table(table))
    assert run.report.name == "report.md"


def test_arrays_are_those_that_were_written(folder):
    run = vitlens.read(folder)
    for file in run.arrays:
        with np.load(folder / "arrays" / f"{file}.npz") as archive:
            assert set(run.arrays[file]) == set(archive.files)


def test_names_are_those_that_were_written(folder):
    results = json.loads((folder / "results.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    config["models"][0]["name"] = "a*b`c"
    (folder / "config.json").write_text(json.dumps(config))
    assert vitlens.read(folder).config.models[0].name == "a*b`c"
    assert vitlens.read(str(folder)).metrics.keys() == results["metrics"].keys()


def test_a_table_as_pandas_has_a_column_for_each_field(monkeypatch):
    pytest.importorskip("pandas")
    run = vitlens.read(REPORTS / "ablate-deit-tiny")
    table, rows = run.to_pandas("curves"), run.table("curves")
    assert len(table) == len(rows)
    first = asdict(rows[0])
    assert set(table.columns) == set(first)
    assert table.iloc[0].to_dict() == first
    empty = next(name for name in run.tables if not run.table(name))
    assert len(run.to_pandas(empty)) == 0
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"expected pandas .*pip install pandas"):
        run.to_pandas("curves")


def test_unknown_names_are_told_with_the_nearest(folder):
    run = vitlens.read(folder)
    for ask, near in (
        (lambda: run.metrics["acuracy/tiny"], "accuracy/tiny"),
        (lambda: run.table("curve"), "curves"),
        (lambda: run.to_pandas("curve"), "curves"),
        (lambda: run.arrays["efects-mean"], "effects-mean"),
    ):
        with pytest.raises(UnknownNameError, match=f"did you mean.*'{near}'"):
            ask()
    assert run.metrics.get("none") is None
    assert run.arrays.get("none", 3) == 3
    assert "none" not in run.metrics


@pytest.mark.parametrize("status", ["running", "failed", "interrupted"])
def test_an_unfinished_run_is_read_only_when_asked(folder, status):
    results = json.loads((folder / "results.json").read_text()) | {"status": status, "tables": {}}
    (folder / "results.json").write_text(json.dumps(results))
    with pytest.raises(InputError, match=f"expected a finished run.*{status}.*unfinished=True"):
        vitlens.read(folder)
    run = vitlens.read(folder, unfinished=True)
    assert run.status == status
    assert all(run.table(name) == [] for name in run.tables)


def damaged(folder: Path, how: str) -> None:
    results = json.loads((folder / "results.json").read_text())
    if how == "schema 1":
        results["schema"] = 1
    elif how == "a text for a number":
        next(iter(results["metrics"].values()))["value"] = "high"
    elif how == "no table":
        results["tables"] = {}
    elif how == "another command":
        results["command"] = "models"
    (folder / "results.json").write_text("{" if how == "no JSON" else json.dumps(results))
    if how == "a link":
        shutil.move(folder / "arrays", folder.parent / "elsewhere")
        (folder / "arrays").symlink_to(folder.parent / "elsewhere")
    if how == "no config":
        (folder / "config.json").unlink()


@pytest.mark.parametrize(
    "how",
    ["schema 1", "a text for a number", "no table", "another command", "no JSON", "a link", "no config"],
)
def test_a_damaged_folder_is_refused_as_by_report(folder, how):
    damaged(folder, how)
    with pytest.raises(InputError) as told:
        vitlens.read(folder)
    with pytest.raises(InputError) as reported:
        report(folder)
    assert str(told.value) == str(reported.value)
    assert "\n" not in str(told.value)


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(InputError, match="expected the folder of a run"):
        vitlens.read(tmp_path / "none")
