"""Atomic writing of files, and reading the folder of a run."""

import errno
import hashlib
import json
import math
import os
import re
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitlens.archives import read_archive
from vitlens.errors import InputError, NonFiniteError, StorageError
from vitlens.recorded import Config, Results
from vitlens.safe_paths import inside
from vitlens.typed import CHARACTERS, SIZE, is_name, parse_json, read_as

CONFIG = "config.json"
RESULTS = "results.json"
SCHEMAS = (2, 3)  # of results.json; 3: of a record class (vitlens/record.py)
_AGAIN = "run the command again"


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with its suffix, that replaces it when the block ends without an exception.

    The parent folder is created. Raises StorageError, one line, when the disk is full or not writable; then, as after
    any other exception, the old file is unchanged and no partial file is left.
    """
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex[:8]}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _to_disk(temporary)
        temporary.replace(path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def is_temporary(name: str) -> bool:
    """Whether a file's name is that of a temporary file of `write_atomically`."""
    return re.fullmatch(r"\..*-[0-9a-f]{8}(\.\w+)?", name) is not None


def storage_error(path: Path, error: OSError) -> StorageError:
    """The error for a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"expected room on the disk for {path}, found it full; free some, or choose another --out")
    return StorageError(f"expected to write {path}, found: {error.strerror or error}; choose another --out")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file atomically."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a whole text file atomically (UTF-8)."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON atomically. Raises NonFiniteError, with the place, for NaN and infinity, which JSON does not have."""
    place = _non_finite(content)
    if place is not None:
        raise NonFiniteError(f"expected finite numbers in {path.name}, found NaN or infinity at {place}")
    text = json.dumps(content, indent=2, ensure_ascii=False, default=_plain) + "\n"
    # a file name that is not UTF-8 has lone surrogates, which JSON writes as \udcff
    write_bytes(path, text.encode(errors="backslashreplace"))


def read_bounded(
    path: Path, limit: int, *, what: str = "a file", error: type[InputError] = InputError, hint: str = ""
) -> bytes:
    """The bytes of a regular file. Raises `error` when it is missing, unreadable, not regular or above the limit."""
    end = f"; {hint}" if hint else ""
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device might never end
            raise error(f"expected {what} at {path}, found no plain file{end}")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as reason:
        raise error(f"expected {what} at {path}, found: {getattr(reason, 'strerror', None) or reason}{end}") from reason
    if len(content) > limit:
        raise error(f"expected {what} of at most {limit:,} bytes at {path}, found more{end}")
    return content


def read_any_json(path: Path, *, size: int = SIZE, error: type[InputError] = InputError, hint: str = "") -> object:
    """The value in a JSON file. Raises `error` when it is missing, unreadable, not JSON, or above the limit."""
    content = read_bounded(path, size, what="a JSON file", error=error, hint=hint)
    value: object = parse_json(content, source=str(path), size=size, error=error, hint=hint)
    return value


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object. Raises InputError when the file is missing, unreadable, too large or not a JSON object."""
    content = read_any_json(path)
    if not isinstance(content, dict):
        raise InputError(f"expected a JSON object in {path}, found a {type(content).__name__}")
    return content


def write_arrays(path: Path, arrays: Mapping[str, ArrayLike]) -> None:
    """Write named arrays as one compressed .npz, atomically; equal arrays give equal bytes. No object arrays."""
    with write_atomically(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # numpy.savez does not accept an array named "file"
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read the arrays of an .npz, without running code from it and within bounds (see `archives`).

    Raises InputError when it is missing or damaged.
    """
    return read_archive(path)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class RunRecord:
    """The output of a run: its folder, config.json and results.json; arrays are read on request."""

    folder: Path
    config: Mapping[str, object]
    results: Mapping[str, object]

    @property
    def command(self) -> str:
        """The command of the run ("evaluate")."""
        return str(self.results["command"])

    @property
    def status(self) -> str:
        """running, done, failed or interrupted."""
        return str(self.results["status"])

    def arrays(self, name: str) -> dict[str, NDArray[np.generic]]:
        """The arrays of arrays/<name>.npz. Raises InputError when they are missing or broken."""
        return read_arrays(self._place(name))

    def table(self, name: str) -> list[dict[str, object]]:
        """The rows of one table. Raises InputError when there is none of that name."""
        tables = self.results["tables"]
        if not isinstance(tables, dict) or name not in tables:
            raise InputError(f"expected a table {name!r} in {self.folder / RESULTS}, found none")
        return list(tables[name])

    def _place(self, name: str) -> Path:
        return inside(self.folder, "arrays", named_file(name, ".npz"))


def named_file(name: str, suffix: str) -> str:
    """A file name made from a name in a file (alias, method). Raises InputError for a path."""
    if not is_name(name):
        raise InputError(f"expected a name that can be part of a file name, found {name[:80]!r}; {_AGAIN}")
    return name + suffix


def read_run(folder: Path) -> RunRecord:
    """The output of a run, read from its folder.

    Raises InputError when it is not the folder of a vitlens run, or its content is not what a run writes.
    """
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "nothing there"
        raise InputError(f"expected the folder of a run at {folder}, found {kind}; see reports/ and runs/")
    missing = [name for name in (CONFIG, RESULTS) if not inside(folder, name).is_file()]
    if missing:
        raise InputError(f"expected the folder of a run at {folder}, found no {' and no '.join(missing)} in it")
    config, results = read_json(folder / CONFIG), read_json(folder / RESULTS)
    if "schema" in results and results["schema"] not in SCHEMAS:
        raise InputError(
            f"expected results of schema {SCHEMAS[-1]} in {folder / RESULTS}, found schema {results['schema']!s:.40}, "
            f"which another version wrote; make them again: {_command_of(config)}"
        )
    read_as(Results, results, source=str(folder / RESULTS), hint=_AGAIN)
    _require_short_cells(results, folder / RESULTS)
    read_as(Config, config, source=str(folder / CONFIG), unknown="ignore", hint=_AGAIN)
    return RunRecord(folder, config, results)


def _command_of(config: Mapping[str, object]) -> str:
    """The command line that a run was made with, to be typed again."""
    line = config.get("command_line")
    return line if isinstance(line, str) and line.startswith("vitlens ") else _AGAIN


def _require_short_cells(results: Mapping[str, object], path: Path) -> None:
    """Refuse texts in tables that are longer than any that a run writes, and would take minutes to draw."""
    tables = results["tables"]
    for name, rows in tables.items() if isinstance(tables, dict) else ():
        for row in rows:
            long = next((key for key, cell in row.items() if isinstance(cell, str) and len(cell) > CHARACTERS), None)
            if long is not None:
                raise InputError(
                    f"expected texts of at most {CHARACTERS:,} characters in the table {name!r} of {path}, found "
                    f"{len(row[long]):,} at {long[:80]!r}; {_AGAIN}"
                )


def _to_disk(path: Path) -> None:
    """Flush a file to disk, so that a crash after the rename cannot leave a partial file under the final name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _plain(value: object) -> object:
    """Types that json does not support, as plain ones: numpy's numbers and arrays, and paths."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"expected something that JSON can hold, found a {type(value).__name__}")


def _non_finite(value: object, place: str = "") -> str | None:
    """The place of the first NaN or infinity in a nested structure."""
    if isinstance(value, (float, np.floating)):
        return None if math.isfinite(value) else place
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind != "f" or np.isfinite(value).all() else place
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        children = [(str(index), child) for index, child in enumerate(value)]
    else:
        return None
    places = (_non_finite(child, f"{place}/{key}".lstrip("/")) for key, child in children)
    return next((where for where in places if where is not None), None)
