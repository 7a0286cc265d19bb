"""The hand-written parts of a command's page, sections under fixed headings: its help.md, which
reports fold in, too, and docs/parts/<word>.md for what belongs on the page alone.
"""

import re
from importlib.resources import files
from pathlib import Path
from typing import Final

from vitlens.commands.registry import COMMANDS

REQUIRED: Final = ("How to read it", "Pitfalls")
OPTIONAL: Final = ("What it does", "A figure", "See also")
_HEADING: Final = re.compile(r"^## (.+)$", flags=re.MULTILINE)


class MissingPartError(Exception):
    """A command without the hand-written parts of its page."""


def parts_of(word: str, folder: Path) -> dict[str, str]:
    """Return the sections of a command's file by heading. Raises MissingPartError, which says what
    to write.
    """
    path = folder / f"{word}.md"
    name = f"docs/{folder.name}/{path.name}"
    wanted = " and ".join(f'"## {heading}"' for heading in REQUIRED)
    hint = (
        "write it as docs/parts/attention.md is written (figure from reports/ where there is "
        f"one), then: {MAKE}"
    )
    package = COMMANDS[word].package if word in COMMANDS else None
    helped = Path(str(files(package or "vitlens.commands"))) / ("" if package else word) / "help.md"
    if helped.is_file():
        known = _sections(helped)
        more = _sections(path) if path.is_file() else {}
        twice = [heading for heading in REQUIRED if heading in more]
        if twice:
            raise MissingPartError(
                f"expected {' and '.join(twice)} in {helped.name} alone, found it in {name}, too"
            )
        return {**more, **known}
    if not path.is_file():
        raise MissingPartError(
            f"expected {name} with {wanted} for the command {word!r}, found no such file; {hint}"
        )
    sections = _sections(path)
    empty = [heading for heading in REQUIRED if not sections.get(heading)]
    if empty:
        raise MissingPartError(
            f"expected {wanted} in {name}, found nothing under {', '.join(empty)}; {hint}"
        )
    unknown = [heading for heading in sections if heading not in (*REQUIRED, *OPTIONAL)]
    if unknown:
        known = ", ".join((*REQUIRED, *OPTIONAL))
        raise MissingPartError(
            f"expected headings among {known} in {name}, found {', '.join(unknown)}"
        )
    return sections


def _sections(path: Path) -> dict[str, str]:
    pieces = _HEADING.split(path.read_text(encoding="utf-8"))
    return {heading.strip(): text.strip() for heading, text in zip(pieces[1::2], pieces[2::2])}


MAKE: Final = "python -m docs.make"
