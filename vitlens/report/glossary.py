"""The glossary: terms of the field that reports use, for tooltips and the docs (glossary.toml)."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final


@dataclass(frozen=True)
class Term:
    """A term of the field.

    name: its usual spelling.
    sentence: its definition, without a full stop.
    also: its other spellings.
    """

    name: str
    sentence: str
    also: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return every form under which a text may use it."""
        return (self.name, *self.also)


_DECLARED: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    files("vitlens.report").joinpath("glossary.toml").read_text("utf-8")
)
GLOSSARY: Final = {
    name: Term(name, entry["is"], tuple(entry.get("also", ()))) for name, entry in _DECLARED.items()
}


def _by_spelling() -> dict[str, Term]:
    terms = {}
    for term in GLOSSARY.values():
        for spelling in term.spellings:
            terms[spelling.casefold()] = term
    return terms


SPELLINGS: Final = _by_spelling()
# the longest spelling first, so that a shorter term does not match a part of "attention weights"
_ALTERNATIVES: Final = "|".join(map(re.escape, sorted(SPELLINGS, key=len, reverse=True)))
_PATTERN: Final = re.compile(rf"(?<![\w.\-/])(?:{_ALTERNATIVES})(?![\w\-/]|\.\w)", re.IGNORECASE)


def find_terms(text: str) -> Iterator[tuple[int, int, Term]]:
    """Yield the start, the end and the term of each use of a term in a text."""
    # IGNORECASE takes the long s (U+017F) as an "s"; casefold replaces it, lower does not
    for match in _PATTERN.finditer(text):
        yield match.start(), match.end(), SPELLINGS[match[0].casefold()]
