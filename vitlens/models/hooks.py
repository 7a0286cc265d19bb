"""Temporary access to modules, undone on exit: watch calls, replace a forward, intercept functions
of torch.

Also values of a model, such as results of trial forward passes, computed once and freed with the
model:

    @per_model
    def layers(model: Model) -> tuple[Layer, ...]: ...

Such a value is computed on the `unchanged` model: contexts entered outside have no effect on it. It
is dropped when a weight, a module, a forward or a hook of another origin changes (`State`). It must
not hold a reference to the model (weakref.ref where needed): the model would never be freed.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from operator import is_
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from vitlens.models.nested import tensors_in
from vitlens.models.trials import with_noise, zero_weights
from vitlens.turns import turn

if TYPE_CHECKING:
    from vitlens.models.model import Model

P = ParamSpec("P")
T = TypeVar("T")
Key = int | str  # of an argument of a call: its position or its name
Arguments = dict[Key, Any]
Forward = Callable[..., Any]

# modules whose hooks change nothing
_READING: Final = ("vitlens.", "transformers.utils.output_capturing")
_PLAIN: Final = (Tensor, nn.Parameter)
_SAMPLED: Final = 512  # elements of each weight: sees a change of any contiguous 1/512 of it
_DEPTH: Final = ContextVar("depth", default=0)  # of nested `unchanged` contexts


@contextmanager
def unchanged() -> Iterator[None]:
    """Run models without the changes and hooks of this file that were entered outside this
    context."""
    token = _DEPTH.set(_DEPTH.get() + 1)
    try:
        yield
    finally:
        _DEPTH.reset(token)


class _Scoped:
    """A change that is in force only at the depth of `unchanged` contexts of its creation."""

    def __init__(self) -> None:
        self._depth = _DEPTH.get()

    @property
    def in_force(self) -> bool:
        """Return True if it has its effect here."""
        return self._depth == _DEPTH.get()


class ScopedMode(_Scoped, TorchFunctionMode):
    """A function mode that intercepts no call of an `unchanged` context inside it."""

    def __init__(self) -> None:
        _Scoped.__init__(self)
        TorchFunctionMode.__init__(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the intercepted call, or the plain one."""
        kwargs = kwargs or {}
        if self.in_force:
            return self.intercept(func, args, kwargs)
        return func(*args, **kwargs)

    def intercept(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the value of a call of one of torch's functions."""
        raise NotImplementedError


class Replaced(_Scoped):
    """A module's replaced forward.

    plain: the one that it replaces, with the hooks of others that were there before; equal: whether
    it gives the same outputs as that, of any part of a batch and of the tokens.
    """

    def __init__(self, forward: Forward, plain: "_Hooked", *, equal: bool = False) -> None:
        super().__init__()
        self.forward = forward
        self.plain = plain
        self.equal = equal

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module."""
        if self.in_force:
            return self.forward(*args, **kwargs)
        return self.plain(*args, **kwargs)


class _Hooked:
    """A module's forward with the hooks of others that were registered before it was replaced.

    The replacement then runs around these hooks, as a context around those entered before it. The
    hooks stay registered, so that they keep their order and can be removed, but they call nothing
    in the meantime.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.forward: Forward = module.forward
        self.before = _others(module._forward_pre_hooks)
        self.after = _others(module._forward_hooks)
        module._forward_pre_hooks.update(dict.fromkeys(self.before, _idle))
        module._forward_hooks.update(dict.fromkeys(self.after, _idle))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output after the hooks."""
        module = self._module()
        if module is None or not (self.before or self.after):
            return self.forward(*args, **kwargs)
        for number, hook in self.before.items():
            if number not in module._forward_pre_hooks:  # removed meanwhile
                continue
            if number in module._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            else:
                changed = hook(module, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        output = self.forward(*args, **kwargs)
        for number, hook in self.after.items():
            if number not in module._forward_hooks:
                continue
            if number in module._forward_hooks_with_kwargs:
                changed = hook(module, args, kwargs, output)
            else:
                changed = hook(module, args, output)
            if changed is not None:
                output = changed
        return output

    def restore(self) -> None:
        """Let torch call the hooks again, except for those that were removed."""
        module = self._module()
        if module is None:
            return
        _put_back(module._forward_pre_hooks, self.before)
        _put_back(module._forward_hooks, self.after)


def _put_back(
    hooks: dict[int, Callable[..., Any]], original: Mapping[int, Callable[..., Any]]
) -> None:
    """Register the original hooks again in place of those that are still registered."""
    for number, hook in original.items():
        if number in hooks:
            hooks[number] = hook


def _others(hooks: Mapping[int, Callable[..., Any]]) -> dict[int, Callable[..., Any]]:
    """Return the hooks that are a user's, or another library's."""
    return {
        number: hook for number, hook in hooks.items() if not _home_of(hook).startswith(_READING)
    }


def _home_of(hook: Callable[..., Any]) -> str:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", ""))


def _idle(*_call: object) -> None:
    """Stand in for a hook that is called elsewhere."""


@contextmanager
def watching(
    model: nn.Module,
    names: Iterable[str],
    after: Callable[[str, Arguments, Any], object] | None = None,
    *,
    before: Callable[[str, Arguments], object] | None = None,
    always: bool = False,
) -> Iterator[None]:
    """Report every call of the named modules; the hooks are removed on exit, also after an
    exception.

    before: called with the module's name and its arguments; after: with its output as well. always:
    `after` is also called for a module that raised, with None as its output.
    """
    scope = _Scoped()

    def watch(stack: ExitStack, name: str) -> None:
        def entered(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if before is not None and scope.in_force:
                before(name, arguments(args, kwargs))

        def left(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if after is not None and scope.in_force:
                after(name, arguments(args, kwargs), output)

        module = model.get_submodule(name)
        if before is not None:
            stack.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
        if after is not None:
            stack.callback(
                module.register_forward_hook(left, with_kwargs=True, always_call=always).remove
            )

    with ExitStack() as stack:
        for name in names:
            watch(stack, name)
        yield


@contextmanager
def overridden(
    module: nn.Module, wrap: Callable[[Forward], Forward], *, equal: bool = False
) -> Iterator[None]:
    """Replace the module's forward by wrap(its forward and the hooks of others); contexts may be
    nested.

    equal: as in `Replaced`.
    """
    before = module.__dict__.get("forward")
    plain = _Hooked(module)
    try:
        module.forward = Replaced(wrap(plain), plain, equal=equal)
        yield
    finally:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before
        plain.restore()


def own_forward(module: nn.Module) -> Forward | None:
    """Return the forward that was put into the module by others than the contexts of this file,
    None where none was.
    """
    forward = vars(module).get("forward")
    while isinstance(forward, Replaced):
        forward = forward.plain.forward
    is_bound = getattr(forward, "__self__", None) is module
    if is_bound and getattr(forward, "__func__", None) is type(module).forward:
        return None
    return forward


def other_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the module's forward hooks that are a user's, or another library's."""
    hooks = {**_others(module._forward_pre_hooks), **_others(module._forward_hooks)}
    forward = vars(module).get("forward")
    while isinstance(forward, Replaced):
        hooks |= forward.plain.before | forward.plain.after
        forward = forward.plain.forward
    return [hooks[number] for number in sorted(hooks)]  # in the order in which they were registered


def hooks_around(module: nn.Module) -> bool:
    """Return True if a hook of others was registered after the module's forward was replaced
    last."""
    return bool(_others(module._forward_pre_hooks) or _others(module._forward_hooks))


def has_global_hooks() -> bool:
    """Return True if torch calls a hook around the forward of every module."""
    return bool(module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks)


def is_changed(module: nn.Module) -> bool:
    """Return True if anything in force changes or reads the results of the module, or of a part of
    it.

    That is a change by a context of this file, a hook of another origin or a forward put into a
    module. Changes of attention are those of `vitlens.lens.attention`.
    """
    return has_global_hooks() or any(map(_is_changed_itself, module.modules()))


def is_within_context(module: nn.Module) -> bool:
    """Return True inside a context of this file that replaces the forward of the module or of a
    part of it.

    A copy of the module would call the original.
    """
    return any(isinstance(vars(part).get("forward"), Replaced) for part in module.modules())


def _is_changed_itself(module: nn.Module) -> bool:
    if (module._forward_hooks or module._forward_pre_hooks) and other_hooks(module):
        return True
    forward = vars(module).get("forward")
    if forward is None:
        return False
    while isinstance(forward, Replaced):
        if forward.in_force and not forward.equal:
            return True
        forward = forward.plain.forward
    return own_forward(module) is not None


class State:
    """The state of a model: its modules and their classes, weights, replaced forwards and hooks of
    other origin.

    Objects are held weakly and compared by identity. Weights are also compared by torch's count of
    changes and, as changes of `.data` are not counted, by their memory and by some elements of
    each. A change of `.data` in place that reaches none of these elements is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        modules: dict[nn.Module, None] = {}
        _collect(model, modules)
        tensors: list[Tensor] = []
        for module in modules:
            tensors += module._parameters.values()  # type: ignore[arg-type]
            tensors += module._buffers.values()  # type: ignore[arg-type]
        tensors = [tensor for tensor in tensors if tensor is not None]
        self._objects: list[Any] = [*map(ref, modules), *map(ref, tensors)]
        for module in modules:
            if "forward" in module.__dict__:
                forward = own_forward(module)
                if forward is not None:
                    self._objects.append(_reference(forward))
            if module._forward_hooks or module._forward_pre_hooks:
                self._objects += map(_reference, other_hooks(module))
        self._values = list(map(type, modules)), *_versions(tensors)
        self._samples = _samples(tensors)

    def equals(self, other: "State") -> bool:
        """Return True if nothing was changed or exchanged between the two."""
        same_values = self._values == other._values and len(self._objects) == len(other._objects)
        same_objects = same_values and all(map(is_, self._objects, other._objects))
        return same_objects and all(map(torch.equal, self._samples, other._samples))


def _collect(module: nn.Module, modules: dict[nn.Module, None]) -> None:
    """Add a module and its parts, as `nn.Module.modules` in a third of its time."""
    modules[module] = None
    for child in module._modules.values():
        if child is not None and child not in modules:
            _collect(child, modules)


def _versions(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return how often each tensor was changed in place, and where its memory is."""
    try:
        return [tensor._version for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    except RuntimeError:
        # inference tensors are not counted, some subclasses have no memory of their own
        counted = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return counted, [id(tensor) for tensor in tensors]


@torch.no_grad()
def _samples(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return evenly spaced elements of every tensor, in the order of its memory, as one tensor for
    each device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch._C.DisableTorchFunction():  # no function mode counts or changes these calls
        for tensor in tensors:
            count = tensor.numel()
            if not count or tensor.is_meta or type(tensor) not in _PLAIN:
                continue
            try:
                sample = tensor.as_strided((min(count, _SAMPLED),), (max(1, count // _SAMPLED),))
            except RuntimeError:
                # an expanded tensor has fewer elements in memory, a sparse one no strides
                continue
            by_device.setdefault(tensor.device, []).append(sample)
        return [torch.cat(samples).nan_to_num() for samples in by_device.values()]


def _reference(function: Callable[..., Any]) -> Any:
    """Return a weak reference, or the object itself where it allows none."""
    try:
        return ref(function)
    except TypeError:
        return function


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return a call's arguments by position and by name."""
    values: Arguments = dict(enumerate(args))
    values.update(kwargs)
    return values


def as_call(values: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inverse of `arguments`: positional and keyword arguments."""
    args = tuple(value for key, value in values.items() if isinstance(key, int))
    return args, {key: value for key, value in values.items() if isinstance(key, str)}


def first_tensor(output: Any) -> Tensor | None:
    """Return a module's output where it is a tensor, or the first tensor in a tuple, list or dict;
    None without one.
    """
    for tensor in tensors_in(output):
        return tensor
    return None


class _Store:
    """The stored values of one model.

    state: of the model when they were computed; zeros: its weights that are all zeros; held: how
    many `holding` contexts are in force; trials: how many trials run, one within the other.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[Memo[Any], Hashable], Any] = {}
        self.state: State | None = None
        self.zeros: tuple[nn.Parameter, ...] | None = None
        self.held = 0
        self.trials = 0

    def refresh(self, model: nn.Module) -> None:
        """Drop everything where the model is no longer what it was."""
        if self.held:
            return
        state = State(model)
        if self.state is None or not self.state.equals(state):
            self.values.clear()
            self.zeros = None
        self.state = state


_STORES: Final[WeakKeyDictionary[Any, _Store]] = WeakKeyDictionary()  # by model


def _store_of(model: "Model") -> _Store:
    store = _STORES.get(model)
    if store is None:
        store = _STORES.setdefault(model, _Store())
    return store


@contextmanager
def holding(model: "Model") -> Iterator[None]:
    """Take the thread's turn; inside, the model is assumed unchanged, and its stored values stay
    valid.
    """
    with turn(model):
        store = _store_of(model)
        store.refresh(model)
        store.held += 1
        try:
            yield
        finally:
            store.held -= 1


@contextmanager
def _trial(model: "Model") -> Iterator[None]:
    """Run a trial: the model is unchanged, and its weights of zeros are noise."""
    with holding(model), unchanged():
        store = _store_of(model)
        if store.zeros is None:
            store.zeros = zero_weights(model)
        is_outermost = store.trials == 0
        store.trials += 1
        try:
            with with_noise(store.zeros if is_outermost else ()):
                yield
        finally:
            store.trials -= 1


class Memo(Generic[T]):
    """Values by model, and by key where a model has several; models are held weakly.

    A value is computed in a trial: see `vitlens.models.trials`. Exceptions are not kept.
    """

    def get(self, model: "Model", compute: Callable[[], T], *, key: Hashable = None) -> T:
        """Return the value kept for a model and key; computed on the unchanged model where there is
        none.
        """
        store = _store_of(model)
        store.refresh(model)
        if (self, key) not in store.values:
            with _trial(model):
                value = compute()
            store.values.setdefault((self, key), value)
        stored: T = store.values[self, key]
        return stored

    def known(self, model: "Model", key: Hashable = None) -> T | None:
        """Return the value kept for a model and key, or None; nothing is computed."""
        store = _store_of(model)
        store.refresh(model)
        return store.values.get((self, key))


def per_model(
    function: Callable[Concatenate["Model", P], T],
) -> Callable[Concatenate["Model", P], T]:
    """Decorate a function so that it runs once for each model (and further hashable arguments)."""
    memo: Memo[T] = Memo()

    @wraps(function)
    def kept(model: "Model", /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items())))
        return memo.get(model, lambda: function(model, *args, **kwargs), key=key)

    return kept


def once_per_model(
    function: Callable[Concatenate["Model", P], T],
) -> Callable[Concatenate["Model", P], T]:
    """Decorate a function so that it runs once for each model; its value must not depend on further
    arguments.
    """
    memo: Memo[T] = Memo()

    @wraps(function)
    def first(model: "Model", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return memo.get(model, lambda: function(model, *args, **kwargs))

    return first
