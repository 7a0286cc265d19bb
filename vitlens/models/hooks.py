"""Temporary access to modules, undone on exit: watch calls, replace a forward, intercept functions of torch; and what
is kept of a model, such as results of trial forward passes, computed once and freed with the model.

    @per_model
    def layers(model: Model) -> tuple[Layer, ...]: ...

What is kept is that of the model as it is (`unchanged`): what was entered outside has no effect on it. It must not hold
a reference to the model (weakref.ref where needed): the model would never be freed.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from vitlens.models.model import Model

P = ParamSpec("P")
T = TypeVar("T")
Key = int | str  # of an argument of a call: its position or its name
Arguments = dict[Key, Any]
Forward = Callable[..., Any]

_DEPTH: Final = ContextVar("depth", default=0)  # of nested `unchanged` contexts


@contextmanager
def unchanged() -> Iterator[None]:
    """Inside, models run as if the changes and hooks of this module that were entered outside were not there."""
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

    def watch(stack: ExitStack, name: str) -> None:
        def entered(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if before is not None and scope.in_force:
                before(name, arguments(args, kwargs))

        def left(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if after is not None and scope.in_force:
                after(name, arguments(args, kwargs), output)

        module = model.get_submodule(name)
        if before is not None:
            stack.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
        if after is not None:
            stack.callback(module.register_forward_hook(left, with_kwargs=True, always_call=always).remove)

    with ExitStack() as stack:
        for name in names:
            watch(stack, name)
        yield


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


class Memo(Generic[T]):
    """Values by model, and by key where a model has several; models are held weakly.

    Two threads may compute a value at the same time; the first result is kept, and both return it. Exceptions are not
    kept.
    """

    def get(self, model: "Model", compute: Callable[[], T], *, key: Hashable = None) -> T:
        """The value kept for a model and key; computed on the unchanged model where there is none."""
        with _LOCK:
            values: dict[tuple[Memo[T], Hashable], T] = _KEPT.setdefault(model, {})
            if (self, key) in values:
                return values[self, key]
        with unchanged():  # not locked, as it may need other values
            value = compute()
        with _LOCK:
            return values.setdefault((self, key), value)

    def known(self, model: "Model", key: Hashable = None) -> T | None:
        """The value kept for a model and key, or None; nothing is computed."""
        with _LOCK:
            return _KEPT.get(model, {}).get((self, key))


_KEPT: Final[WeakKeyDictionary[Any, dict[tuple[Memo[Any], Hashable], Any]]] = WeakKeyDictionary()  # by model
_LOCK: Final = Lock()


def per_model(function: Callable[Concatenate["Model", P], T]) -> Callable[Concatenate["Model", P], T]:
    """Decorator: call the function once for each model (and further hashable arguments), and keep its value."""
    memo: Memo[T] = Memo()

    @wraps(function)
    def kept(model: "Model", /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        return memo.get(model, lambda: function(model, *args, **kwargs), key=key)

    return kept


def once_per_model(function: Callable[Concatenate["Model", P], T]) -> Callable[Concatenate["Model", P], T]:
    """Decorator: call the function once for each model; its value must not depend on its further arguments."""
    memo: Memo[T] = Memo()

    @wraps(function)
    def first(model: "Model", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return memo.get(model, lambda: function(model, *args, **kwargs))

    return first


def forget(model: "Model") -> None:
    """Drop all values kept for a model; call it after changing the model's modules in place."""
    with _LOCK:
        _KEPT.pop(model, None)
