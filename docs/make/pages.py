"""All generated pages, as text by their path below docs/."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from docs.make.command_pages import command_page, list_of_commands, shared_page
from docs.make.glossary import glossary_page
from docs.make.measured import TEMPLATES, filled
from docs.make.readable import readable_page
from docs.make.references import bibliography, references_page
from vitlens.commands.registry import COMMANDS

DOCS: Final = Path(__file__).parents[1]
PARTS: Final = DOCS / "parts"
_OUTSIDE: Final = {"README.md": "../README.md", "reports.md": "../reports/README.md"}  # of docs/


def prose_pages() -> dict[str, str]:
    """Return the pages with numbers of reports. They are committed, since GitHub shows them.

    Raises UnknownNumberError for a number that no committed report has.
    """
    places = {path: _OUTSIDE.get(path.name, path.name) for path in TEMPLATES.glob("*.md")}
    return {place: filled(path, DOCS / place) for path, place in sorted(places.items())}


def reference_pages() -> dict[str, str]:
    """Return the pages that follow from the package. They are not committed (.gitignore).

    Raises MissingPartError for a command whose hand-written parts are missing.
    """
    commands = {
        f"commands/{word}.md": command_page(command, PARTS) for word, command in COMMANDS.items()
    }
    return {
        "commands/index.md": list_of_commands(COMMANDS.values()),
        "commands/shared.md": shared_page(PARTS),
        **commands,
        "glossary.md": glossary_page(),
        "readable.md": readable_page(),
        "references.bib": bibliography(),
        "references.md": references_page(),
    }


def generated() -> dict[str, str]:
    """Return every generated page."""
    return {**prose_pages(), **reference_pages()}


def outdated(pages: Mapping[str, str], docs: Path = DOCS) -> list[str]:
    """Return the paths of pages that are missing, differ from what is generated, or are generated
    no more.
    """
    found = {f"commands/{path.name}" for path in (docs / "commands").glob("*.md")}
    stale = found - pages.keys()
    differ = {path for path, text in pages.items() if _stored(docs / path) != text}
    return sorted(stale | differ)


def _stored(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
