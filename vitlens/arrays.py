"""Arrays of a record as frozen dataclasses: the forms of their fields, written to and read from .npz files.

A field is Annotated with a `Form`, as the types below are; one that is None is left out of the file. A mapping holds
several arrays of one form: a Mapping[int, Matrix] "layer" those named layer0, layer1 ...; a Mapping[str, Vector] "mean"
those named mean_distance, mean_entropy ...
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form, require_forms

Kind = TypeVar("Kind")

# by their shapes, of any length where it is None
Vector: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None,))]
Matrix: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None))]
Stack: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None, None))]  # of matrices
Stacks: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, None, None, None))]
Image: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (3, None, None))]  # in colour
Images: TypeAlias = Annotated[NDArray[np.floating[Any]], Form("f", (None, 3, None, None))]
Pixels: TypeAlias = Annotated[NDArray[np.uint8], Form("u", (None, 3, None, None))]  # images, 0 to 255
Masks: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None, None))]
Flags: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None,))]
FlagMatrix: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None))]
FlagStacks: TypeAlias = Annotated[NDArray[np.bool_], Form("b", (None, None, None, None))]
Indices: TypeAlias = Annotated[NDArray[np.integer[Any]], Form("iu", (None,))]
IndexMatrix: TypeAlias = Annotated[NDArray[np.integer[Any]], Form("iu", (None, None))]
Digests: TypeAlias = Annotated[NDArray[np.uint64], Form("u", (None,))]
Words: TypeAlias = Annotated[NDArray[Any], Form("U", (None,))]


def as_arrays(values: Any) -> dict[str, NDArray[np.generic]]:
    """The arrays of a dataclass of arrays, by their names in the file, without those that are None."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for place in _places(type(values)):
        value = getattr(values, place.name)
        if place.keys is not None:
            arrays |= {f"{place.prefix}{key}": np.asarray(array) for key, array in value.items()}
        elif value is not None:
            arrays[place.name] = np.asarray(value)
    return arrays


def arrays_of(kind: type[Kind], stored: Mapping[str, NDArray[np.generic]], path: Path) -> Kind:
    """The arrays of a file, which lies at `path`, as their dataclass. Raises InputError where they do not fit it."""
    forms: dict[str, Form] = {}
    values: dict[str, Any] = {}
    for place in _places(kind):
        names = place.names(stored)
        forms |= dict.fromkeys(names.values(), place.form)
        values[place.name] = (
            stored.get(place.name) if place.keys is None else {key: stored[name] for key, name in names.items()}
        )
    require_forms(stored, forms, path, hint="run the command again")
    return kind(**values)


@dataclass(frozen=True)
class _Place:
    """One field of a dataclass of arrays. keys: int or str where it holds several arrays, by number or by name."""

    name: str
    form: Form
    optional: bool
    keys: type[int] | type[str] | None

    @property
    def prefix(self) -> str:
        """The part of the name before the key, for several arrays."""
        return f"{self.name}_" if self.keys is str else self.name

    def names(self, stored: Collection[str]) -> dict[int | str, str]:
        """The names of this field's arrays in a file, by key (0 for a single array, which is required)."""
        if self.keys is None:
            return {} if self.optional and self.name not in stored else {0: self.name}
        expression = re.escape(self.prefix) + (r"(\d{1,6})" if self.keys is int else "(.+)")
        matches = (re.fullmatch(expression, name) for name in stored)
        return {self.keys(match[1]): match[0] for match in matches if match}


def _places(kind: Any) -> Iterator[_Place]:
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        members = (annotation,) if get_origin(annotation) in (Annotated, Mapping) else get_args(annotation)
        own = next(member for member in members if member is not type(None))
        keys, array = get_args(own) if get_origin(own) is Mapping else (None, own)
        yield _Place(name, next(mark for mark in array.__metadata__ if isinstance(mark, Form)), len(members) > 1, keys)
