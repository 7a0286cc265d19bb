"""A limit on the time that a computation takes, checked between its steps; without one, nothing is
checked.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from vitlens.errors import RunError

# the end as a time of time.monotonic, and the budget in seconds
_END: ContextVar[tuple[float, float] | None] = ContextVar("end", default=None)


class TooLongError(RunError):
    """A computation took longer than it may."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Make `require_time` raise TooLongError after these seconds, in this thread only."""
    before = _END.set((time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _END.reset(before)


def require_time() -> None:
    """Check the time between the steps of a computation.

    Raises TooLongError after the deadline, where there is one.
    """
    end = _END.get()
    if end is not None and time.monotonic() >= end[0]:
        raise TooLongError(
            f"expected an answer within {end[1]:g} s of computing, found that it takes longer; "
            "stopped: try a smaller model or a faster method, or the same command in a terminal"
        )
