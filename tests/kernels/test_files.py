"""Files: an .npz is checked before memory is taken; complete files or none; none outside."""

import errno
import hashlib
import io
import os
import tracemalloc
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from vitlens.arrays import Form, read_arrays, require_forms, write_arrays
from vitlens.errors import DataError, InputError, NonFiniteError, StorageError
from vitlens.files import inside, named_file, read_json, sha256, write_atomically, write_json


def header(shape: str, kind: str = "<f8") -> bytes:
    """Return the start of a .npy that claims a shape."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def plain(array: np.ndarray, *, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=pickled)
    return file.getvalue()


GOOD = plain(np.arange(4.0))
FORMS: dict[str, bytes] = {
    "272 TiB": header("(37, 1000000000000)"),
    "overflow": header("(4611686018427387904, 4611686018427387904)"),
    "negative": header("(-1, 4)") + b"\0" * 64,
    "no bytes an item": header("(1000000000000,)", "<U0"),
    "an endless side": header("(0, 1000000000000)"),
    "short": GOOD[:-8],
    "no array": b"hello",
    "nested header": header("(" * 200 + ")" * 200),
    "a header of 16 MB": b"\x93NUMPY\x02\x00" + (1 << 24).to_bytes(4, "little") + b" " * (1 << 24),
    "format 9": GOOD[:6] + b"\x09" + GOOD[7:],
    "objects": plain(np.array([{}], dtype=object), pickled=True),
    "records": plain(np.zeros(2, dtype=[("a", "f8")])),
    "dates": plain(np.zeros(2, dtype="M8[s]")),
    "twice": GOOD,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_archive_is_one_line_and_no_memory(tmp_path, form):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        # zipfile's, of a name that is written twice
        warnings.filterwarnings("ignore", "Duplicate name")
        for _ in range(2 if form == "twice" else 1):
            archive.writestr(zipfile.ZipInfo("x.npy"), FORMS[form])
    tracemalloc.start()
    with pytest.raises(DataError, match=r"a\.npz") as caught:
        read_arrays(path, error=DataError)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06", GOOD, None])
def test_what_is_no_archive_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(
        InputError, match="expected plain arrays" if content is not None else "no such file"
    ):
        read_arrays(tmp_path / "a.npz")


def test_a_bomb_is_refused_by_its_list_of_contents(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"")
        archive.filelist[0].file_size = 300 << 20  # as the list says
    with pytest.raises(InputError, match="packed at most"):
        read_arrays(tmp_path / "a.npz")
    with pytest.raises(InputError, match=r"at most 0\.125 GiB"):
        read_arrays(tmp_path / "a.npz", most=1 << 27)


def test_good_arrays_come_back_and_only_the_keys_asked_for(tmp_path):
    arrays = {
        "a": np.arange(3),
        "b": np.array(["x", "yz"]),
        "c": np.zeros((0, 5)),
        "d": np.array(True),
        "file": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "g": np.array(["", ""]),
        "h": np.arange(4, dtype=">i4"),
    }
    np.savez(
        tmp_path / "a.npz", **{name: array for name, array in arrays.items() if name != "file"}
    )
    write_arrays(tmp_path / "b.npz", arrays)
    for read in (read_arrays(tmp_path / "a.npz"), read_arrays(tmp_path / "b.npz")):
        for name, array in read.items():
            assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
            np.testing.assert_array_equal(array, arrays[name])
    assert read.keys() == arrays.keys()
    assert list(read_arrays(tmp_path / "a.npz", keys=("b", "z"))) == ["b"]


def test_arrays_of_another_form_are_refused():
    content = {"a": np.zeros((2, 3)), "digest": np.array("x")}
    require_forms(
        content, {"a": Form("f", (2, None)), "digest": Form("U")}, Path("p"), hint="again"
    )
    for name, form in (
        ("a", Form("f", (2, 4))),
        ("a", Form("iu", (2, 3))),
        ("a", Form("f", (2,))),
        ("b", Form("f")),
    ):
        with pytest.raises(InputError, match=name):
            require_forms(content, {name: form}, Path("p"), hint="again")


def test_the_file_appears_whole_and_alone(tmp_path):
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
def test_a_disk_that_fails_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, code, words):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, os.strerror(code))))
    with pytest.raises(StorageError, match=words) as caught:
        write_json(tmp_path / "file.json", {"a": 1})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_json_comes_back_with_numpy_and_paths_as_plain(tmp_path):
    content = {
        "n": np.int64(3),
        "x": np.float32(0.5),
        "list": np.arange(2),
        "path": Path("a/b"),
        "é\udcff": None,
    }
    write_json(tmp_path / "a.json", content)
    assert read_json(tmp_path / "a.json") == {
        "n": 3,
        "x": 0.5,
        "list": [0, 1],
        "path": "a/b",
        "é\udcff": None,
    }


@pytest.mark.parametrize("bad", [float("nan"), np.float32("inf"), np.array([1.0, np.nan])])
def test_json_holds_no_nan_and_says_where(tmp_path, bad):
    with pytest.raises(NonFiniteError, match="tables/heads/1/x"):
        write_json(tmp_path / "a.json", {"tables": {"heads": [{"x": 1.0}, {"x": bad}]}})
    assert not list(tmp_path.iterdir())


def test_no_place_outside_no_link_and_no_path_in_a_name(tmp_path):
    """The folder itself may be a link; tests/contracts has those inside it."""
    (tmp_path / "latest").symlink_to(tmp_path)
    with pytest.raises(InputError, match="no link"):
        inside(tmp_path, "latest", "y.npz")
    assert inside(tmp_path / "latest", "y.npz") == tmp_path / "latest" / "y.npz"
    for parts in (("..",), ("a", "../../x"), ("/etc",), ("a", "/etc"), (), ("a\0",), ("x" * 300,)):
        with pytest.raises(InputError):
            inside(tmp_path, *parts)
    for name in ("", ".x", "~x", "a/b", "a\\b", "a\nb", "a" * 201, "\u202e"):
        with pytest.raises(InputError):
            named_file(name, ".npz")
    assert named_file("é", ".npz") == "é.npz"
