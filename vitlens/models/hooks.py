"""Temporary access to modules, undone on exit: watch calls, replace a forward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

Key = int | str  # of an argument of a call: its position or its name
Arguments = dict[Key, Any]
Forward = Callable[..., Any]


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

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            if before is not None:
                stack.callback(
                    module.register_forward_pre_hook(partial(_entered, before, name), with_kwargs=True).remove
                )
            if after is not None:
                handle = module.register_forward_hook(partial(_left, after, name), with_kwargs=True, always_call=always)
                stack.callback(handle.remove)
        yield


def _entered(
    before: Callable[[str, Arguments], object],
    name: str,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    before(name, arguments(args, kwargs))


def _left(
    after: Callable[[str, Arguments, Any], object],
    name: str,
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    after(name, arguments(args, kwargs), output)


@contextmanager
def overridden(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """Inside, the module's forward is wrap(its forward); contexts may be nested."""
    own_forward = module.__dict__.get("forward")
    module.forward = wrap(module.forward)
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
