"""Names and patterns of places, resolved against a model: "blocks.*.residual", "blocks.{3,4}.head.*", "...[cls]"."""

import re
from collections.abc import Iterable, Iterator, Sequence

from vitlens.errors import InputError, UnknownNameError, nearest
from vitlens.lens.interventions import TokenWord, positions
from vitlens.lens.places.access import TOKEN_AXES, Access
from vitlens.lens.places.listing import accesses
from vitlens.models.model import Model
from vitlens.shapes import TokenLayout

_BRACES = re.compile(r"\{([^{}]*)\}")
_WORDS = ("cls", "distillation", "register", "patch", "all")
_HINT = "model.places()"


def resolve_places(model: Model, names: str | Sequence[str]) -> tuple[Access, ...]:
    """The places that some names or patterns mean, each once, in the order of the names.

    "*" stands for one part between dots, "{3,4}" and "{0..5}" for alternatives. "[cls]", "[register]", "[patch]",
    "[0,5]" or "[3..8]" at the end takes some token positions, "[*]" each position as a place of its own. "blocks.3"
    is the output of block 3, "blocks.3.residual" in a transformer. Raises UnknownNameError for a name that is none of
    `places`, InputError for a pattern that fits none of them and for positions that are not there.
    """
    named = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    found: dict[str, Access] = {}
    for name in named:
        found.update((access.name, access) for access in _resolve(model, name))
    return tuple(found.values())


def resolve_tokens(model: Model, tokens: str | int | Sequence[int], count: int) -> tuple[int, ...]:
    """Positions of tokens from a word ("cls", "register", "patch"), a position, or several; count: of all tokens.

    Raises InputError for positions that are not there, and for a word where the tokens are not the model's sequence.
    """
    if isinstance(tokens, str):
        return _of_word(model, tokens, count)
    chosen = (tokens,) if isinstance(tokens, int) else tuple(tokens)
    wrong = [token for token in chosen if not 0 <= token < count]
    if wrong:
        raise InputError(f"expected positions from 0 to {count - 1}, found {wrong[0]}")
    return chosen


def _resolve(model: Model, name: str) -> Iterator[Access]:
    if not isinstance(name, str):
        raise InputError(f"expected the name of a place, found {type(name).__name__}; see {_HINT}")
    whole, bracket, inner = name.partition("[")
    if bracket and not inner.endswith("]"):
        raise InputError(f"expected positions such as [cls] or [0,5] at the end of a place, found {name!r}")
    for access in _matching(model, whole):
        if not bracket:
            yield access
        elif inner == "*]":
            axis = [index for index, axis in enumerate(access.place.axes) if axis in TOKEN_AXES]
            count = access.place.shape[axis[0]] if axis else 0
            yield from (access.at((token,), str(token)) for token in range(count or 1))
        else:
            yield access.at(_inside_brackets(model, access, inner[:-1]), inner[:-1])


def _matching(model: Model, name: str) -> list[Access]:
    found: dict[str, Access] = {}
    for alternative in _expanded(name):
        found.update((access.name, access) for access in _fitting(model, alternative))
    return list(found.values())


def _fitting(model: Model, name: str) -> list[Access]:
    """The places that a name, or a pattern without braces, means."""
    known = accesses(model)
    if "*" not in name:
        access = known.get(name) or known.get(f"{name}.residual")
        if access is None:
            raise UnknownNameError("place", name, known, hint=_HINT)
        return [access]
    pattern = re.compile("[^.]+".join(map(re.escape, name.split("*"))))
    # also "blocks.*" in a transformer: the blocks' outputs
    found = [known[key] for key in known if pattern.fullmatch(key) or pattern.fullmatch(key.removesuffix(".residual"))]
    if not found:
        near = " or ".join(map(repr, nearest(name, known)))
        raise InputError(f"no place of {model.alias} fits {name!r}; {f'did you mean {near}? ' * bool(near)}see {_HINT}")
    return found


def _expanded(pattern: str) -> Iterator[str]:
    """A pattern without braces for every combination of their alternatives."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    for alternative in _listed(braces[1]):
        yield from _expanded(f"{pattern[: braces.start()]}{alternative}{pattern[braces.end() :]}")


def _listed(text: str) -> Iterator[str]:
    """The alternatives of "3,4" or "0..5,8"."""
    for word in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\.\.(\d+)\s*", word)
        yield from map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else (word.strip(),)


def _inside_brackets(model: Model, access: Access, text: str) -> tuple[int, ...]:
    axis = next((index for index, axis in enumerate(access.place.axes) if axis in TOKEN_AXES), None)
    if axis is None:
        return access.at((), text).tokens or ()  # which says that there is no such axis
    if text in _WORDS:
        return _of_word(model, text, access.place.shape[axis])
    words = list(_listed(text))
    if not all(word.isdigit() for word in words):
        raise InputError(f"expected positions ({', '.join(_WORDS)}, or numbers such as 0,5 or 3..8), found [{text}]")
    return tuple(map(int, words))


def _of_word(model: Model, word: str, count: int) -> tuple[int, ...]:
    layout: TokenLayout | None = model.anatomy.layout
    if word not in _WORDS:
        raise UnknownNameError("kind of token", word, _WORDS)
    if word == "all":
        return tuple(range(count))
    if layout is None or layout.tokens != count:
        raise InputError(
            f"expected the model's whole sequence of tokens for {word!r}, found {count} tokens; give positions"
        )
    chosen: TokenWord = word  # type: ignore[assignment]
    return positions(layout, chosen)
