"""Turns: one thread at a time uses a model.

Changes, hooks and modes belong to the model, not to a thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vitlens.errors import LensError, ModelError


class _Turn:
    """The turn of one module.

    owner: the thread that uses the module, None if none does.
    depth: the number of open contexts of this thread.
    compiled_calls: the parts of the module that are compiled in place, with their compiled calls.
        The calls are restored when the turn ends.
    """

    def __init__(self) -> None:
        self.owner: int | None = None
        self.depth = 0
        self.compiled_calls: list[tuple[Any, Any]] = []

    def enter(self, model: nn.Module, thread: int) -> None:
        """Begin a context.

        From the outermost one on, compiled parts run as the code from which they were compiled.
        """
        if self.depth == 0:
            compiled = _compiled_parts(model)
            for part in compiled:
                self.compiled_calls.append((part, part._compiled_call_impl))
                part._compiled_call_impl = None
        self.owner = thread
        self.depth += 1

    def leave(self) -> None:
        """End a context; after the outermost one, the model is as it was."""
        self.depth -= 1
        if self.depth == 0:
            self.owner = None
            for part, call in self.compiled_calls:
                part._compiled_call_impl = call
            self.compiled_calls.clear()


def _compiled_parts(model: nn.Module) -> list[Any]:
    """Return the parts that `compile()` compiled in place.

    Hooks inside compiled parts would not be called. Raises ModelError for a part that torch.compile
    replaced, or whose forward it replaced, after the model was built.
    """
    parts: list[Any] = []
    for name, part in model.named_modules():
        if getattr(part, "_compiled_call_impl", None) is not None:
            parts.append(part)
        forward = vars(part).get("forward")
        original = getattr(forward, "_torchdynamo_orig_callable", None)
        if "_orig_mod" in part._modules or original is not None:
            raise ModelError(
                f"expected a model that is not compiled, found torch.compile's {name or 'forward'} "
                "in it; put what was compiled back (module._orig_mod), or call compile() on the "
                "module, which changes it in place"
            )
    return parts


_CHANGED: Final = Condition()  # guards both mappings below
_TURNS: Final[WeakKeyDictionary[nn.Module, _Turn]] = WeakKeyDictionary()
_WAITING: Final[dict[int, _Turn]] = {}  # the turn that each waiting thread waits for


@contextmanager
def turn(model: nn.Module) -> Iterator[None]:
    """Wait for the model, and keep other threads from it inside; contexts of one thread nest.

    A model and the module that it wraps take turns together. Parts that `compile()` compiled in
    place run uncompiled inside the context, and stay compiled outside.

    Code that torch.compile traces takes no turn, because its graph cannot contain a lock. The
    caller of the compiled code may hold one around it.

    Raises ModelError for parts that torch.compile replaced. Raises LensError if two threads would
    wait for each other, because each uses the model that the other one needs.
    """
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    key = _key(model)
    thread = get_ident()
    with _CHANGED:
        current = _TURNS.setdefault(key, _Turn())
        while current.owner not in (None, thread):
            if _waits_for(current, thread):
                raise LensError(
                    "expected a model that another thread will release, found that "
                    "thread waiting for a model that this thread uses; use the models "
                    "in the same order in all threads"
                )
            _WAITING[thread] = current
            try:
                _CHANGED.wait()
            finally:
                del _WAITING[thread]
        current.enter(model, thread)
    try:
        yield
    finally:
        with _CHANGED:
            current.leave()
            if current.depth == 0:
                _CHANGED.notify_all()


def _key(model: nn.Module) -> nn.Module:
    """Return the module that takes turns: the wrapped one of a model."""
    inner: Any = getattr(model, "module", model)
    return inner if isinstance(inner, nn.Module) else model


def _waits_for(requested: _Turn, thread: int) -> bool:
    """Return True if the owner of the requested turn waits for this thread.

    It may wait directly or through other threads.
    """
    next_turn: _Turn | None = requested
    while next_turn is not None and next_turn.owner is not None:
        if next_turn.owner == thread:
            return True
        next_turn = _WAITING.get(next_turn.owner)
    return False
