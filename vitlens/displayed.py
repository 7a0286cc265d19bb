"""Untrusted names in reports and figures: made visible, shortened, and distinguished from markup.

The JSON of a run keeps every name as it is. A field that holds such a name is annotated with `Untrusted`; all other
strings are our own sentences and words, in which long names are shortened as well.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from vitlens.display import NAME_LENGTH, protected, shortened, visible
from vitlens.schema import Untrusted, Verbatim

T = TypeVar("T")


class Displayed:
    """Copies dataclasses with their strings escaped for display.

    known: dataclasses (in tuples and mappings) that hold all given names. Equal names stay equal and different ones
    different, so that rows of several tables can still be matched.
    """

    def __init__(self, known: object) -> None:
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()
        for name in sorted(set(_untrusted_names(known, False))):
            self._name(name)
        self._long = sorted((name for name in self._names if len(name) > NAME_LENGTH), key=len, reverse=True)

    def __call__(self, value: T) -> T:
        """The same values, with the names in them escaped for display."""
        shown: T = self._shown(value, False)
        return shown

    def _shown(self, value: Any, is_untrusted: bool) -> Any:
        if isinstance(value, str):
            return self._name(value) if is_untrusted else self._sentence(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {
                name: self._shown(getattr(value, name), marked) for name, marked in _strings(type(value)).items()
            }
            return dataclasses.replace(value, **changed) if changed else value
        if isinstance(value, np.ndarray):
            return self._array(value) if is_untrusted else value
        if isinstance(value, Mapping):
            return {key: self._shown(item, is_untrusted) for key, item in value.items()}
        return (
            type(value)(self._shown(item, is_untrusted) for item in value) if isinstance(value, list | tuple) else value
        )

    def _array(self, names: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.array([self._name(str(name)) for name in names.flat], dtype=np.str_).reshape(names.shape)

    def _name(self, name: str) -> str:
        if name not in self._names:
            shown, number = shortened(visible(name)), 1
            while shown in self._taken:
                number += 1
                shown = f"{shortened(visible(name))} ({number})"
            self._taken.add(shown)
            self._names[name] = shown
        return protected(self._names[name])

    def _sentence(self, text: str) -> str:
        for name in self._long:
            text = text.replace(name, self._names[name])
        return visible(text)


def _untrusted_names(value: Any, is_untrusted: bool) -> Iterator[str]:
    if isinstance(value, str):
        if is_untrusted:
            yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, marked in _strings(type(value)).items():
            yield from _untrusted_names(getattr(value, name), marked)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _untrusted_names(item, is_untrusted)


@cache
def _strings(kind: type) -> Mapping[str, bool]:
    """The fields of a dataclass that may hold strings, and whether these are `Untrusted` names."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {}
    for field in dataclasses.fields(kind):
        parts = set(_parts(hints[field.name]))
        if field.init and not parts <= {int, float, bool, type(None)} and Verbatim() not in parts:
            fields[field.name] = Untrusted() in parts
    return fields


def _parts(annotation: Any) -> Iterator[Any]:
    """The plain types and the marks in an annotation."""
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from () if argument is Ellipsis else _parts(argument)
