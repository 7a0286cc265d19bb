"""Folders of earlier and later versions of a schema are read and reported."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

import vitlens
from tests.contracts.test_report_folders import MADE
from tests.kit.damage import refused, served_or_refused
from tests.kit.marks import slow_among
from vitlens.cli.main import run
from vitlens.commands.registry import COMMANDS
from vitlens.record import SCHEMA

LONG = ("study", "audit", "compare", "attack", "features")  # folders that take seconds to make
WORDS = slow_among(sorted(MADE), LONG)
Results = dict[str, Any]


@pytest.fixture
def folder(word: str, golden: Any, tmp_path: Path) -> Path:
    """Return a copy of a folder of the command."""
    return Path(shutil.copytree(golden(word).folder, tmp_path / "run"))


def change_results(folder: Path, change: Callable[[Results], None]) -> None:
    path = folder / "results.json"
    results = json.loads(path.read_text())
    change(results)
    path.write_text(json.dumps(results))


def drop_empty_tables(results: Results) -> None:
    results["tables"] = {name: rows for name, rows in results["tables"].items() if rows}


def add_tables(results: Results) -> None:
    results["tables"]["of_tomorrow"] = [{"model": "m", "value": 1}]


def drop_all_tables(results: Results) -> None:
    results["tables"] = {}


def has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def drop_optional_columns(kinds: Mapping[str, type]) -> Callable[[Results], None]:
    """Return a change that drops all cells with a default, as in rows of an earlier version."""

    def change(results: Results) -> None:
        for name, rows in results["tables"].items():
            optional = {field.name for field in fields(kinds[name]) if has_default(field)}
            for row in rows:
                for key in optional & row.keys():
                    del row[key]

    return change


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.usefixtures("undrawn")
def test_a_report_is_the_same_without_the_tables_that_are_empty(word, folder):
    assert run(["report", str(folder)]) == 0
    before = (folder / "report.md").read_text()
    change_results(folder, drop_empty_tables)
    assert run(["report", str(folder)]) == 0
    assert (folder / "report.md").read_text() == before


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.usefixtures("undrawn")
def test_a_table_of_a_later_version_is_left_out_with_a_line_that_names_it(word, folder, capsys):
    assert run(["report", str(folder)]) == 0
    before = (folder / "report.md").read_text()
    change_results(folder, add_tables)
    capsys.readouterr()
    assert run(["report", str(folder)]) == 0
    assert "of_tomorrow" in capsys.readouterr().err
    assert (folder / "report.md").read_text() == before
    assert "of_tomorrow" not in vitlens.read(folder).tables


@pytest.mark.parametrize("word", WORDS)
def test_a_folder_is_compared_with_one_of_an_earlier_version(word, golden, folder):
    change_results(folder, drop_empty_tables)
    assert run(["report", "--compare", str(folder), str(golden(word).folder)]) == 0


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.usefixtures("undrawn")
def test_tables_that_are_missing_are_empty_and_a_report_that_needs_them_is_refused_in_a_line(
    word, folder, capsys
):
    change_results(folder, drop_all_tables)
    read = vitlens.read(folder)
    for name in read.tables:
        assert not read.table(name)
    code = run(["report", str(folder)])
    assert served_or_refused(code, capsys.readouterr().err)


@pytest.mark.parametrize("word", WORDS)
def test_rows_without_a_column_that_has_a_default_take_it(word, folder):
    kinds = COMMANDS[word].contents.tables
    change_results(folder, drop_optional_columns(kinds))
    read = vitlens.read(folder)
    optional = 0
    for name, kind in kinds.items():
        for field in filter(has_default, fields(kind)):
            for row in read.table(name):
                default = field.default if field.default is not MISSING else field.default_factory()
                assert getattr(row, field.name) == default
                optional += 1
    assert optional > 0 or not any(
        has_default(field) for kind in kinds.values() for field in fields(kind)
    )


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
def test_a_folder_of_another_schema_is_refused_in_a_line_that_says_what_to_type(
    word, schema, folder, capsys
):
    change_results(folder, lambda results: results.update(schema=schema))
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "models": 0})
    )
    assert refused(run(["report", str(folder)]), said := capsys.readouterr().err)
    assert (f"vitlens {word} " in said) == (schema < SCHEMA)
    assert ("pip install" in said) == (schema > SCHEMA)
