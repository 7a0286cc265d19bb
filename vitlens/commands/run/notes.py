"""Notes on stderr about a run's images and classes; a run of chapters prints each once."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from vitlens.display import for_terminal

# the notes that the command has printed, None outside of a command
_PRINTED: Final[ContextVar[set[str] | None]] = ContextVar("printed", default=None)


@contextmanager
def each_note_once() -> Iterator[None]:
    """Print no note twice in the block, in which a command runs: its chapters read one data set."""
    token = _PRINTED.set(set())
    try:
        yield
    finally:
        _PRINTED.reset(token)


def print_notes(notes: Sequence[str]) -> None:
    """Print notes on stderr, one a line."""
    printed = _PRINTED.get()
    for note in notes:
        if printed is not None:
            if note in printed:
                continue
            printed.add(note)
        print(for_terminal(note), file=sys.stderr)  # noqa: T201
