"""Names of attribution methods as they are typed: those of vitlens, and LIBRARY:NAME; and the notes
of libraries.
"""

import sys
from collections.abc import Iterable
from typing import Final

from vitlens.attribution.adapters.registry import (
    LIBRARIES,
    is_of_library,
    library_method,
    library_names,
    note_of,
)
from vitlens.commands.run.parsing import one_of

LIBRARY_METHODS: Final = ", ".join(f"{name}:NAME" for name in LIBRARIES)


def methods_of_text(
    option: str, text: str, *, own: Iterable[str], several: bool = False
) -> tuple[str, ...]:
    """Return the methods of a comma-separated list.

    own: names of vitlens; several: LIBRARY:all is allowed. Raises UnknownNameError for an unknown
    name, InputError for a library that is not installed.
    """
    names = [part.strip() for part in text.split(",")]
    of_libraries = tuple(filter(is_of_library, names))
    for name in of_libraries:
        if several:
            library_names(name)
        else:
            library_method(name)
    return one_of(option, text, (*own, *of_libraries))


def notes_of(methods: Iterable[str]) -> tuple[str, ...]:
    """Return the notes about licences and patents of the libraries of these methods."""
    notes = dict.fromkeys(note_of(name) for name in methods)
    return tuple(note for note in notes if note)


def print_notes(methods: Iterable[str], *, quiet: bool) -> None:
    """Print the notes of the libraries of these methods on standard error."""
    if quiet:
        return
    for note in notes_of(methods):
        print(f"note: {note}", file=sys.stderr)  # noqa: T201
