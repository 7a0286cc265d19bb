"""Names and patterns of places, and words for positions of tokens, resolved for a model."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, get_args

from vitlens.errors import InputError, UnknownNameError, nearest
from vitlens.lens.access import Access, Place
from vitlens.lens.places import accesses, places
from vitlens.models.model import Model
from vitlens.shapes import PrefixKind

Tokens = str | int | Sequence[int]  # a word, a position or several positions

_WORDS: Final = ("cls", "distillation", "register", "patch", "all")
_HINT: Final = "model.places()"


def resolve_places(model: Model, names: str | Sequence[str]) -> tuple[Access, ...]:
    """Return the places that some names or patterns mean, without repetition, in their order.

    - "*" stands for one part between dots, "{3,4}" and "{0..5}" for alternatives.
    - "[cls]", "[register]", "[patch]", "[0,5]" or "[3..8]" at the end selects token positions.
    - "[*]" at the end makes a separate place of each position.
    - "blocks.3" is the output of block 3; in a transformer, this is "blocks.3.residual".

    Raises UnknownNameError for a name that is none of `places`, InputError for a pattern that fits
    none of them and for positions that do not exist.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        names = (names,)
    access_by_name = accesses(model)
    resolved = dict[str, Access]()
    for name in names:
        if isinstance(name, str) and name in access_by_name:
            access = access_by_name[name]
            resolved[access.name] = access
        else:
            resolved.update((access.name, access) for access in _resolve(model, name))
    return tuple(resolved.values())


def resolve_tokens(model: Model, tokens: Tokens, count: int) -> tuple[int, ...]:
    """Return positions of tokens from a word, a position, or several positions.

    tokens: the words are "cls", "distillation", "register", "patch" and "all".
    count: the number of all tokens. Raises InputError for positions that do not exist, and for a
    word if the tokens are not the model's sequence.
    """
    if not isinstance(tokens, str):
        positions = (tokens,) if isinstance(tokens, int) else tuple(tokens)
        for position in positions:
            if not 0 <= position < count:
                raise InputError(f"expected positions from 0 to {count - 1}, found {position}")
        return positions
    if tokens not in _WORDS:
        raise UnknownNameError("kind of token", tokens, _WORDS)
    if tokens == "all":
        return tuple(range(count))
    layout = model.anatomy.layout
    if layout is None or layout.tokens != count:
        raise InputError(
            f"expected the model's whole sequence of tokens for {tokens!r}, found {count} tokens; "
            "give positions"
        )
    if tokens not in get_args(PrefixKind):  # "patch"
        return tuple(range(len(layout.prefix), count))
    positions = layout.positions(tokens)  # type: ignore[arg-type]
    if not positions:
        raise InputError(
            f"expected a model with a {tokens} token, found prefix {layout.prefix}; try 'patch'"
        )
    return positions


def _resolve(model: Model, name: str) -> Iterator[Access]:
    """Yield the places that one name or pattern means, with positions in brackets if it has any."""
    if not isinstance(name, str):
        raise InputError(f"expected the name of a place, found {type(name).__name__}; see {_HINT}")
    pattern, bracket, after_bracket = name.partition("[")
    if bracket and not after_bracket.endswith("]"):
        raise InputError(
            f"expected positions such as [cls] or [0,5] at the end of a place, found {name!r}"
        )
    positions = after_bracket.removesuffix("]")
    for access in _accesses_of_pattern(model, pattern):
        if bracket:
            yield from _at_positions(model, access, positions)
        else:
            yield access


def _accesses_of_pattern(model: Model, pattern: str) -> list[Access]:
    """Return the places that a pattern means, each once."""
    accesses_in_order: dict[Access, None] = {}  # without repetition
    for name in _expand_braces(pattern):
        accesses_in_order.update(dict.fromkeys(_matching(model, name)))
    return list(accesses_in_order)


def _at_positions(model: Model, access: Access, text: str) -> Iterator[Access]:
    """Yield the access to the positions that the text between brackets means."""
    axis = _token_axis(access.place)
    if axis is None:
        raise InputError(
            f"expected a place with an axis of tokens for the positions [{text}], found "
            f"{access.place}; leave the brackets out"
        )
    count = access.place.shape[axis]
    if text == "*":
        for token in range(count):
            yield access.at((token,), str(token), axis)
    elif text in _WORDS:
        yield access.at(resolve_tokens(model, text, count), text, axis)
    else:
        positions = list(_alternatives(text))
        if not all(word.isdecimal() for word in positions):
            words = ", ".join(_WORDS)
            raise InputError(
                f"expected positions ({words}, or numbers such as 0,5 or 3..8), found [{text}]"
            )
        yield access.at(tuple(map(int, positions)), text, axis)


def _token_axis(place: Place) -> int | None:
    for index, axis in enumerate(place.axes):
        if axis in ("tokens", "patches"):
            return index
    return None


def _matching(model: Model, name: str) -> list[Access]:
    """Return the places that a name, or a pattern without braces, means."""
    access_by_name = accesses(model)
    if "*" not in name:
        access = access_by_name.get(name) or access_by_name.get(f"{name}.residual")
        if access is None:
            raise UnknownNameError("place", name, places(model).names, hint=_HINT)
        return [access]
    # "*" stands for one part between dots
    pattern = re.compile("[^.]+".join(map(re.escape, name.split("*"))))
    matching = []
    for key, access in access_by_name.items():
        # also "blocks.*" in a transformer: the blocks' outputs
        matches = pattern.fullmatch(key) or pattern.fullmatch(key.removesuffix(".residual"))
        if access.listed and matches:
            matching.append(access)
    if not matching:
        near = " or ".join(map(repr, nearest(name, places(model).names)))
        suggestion = f"did you mean {near}? " if near else ""
        raise InputError(f"no place of {model.alias} fits {name!r}; {suggestion}see {_HINT}")
    return matching


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield a pattern without braces for every combination of their alternatives."""
    braces = re.search(r"\{([^{}]*)\}", pattern)
    if braces is None:
        yield pattern
        return
    for alternative in _alternatives(braces[1]):
        yield from _expand_braces(
            f"{pattern[: braces.start()]}{alternative}{pattern[braces.end() :]}"
        )


def _alternatives(text: str) -> Iterator[str]:
    """Yield the alternatives of "3,4" or "0..5,8". Raises InputError for "5..3"."""
    for word in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\.\.(\d+)\s*", word)
        if ends:
            first, last = int(ends[1]), int(ends[2])
            if first > last:
                raise InputError(
                    f"expected a range from the lower to the higher number, found {word.strip()}; "
                    f"write {last}..{first}"
                )
            yield from map(str, range(first, last + 1))
        else:
            yield word.strip()
