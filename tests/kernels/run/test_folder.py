"""The folder of a run: its status, its content, and what it never overwrites."""

import json
import os
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contracts.throw_away.record import BrightnessArrays, BrightnessRecord, MeanRow
from vitlens.arrays import read_arrays
from vitlens.commands.run.folder import RunFolder, versions
from vitlens.commands.run.options import RunOptions
from vitlens.errors import NonFiniteError, OutputError, StorageError, Terminated
from vitlens.record import read_run
from vitlens.uncertainty import Estimate

MEANS = (MeanRow("m", Estimate(0.5, 0.4, 0.6, 10)),)
KEPT = BrightnessRecord(means=MEANS, rows={"m": BrightnessArrays(np.arange(3.0)[None])})
NAN = BrightnessRecord(means=(MeanRow("m", Estimate(float("nan"))),))


def at(
    out: Path | None, config: dict[str, object] | None = None, *, overwrite: bool = False, **more
) -> RunFolder:
    word = more.pop("word", "brightness")
    run = RunOptions(out=out, overwrite=overwrite)
    return RunFolder.opened(word, run, config or {}, **more)


def raising(code: int):
    """Return a stand-in for a function that the operating system refuses."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def ended(
    out: Path,
    record: BrightnessRecord,
    error: BaseException | None,
    full: pytest.MonkeyPatch | None = None,
):
    """Run something that keeps a record and ends with an error or on a full disk."""
    with at(out) as folder:
        folder.keep(record)
        if full:
            full.setattr(os, "fsync", raising(28))
        if error:
            raise error


def test_a_run_that_ends_well_is_done_and_reads_back(tmp_path):
    out = tmp_path / "a" / "b"
    with at(out, {"seed": 3}, name_parts=("m", "d")) as folder:
        assert read_run(out).status == "running"
        folder.keep(KEPT)
        # nothing claims to be there before it is asked for
        assert read_run(out).results["metrics"] == {}
        assert folder.record().status == "running"
    record = read_run(out)
    assert (record.command, record.status, record.config["seed"]) == ("brightness", "done", 3)
    number = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 10, "unit": "fraction"}
    assert record.results["metrics"] == {"brightness/m": number}
    assert record.results["tables"] == {
        "images_shown": [],
        "means": [{"model": "m", "brightness": number}],
    }
    assert read_arrays(out / "arrays" / "brightness-m.npz")["rows"].tolist() == [[0, 1, 2]]
    assert (record.config["versions"], record.config["title"]) == (versions(), "Brightness m d")
    assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (Terminated(), "interrupted"),
        (SystemExit(1), "failed"),
    ],
)
def test_an_exception_shows_in_the_status_and_goes_on(tmp_path, error, status):
    with pytest.raises(type(error)):
        ended(tmp_path / "run", KEPT, error)
    record = read_run(tmp_path / "run")
    assert record.status == status
    assert record.results["metrics"].keys() == {"brightness/m"}


@pytest.mark.parametrize(
    ("record", "error", "kind", "words"),
    [
        (KEPT, None, StorageError, "full"),
        (KEPT, ValueError("first"), ValueError, "first"),  # not that of the disk
        (NAN, None, NonFiniteError, "metrics/brightness/m/value"),
    ],
)
def test_a_full_disk_tells_the_first_error_and_a_nan_its_name_and_neither_looks_finished(
    tmp_path, monkeypatch, record, error, kind, words
):
    with monkeypatch.context() as patch, pytest.raises(kind, match=words):
        ended(tmp_path / "run", record, error, patch if record is KEPT else None)
    assert read_run(tmp_path / "run").status == "running"


def test_the_default_place_is_named_by_what_and_when(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = at(None, name_parts=("vit-digits", "/some/where/my photos")).path
    second = at(None, name_parts=("vit-digits", "/some/where/my photos")).path
    assert first != second
    train = at(None, word="train", name_parts=("vit-micro", "digits")).path
    assert (first.parent, train.parent) == (Path("reports"), Path("runs"))
    assert first.name.startswith("brightness-vit-digits-my-photos-2")
    assert train.name.startswith("vit-micro-digits-2")


def test_an_existing_folder_is_kept_unless_asked_and_a_foreign_one_always(tmp_path):
    out = tmp_path / "run"
    foreign = tmp_path / "foreign"
    empty = tmp_path / "empty"
    with at(out) as folder:
        folder.arrays("old", x=np.ones(1))
    files = [out / "notes.txt", out / "figures" / "mine.txt", foreign / "config.json"]
    for path in (out / "report.md", *files):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    before = (out / "results.json").read_text()
    for place, overwrite, words in ((out, False, "--overwrite"), (foreign, True, "other files")):
        with pytest.raises(OutputError, match=words):
            at(place, overwrite=overwrite)
    assert (out / "results.json").read_text() == before
    with at(out, word="rollout", overwrite=True):
        assert read_run(out).status == "running"
    assert read_run(out).command == "rollout"
    assert not (out / "report.md").exists()
    assert not (out / "arrays" / "old.npz").exists()
    assert [path.read_text() for path in files] == ["mine"] * 3
    empty.mkdir()
    at(empty, overwrite=True)


def hold(out: Path, holds: Any, ends: Any) -> None:
    """Run in another process until it may end or is killed."""
    with at(out) as folder:
        folder.keep(KEPT)
        holds.set()
        ends.wait()


@pytest.mark.parametrize("how", ["done", "killed"])
def test_the_folder_of_a_run_that_still_runs_is_neither_overwritten_nor_resumed(tmp_path, how):
    context = get_context("fork")
    out = tmp_path / "run"
    holds = context.Event()
    ends = context.Event()
    other = context.Process(target=hold, args=(out, holds, ends))
    other.start()
    assert holds.wait(60)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(OutputError, match="still running"):
        at(out, overwrite=True)
    with pytest.raises(OutputError, match="still running"):
        RunFolder.reopen(out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    if how == "killed":
        other.kill()
    else:
        ends.set()
    other.join(60)
    assert read_run(out).status == ("running" if how == "killed" else "done")
    with at(out, overwrite=True, word="rollout"):
        assert read_run(out).command == "rollout"


def test_two_runs_in_one_process_do_not_share_a_folder(tmp_path):
    with at(tmp_path / "run"), pytest.raises(OutputError, match="still running"):
        at(tmp_path / "run", overwrite=True)
    at(tmp_path / "run", overwrite=True)


@pytest.mark.parametrize(
    ("place", "overwrite", "words"),
    [
        ("file", False, "a file at"),
        ("file", True, "a file at"),
        ("file/below", False, None),
        ("x" * 300, False, None),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, place, overwrite, words):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match=words) as caught:
        at(tmp_path / place, overwrite=overwrite)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
    # root may write anywhere, so the refusal is played
    monkeypatch.setattr(Path, "mkdir", raising(13))
    with pytest.raises(OutputError, match="Permission denied"):
        at(tmp_path / "run")


def test_a_reopened_run_keeps_its_results_and_its_time_and_leaves_nothing_half_written(tmp_path):
    out = tmp_path / "run"
    with at(out, {"command_line": "first", "data": {"images": 3}}, word="ablate") as folder:
        folder.keep(KEPT)
        seconds = folder.stop()
    content = json.loads((out / "results.json").read_text())
    assert content["seconds"] == seconds  # the clock stops when the run is finished
    (out / "results.json").write_text(json.dumps({**content, "seconds": 100.0}))
    for name in (".mean-0-0123abcd.npz", ".results-89abcdef.json", ".mine"):
        (out / name).touch()
        os.utime(out / name, (0, 0))
    (out / ".new-01234567.npz").touch()
    with RunFolder.reopen(
        out, config={"command_line": "second", "data": {"title": "x", "images": 3}}
    ):
        assert read_run(out).status == "running"
    record = read_run(out)
    assert (record.results["metrics"], record.results["tables"]) == (
        content["metrics"],
        content["tables"],
    )
    assert record.results["seconds"] > 100
    assert sorted(path.name for path in out.glob(".*")) == [".mine", ".new-01234567.npz"]
    assert (record.config["command_line"], record.config["data"]) == (
        "first",
        {"title": "x", "images": 3},
    )


@pytest.mark.parametrize(
    ("left", "error"),
    [("nothing", ValueError("x")), ("nothing", KeyboardInterrupt())]
    + [(left, ValueError("x")) for left in ("rows", "progress", "a file of the user's")]
    + [("still running", None)],
)
def test_only_a_run_that_has_come_to_nothing_gives_its_place_to_a_retry(tmp_path, left, error):
    out = tmp_path / "out"
    folder = at(out)
    if left == "rows":
        folder.keep(BrightnessRecord(means=MEANS))
    if left == "progress":
        folder.arrays("part", values=[1])
    if left == "a file of the user's":
        (out / "notes.txt").write_text("mine")
    if error is not None:
        with suppress(type(error)), folder:
            raise error
    if left == "nothing":
        with at(out) as again:
            again.keep(KEPT)
        assert read_run(out).status == "done"
        return
    before = sorted(out.rglob("*"))
    with pytest.raises(OutputError, match="--overwrite"):
        at(out)
    assert sorted(out.rglob("*")) == before


def test_overwrite_removes_what_vitlens_report_added_to_the_run(tmp_path):
    out = tmp_path / "run"
    with at(out) as folder:
        folder.keep(KEPT)
    names = ("portfolio.md", "portfolio.html", "comparison.md", "comparison/rows.csv", "mine.txt")
    (out / "comparison").mkdir()
    for name in names:
        (out / name).write_text("of the earlier run")
    with at(out, overwrite=True):
        pass
    assert [name for name in names if (out / name).exists()] == ["mine.txt"]
