"""What a command declares is what it writes and what is read back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.run.folder import RunFolder
from vitlens.errors import InputError
from vitlens.files import read_arrays, read_run
from vitlens.record import Contents, MetricName, Record
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class Point:
    name: str
    words: str
    value: float | None


@dataclass(frozen=True)
class Layers:
    layer: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None))]


@dataclass(frozen=True)
class Named:
    mean: Annotated[Mapping[str, NDArray[np.floating]], Form("f", (None,))]
    low: Annotated[Mapping[str, NDArray[np.floating]], Form("f", (None,))]


@dataclass(frozen=True)
class Head:
    head: int
    statistics: Annotated[Mapping[str, float | None], Columns()]


@dataclass(frozen=True)
class Grid:
    numbers: Annotated[NDArray[np.floating], Form("f", (None, 2))]
    masks: Annotated[NDArray[np.bool_], Form("b", (None,))] | None = None


ACCURACY = MetricName("accuracy/{model}")
IMPORTANCE = MetricName("importance/{model}/delta_loss/{layer}/{head}")
POINTS = TableOf("points", Point)
GRID = ArraysOf("grid-{model}", Grid)
CONTENTS = Contents((ACCURACY, IMPORTANCE), (POINTS,), (GRID,))
LONG = "a" * 100


def written_record(path: Path, *rows: Point, grid: Grid | None = None) -> Record:
    with RunFolder.create("rollout", out=path) as folder:
        folder.metric(ACCURACY(model="vit"), Estimate(0.5, 0.25, 0.75, 8))
        folder.metric(IMPORTANCE(model="vit", layer=0, head=3), Estimate(0.1, unit="nats"))
        folder.write(POINTS, rows)
        if grid is not None:
            folder.save(GRID, grid, model="vit")
    return Record(read_run(path), CONTENTS)


def test_metrics_come_back_by_their_declared_names(tmp_path):
    record = written_record(tmp_path / "run")
    assert record.metric("accuracy/vit") == Estimate(0.5, 0.25, 0.75, 8)
    assert list(record.all(IMPORTANCE)) == [({"model": "vit", "layer": "0", "head": "3"}, Estimate(0.1, unit="nats"))]
    assert ACCURACY.parts("accuracy/vit/pgd") is None
    with pytest.raises(InputError, match=r"expected a metric 'accuracy/cnn' in .*, found none; run the command again"):
        record.metric(ACCURACY(model="cnn"))


def test_rows_come_back_as_their_type_with_names_fit_to_show(tmp_path):
    rows = (Point("cat\n*1*", "plain *words*", None), Point(LONG, f"of {LONG}", 2.0))
    first, second = written_record(tmp_path / "run", *rows).rows(POINTS)
    assert "\n" not in first.name
    assert "*" not in first.name  # told apart from our marks until it is rendered
    assert (first.words, first.value) == ("plain *words*", None)
    assert len(second.name) == 60
    assert second.words == f"of {second.name}"
    assert read_run(tmp_path / "run").table("points")[0]["name"] == "cat\n*1*"  # the JSON keeps it


def test_different_names_stay_different_when_they_are_cut(tmp_path):
    names = [f"{'a' * 50}{letter}{'a' * 50}" for letter in "xyz"]
    shown = [
        row.name for row in written_record(tmp_path / "run", *(Point(name, "", 0.0) for name in names)).rows(POINTS)
    ]
    assert len(set(shown)) == 3


def test_rows_of_another_table_are_refused(tmp_path):
    with RunFolder.create("rollout", out=tmp_path / "run") as folder, pytest.raises(TypeError, match="rows of Point"):
        folder.write(POINTS, [Grid(np.zeros((1, 2)))])  # type: ignore[list-item]


def test_several_arrays_of_one_form_come_back_by_number(tmp_path):
    arrays = ArraysOf("layers", Layers)
    with RunFolder.create("rollout", out=tmp_path / "run") as folder:
        folder.write(POINTS, [])
        folder.save(arrays, Layers({0: np.zeros((2, 2)), 10: np.ones((3, 1))}))
    layers = Record(read_run(tmp_path / "run"), CONTENTS).arrays(arrays).layer
    assert {key: array.shape for key, array in layers.items()} == {0: (2, 2), 10: (3, 1)}


def test_several_arrays_of_one_form_come_back_by_name(tmp_path):
    arrays = ArraysOf("named", Named)
    with RunFolder.create("rollout", out=tmp_path / "run") as folder:
        folder.write(POINTS, [])
        folder.save(arrays, Named({"own weight": np.zeros(2), "x_low": np.ones(3)}, {"x": np.ones(1)}))
    assert set(read_arrays(tmp_path / "run" / "arrays" / "named.npz")) == {"mean_own weight", "mean_x_low", "low_x"}
    named = Record(read_run(tmp_path / "run"), CONTENTS).arrays(arrays)
    assert ({*named.mean}, {*named.low}) == ({"own weight", "x_low"}, {"x"})


def test_a_mapping_of_a_row_is_columns_of_the_table(tmp_path):
    table = TableOf("heads", Head)
    rows = (Head(0, {"distance": 2.0, "entropy": None}), Head(1, {}))
    with RunFolder.create("rollout", out=tmp_path / "run") as folder:
        folder.write(table, rows)
    run = read_run(tmp_path / "run")
    assert run.table("heads") == [{"head": 0, "distance": 2.0, "entropy": None}, {"head": 1}]
    assert Record(run, Contents(tables=(table,))).rows(table) == rows
    run.table("heads")[0]["entropy"] = "high"
    with pytest.raises(InputError, match=r"expected a number or null at statistics/entropy in table 'heads'"):
        Record(run, Contents(tables=(table,)))


@pytest.mark.parametrize("masks", [None, np.array([True, False])])
def test_arrays_come_back_and_optional_ones_may_be_left_out(tmp_path, masks):
    grid = written_record(tmp_path / "run", grid=Grid(np.ones((3, 2)), masks)).arrays(GRID, model="vit")
    assert (grid.numbers == np.ones((3, 2))).all()
    assert (grid.masks is None) == (masks is None)


def test_arrays_of_another_form_are_refused(tmp_path):
    record = written_record(tmp_path / "run", grid=Grid(np.ones((3, 5))))
    with pytest.raises(InputError, match=r"expected 'numbers' of shape \(any, 2\)"):
        record.arrays(GRID, model="vit")


def test_a_table_that_a_finished_run_has_not_is_said(tmp_path):
    with RunFolder.create("rollout", out=tmp_path / "run"):
        pass
    with pytest.raises(InputError, match="expected a table 'points'"):
        Record(read_run(tmp_path / "run"), CONTENTS)


def test_a_table_that_older_versions_lack_is_empty(tmp_path):
    later = TableOf("added", Point, optional=True)
    with RunFolder.create("rollout", out=tmp_path / "run"):
        pass
    assert Record(read_run(tmp_path / "run"), Contents(tables=(later,))).rows(later) == ()


def test_an_unfinished_run_has_empty_tables(tmp_path):
    with pytest.raises(RuntimeError), RunFolder.create("rollout", out=tmp_path / "run"):
        raise RuntimeError
    assert Record(read_run(tmp_path / "run"), CONTENTS).rows(POINTS) == ()


def test_a_row_that_does_not_fit_is_one_line(tmp_path):
    written_record(tmp_path / "run", Point("a", "b", 1.0))
    file = tmp_path / "run" / "results.json"
    file.write_text(file.read_text().replace('"value": 1.0', '"value": "much"'))
    with pytest.raises(InputError, match=r"expected .*a number.* at value in table 'points'"):
        Record(read_run(tmp_path / "run"), CONTENTS)
