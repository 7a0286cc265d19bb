from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from vitlens.errors import InputError, ModelError
from vitlens.schema import Between, Length, Name, is_name, read_as


@dataclass(frozen=True)
class Inner:
    size: tuple[int, int]
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size == (0, 0):
            raise InputError("expected a size, found none")


@dataclass(frozen=True)
class Outer:
    name: Name
    kind: Literal["a", "b"]
    inner: Inner
    rate: Annotated[float, Between(0, 1)] = 0.5
    limit: int | None = None
    on: bool = False
    lists: Mapping[str, list[int]] = field(default_factory=dict)
    few: Annotated[tuple[float, ...], Length(1, 3)] = (1.0,)
    anything: object = None
    more: Any = None


GOOD = {"name": "n", "kind": "a", "inner": {"size": [1, 2]}}


def read(**changes: object) -> Outer:
    return read_as(Outer, GOOD | changes, source="f.json", error=ModelError, hint="do this")


def test_what_fits_is_read_as_its_types():
    found = read(
        inner={"size": [3, 4], "words": ["x"]}, rate=1, limit=None, lists={"k": [1]}, few=[1, 2.5], anything=[{"a": 1}]
    )
    assert found == Outer("n", "a", Inner((3, 4), ("x",)), 1.0, None, False, {"k": [1]}, (1.0, 2.5), [{"a": 1}])
    assert isinstance(found.rate, float)
    assert isinstance(found.few[0], float)
    assert isinstance(found.inner.words, tuple)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"name": 1}, "name"),
        ({"name": "../x"}, "name"),
        ({"name": ""}, "name"),
        ({"kind": "c"}, "kind"),
        ({"kind": None}, "kind"),
        ({"inner": []}, "inner"),
        ({"inner": {}}, "size"),
        ({"inner": {"size": [1]}}, "inner/size"),
        ({"inner": {"size": [1, 2.0]}}, "inner/size/1"),
        ({"inner": {"size": [1, True]}}, "inner/size/1"),
        ({"inner": {"size": [0, 0]}}, "expected a size"),
        ({"inner": {"size": [1, 2], "words": ["x" * 10**5]}}, "inner/words/0"),
        ({"rate": 2}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": True}, "rate"),
        ({"rate": 10**400}, "rate"),
        ({"limit": "1"}, "limit"),
        ({"on": 1}, "on"),
        ({"lists": {"k": [1.5]}}, "lists/k/0"),
        ({"lists": {"k": None}}, "lists/k"),
        ({"few": []}, "few"),
        ({"few": [1, 2, 3, 4]}, "few"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_the_first_place_that_does_not_fit_is_named(changes, place):
    with pytest.raises(ModelError, match=r"f\.json.*; do this") as caught:
        read(**changes)
    assert place in str(caught.value)
    assert len(str(caught.value)) < 400


def test_all_missing_keys_are_named():
    with pytest.raises(InputError, match="kind, inner"):
        read_as(Outer, {"name": "n"}, source="f")


def test_unknown_keys_are_passed_over_where_a_format_is_anothers():
    found = read_as(
        Outer, GOOD | {"more": 1, "odd": 2, "inner": {"size": [1, 2], "odd": 3}}, source="f", unknown="ignore"
    )
    assert found.inner.size == (1, 2)


@pytest.mark.parametrize("text", ["a", "vit-digits", "größe 2", "timm_x.y", "small=2"])
def test_names(text):
    assert is_name(text)


@pytest.mark.parametrize(
    "text", ["", ".", "..", ".x", "a/b", "a\\b", "a\0", "a\nb", "x" * 300, "~a", "a\u202eb", "\ud800"]
)
def test_what_is_no_name(text):
    assert not is_name(text)
