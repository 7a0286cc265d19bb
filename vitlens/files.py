"""Writes files atomically, reads them within bounds, and only inside a run's folder."""

import csv
import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import numpy as np

from vitlens.errors import InputError, NonFiniteError, OutputError, StorageError
from vitlens.typed import SIZE, is_name, parse_json

# folders of other programs in a run's folder, which vitlens neither reads nor writes
_FOREIGN: Final = ("wandb",)


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block ends without an exception.

    The temporary path is in the same folder and has the same suffix. The parent folder is created.
    After any exception, the old file is unchanged and no partial file is left. Raises StorageError
    if the disk is full or not writable, and OutputError if a folder is at `path`.
    """
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex[:8]}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        # on disk before the rename, so that a crash cannot leave a partial file
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def is_temporary(name: str) -> bool:
    """Return True if a file's name is that of a temporary file of `write_atomically`."""
    return re.fullmatch(r"\..*-[0-9a-f]{8}(\.\w+)?", name) is not None


def storage_error(path: Path, error: OSError) -> StorageError | OutputError:
    """Return the error for a file that could not be written."""
    if path.is_dir() and not path.is_symlink():
        return OutputError(f"expected to write the file {path}, found a folder there; remove it")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"expected free space on the disk for {path}, found it full; free some, or write to "
            "another disk"
        )
    return StorageError(
        f"expected to write {path}, found: {error.strerror or error}; make its folder writable, or "
        "choose another"
    )


def require_writable(folder: Path, *, purpose: str, hint: str) -> None:
    """Raise OutputError unless files can be made in a folder, or in a new one at this path.

    Nothing is changed. Raises StorageError if the disk is full.

    purpose: what is written there: "for --save".
    hint: what to type next.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        write_probe(existing)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise storage_error(folder, error) from error
        raise OutputError(
            f"expected a folder that can be written {purpose}, found {folder}: "
            f"{error.strerror or error}; {hint}"
        ) from error


def require_writable_file(file: Path, *, option: str, example: str) -> None:
    """Raise OutputError unless a file can be written, whose folder must be there.

    option: the option that names it. example: a name for the hint.
    """
    if not str(file).strip() or (file.exists() and not file.is_file()):
        raise OutputError(
            f"expected a file for {option}, found {str(file)!r}; e.g. {option} {example}"
        )
    folder = file.parent
    if not folder.is_dir():
        raise OutputError(
            f"expected an existing folder for {option}, found none at {folder}; create it, or "
            "choose another"
        )
    require_writable(
        folder, purpose=f"for {option}", hint=f"make it writable, or choose another {option}"
    )


def write_probe(folder: Path) -> None:
    """Make a file in a folder and remove it. Raises OSError if that fails."""
    with TemporaryFile(dir=folder):
        pass


def write_bytes(path: Path, content: bytes) -> None:
    """Write a whole file atomically."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: Path, content: str) -> None:
    """Write a whole text file atomically (UTF-8)."""
    write_bytes(path, content.encode())


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON atomically.

    Raises NonFiniteError, with the place, for NaN and infinity, which JSON does not have.
    """
    plain = json.loads(json.dumps(content, default=_as_plain))
    for place, number in _numbers(plain):
        if not isfinite(number):
            raise NonFiniteError(
                f"expected finite numbers in {path.name}, found NaN or infinity at {place}"
            )
    text = json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    # a file name that is not UTF-8 has lone surrogates, which JSON writes as \udcff
    write_bytes(path, text.encode(errors="backslashreplace"))


def _as_plain(value: object) -> object:
    """Return numpy's numbers and arrays, and paths, as types that json supports."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"expected something that JSON can hold, found a {type(value).__name__}")


def _numbers(value: object, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield the floats of nested JSON, with their places."""
    if isinstance(value, float):
        yield place.removeprefix("/"), value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _numbers(child, f"{place}/{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _numbers(child, f"{place}/{index}")


def read_bounded(
    path: Path,
    limit: int,
    *,
    what: str = "a file",
    error: type[InputError] = InputError,
    hint: str = "",
) -> bytes:
    """Return the bytes of a regular file.

    Raises `error` if it is missing, unreadable, not regular or above the limit.
    """
    end = f"; {hint}" if hint else ""
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device might never end
            raise error(f"expected {what} at {path}, found no plain file{end}")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as reason:
        raise error(
            f"expected {what} at {path}, found: {getattr(reason, 'strerror', None) or reason}{end}"
        ) from reason
    if len(content) > limit:
        raise error(f"expected {what} of at most {limit:,} bytes at {path}, found more{end}")
    return content


def read_csv_text(
    path: Path, limit: int, *, what: str = "a table", error: type[InputError] = InputError
) -> str:
    r"""Return the text of a CSV file, in which every line ends in "\n".

    The file is in UTF-8, or in UTF-16 with a byte order mark. Raises `error` as `read_bounded`, and
    for a file that is no such text.
    """
    content = read_bounded(path, limit, what=what, error=error)
    encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as reason:
        raise error(
            f"expected a text table (CSV) at {path}, found: {reason}; save it as UTF-8"
        ) from reason
    return text.replace("\r\n", "\n").replace("\r", "\n")


def csv_rows(
    lines: Iterable[str],
    path: Path,
    *,
    delimiter: str = ",",
    error: type[InputError] = InputError,
) -> list[list[str]]:
    """Return the cells of each line of a CSV file.

    path: the file, for the error. Raises `error` for a cell that is too long.
    """
    try:
        return list(csv.reader(lines, delimiter=delimiter))
    except csv.Error as reason:
        raise error(
            f"expected cells of at most {csv.field_size_limit():,} characters in {path}, found: "
            f"{reason}; close its quotes, or shorten the cell"
        ) from reason


def read_json(
    path: Path, *, size: int = SIZE, error: type[InputError] = InputError, hint: str = ""
) -> Any:
    """Return the value in a JSON file.

    Raises `error` if it is missing, unreadable, not JSON, or above the limit.
    """
    content = read_bounded(path, size, what="a JSON file", error=error, hint=hint)
    return parse_json(content, source=str(path), size=size, error=error, hint=hint)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inside(folder: Path, *parts: str) -> Path:
    """Return the path of the parts below a folder, which itself may be a link.

    Raises InputError for parts that lead out of the folder, and for a link in them. An untrusted
    file must not determine which other files are read or overwritten.
    """
    below = Path(*parts)
    try:
        leads_out = below.is_absolute() or ".." in below.parts
        if leads_out or not below.parts or "\0" in str(below):
            raise InputError(
                f"expected a place inside {folder}, found {'/'.join(parts)!r}; run the "
                "command again"
            )
        path = folder
        for part in below.parts:
            path /= part
            _require_no_link(path)
    except (OSError, ValueError) as error:  # an invalid file name
        raise InputError(
            f"expected a place inside {folder}, found {str(below)[:80]!r} ({error})"
        ) from error
    return path


def require_no_links(folder: Path, names: Iterable[str]) -> None:
    """Raise InputError if one of these files of a run's folder, or anything below, is a link."""
    pending = [folder / name for name in names]
    while pending:
        path = pending.pop()
        _require_no_link(path)
        if path.is_dir():
            pending += [child for child in path.iterdir() if child.name not in _FOREIGN]


def _require_no_link(path: Path) -> None:
    if path.is_symlink():
        raise InputError(
            f"expected no link in a run's folder, found {path}, which leads to {path.readlink()}; "
            "put a copy in its place, or remove it"
        )


def named_file(name: str, suffix: str) -> str:
    """Return a file name for a name from a file (alias, method). Raises InputError for a path."""
    if not is_name(name):
        raise InputError(
            f"expected a name that can be part of a file name, found {name[:80]!r}; run the "
            "command again"
        )
    return name + suffix
