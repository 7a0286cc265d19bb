"""The glossary: the field's terms that reports use, each in one sentence (glossary.toml), for tooltips and the docs."""

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final


@dataclass(frozen=True)
class Term:
    """One term. sentence: what it is, without a full stop; also: other spellings under which a text may use it."""

    name: str
    sentence: str
    also: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return every form under which it is found in a text."""
        return (self.name, *self.also)


_DECLARED: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    files("vitlens.report").joinpath("glossary.toml").read_text("utf-8")
)
GLOSSARY: Final = {name: Term(name, each["is"], tuple(each.get("also", ()))) for name, each in _DECLARED.items()}
SPELLINGS: Final = {spelling.lower(): term for term in GLOSSARY.values() for spelling in term.spellings}
# the longest spelling first, so that "attention weights" is not found as another, shorter term
_PATTERN: Final = re.compile(
    r"(?<![\w.\-/])(?:" + "|".join(map(re.escape, sorted(SPELLINGS, key=len, reverse=True))) + r")(?![\w\-/]|\.\w)",
    re.IGNORECASE,
)


def found(text: str) -> tuple[tuple[int, int, Term], ...]:
    """Return where a text uses a term: its first and last place, and the term; each use, in the order of the text."""
    return tuple((match.start(), match.end(), SPELLINGS[match[0].lower()]) for match in _PATTERN.finditer(text))
