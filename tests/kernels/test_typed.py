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
    named: Mapping[str, Inner] = field(default_factory=dict)
    some: tuple[Inner, ...] | None = None


GOOD = {"name": "n", "kind": "a", "inner": {"size": [1, 2]}}


def read(**changes: object) -> Outer:
    return read_as(Outer, GOOD | changes, source="f.json", error=ModelError, hint="do this")


def test_what_fits_is_read_as_its_types():
    size = {"size": [1, 2]}
    found = read(other=1, rate=1, place="x/y", lists={"k": [1]}, few=[1, 2.5], named={"any": size}, some=[size])
    inner = Inner((1, 2))
    assert found == Outer("n", "a", inner, 1.0, Path("x/y"), {"k": [1]}, (1.0, 2.5), {"any": inner}, (inner,))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 1}, {"name": "../x"}, {"name": ""}, {"name": ".x"}, {"kind": "c"}, {"inner": []},
        {"inner": {"size": [1]}}, {"inner": {"size": [0, 0]}}, {"inner": {}}, {"rate": 2}, {"rate": "1"}, {"place": 3},
        {"lists": {"k": [1.5]}}, {"few": []}, {"few": [1, 2, 3, 4]},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(changes):
    with pytest.raises(ModelError) as raised:
        read(**changes)
    text = str(raised.value)
    assert "f.json" in text
    assert text.endswith("; do this")
    assert "\n" not in text


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", b"\xff", "[" * 100_000, "nul"])
def test_what_is_not_json_is_one_line(text):
    with pytest.raises(InputError, match=r"expected JSON in f\.json"):
        parse_json(text, source="f.json")
    with pytest.raises(InputError, match="at most 4 bytes"):
        parse_json("[1, 2]", source="f.json", size=4)


@pytest.mark.parametrize(
    ("text", "fits"),
    [("vit", True), ("é", True), ("", False), (".x", False), ("a/b", False), ("a\\b", False), ("~", False),
     ("a\nb", False), ("a" * 201, False), ("\u202e", False)],
)  # fmt: skip
def test_names_in_paths(text, fits):
    assert is_name(text) == fits
