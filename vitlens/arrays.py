"""Arrays in .npz files: written and read within bounds, and as frozen dataclasses whose fields
declare their forms.

A field is Annotated with a `Form`, as the types below are; one that is None is left out of the
file. A mapping holds several arrays of one form: a Mapping[int, Matrix] "layer" those named layer0,
layer1 ...; a Mapping[str, Vector] "mean" those named mean_distance, mean_entropy ...
"""

import math
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError, first_line
from vitlens.files import write_atomically

Array = NDArray[np.generic]
Kind = TypeVar("Kind")

SIZE: Final = 4 << 30  # bytes of all arrays of a file
# booleans, numbers, strings: no objects, structured types, complex numbers or dates
_KINDS: Final = "biufUS"
_SUSPECT: Final = 256 << 20  # bytes of the arrays; below, any compression ratio is accepted
_PACKED: Final = 100  # largest compression ratio above that
_PART: Final = 16 << 20  # bytes read at once
_EMPTY: Final = 1 << 24  # longest side of an array without elements
_Header: TypeAlias = tuple[
    tuple[int, ...], bool, np.dtype[np.generic]
]  # shape, whether column by column, dtype
# by version: bytes of the header's length, and numpy's parser of both
_HEADERS: Final = {
    (1, 0): (2, np.lib.format.read_array_header_1_0),
    (2, 0): (4, np.lib.format.read_array_header_2_0),
}


@dataclass(frozen=True)
class Form:
    """The expected form of an array: kinds of numpy dtypes ("b", "iu", "f", "U"), and its shape,
    None for any size.
    """

    kinds: str
    shape: tuple[int | None, ...] = ()


# by their shapes, of any length where it is None
Vector: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None,))]
Matrix: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None))]
Stack: TypeAlias = Annotated[
    NDArray[np.floating[Any]], Form("f", (None, None, None))
]  # of matrices
Stacks: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None, None, None))]
Image: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (3, None, None))]  # in colour
Images: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, 3, None, None))]
Pixels: TypeAlias = Annotated[
    NDArray[np.uint8], Form("u", (None, 3, None, None))
]  # images, 0 to 255
Masks: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None, None))]
Flags: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None,))]
FlagMatrix: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None))]
FlagStacks: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None, None, None))]
Indices: TypeAlias = Annotated[NDArray[np.integer[Any]], Form("iu", (None,))]
IndexMatrix: TypeAlias = Annotated[NDArray[np.integer[Any]], Form("iu", (None, None))]
Digests: TypeAlias = Annotated[NDArray[np.uint64], Form("u", (None,))]
Words: TypeAlias = Annotated[NDArray[Any], Form("U", (None,))]


def write_arrays(path: Path, arrays: Mapping[str, ArrayLike]) -> None:
    """Write named arrays as one compressed .npz, atomically; equal arrays give equal bytes. No
    object arrays.
    """
    with (
        write_atomically(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(
                f"{name}.npy"
            )  # numpy.savez does not accept an array named "file"
            entry.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def read_arrays(
    path: Path,
    *,
    keys: Collection[str] | None = None,
    most: int = SIZE,
    error: type[InputError] = InputError,
) -> dict[str, Array]:
    """Return the arrays of an .npz by name, only `keys` where given; nothing is unpickled.

    Raises `error`, one line, when the file is missing or damaged, holds anything but numbers,
    booleans and strings, or claims more than `most` bytes, than it has, or than is plausible for
    its size.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            if len(entries) < len(archive.infolist()):
                raise error(
                    f"expected each array of {path} once, found one twice; save them with "
                    "numpy.savez"
                )
            unpacked = sum(entry.file_size for entry in archive.infolist())
            packed = path.stat().st_size
            if unpacked > most:
                raise error(
                    f"expected arrays of at most {most / 2**30:g} GiB in {path}, found "
                    f"{unpacked / 2**30:,.1f}"
                )
            if unpacked > max(_SUSPECT, _PACKED * packed):
                raise error(
                    f"expected arrays packed at most {_PACKED} times smaller in {path}, found "
                    f"{unpacked:,} bytes in {packed:,}; save them with numpy.savez"
                )
            return {
                name: _array(archive, each)
                for name, each in entries.items()
                if keys is None or name in keys
            }
    except FileNotFoundError as reason:
        raise error(
            f"expected arrays at {path}, found no such file; run the command again"
        ) from reason
    except InputError:
        raise
    except Exception as reason:  # numpy and zipfile raise a dozen types for a broken archive
        found = first_line(reason)
        raise error(
            f"expected plain arrays in {path}, found: {found}; save them with numpy.savez"
        ) from reason


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    """Return one array, after its header was checked against the size of its entry, before memory
    is taken.
    """
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        length = file.read(_HEADERS[version][0])
        shape, by_columns, kind = _parsed(
            version, length + file.read(int.from_bytes(length, "little"))
        )
        count = math.prod(shape)
        room = entry.file_size
        if kind.kind not in _KINDS:
            raise ValueError(
                f"{kind} in {entry.filename!r}, no numbers or texts: a pickle could run code"
            )
        fits = max(count, count * kind.itemsize) <= room and all(
            0 <= side <= room + _EMPTY for side in shape
        )
        if not fits:
            raise ValueError(
                f"{room:,} bytes of {entry.filename!r}, which claims the shape {str(shape)[:80]}"
            )
        content = bytearray()
        while part := file.read(_PART):  # to the end, where the checksum is compared
            content += part
    array: Array = np.ndarray(shape, kind, content, order="F" if by_columns else "C")
    return array


@lru_cache(maxsize=1024)
def _parsed(version: tuple[int, int], header: bytes) -> _Header:
    """Return a header as numpy parses it, once where arrays have the same: it is most of the time
    of reading a small array.
    """
    parsed: _Header = _HEADERS[version][1](BytesIO(header))
    return parsed


def require_forms(
    arrays: Mapping[str, Array], forms: Mapping[str, Form], path: Path, *, hint: str
) -> None:
    """Raise InputError unless `arrays`, read from path, has these names and forms; other arrays are
    ignored.
    """
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
                f"expected {name!r} of shape ({sides}) and kind {form.kinds} in {path}, found "
                f"{array.shape} of {array.dtype}; {hint}"
            )


class _Place(NamedTuple):
    """One field of a dataclass of arrays. keys: int or str where it holds several, by number or by
    name; prefix: of the names of several in the file, before the key.
    """

    name: str
    form: Form
    optional: bool
    keys: type[int] | type[str] | None
    prefix: str


def _places(kind: Any) -> Iterator[_Place]:
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        members = (
            (annotation,)
            if get_origin(annotation) in (Annotated, Mapping)
            else get_args(annotation)
        )
        own = next(member for member in members if member is not type(None))
        keys, array = get_args(own) if get_origin(own) is Mapping else (None, own)
        form = next(mark for mark in array.__metadata__ if isinstance(mark, Form))
        yield _Place(name, form, len(members) > 1, keys, f"{name}_" if keys is str else name)


def as_arrays(values: Any) -> dict[str, Array]:
    """Return the arrays of a dataclass of arrays, by their names in the file, without those that
    are None.
    """
    arrays: dict[str, Array] = {}
    for name, _, _, keys, prefix in _places(type(values)):
        value = getattr(values, name)
        several = (
            {name: value}
            if keys is None
            else {f"{prefix}{key}": array for key, array in value.items()}
        )
        arrays |= {each: np.asarray(array) for each, array in several.items() if array is not None}
    return arrays


def arrays_of(kind: type[Kind], stored: Mapping[str, Array], path: Path) -> Kind:
    """Return the arrays of a file, which lies at `path`, as their dataclass.

    Raises InputError where they do not fit it.
    """
    forms: dict[str, Form] = {}
    values: dict[str, Any] = {}
    for name, form, optional, keys, prefix in _places(kind):
        if keys is None:
            values[name] = stored.get(name)
            forms |= {} if optional and name not in stored else {name: form}
        else:
            expression = re.compile(re.escape(prefix) + (r"(\d{1,6})" if keys is int else "(.+)"))
            matches = [match for match in map(expression.fullmatch, stored) if match]
            values[name] = {keys(match[1]): stored[match[0]] for match in matches}
            forms |= {match[0]: form for match in matches}
    require_forms(stored, forms, path, hint="run the command again")
    return kind(**values)
