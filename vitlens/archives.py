"""Arrays of an .npz, read within bounds: the sizes in its headers are checked before memory is allocated."""

import math
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitlens.errors import InputError

Array = NDArray[np.generic]

SIZE: Final = 4 << 30  # bytes of all arrays of a file
_KINDS: Final = "biufUS"  # booleans, numbers, strings: no objects, structured types, complex numbers or dates
_SUSPECT: Final = 256 << 20  # bytes of the arrays; below, any compression ratio is accepted
_PACKED: Final = 100  # largest compression ratio above that
_PART: Final = 16 << 20  # bytes read at once
_EMPTY: Final = 1 << 24  # longest side of an array without elements
_Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[np.generic]]  # shape, whether column by column, dtype
# by version: bytes of the header's length, and numpy's parser of both
_HEADERS: Final = {(1, 0): (2, np.lib.format.read_array_header_1_0), (2, 0): (4, np.lib.format.read_array_header_2_0)}


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
    path: Path, *, keys: Collection[str] | None = None, most: int = SIZE, error: type[InputError] = InputError
) -> dict[str, Array]:
    """The arrays of an .npz by name, only `keys` where given; nothing is unpickled.

    Raises `error`, one line, when the file is missing or damaged, holds anything but numbers, booleans and strings, or
    claims more than `most` bytes, than it has, or than is plausible for its size.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            if len(entries) < len(archive.infolist()):
                raise error(f"expected each array of {path} once, found one twice; save them with numpy.savez")
            unpacked, packed = sum(entry.file_size for entry in archive.infolist()), path.stat().st_size
            if unpacked > most:
                raise error(f"expected arrays of at most {most / 2**30:g} GiB in {path}, found {unpacked / 2**30:,.1f}")
            if unpacked > max(_SUSPECT, _PACKED * packed):
                raise error(
                    f"expected arrays packed at most {_PACKED} times smaller in {path}, found {unpacked:,} bytes in "
                    f"{packed:,}; save them with numpy.savez"
                )
            return {name: _array(archive, each) for name, each in entries.items() if keys is None or name in keys}
    except FileNotFoundError as reason:
        raise error(f"expected arrays at {path}, found no such file; run the command again") from reason
    except InputError:
        raise
    except Exception as reason:  # numpy and zipfile raise a dozen types for a broken archive
        message = (str(reason).splitlines() or [type(reason).__name__])[0][:160]
        raise error(f"expected plain arrays in {path}, found: {message}; save them with numpy.savez") from reason


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    """One array, after its header was checked against the size of its entry. Raises ValueError and others."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        length = file.read(_HEADERS[version][0])
        shape, by_columns, kind = _parsed(version, length + file.read(int.from_bytes(length, "little")))
        count, room = math.prod(shape), entry.file_size
        if kind.kind not in _KINDS:
            raise ValueError(f"{kind} in {entry.filename!r}, no numbers or texts: a pickle could run code")
        fits = max(count, count * kind.itemsize) <= room and all(0 <= side <= room + _EMPTY for side in shape)
        if not fits:
            raise ValueError(f"{room:,} bytes of {entry.filename!r}, which claims the shape {str(shape)[:80]}")
        content = bytearray()
        while part := file.read(_PART):  # to the end, where the checksum is compared
            content += part
    array: Array = np.ndarray(shape, kind, content, order="F" if by_columns else "C")
    return array


@lru_cache(maxsize=1024)
def _parsed(version: tuple[int, int], header: bytes) -> _Header:
    """A header as numpy parses it, once where arrays have the same: it is most of the time of reading a small array."""
    parsed: _Header = _HEADERS[version][1](BytesIO(header))
    return parsed
