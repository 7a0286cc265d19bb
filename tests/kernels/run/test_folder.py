"""The folder of a run: its status, what is kept in it, and what it never overwrites."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from vitlens import files
from vitlens.arrays import Form, read_arrays
from vitlens.commands.run.folder import RunFolder, versions
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError, NonFiniteError, OutputError, StorageError
from vitlens.files import read_json, write_text
from vitlens.record import Record, arrays, col, read_run, table
from vitlens.uncertainty import Estimate


@dataclass(frozen=True)
class ScoreRow:
    model: str = col("model")
    accuracy: Estimate | None = col("accuracy", metric="accuracy/{model}")


@dataclass(frozen=True)
class LabelArrays:
    labels: Annotated[NDArray[np.integer], Form("i", (None,))]


@dataclass(frozen=True, kw_only=True)
class ScoreRecord(Record):
    command: ClassVar[str] = "evaluate"
    scores: tuple[ScoreRow, ...] = table()
    labels: Mapping[str, LabelArrays] = arrays("labels-{model}")


KEPT = ScoreRecord(
    scores=(ScoreRow("m", Estimate(0.5, 0.4, 0.6, 10)), ScoreRow("k", None)), labels={"m": LabelArrays(np.arange(3))}
)


NAN, NOT_A_NUMBER = ScoreRecord(scores=(ScoreRow("m", Estimate(float("nan"))),)), ValueError("nan")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_ends_well_is_done_and_reads_back(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with RunFolder.opened("evaluate", RunOptions(out=out), {"seed": 3}, name_parts=("m", "d")) as folder:
        assert read_run(out).status == "running"
        folder.keep(KEPT)
        assert read_run(out).results["metrics"] == {}  # nothing claims to be there before it is asked for
        assert folder.record().status == "running"
    record = read_run(out)
    assert record.results.keys() == {"schema", "command", "status", "seconds", "metrics", "tables"}
    assert (record.command, record.status, record.config["seed"]) == ("evaluate", "done", 3)
    accuracy = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 10, "unit": "fraction"}
    assert record.results["metrics"] == {"accuracy/m": accuracy}
    assert record.results["tables"]["scores"] == [
        {"model": "m", "accuracy": accuracy},
        {"model": "k", "accuracy": None},
    ]
    assert read_arrays(out / "arrays" / "labels-m.npz")["labels"].tolist() == [0, 1, 2]
    assert record.config["versions"] == versions()
    assert record.config["title"] == "Evaluate m d"
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("x"), "failed"), (KeyboardInterrupt(), "interrupted"), (SystemExit(1), "failed")]
)
def test_an_exception_shows_in_the_status_and_goes_on(tmp_path: Path, error: BaseException, status: str) -> None:
    def run() -> None:
        with RunFolder.opened("evaluate", RunOptions(out=tmp_path / "run")) as folder:
            folder.keep(KEPT)
            raise error

    with pytest.raises(type(error)):
        run()
    record = read_run(tmp_path / "run")
    assert record.status == status
    assert record.results["metrics"].keys() == {"accuracy/m"}


def test_a_full_disk_tells_the_first_error_and_a_nan_its_name_and_neither_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, os.strerror(28))

    def run(error: Exception | None) -> None:
        with RunFolder.opened("evaluate", RunOptions(out=tmp_path / str(error))) as folder:
            folder.keep(NAN if error is NOT_A_NUMBER else KEPT)
            if error is not NOT_A_NUMBER:
                monkeypatch.setattr(files.os, "fsync", full)
            if error and error is not NOT_A_NUMBER:
                raise error

    for error, kind, words in (
        (None, StorageError, "full"),
        (ValueError("first"), ValueError, "first"),
        (NOT_A_NUMBER, NonFiniteError, "metrics/accuracy/m/value"),
    ):
        with pytest.raises(kind, match=words):
            run(error)
        monkeypatch.undo()
        assert read_run(tmp_path / str(error)).status == "running"


def test_the_default_place_is_named_by_what_and_when(elsewhere: Path) -> None:
    first = RunFolder.opened("evaluate", RunOptions(), name_parts=("vit-digits", "/some/where/my photos"))
    second = RunFolder.opened("evaluate", RunOptions(), name_parts=("vit-digits", "/some/where/my photos"))
    assert first.path != second.path
    assert first.path.parent == Path("reports")
    assert first.path.name.startswith("evaluate-vit-digits-my-photos-2")
    train = RunFolder.opened("train", RunOptions(), name_parts=("vit-micro", "digits"))
    assert train.path.parent == Path("runs")
    assert train.path.name.startswith("vit-micro-digits-2")


def test_an_existing_folder_is_kept_unless_asked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder.opened("evaluate", RunOptions(out=out)) as folder:
        folder.arrays("old", x=np.ones(1))
        write_text(out / "report.md", "old")
        write_text(out / "notes.txt", "mine")
        write_text(out / "figures" / "mine.txt", "mine")
    before = (out / "results.json").read_text()
    with pytest.raises(OutputError, match="--overwrite"):
        RunFolder.opened("evaluate", RunOptions(out=out))
    assert (out / "results.json").read_text() == before
    with RunFolder.opened("rollout", RunOptions(out=out, overwrite=True)):
        assert read_run(out).status == "running"
    assert read_run(out).command == "rollout"
    assert not (out / "report.md").exists()
    assert not (out / "arrays" / "old.npz").exists()
    assert (out / "notes.txt").read_text() == (out / "figures" / "mine.txt").read_text() == "mine"


def test_overwrite_takes_no_foreign_folder_and_follows_no_link(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    write_text(foreign / "config.json", "{}")
    write_text(foreign / "model.safetensors", "precious")
    with pytest.raises(OutputError, match="other files"):
        RunFolder.opened("evaluate", RunOptions(out=foreign, overwrite=True))
    assert (foreign / "model.safetensors").read_text() == "precious"
    run = RunFolder.opened("evaluate", RunOptions(out=tmp_path / "run")).path
    write_text(tmp_path / "pictures" / "a.png", "precious")
    (run / "figures").symlink_to(tmp_path / "pictures")
    with pytest.raises(InputError, match="no link"):  # its figures would be written there
        RunFolder.opened("evaluate", RunOptions(out=run, overwrite=True))
    assert (tmp_path / "pictures" / "a.png").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    RunFolder.opened("evaluate", RunOptions(out=tmp_path / "empty", overwrite=True))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    for path, overwrite, words in (
        ("file", False, "a file at"), ("file", True, "a file at"), ("file/below", False, "can be written"),
        ("x" * 300, False, "can be written"),
    ):  # fmt: skip
        with pytest.raises(OutputError, match=words):
            RunFolder.opened("evaluate", RunOptions(out=tmp_path / path, overwrite=overwrite))
    assert (tmp_path / "file").read_text() == "mine"

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere, so the refusal is played
    with pytest.raises(OutputError, match="Permission denied"):
        RunFolder.opened("evaluate", RunOptions(out=tmp_path / "run"))


def test_a_reopened_run_keeps_its_results_and_its_time_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder.opened("ablate", RunOptions(out=out), {"command_line": "first", "data": {"images": 3}}) as folder:
        folder.keep(KEPT)
        seconds = folder.stop()
    content = read_json(out / "results.json")
    assert content["seconds"] == seconds  # the clock stops when the run is finished
    write_text(out / "results.json", json.dumps({**content, "seconds": 100.0}))
    for name in (".mean-0-0123abcd.npz", ".results-89abcdef.json", ".mine"):
        (out / name).touch()
        os.utime(out / name, (0, 0))
    (out / ".new-01234567.npz").touch()
    with RunFolder.reopen(out, config={"command_line": "second", "data": {"title": "x", "images": 3}}):
        assert read_run(out).status == "running"
    record = read_run(out)
    assert (record.results["metrics"], record.results["tables"]) == (content["metrics"], content["tables"])
    assert record.results["seconds"] > 100
    assert sorted(path.name for path in out.glob(".*")) == [".mine", ".new-01234567.npz"]
    assert (record.config["command_line"], record.config["data"]) == ("first", {"title": "x", "images": 3})


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_a_run_that_came_to_nothing_does_not_block_its_retry(tmp_path: Path, error: BaseException) -> None:
    with suppress(type(error)), RunFolder.opened("ablate", RunOptions(out=tmp_path / "out")):
        raise error
    with RunFolder.opened("ablate", RunOptions(out=tmp_path / "out")) as again:
        again.keep(KEPT)
    assert read_run(tmp_path / "out").status == "done"


@pytest.mark.parametrize("left", ["rows", "progress", "a file of the user's", "running"])
def test_what_a_failed_run_left_of_use_is_not_taken_away(tmp_path: Path, left: str) -> None:
    out = tmp_path / "out"
    folder = RunFolder.opened("ablate", RunOptions(out=out))
    if left == "rows":
        folder.keep(ScoreRecord(scores=KEPT.scores))
    if left == "progress":
        folder.arrays("part", values=[1])
    if left == "a file of the user's":
        (out / "sub").mkdir()
        (out / "sub" / "notes.txt").write_text("mine")
    if left != "running":
        with pytest.raises(ValueError, match="x"), folder:
            raise ValueError("x")
    before = sorted(out.rglob("*"))
    with pytest.raises(OutputError, match="--overwrite"):
        RunFolder.opened("ablate", RunOptions(out=out))
    assert sorted(out.rglob("*")) == before
