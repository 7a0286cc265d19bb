"""Files as types: what fits is read, what does not is one line with the place, whatever lies in the file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest

from vitlens.errors import InputError, ModelError
from vitlens.typed import Name, between, is_name, length, parse_json, read_as


@dataclass(frozen=True)
class Inner:
    size: tuple[int, int]

    def __post_init__(self) -> None:
        if self.size == (0, 0):
            raise InputError("expected a size, found none")


@dataclass(frozen=True)
class Outer:
    name: Name
    kind: Literal["a", "b"]
    inner: Inner
    rate: Annotated[float, between(0, 1)] = 0.5
    place: Path | None = None
    lists: Mapping[str, list[int]] = field(default_factory=dict)
    few: Annotated[tuple[float, ...], length(1, 3)] = (1.0,)


def read(**changes: object) -> Outer:
    content = {"name": "n", "kind": "a", "inner": {"size": [1, 2]}} | changes
    return read_as(Outer, content, source="f.json", error=ModelError, hint="do this")


def test_what_fits_is_read_as_its_types():
    found = read(other=1, rate=1, place="x/y", lists={"k": [1]}, few=[1, 2.5])
    assert found == Outer("n", "a", Inner((1, 2)), 1.0, Path("x/y"), {"k": [1]}, (1.0, 2.5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": 1}, "name"), ({"name": "../x"}, "part of a file name"), ({"kind": "c"}, "expected 'a' or 'b', found"),
        ({"inner": []}, "inner"), ({"inner": {"size": [0, 0]}}, "a size, found none"), ({"rate": 2}, "rate"),
        ({"place": 3}, "place"), ({"lists": {"k": [1.5]}}, "lists"), ({"few": []}, "few"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(changes, words):
    with pytest.raises(ModelError, match=rf"{words}.*; do this$") as raised:
        read(**changes)
    assert "f.json" in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", b"\xff", "[" * 100_000])
def test_what_is_not_json_is_one_line(text):
    with pytest.raises(InputError, match=r"expected JSON in f\.json"):
        parse_json(text, source="f.json")
    with pytest.raises(InputError, match="at most 4 bytes"):
        parse_json("[1, 2]", source="f.json", size=4)


@pytest.mark.parametrize(
    ("text", "fits"),
    [("é", True), ("", False), (".x", False), ("a/b", False), ("a\nb", False), ("a" * 201, False), ("\u202e", False)],
)
def test_names_in_paths(text, fits):
    assert is_name(text) == fits
