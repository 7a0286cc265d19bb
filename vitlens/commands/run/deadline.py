"""A limit on the time of a computation, checked between its steps (`vitlens demo` sets one)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from vitlens.errors import RunError


class _Deadline(NamedTuple):
    """The end of a computation as a time of time.monotonic, and its budget in seconds."""

    end: float
    budget: float


_DEADLINE: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)


class TooLongError(RunError):
    """A computation took longer than it may."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Make `require_time` raise TooLongError after these seconds, in this thread only."""
    token = _DEADLINE.set(_Deadline(time.monotonic() + seconds, seconds))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def require_time() -> None:
    """Check the time between the steps of a computation.

    Raises TooLongError after the deadline, where there is one.
    """
    limit = _DEADLINE.get()
    if limit is not None and time.monotonic() >= limit.end:
        raise TooLongError(
            f"expected an answer within {limit.budget:g} s of computing, found that it "
            "takes longer and stopped it; try a smaller model or a faster method, or "
            "the same command in a terminal"
        )
