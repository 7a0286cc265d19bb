"""Names of attribution methods as users type them, and notes about the libraries they come from.

A name is that of a method of vitlens, or LIBRARY:NAME.
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

    option: the option of the list, for messages.
    own: the names of vitlens's methods.
    several: True to allow LIBRARY:all, which `library_names` accepts and `library_method` does not.

    Raises UnknownNameError for an unknown name, InputError for a library that is not installed.
    """
    names = [part.strip() for part in text.split(",")]
    names_of_libraries = tuple(name for name in names if is_of_library(name))
    for name in names_of_libraries:
        # called only because they raise for a name that the library does not have
        if several:
            library_names(name)
        else:
            library_method(name)
    return one_of(option, text, (*own, *names_of_libraries))


def notes_of(methods: Iterable[str]) -> tuple[str, ...]:
    """Return the notes about licences and patents of the libraries of these methods."""
    notes = dict.fromkeys(note_of(name) for name in methods)  # each once, in order
    return tuple(note for note in notes if note)


def print_notes(methods: Iterable[str], *, quiet: bool) -> None:
    """Print the notes of the libraries of these methods on standard error."""
    if quiet:
        return
    for note in notes_of(methods):
        print(f"note: {note}", file=sys.stderr)  # noqa: T201
