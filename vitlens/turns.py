"""Turns: one thread at a time uses a model. Changes, hooks and modes are those of the model, not of a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from vitlens.errors import LensError


class _Turn:
    """The thread that uses one module, and how many of its contexts do."""

    def __init__(self) -> None:
        self.owner: int | None = None
        self.depth = 0


_CHANGED: Final = Condition()  # guards everything below
_TURNS: Final[WeakKeyDictionary[nn.Module, _Turn]] = WeakKeyDictionary()
_WAITING: Final[dict[int, _Turn]] = {}  # by thread


@contextmanager
def turn(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread uses the model, and keep other threads from it inside; contexts of one thread nest.

    A model and the module that it wraps take turns together. Raises LensError where two threads would wait for each
    other, as each uses the model that the other one needs.
    """
    inner: Any = getattr(model, "module", model)
    key = inner if isinstance(inner, nn.Module) else model
    thread = get_ident()
    with _CHANGED:
        own = _TURNS.setdefault(key, _Turn())
        while own.owner not in (None, thread):
            if _waits_for(own, thread):
                raise LensError(
                    "expected a model that another thread will leave, found that it waits for one that this thread "
                    "uses; use the models in the same order in all threads"
                )
            _WAITING[thread] = own
            try:
                _CHANGED.wait()
            finally:
                del _WAITING[thread]
        own.owner = thread
        own.depth += 1
    try:
        yield
    finally:
        with _CHANGED:
            own.depth -= 1
            if not own.depth:
                own.owner = None
                _CHANGED.notify_all()


def _waits_for(wanted: _Turn, thread: int) -> bool:
    """Return True if the thread that uses what is wanted waits, directly or through others, for this thread."""
    waiting: _Turn | None = wanted
    while waiting is not None and waiting.owner is not None:
        if waiting.owner == thread:
            return True
        waiting = _WAITING.get(waiting.owner)
    return False
