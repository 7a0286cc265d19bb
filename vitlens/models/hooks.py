"""Temporary access to modules: watch calls, replace a forward, intercept functions of torch.

All contexts are undone on exit, also after an exception.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from vitlens.models.nested import tensors_in

Key = int | str  # the position or the name of an argument
Arguments = dict[Key, Any]
Forward = Callable[..., Any]

# hooks that are defined in these modules are ours, or only read
_NOT_FOREIGN: Final = ("vitlens.", "transformers.utils.output_capturing")
_DEPTH: Final = ContextVar("depth", default=0)  # the number of nested `unchanged` contexts


@contextmanager
def unchanged() -> Iterator[None]:
    """Run models without the changes and hooks of this file that were entered outside."""
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
    """What `overridden` puts in place of a module's forward.

    forward: the new forward, which runs while it is in force.
    plain: the forward before, with the hooks of others that were there before.
    equal: whether both return the same outputs, for any part of a batch and of the tokens.
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

    The replacement runs around these hooks, like a context around those entered before it. The
    hooks stay registered, so that they keep their order and can be removed, but torch then calls an
    idle function in their place.
    """

    def __init__(self, module: nn.Module) -> None:
        # weak, because the module holds this object in its forward
        self._module = ref(module)
        self.forward: Forward = module.forward
        # by the numbers that torch gives to hooks, in the order of registration
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
                changed = hook(module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
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
    others = {}
    for number, hook in hooks.items():
        if not _home_of(hook).startswith(_NOT_FOREIGN):
            others[number] = hook
    return others


def _home_of(hook: Callable[..., Any]) -> str:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", ""))


def _idle(*_call: object) -> None:
    """Stand in for a hook that is called elsewhere.

    `_others` does not count it as a hook of others, because it is defined in this file.
    """


@contextmanager
def watching(
    model: nn.Module,
    names: Iterable[str],
    after: Callable[[str, Arguments, Any], object] | None = None,
    *,
    before: Callable[[str, Arguments], object] | None = None,
    always: bool = False,
) -> Iterator[None]:
    """Report every call of the named modules.

    The hooks are removed on exit, also after an exception.

    after: called with the module's name, its arguments and its output.
    before: called with the module's name and its arguments.
    always: call `after` also for a module that raised, with None as its output.
    """
    scope = _Scoped()

    def call_before(
        name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if before is not None and scope.in_force:
            before(name, arguments(args, kwargs))

    def call_after(
        name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if after is not None and scope.in_force:
            after(name, arguments(args, kwargs), output)

    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)
            if before is not None:
                pre_hook = module.register_forward_pre_hook(
                    partial(call_before, name), with_kwargs=True
                )
                stack.callback(pre_hook.remove)
            if after is not None:
                hook = module.register_forward_hook(
                    partial(call_after, name), with_kwargs=True, always_call=always
                )
                stack.callback(hook.remove)
        yield


@contextmanager
def overridden(
    module: nn.Module, wrap: Callable[[Forward], Forward], *, equal: bool = False
) -> Iterator[None]:
    """Replace the module's forward; contexts may be nested.

    wrap: a function that returns the new forward for the one before, with the hooks of others.
    equal: as in `Replaced`.
    """
    # None unless the module has a forward other than that of its class
    previous_forward = module.__dict__.get("forward")
    plain = _Hooked(module)
    try:
        module.forward = Replaced(wrap(plain), plain, equal=equal)
        yield
    finally:
        if previous_forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = previous_forward
        plain.restore()


def foreign_forward(module: nn.Module) -> Forward | None:
    """Return the forward that other code than this file has put into the module, or None."""
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
    """Return True if a hook of others was registered since the module's forward was replaced."""
    return bool(_others(module._forward_pre_hooks) or _others(module._forward_hooks))


def has_global_hooks() -> bool:
    """Return True if torch calls a hook around the forward of every module."""
    return bool(module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks)


def is_changed(module: nn.Module) -> bool:
    """Return True if anything in force changes or reads results of the module or of its parts.

    That is a context of this file, a hook of others, or a forward that others put into a module.
    For changes of attention, see `vitlens.lens.attention.is_tapped`.
    """
    return has_global_hooks() or any(map(_is_changed_itself, module.modules()))


def is_within_context(module: nn.Module) -> bool:
    """Return True inside a context of this file that replaces a forward of the module or its parts.

    A copy of the module would then call the original.
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
    return foreign_forward(module) is not None


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
    """Return a module's output if it is a tensor, or the first tensor in a tuple, list or dict.

    Returns None without a tensor.
    """
    tensors = tensors_in(output)
    return tensors[0] if tensors else None
