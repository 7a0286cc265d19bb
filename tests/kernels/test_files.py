import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from vitlens import files
from vitlens.errors import InputError, NonFiniteError, StorageError
from vitlens.files import inside, read_json, require_no_links, sha256, write_atomically, write_json, write_text


def test_the_file_appears_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file.txt"
    with write_atomically(target) as temporary:
        temporary.write_text("half")
        assert not target.exists()
        assert temporary.suffix == ".txt"
    assert target.read_text() == "half"
    with suppress(ZeroDivisionError), write_atomically(target) as temporary:
        temporary.write_text("new")
        raise ZeroDivisionError
    assert target.read_text() == "half"
    assert list(target.parent.iterdir()) == [target]
    assert sha256(target) == hashlib.sha256(b"half").hexdigest()


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


def test_json_comes_back_with_numpy_and_paths_as_plain(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"n": np.int64(3), "x": np.float32(0.5), "list": np.arange(2), "path": Path("a/b"), "é": None})
    assert read_json(target) == {"n": 3, "x": 0.5, "list": [0, 1], "path": "a/b", "é": None}
    for content in ("{", "1]", ""):
        target.write_text(content)
        with pytest.raises(InputError, match="expected JSON"):
            read_json(target)


@pytest.mark.parametrize("bad", [float("nan"), np.float32("inf"), np.array([1.0, np.nan])])
def test_json_holds_no_nan_and_says_where(tmp_path: Path, bad: object) -> None:
    with pytest.raises(NonFiniteError, match="tables/heads/1/x"):
        write_json(tmp_path / "a.json", {"tables": {"heads": [{"x": 1.0}, {"x": bad}]}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("parts", [("..",), ("a", "../../x"), ("/etc",), ("a", "/etc"), (), ("a\0",), ("x" * 300,)])
def test_no_place_outside(tmp_path, parts):
    with pytest.raises(InputError):
        inside(tmp_path, *parts)


def test_links_are_refused_on_the_way_and_at_the_end_but_the_folder_itself_may_be_one(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    write_text(other / "a.png", "mine")
    (run / "arrays").mkdir(parents=True)
    (run / "figures").symlink_to(other)
    (run / "arrays" / "x.npz").symlink_to(other / "a.png")
    (run / "report.md").symlink_to(tmp_path / "nowhere")
    for parts in (("figures", "a.png"), ("arrays", "x.npz"), ("report.md",)):
        with pytest.raises(InputError, match="no link"):
            inside(run, *parts)
        with pytest.raises(InputError, match="no link"):
            require_no_links(run, parts[:1])
    require_no_links(run, ("config.json",))
    (tmp_path / "latest").symlink_to(run)
    assert inside(tmp_path / "latest", "arrays", "y.npz") == tmp_path / "latest" / "arrays" / "y.npz"
