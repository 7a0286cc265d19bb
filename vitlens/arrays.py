"""Writes and reads arrays in .npz files, also as frozen dataclasses that declare their forms.

A field is Annotated with a `Form`, as the types below are. A field that is None is left out of the
file. A field may be a mapping of several arrays of one form:
- `layer: Mapping[int, Matrix]` holds the arrays layer0, layer1 and so on;
- `mean: Mapping[str, Vector]` holds the arrays mean_distance, mean_entropy and so on.

`write_arrays` and `read_arrays` are for arrays by name. `as_arrays` turns a dataclass into such
arrays, and `arrays_of` turns them back.
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

SIZE: Final = 4 << 30  # most bytes of all arrays of a file
# booleans, numbers, strings: no objects, structured types, complex numbers or dates
_KINDS: Final = "biufUS"
# up to so many bytes of arrays, any compression ratio is accepted
_ANY_RATIO_SIZE: Final = 256 << 20
_LARGEST_RATIO: Final = 100  # of compression, for larger arrays
_PART: Final = 16 << 20  # bytes read at a time
_LONGEST_HEADER: Final = 10_000  # bytes; numpy itself refuses longer ones, but reads them first
_LONGEST_EMPTY_SIDE: Final = 1 << 24  # of an array without elements
# as numpy parses it: shape, True for column-major order, dtype
_Header: TypeAlias = tuple[tuple[int, ...], bool, np.dtype[np.generic]]
# by version: the number of bytes that hold the header's length, and numpy's parser of the header
_HEADERS: Final = {
    (1, 0): (2, np.lib.format.read_array_header_1_0),
    (2, 0): (4, np.lib.format.read_array_header_2_0),
}


@dataclass(frozen=True)
class Form:
    """The expected form of an array.

    kinds: the accepted kinds of numpy dtypes, e.g. "b", "iu", "f", "U".
    shape: the length of each axis, None for any length.
    """

    kinds: str
    shape: tuple[int | None, ...] = ()


# the types of fields, by the shape of their arrays; None stands for any length
Vector: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None,))]
Matrix: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None))]
# several matrices, and several such stacks
Stack: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None, None))]
Stacks: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None, None, None))]
Image: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (3, None, None))]  # in colour
Images: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, 3, None, None))]
# images, 0 to 255
Pixels: TypeAlias = Annotated[NDArray[np.uint8], Form("u", (None, 3, None, None))]
Masks: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None, None))]
Flags: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None,))]
FlagMatrix: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None))]
FlagStacks: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None, None, None))]
Indices: TypeAlias = Annotated[NDArray[np.integer[Any]], Form("iu", (None,))]
IndexMatrix: TypeAlias = Annotated[NDArray[np.integer[Any]], Form("iu", (None, None))]
Digests: TypeAlias = Annotated[NDArray[np.uint64], Form("u", (None,))]
Words: TypeAlias = Annotated[NDArray[Any], Form("U", (None,))]


def write_arrays(path: Path, arrays: Mapping[str, ArrayLike]) -> None:
    """Write named arrays as one compressed .npz, atomically; equal arrays give equal bytes.

    Object arrays are refused.
    """
    with (
        write_atomically(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name, array in arrays.items():
            # numpy.savez does not accept an array named "file"
            entry = zipfile.ZipInfo(f"{name}.npy")
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
    """Return the arrays of an .npz by name, all or only `keys`; nothing is unpickled.

    keys: the names of the arrays to read, None for all.
    most: the largest accepted number of bytes.

    Raises `error`, one line, if the file is missing or damaged, or holds anything but numbers,
    booleans and strings. Also raises it if arrays claim more than `most` bytes, more than the file
    has, or more than is plausible for its size.
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
            if unpacked > max(_ANY_RATIO_SIZE, _LARGEST_RATIO * packed):
                raise error(
                    f"expected arrays packed at most {_LARGEST_RATIO} times smaller in {path}, "
                    f"found {unpacked:,} bytes in {packed:,}; save them with numpy.savez"
                )
            arrays = {}
            for name, entry in entries.items():
                if keys is None or name in keys:
                    arrays[name] = _read_array(archive, entry)
            return arrays
    except FileNotFoundError as reason:
        raise error(
            f"expected arrays at {path}, found no such file; run the command again"
        ) from reason
    except InputError:
        raise
    except Exception as reason:  # numpy and zipfile raise a dozen types for a broken archive
        raise error(
            f"expected plain arrays in {path}, found: {first_line(reason)}; save them with "
            "numpy.savez"
        ) from reason


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    """Return one array; its header is checked against the entry's size before memory is taken."""
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        length_bytes, _ = _HEADERS[version]
        length = file.read(length_bytes)
        header_size = int.from_bytes(length, "little")
        if header_size > _LONGEST_HEADER:
            raise ValueError(f"a header of {header_size:,} bytes in {entry.filename!r}")
        header = length + file.read(header_size)
        shape, by_columns, dtype = _parse_header(version, header)
        size = entry.file_size
        if dtype.kind not in _KINDS:
            raise ValueError(
                f"{dtype} in {entry.filename!r}, no numbers or texts: a pickle could run code"
            )
        # Empty strings take no bytes. They count as one byte each, so that no header claims many
        # elements in few bytes.
        bytes_at_least = math.prod(shape) * max(1, dtype.itemsize)
        # an array without elements fits with any sides, but numpy fails with huge ones
        has_wrong_side = any(not 0 <= side <= size + _LONGEST_EMPTY_SIDE for side in shape)
        if bytes_at_least > size or has_wrong_side:
            raise ValueError(
                f"{size:,} bytes of {entry.filename!r}, which claims the shape {str(shape)[:80]}"
            )
        content = bytearray()
        while part := file.read(_PART):  # to the end: zipfile compares the checksum there
            content += part
    array: Array = np.ndarray(shape, dtype, content, order="F" if by_columns else "C")
    return array


@lru_cache(maxsize=1024)
def _parse_header(version: tuple[int, int], header: bytes) -> _Header:
    """Return a header as numpy parses it.

    Equal headers are parsed once, as this takes most of the time of reading a small array.
    """
    _, parse = _HEADERS[version]
    try:
        parsed: _Header = parse(BytesIO(header))
    except Exception as reason:  # of Python's parser, some with the address of an object
        raise ValueError("a damaged header of an array") from reason
    return parsed


def require_forms(
    arrays: Mapping[str, Array], forms: Mapping[str, Form], path: Path, *, hint: str
) -> None:
    """Raise InputError unless `arrays`, read from a path, have these names and forms.

    Other arrays are ignored.
    """
    for name, form in forms.items():
        if name not in arrays:
            raise InputError(f"expected the array {name!r} in {path}, found none; {hint}")
        array = arrays[name]
        fits = len(array.shape) == len(form.shape)
        for side, length in zip(form.shape, array.shape):
            fits = fits and side in (None, length)
        if not fits or array.dtype.kind not in form.kinds:
            sides = ", ".join("any" if side is None else str(side) for side in form.shape)
            raise InputError(
                f"expected {name!r} of shape ({sides}) and kind {form.kinds} in {path}, found "
                f"{array.shape} of {array.dtype}; {hint}"
            )


class _ArrayField(NamedTuple):
    """One field of a dataclass of arrays.

    name: the name of the field.
    form: the form of its arrays.
    is_optional: True if it may be None.
    key_type: the type of a mapping's keys, None for a single array.
    prefix: the beginning of the names of a mapping's arrays in the file, before the key.
    """

    name: str
    form: Form
    is_optional: bool
    key_type: type[int] | type[str] | None
    prefix: str


def _array_fields(array_class: Any) -> Iterator[_ArrayField]:
    """Yield the fields of a dataclass of arrays, as their annotations declare them."""
    for name, declared in get_type_hints(array_class, include_extras=True).items():
        # an array such as Vector is Annotated; None | Vector and Mapping[str, Vector] hold one
        is_optional = get_origin(declared) not in (Annotated, Mapping)
        required = declared
        if is_optional:
            (required,) = (member for member in get_args(declared) if member is not type(None))
        key_type = None
        array = required
        if get_origin(required) is Mapping:
            key_type, array = get_args(required)
        (form,) = (mark for mark in array.__metadata__ if isinstance(mark, Form))
        prefix = f"{name}_" if key_type is str else name
        yield _ArrayField(name, form, is_optional, key_type, prefix)


def as_arrays(values: Any) -> dict[str, Array]:
    """Return the arrays of a dataclass by their names in the file, without those that are None."""
    arrays: dict[str, Array] = {}
    for array_field in _array_fields(type(values)):
        value = getattr(values, array_field.name)
        if array_field.key_type is None:
            value_of_name = {array_field.name: value}
        else:
            value_of_name = {f"{array_field.prefix}{key}": item for key, item in value.items()}
        for name, item in value_of_name.items():
            if item is not None:
                arrays[name] = np.asarray(item)
    return arrays


def arrays_of(kind: type[Kind], stored: Mapping[str, Array], path: Path) -> Kind:
    """Return the arrays of the file at `path` as their dataclass.

    Raises InputError if they do not fit it.
    """
    forms: dict[str, Form] = {}
    values: dict[str, Any] = {}
    for array_field in _array_fields(kind):
        name = array_field.name
        key_type = array_field.key_type
        if key_type is None:
            values[name] = stored.get(name)
            if not array_field.is_optional or name in stored:
                forms[name] = array_field.form
            continue
        key_pattern = r"(\d{1,6})" if key_type is int else "(.+)"
        expression = re.compile(re.escape(array_field.prefix) + key_pattern)
        values[name] = {}
        for stored_name, array in stored.items():
            match = expression.fullmatch(stored_name)
            if match:
                values[name][key_type(match[1])] = array
                forms[stored_name] = array_field.form
    require_forms(stored, forms, path, hint="run the command again")
    return kind(**values)
