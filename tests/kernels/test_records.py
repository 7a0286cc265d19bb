"""What a record declares is what is written and what is read back, strictly."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from vitlens.arrays import Form, read_arrays
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError
from vitlens.record import MetricName, Record, arrays, by, col, flat, read_record, read_run, table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Point:
    name: str = col("name")
    value: float | None = col("value", metric="value/{name}", better="lower")
    shares: Mapping[str, Estimate | None] = col("share", metric="share/{name}/{key}", keys=lambda: ("a", "b"))
    note: str | None = col("note", default=None)


@dataclass(frozen=True)
class Grid:
    numbers: Annotated[NDArray[np.floating], Form("f", (None, 2))]
    masks: Annotated[NDArray[np.bool_], Form("b", (None,))] | None = None


@dataclass(frozen=True)
class Several:
    layer: Mapping[int, Annotated[NDArray[np.floating], Form("f", (None, None))]]
    mean: Mapping[str, Annotated[NDArray[np.floating], Form("f", (None,))]]
    low: Mapping[str, Annotated[NDArray[np.floating], Form("f", (None,))]]


@dataclass(frozen=True, kw_only=True)
class PointsRecord(Record):
    command: ClassVar[str] = "rollout"
    points: tuple[Point, ...] = table()
    grid: Mapping[str, Grid] = arrays("grid-{model}")
    several: Several | None = arrays("several")


HALF = Estimate(0.5, 0.25, 0.75, 8)
ROWS = (Point("cat\n*1*", 1.0, {"a": HALF, "c": HALF, "b": None}, "odd"), Point("dog", None, {}))


def back(path: Path, **parts: object) -> PointsRecord:
    """A record of these parts as it is read from its folder."""
    with RunFolder.opened("rollout", RunOptions(out=path)) as folder:
        folder.keep(PointsRecord(**parts))  # type: ignore[arg-type]
    return read_record(PointsRecord, read_run(path))


def test_rows_come_back_as_they_were(tmp_path):
    record = back(tmp_path / "run", points=ROWS)
    cat, dog = record.points
    assert (cat.name, cat.value, dog.value, cat.note, dog.note) == ("cat\n*1*", 1.0, None, "odd", None)
    assert cat.shares == {"a": HALF, "c": HALF}  # what is None is left out
    assert read_run(tmp_path / "run").results["tables"]["points"][1] == {"name": "dog", "value": None, "shares": {}}
    assert (record.status, record.folder) == ("done", tmp_path / "run")


def test_columns_name_the_metrics(tmp_path):
    record = back(tmp_path / "run", points=ROWS[:1])
    assert record.metrics == {"value/cat\n*1*": Estimate(1.0, unit=""), "share/cat\n*1*/a": HALF}
    assert set(json.loads((tmp_path / "run" / "results.json").read_text())["metrics"]) == set(record.metrics)
    assert (record.better("value/cat"), record.better("share/cat/a"), record.better("other")) == ("lower", None, None)
    with pytest.raises(InputError, match=r"expected a metric 'value/cnn' in .*, found none; run the command again"):
        record.metric("value/cnn")
    importance = MetricName("importance/{model}/{layer}/{head}")
    assert importance.parts("importance/vit/0/3") == {"model": "vit", "layer": "0", "head": "3"}
    assert importance.parts("importance/vit/0") is None


def test_contents_rows_as_cells_and_by_the_value_of_a_field():
    contents = PointsRecord.contents()
    assert [metric.pattern for metric in contents.metrics] == ["value/{name}", "share/{name}/{key}"]
    assert dict(contents.tables) == {"points": Point}
    assert dict(contents.arrays) == {"grid-{model}": Grid, "several": Several}
    assert flat(ROWS[0]) == {
        "name": "cat\n*1*", "value": 1.0, "shares_b": None, "note": "odd",
        **{f"shares_{key}{end}": value for key in "ac" for end, value in
           (("", 0.5), ("_low", 0.25), ("_high", 0.75), ("_n", 8))},
    }  # fmt: skip
    assert by((*ROWS, ROWS[0]), "name") == {"cat\n*1*": (ROWS[0], ROWS[0]), "dog": (ROWS[1],)}


@pytest.mark.parametrize("masks", [None, np.array([True, False])])
def test_arrays_come_back_and_optional_ones_may_be_left_out(tmp_path, masks):
    record = back(tmp_path / "run", grid={"vit": Grid(np.ones((3, 2)), masks), "a-b": Grid(np.zeros((1, 2)))})
    assert set(record.grid) == {"vit", "a-b"}
    assert (record.grid["vit"].numbers == np.ones((3, 2))).all()
    assert (record.grid["vit"].masks is None) == (masks is None)
    assert record.several is None


def test_several_arrays_of_one_form_come_back_by_number_and_by_name(tmp_path):
    given = Several(
        {0: np.zeros((2, 2)), 10: np.ones((3, 1))}, {"own weight": np.zeros(2), "x_low": np.ones(3)}, {"x": np.ones(1)}
    )
    several = back(tmp_path / "run", several=given).several
    assert set(read_arrays(tmp_path / "run" / "arrays" / "several.npz")) == {
        "layer0", "layer10", "mean_own weight", "mean_x_low", "low_x",
    }  # fmt: skip
    assert several is not None
    assert {key: array.shape for key, array in several.layer.items()} == {0: (2, 2), 10: (3, 1)}
    assert ({*several.mean}, {*several.low}) == ({"own weight", "x_low"}, {"x"})


def test_arrays_of_another_form_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"expected 'numbers' of shape \(any, 2\)"):
        back(tmp_path / "run", grid={"vit": Grid(np.ones((3, 5)))})


def changed(folder: Path, **parts: object) -> PointsRecord:
    """The record of a folder whose results.json says something else."""
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**results, **parts}))
    return read_record(PointsRecord, read_run(folder))


def test_what_does_not_fit_is_one_line_and_an_unfinished_run_has_empty_tables(tmp_path):
    folder = tmp_path / "run"
    back(folder, points=ROWS[:1])
    assert changed(folder, tables={}, status="interrupted").points == ()
    row = {"name": "a", "value": "much", "shares": {}}
    for parts, words in (
        ({"tables": {}, "status": "done"}, "expected a table 'points'"),
        ({"tables": {"points": [row]}}, r"`float \| null`, got `str` - at `\$\[0\]\.value`"),
        ({"schema": 4}, r"schema 3 in .*, found schema 4, .*: run the command again$"),
        ({"schema": 3, "command": 5}, r"results\.json.*command"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            changed(folder, **parts)
        assert "\n" not in str(caught.value)


def test_what_is_no_run_is_refused_in_words(tmp_path):
    with pytest.raises(InputError, match="nothing there"):
        read_run(tmp_path / "none")
    with pytest.raises(InputError, match=r"no config\.json and no results\.json"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="a file"):
        read_run(tmp_path / "config.json")
