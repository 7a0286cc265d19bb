"""A run's record as its report and its figures show it: the names in it made visible and cut to their length."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.display import NAME_LENGTH, protected, shortened, visible
from vitlens.files import RunRecord

# What holds a name of a file, a class, a model or data. The other strings of a record are sentences and words of ours,
# and aliases, which follow a rule of their own (models/naming.py).
_NAMES = frozenset(
    {
        "class", "class_1", "class_2", "class_3", "class_4", "class_5", "class_names", "clean", "corrupted", "file",
        "first_prediction", "image", "label", "name", "other", "prediction", "second_prediction", "target",
        "truth", "weights", "word",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Displayed(RunRecord):
    """A record whose strings are fit to show; numbers, keys and what lies on the disk are as they are."""

    name: Callable[[str], str]

    def arrays(self, name: str) -> dict[str, NDArray[np.generic]]:
        """The arrays of arrays/<name>.npz, those of strings (class names) fit to show."""
        found = super().arrays(name)
        return {key: self._shown(array) if array.dtype.kind == "U" else array for key, array in found.items()}

    def _shown(self, array: NDArray[Any]) -> NDArray[np.generic]:
        return np.array([self.name(str(one)) for one in array.flat]).reshape(array.shape)


def for_figures(record: RunRecord) -> RunRecord:
    """The record that a command's `draw` is given."""
    return _displayed(record, lambda text: text)


def for_sentences(record: RunRecord) -> RunRecord:
    """The record that a command's `tell` is given: what looks like a mark of ours in a name is protected, too."""
    return _displayed(record, protected)


def _displayed(record: RunRecord, finish: Callable[[str], str]) -> RunRecord:
    """Equal names stay equal and different ones different, so that tables still fit together."""
    known: dict[str, str] = {}
    taken: set[str] = set()

    def name(text: str) -> str:
        if text not in known:
            shown, number = shortened(visible(text)), 1
            while shown in taken:
                number += 1
                shown = f"{shortened(visible(text))} ({number})"
            taken.add(shown)
            known[text] = shown
        return finish(known[text])

    def sentence(text: str) -> str:
        for full in long:
            text = text.replace(full, known[full])
        return visible(text)

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, str) and key == "command_line":
            return value  # to be typed again as it is; the report sets it in a block of code
        if isinstance(value, str):
            return name(value) if key in _NAMES else sentence(value)
        if isinstance(value, Mapping):
            return {word: walk(item, str(word)) for word, item in value.items()}
        return [walk(item, key) for item in value] if isinstance(value, list | tuple) else value

    data = record.config.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("title"), str):
        name(str(data["title"]))
    found = _collect(record.config, "") | _collect(record.results.get("tables"), "")
    for one in sorted(found):
        name(one)
    long = sorted((full for full in known if len(full) > NAME_LENGTH), key=len, reverse=True)
    results = {**record.results, "tables": walk(record.results.get("tables"), "")}
    return Displayed(record.folder, walk(record.config, ""), results, name)


def _collect(value: Any, key: str) -> set[str]:
    """All names in a nested structure."""
    if isinstance(value, str):
        return {value} if key in _NAMES else set()
    if isinstance(value, Mapping):
        return set[str]().union(*(_collect(item, str(word)) for word, item in value.items()))
    if isinstance(value, list | tuple):
        return set[str]().union(*(_collect(item, key) for item in value))
    return set()
