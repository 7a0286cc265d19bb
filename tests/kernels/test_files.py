import errno
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from vitlens import files
from vitlens.arrays import read_arrays, write_arrays
from vitlens.errors import InputError, NonFiniteError, StorageError
from vitlens.files import (
    inside,
    read_json,
    require_no_links,
    sha256,
    write_atomically,
    write_json,
    write_text,
)
from vitlens.record import read_run

RESULTS = {"schema": 3, "command": "evaluate", "status": "done", "seconds": 1.0, "metrics": {}, "tables": {"t": []}}


def test_the_file_appears_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    with write_atomically(target) as temporary:
        temporary.write_text("half")
        assert not target.exists()
        assert temporary.suffix == ".txt"
    assert target.read_text() == "half"
    assert list(target.parent.iterdir()) == [target]


def test_an_exception_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_text(target, "old")

    def fail() -> None:
        with write_atomically(target) as temporary:
            temporary.write_text("new")
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "full"), (errno.EROFS, "Read-only")])
def test_a_disk_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    def fail(file: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(StorageError, match=words) as caught:
        write_json(tmp_path / "file.json", {"a": 1})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    def write() -> None:
        with write_atomically(tmp_path / "file.bin"), Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(StorageError, match="full"):
        write()


def test_json_comes_back_with_numpy_and_paths_as_plain(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"n": np.int64(3), "x": np.float32(0.5), "list": np.arange(2), "path": Path("a/b"), "é": None})
    assert read_json(target) == {"n": 3, "x": 0.5, "list": [0, 1], "path": "a/b", "é": None}


@pytest.mark.parametrize("bad", [float("nan"), np.float32("inf"), np.array([1.0, np.nan])])
def test_json_holds_no_nan_and_says_where(tmp_path: Path, bad: object) -> None:
    with pytest.raises(NonFiniteError, match="tables/heads/1/x"):
        write_json(tmp_path / "a.json", {"tables": {"heads": [{"x": 1.0}, {"x": bad}]}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["{", "1]", ""])
def test_what_is_no_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match="expected JSON"):
        read_json(tmp_path / "a.json")


def test_arrays_come_back_and_objects_do_not(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.npz", {"x": np.arange(6).reshape(2, 3), "file": np.array([1])})
    back = read_arrays(tmp_path / "a.npz")
    assert set(back) == {"x", "file"}
    assert (back["x"] == np.arange(6).reshape(2, 3)).all()
    np.savez(tmp_path / "evil.npz", x=np.array([{"code": 1}], dtype=object))
    with pytest.raises(InputError, match="plain arrays"):
        read_arrays(tmp_path / "evil.npz")
    (tmp_path / "broken.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:40])
    with pytest.raises(InputError, match="plain arrays"):
        read_arrays(tmp_path / "broken.npz")
    with pytest.raises(InputError, match="no such file"):
        read_arrays(tmp_path / "none.npz")


def test_sha256_is_hashlibs(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000  # more than one chunk
    (tmp_path / "a").write_bytes(content)
    assert sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_a_run_is_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"seed": 0})
    write_json(tmp_path / "results.json", RESULTS)
    record = read_run(tmp_path)
    assert (record.command, record.status, record.config["seed"]) == ("evaluate", "done", 0)


def test_what_is_no_run_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing there"):
        read_run(tmp_path / "none")
    with pytest.raises(InputError, match=r"no config\.json and no results\.json"):
        read_run(tmp_path)
    write_json(tmp_path / "config.json", {})
    with pytest.raises(InputError, match="a file"):
        read_run(tmp_path / "config.json")
    write_json(tmp_path / "results.json", {**RESULTS, "schema": 4})
    with pytest.raises(InputError, match=r"schema 3 in .*, found schema 4, .*: run the command again$"):
        read_run(tmp_path)
    write_json(tmp_path / "results.json", {"schema": 3})
    with pytest.raises(InputError, match=r"results\.json.*`command`"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "parts", [("..",), ("a", "../../x"), ("/etc",), ("a", "/etc"), (), (".",), ("a\0",), ("x" * 300,)]
)
def test_no_place_outside(tmp_path, parts):
    with pytest.raises(InputError):
        inside(tmp_path, *parts)


def test_links_are_refused_on_the_way_and_at_the_end(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "arrays").mkdir(parents=True)
    other.mkdir()
    (other / "a.png").write_text("mine")
    (run / "figures").symlink_to(other)
    (run / "arrays" / "x.npz").symlink_to(other / "a.png")
    (run / "report.md").symlink_to(tmp_path / "nowhere")
    for parts in (("figures", "a.png"), ("arrays", "x.npz"), ("report.md",)):
        with pytest.raises(InputError, match="no link"):
            inside(run, *parts)
        with pytest.raises(InputError, match="no link"):
            require_no_links(run, parts[:1])
    assert inside(run, "arrays", "y.npz") == run / "arrays" / "y.npz"
    require_no_links(run, ("config.json",))


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    assert inside(tmp_path / "latest", "report.md") == tmp_path / "latest" / "report.md"
