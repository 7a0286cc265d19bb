"""A record's declaration is written and read back strictly."""

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
from vitlens.record import MetricName, Record, arrays, by, col, read_run, table
from vitlens.record_files import flat, join_records, read_record
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Point:
    name: str = col("name")
    value: float | None = col("value", metric="value/{name}", better="lower")
    shares: Mapping[str, Estimate | None] = col(
        "share", metric="share/{name}/{key}", keys=lambda: ("a", "b")
    )
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
    """Write a record of these parts and read it from its folder."""
    with RunFolder.opened("rollout", RunOptions(out=path)) as folder:
        folder.keep(PointsRecord(**parts))  # type: ignore[arg-type]
    return read_record(PointsRecord, read_run(path))


def test_rows_come_back_as_they_were_and_columns_name_the_metrics(tmp_path):
    record = back(tmp_path / "run", points=ROWS)
    cat, dog = record.points
    assert (cat.name, cat.value, dog.value, cat.note, dog.note) == (
        "cat\n*1*",
        1.0,
        None,
        "odd",
        None,
    )
    assert cat.shares == {"a": HALF, "c": HALF}  # what is None is left out
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert written["tables"]["points"][1] == {"name": "dog", "value": None, "shares": {}}
    assert (record.status, record.folder) == ("done", tmp_path / "run")
    assert record.metrics == {"value/cat\n*1*": Estimate(1.0, unit=""), "share/cat\n*1*/a": HALF}
    assert set(written["metrics"]) == set(record.metrics)
    assert (record.better("value/cat"), record.better("share/cat/a"), record.better("other")) == (
        "lower",
        None,
        None,
    )
    with pytest.raises(InputError, match="value/cnn"):
        record.metric("value/cnn")
    importance = MetricName("importance/{model}/{layer}/{head}")
    assert importance.parts("importance/vit/0/3") == {"model": "vit", "layer": "0", "head": "3"}
    assert importance.parts("importance/vit/0") is None
    assert MetricName("a/{key}", ("x", "y")).patterns == ("a/x", "a/y")
    assert MetricName("a/{key}", ("x",)).parts("a/z") is None


def test_contents_cells_rows_by_a_field_and_several_records_in_one():
    contents = PointsRecord.contents()
    assert [metric.pattern for metric in contents.metrics] == ["value/{name}", "share/{name}/{key}"]
    assert dict(contents.tables) == {"points": Point}
    assert dict(contents.arrays) == {"grid-{model}": Grid, "several": Several}
    assert flat(ROWS[0]) == {
        "name": "cat\n*1*",
        "value": 1.0,
        "shares_b": None,
        "note": "odd",
        **{
            f"shares_{key}{end}": value
            for key in "ac"
            for end, value in (("", 0.5), ("_low", 0.25), ("_high", 0.75), ("_n", 8))
        },
    }
    assert by((*ROWS, ROWS[0]), "name") == {"cat\n*1*": (ROWS[0], ROWS[0]), "dog": (ROWS[1],)}
    grids = [Grid(np.ones((1, 2))), Grid(np.zeros((1, 2)))]
    combined = join_records(
        [PointsRecord(points=(row,), grid={row.name: grid}) for row, grid in zip(ROWS, grids)]
    )
    assert (combined.points, list(combined.grid.values())) == (ROWS, grids)


def test_arrays_come_back_optional_or_not_and_several_of_one_form_by_number_and_by_name(tmp_path):
    several = Several(
        {0: np.zeros((2, 2)), 10: np.ones((3, 1))},
        {"own weight": np.zeros(2), "x_low": np.ones(3)},
        {"x": np.ones(1)},
    )
    grids = {"vit": Grid(np.ones((3, 2)), np.array([True, False])), "a-b": Grid(np.zeros((1, 2)))}
    record = back(tmp_path / "run", grid=grids, several=several)
    assert set(record.grid) == {"vit", "a-b"}
    assert (record.grid["vit"].numbers == np.ones((3, 2))).all()
    assert record.grid["vit"].masks.tolist() == [True, False]
    assert record.grid["a-b"].masks is None
    assert set(read_arrays(tmp_path / "run" / "arrays" / "several.npz")) == {
        "layer0",
        "layer10",
        "mean_own weight",
        "mean_x_low",
        "low_x",
    }
    assert {key: array.shape for key, array in record.several.layer.items()} == {
        0: (2, 2),
        10: (3, 1),
    }
    assert ({*record.several.mean}, {*record.several.low}) == ({"own weight", "x_low"}, {"x"})
    assert back(tmp_path / "none").several is None
    with pytest.raises(InputError, match="numbers"):
        back(tmp_path / "other", grid={"vit": Grid(np.ones((3, 5)))})


ROW = {"name": "a", "value": "much", "shares": {}}
MODEL = {"alias": "m", "name": "vit", "parameters": 3}


@pytest.mark.parametrize(
    ("file", "changes", "place"),
    [
        ("results", {"tables": {"points": [ROW]}}, r"\$\[0\]\.value"),
        ("results", {"schema": 4}, "schema 3"),
        ("results", {"schema": "3.1"}, "schema 3"),
        ("results", {"tables": {"points": [{"value": 1, "shares": {}}]}}, "name"),
        ("results", {"command": 5}, "command"),
        ("results", {"status": "half"}, "status"),
        ("results", {"seconds": -1}, "seconds"),
        ("results", {"seconds": 1e11}, "seconds"),
        ("results", {"metrics": {"a": {"value": "x"}}}, "metrics"),
        ("results", {"tables": {"points": [{str(number): 0 for number in range(1001)}]}}, "tables"),
        ("config", {"models": [{**MODEL, "parameters": -1}]}, "parameters"),
        ("config", {"data": {"size": [1, 2, 3]}}, "size"),
        ("config", {"seed": 1.5}, "seed"),
        # paths as aliases: tests/contracts
        (
            "config",
            {"models": [{**MODEL, "alias": 3}]},
            "alias",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_with_its_place(tmp_path, file, changes, place):
    back(tmp_path / "run", points=ROWS[:1])
    path = tmp_path / "run" / f"{file}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(
        InputError, match=rf"(?s){file}\.json.*{place}|{place}.*{file}\.json"
    ) as caught:
        read_record(PointsRecord, read_run(tmp_path / "run"))
    assert "\n" not in str(caught.value)


def test_what_fits_is_read_as_its_types_and_unknown_names_are_left_alone(tmp_path):
    back(tmp_path / "run", points=ROWS[:1])
    config = tmp_path / "run" / "config.json"
    results = tmp_path / "run" / "results.json"
    fields = {
        "models": [{**MODEL, "alias": "é", "later": 1}],
        "data": {"size": [2, 3]},
        "formats": ["svg"],
        "new": {},
    }
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    results.write_text(json.dumps({**json.loads(results.read_text()), "tables": {"later": [{}]}}))
    record = read_record(PointsRecord, read_run(tmp_path / "run"))
    assert (record.points, record.missing_tables) == ((), ("points",))
    assert (record.aliases, record.config.formats) == (("é",), ("svg",))
    assert record.config.data.size == (2, 3)


@pytest.mark.parametrize("text", [b"", b"[Infinity]", b"\xff", b"[" * 100_000])
def test_what_is_not_json_is_one_line(tmp_path, text):
    back(tmp_path / "run")
    (tmp_path / "run" / "results.json").write_bytes(text)
    with pytest.raises(InputError, match=r"results\.json") as caught:
        read_run(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for place, words in (
        ("none", "nothing there"),
        ("", r"found no results\.json"),
        ("config.json", "a file"),
    ):
        with pytest.raises(InputError, match=words):
            read_run(tmp_path / place)
