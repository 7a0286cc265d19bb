"""Arrays of an .npz, read within bounds: the sizes in its headers are checked before memory is allocated."""

import math
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import IO, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.errors import InputError

Array = NDArray[np.generic]

_KINDS: Final = "biufUS"  # booleans, numbers, strings: no objects, structured types, complex numbers or dates
_ENTRIES: Final = 10_000
_AXES: Final = 16
_SUSPECT: Final = 256 << 20  # bytes of the arrays; below, any compression ratio is accepted
_PART: Final = 16 << 20  # bytes read at once
_PACKED: Final = 100  # largest compression ratio above that
_Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[np.generic]]  # shape, whether column by column, dtype
# by version: bytes of the header's length, and numpy's parser of both
_HEADERS: Final = {(1, 0): (2, np.lib.format.read_array_header_1_0), (2, 0): (4, np.lib.format.read_array_header_2_0)}


@dataclass(frozen=True)
class Bounds:
    """size: most bytes of all arrays of one file together."""

    size: int = 4 << 30


@dataclass(frozen=True)
class Form:
    """The expected form of an array: kinds of numpy dtypes ("b", "iu", "f", "U"), and its shape, None for any size."""

    kinds: str
    shape: tuple[int | None, ...] = ()


def require_forms(
    arrays: Mapping[str, Array], forms: Mapping[str, Form], path: Path, *, hint: str = "start again without --resume"
) -> None:
    """Raise InputError unless `arrays`, read from path, has these names and forms; other arrays are ignored."""
    for name, form in forms.items():
        if name not in arrays:
            raise InputError(f"expected the array {name!r} in {path}, found none; {hint}")
        array = arrays[name]
        fits = len(array.shape) == len(form.shape) and all(
            side in (None, length) for side, length in zip(form.shape, array.shape)
        )
        if not fits or array.dtype.kind not in form.kinds:
            sides = ", ".join("any" if side is None else str(side) for side in form.shape)
            raise InputError(
                f"expected {name!r} of shape ({sides}) and kind {form.kinds} in {path}, found {array.shape} of "
                f"{array.dtype}; {hint}"
            )


def read_archive(
    path: Path,
    *,
    keys: Collection[str] | None = None,
    bounds: Bounds = Bounds(),
    error: type[InputError] = InputError,
) -> dict[str, Array]:
    """The arrays of an .npz by name, only `keys` where given; nothing is unpickled.

    Raises `error`, one line, when the file is missing or damaged, holds anything but numbers, booleans and strings, or
    claims more bytes than the bounds, than it has, or than is plausible for its size.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = {_name(entry): entry for entry in archive.infolist()}
            _check(path, archive.infolist(), entries, bounds, error)
            chosen = {name: entry for name, entry in entries.items() if keys is None or name in keys}
            return {name: _array(archive, entry, path, error) for name, entry in chosen.items()}
    except FileNotFoundError as reason:
        raise error(f"expected arrays at {path}, found no such file; run the command again") from reason
    except InputError:
        raise
    except Exception as reason:  # numpy and zipfile raise a dozen types for a broken archive
        message = (str(reason).splitlines() or [type(reason).__name__])[0][:160]
        raise error(f"expected plain arrays in {path}, found: {message}; save them with numpy.savez") from reason


def _name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")


def _check(
    path: Path,
    listed: Collection[zipfile.ZipInfo],
    entries: Mapping[str, zipfile.ZipInfo],
    bounds: Bounds,
    error: type[InputError],
) -> None:
    """Refuse an archive by its directory, before reading any array."""
    if len(listed) > _ENTRIES:
        raise error(f"expected at most {_ENTRIES:,} arrays in {path}, found {len(listed):,}")
    if len(entries) < len(listed):
        raise error(f"expected each array of {path} once, found one twice")
    unpacked, packed = sum(entry.file_size for entry in listed), path.stat().st_size
    if unpacked > bounds.size:
        raise error(
            f"expected arrays of at most {bounds.size / (1 << 30):g} GiB in {path}, found {unpacked / (1 << 30):,.1f}"
        )
    if unpacked > _SUSPECT and unpacked > _PACKED * packed:
        raise error(
            f"expected arrays packed at most {_PACKED} times smaller in {path}, found {unpacked:,} bytes in "
            f"{packed:,}; save them with numpy.savez"
        )


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, error: type[InputError]) -> Array:
    """One array, after its header was checked against the size of its entry."""
    name = _name(entry)
    with archive.open(entry) as file:
        shape, by_columns, kind = _header(file, name, path, error)
        count, size = math.prod(shape), math.prod(shape) * kind.itemsize
        if kind.hasobject:
            raise error(f"expected plain arrays in {path}, found a pickle, which could run code, in {name!r}")
        if kind.kind not in _KINDS:
            raise error(f"expected numbers or texts in {path}, found {kind} in {name!r}")
        if len(shape) > _AXES or (not count and max(shape) > entry.file_size + 2**24) or (count and not kind.itemsize):
            raise error(f"expected an array in {path}, found {name!r} of shape {str(shape)[:80]}")
        if size > entry.file_size:
            raise error(f"expected {size:,} bytes of {name!r} in {path}, found {entry.file_size:,}: it is damaged")
        content = bytearray()
        while part := file.read(_PART):  # to the end, where the checksum is compared
            content += part
    array: Array = np.ndarray(shape, kind, content, order="F" if by_columns else "C")
    return array


def _header(file: IO[bytes], name: str, path: Path, error: type[InputError]) -> _Header:
    """The shape, order and dtype in an entry's header."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise error(f"expected arrays of numpy's format 1 or 2 in {path}, found {version} in {name!r}")
    length = file.read(_HEADERS[version][0])
    shape, by_columns, kind = _parsed(version, length + file.read(int.from_bytes(length, "little")))
    if any(side < 0 for side in shape):
        raise error(f"expected an array in {path}, found {name!r} of shape {str(shape)[:80]}")
    return shape, by_columns, kind


@lru_cache(maxsize=1024)
def _parsed(version: tuple[int, int], header: bytes) -> _Header:
    """A header as numpy parses it, once where arrays have the same: it is most of the time of reading a small array."""
    parsed: _Header = _HEADERS[version][1](BytesIO(header))
    return parsed
