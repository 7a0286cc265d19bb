"""Turns: one thread at a time uses a model. Changes, hooks and modes are those of the model, not of a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn

from vitlens.errors import LensError


class _Turn:
    """The thread that uses one module, how many of its contexts do, and what of the module is compiled in place."""

    def __init__(self) -> None:
        self.owner: int | None = None
        self.depth = 0
        self.compiled_parts: tuple[str, ...] = ()
        self.compiled_calls: dict[str, Any] = {}  # what is put back when the turn ends

    def enter(self, module: nn.Module, thread: int) -> None:
        """Begin a context; in the outermost one, compiled parts run as the code that they were compiled from."""
        self.owner = thread
        self.depth += 1
        if self.depth == 1:
            for name in self.compiled_parts:
                part: Any = module.get_submodule(name)
                self.compiled_calls[name] = part._compiled_call_impl
                part._compiled_call_impl = None

    def leave(self, module: nn.Module) -> None:
        """End a context; after the outermost one, the module is as it was."""
        self.depth -= 1
        if self.depth == 0:
            self.owner = None
            for name, call in self.compiled_calls.items():
                part: Any = module.get_submodule(name)
                part._compiled_call_impl = call
            self.compiled_calls.clear()


_CHANGED: Final = Condition()  # guards everything below
_TURNS: Final[WeakKeyDictionary[nn.Module, _Turn]] = WeakKeyDictionary()
_WAITING: Final[dict[int, _Turn]] = {}  # by thread


@contextmanager
def turn(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread uses the model, and keep other threads from it inside; contexts of one thread nest.

    A model and the module that it wraps take turns together. Raises LensError where two threads would wait for each
    other, as each uses the model that the other one needs.
    """
    key = _key(model)
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
        own.enter(key, thread)
    try:
        yield
    finally:
        with _CHANGED:
            own.leave(key)
            if own.depth == 0:
                _CHANGED.notify_all()


def run_uncompiled(module: nn.Module) -> None:
    """Let the parts of a module that `compile()` compiled in place run uncompiled in every turn.

    What is observed or changed inside a compiled part would otherwise be missed. Outside a turn they stay compiled.
    """
    key = _key(module)
    with _CHANGED:
        _TURNS.setdefault(key, _Turn()).compiled_parts = tuple(
            name for name, part in key.named_modules() if getattr(part, "_compiled_call_impl", None) is not None
        )


def _key(model: nn.Module) -> nn.Module:
    """Return the module that takes turns: the wrapped one of a model."""
    inner: Any = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def _waits_for(wanted: _Turn, thread: int) -> bool:
    """Return True if the thread that uses what is wanted waits, directly or through others, for this thread."""
    waiting: _Turn | None = wanted
    while waiting is not None and waiting.owner is not None:
        if waiting.owner == thread:
            return True
        waiting = _WAITING.get(waiting.owner)
    return False
