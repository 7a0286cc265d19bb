"""Temporary access to modules, undone on exit: watch calls, replace a forward, intercept functions of torch.

What is kept of a model is computed on the model as it is (`unchanged`): there, what was entered outside has no effect.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Key = int | str  # of an argument of a call: its position or its name
Arguments = dict[Key, Any]
Forward = Callable[..., Any]

_DEPTH: Final = ContextVar("depth", default=0)  # of nested `unchanged` contexts


@contextmanager
def unchanged() -> Iterator[None]:
    """Inside, every model runs as if the changes and hooks of this module that were entered outside were not there.

    What is entered inside has its effect; `unchanged` contexts may be nested.
    """
    token = _DEPTH.set(_DEPTH.get() + 1)
    try:
        yield
    finally:
        _DEPTH.reset(token)


class _Scoped:
    """In force at the depth of `unchanged` contexts at which it was made."""

    def __init__(self) -> None:
        self._depth = _DEPTH.get()

    @property
    def in_force(self) -> bool:
        """Whether it has its effect here."""
        return self._depth == _DEPTH.get()


class ScopedMode(_Scoped, TorchFunctionMode):
    """A function mode that intercepts no call of an `unchanged` context inside it."""

    def __init__(self) -> None:
        _Scoped.__init__(self)
        TorchFunctionMode.__init__(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The intercepted call, or the plain one."""
        return self.intercept(func, args, kwargs or {}) if self.in_force else func(*args, **(kwargs or {}))

    def intercept(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a call of one of torch's functions."""
        raise NotImplementedError


class Replaced(_Scoped):
    """A module's replaced forward; `plain` is the one that it replaces."""

    def __init__(self, forward: Forward, plain: Forward) -> None:
        super().__init__()
        self.forward, self.plain = forward, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module."""
        return (self.forward if self.in_force else self.plain)(*args, **kwargs)


@contextmanager
def watching(
    model: nn.Module,
    names: Iterable[str],
    after: Callable[[str, Arguments, Any], object] | None = None,
    *,
    before: Callable[[str, Arguments], object] | None = None,
    always: bool = False,
) -> Iterator[None]:
    """Report every call of the named modules; the hooks are removed on exit, also after an exception.

    before: called with the module's name and its arguments; after: with its output as well. always: `after` is also
    called for a module that raised, with None as its output.
    """

    scope = _Scoped()
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            if before is not None:
                entered = partial(_entered, scope, before, name)
                stack.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
            if after is not None:
                left = partial(_left, scope, after, name)
                handle = module.register_forward_hook(left, with_kwargs=True, always_call=always)
                stack.callback(handle.remove)
        yield


def _entered(
    scope: _Scoped,
    before: Callable[[str, Arguments], object],
    name: str,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if scope.in_force:
        before(name, arguments(args, kwargs))


def _left(
    scope: _Scoped,
    after: Callable[[str, Arguments, Any], object],
    name: str,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    if scope.in_force:
        after(name, arguments(args, kwargs), output)


@contextmanager
def overridden(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """Inside, the module's forward is wrap(its forward); contexts may be nested."""
    own_forward = module.__dict__.get("forward")
    module.forward = Replaced(wrap(module.forward), module.forward)
    try:
        yield
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """A call's arguments by position and by name."""
    values: Arguments = dict(enumerate(args))
    values.update(kwargs)
    return values


def as_call(values: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `arguments`: positional and keyword arguments."""
    args = tuple(value for key, value in values.items() if isinstance(key, int))
    return args, {key: value for key, value in values.items() if isinstance(key, str)}


def first_tensor(output: Any) -> Tensor | None:
    """A module's output where it is a tensor, or the first of several outputs; None where that is no tensor."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None
