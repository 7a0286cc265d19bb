"""Touches: places of a model read or changed in every forward pass inside a context, undone on exit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitlens.lens.attention import Attended, Stage, Tap, TensorFunction, tapped
from vitlens.lens.places.access import Access
from vitlens.models.hooks import Arguments, Forward, Replaced, arguments, as_call, first_tensor, overridden
from vitlens.models.model import Model

Before = Callable[[Arguments], Arguments]
After = Callable[[Arguments, Any], Any]


@dataclass(frozen=True)
class Touch:
    """What is done at one place in a forward pass.

    change: of the place's tensor (batch, *shape) to one of that shape; reads: it returns its tensor unchanged, so that
    the forward pass stays bit-equal; rows: query rows that a reading of scores or weights takes (None: all).
    """

    access: Access
    change: TensorFunction
    reads: bool = False
    rows: tuple[int, ...] | None = None


@contextmanager
def touched(model: Model, touches: Sequence[Touch]) -> Iterator[None]:
    """Inside, every forward pass of the model is touched; of several touches of a tensor, the earlier come first."""
    with ExitStack() as stack:
        for touch in touches:
            module = model.module.get_submodule(touch.access.module)
            if touch.access.part in ("inside", "joined"):
                stack.enter_context(tapped(model, _tap(touch)))
            elif touch.access.part == "input":
                stack.enter_context(around(module, before=_on_input(touch)))
            elif touch.access.part == "output":
                stack.enter_context(around(module, after=_on_output(touch)))
        yield


class AroundForward:
    """A module's forward between changes of its arguments and of its output, each in the order of their contexts."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.before: list[Before] = []
        self.after: list[After] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward with the changes."""
        values = arguments(args, kwargs)
        for before in self.before:
            values = before(values)
        args, kwargs = as_call(values)
        output = self.forward(*args, **kwargs)
        for after in self.after:
            output = after(values, output)
        return output


@contextmanager
def around(module: nn.Module, *, before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """Inside, the module's arguments and its output are changed.

    Nested contexts share one replaced forward, so that an inner context reads the arguments that an outer one changed.
    """
    with ExitStack() as stack:
        replaced = module.__dict__.get("forward")
        shared = isinstance(replaced, Replaced) and replaced.in_force and isinstance(replaced.forward, AroundForward)
        if not shared:
            stack.enter_context(overridden(module, AroundForward))
        current: AroundForward = module.__dict__["forward"].forward
        if before is not None:
            current.before.append(before)
            stack.callback(_remove, current.before, before)
        if after is not None:
            current.after.append(after)
            stack.callback(_remove, current.after, after)
        yield


def _remove(changes: list[Any], change: object) -> None:
    """Remove the latest entry of this change."""
    del changes[next(index for index in reversed(range(len(changes))) if changes[index] is change)]


def _tap(touch: Touch) -> Tap:
    """What a touch does inside the attention of its module."""
    modules, change = (touch.access.module,), _on_raw(touch)
    if touch.access.part == "joined":
        return Tap(modules, joined=change)
    stage: Stage = touch.access.place.kind  # type: ignore[assignment]
    if not touch.reads:
        return Tap(modules, changes={stage: change})

    def read(call: Attended) -> None:
        found = call.at(stage, slice(None) if touch.rows is None else touch.rows)
        if found is not None:
            change(found)

    return Tap(modules, read=read)


def _on_raw(touch: Touch) -> TensorFunction:
    def on_raw(raw: Tensor) -> Tensor:
        if touch.reads:
            touch.change(touch.access.read(raw))
            return raw
        return touch.access.changed(raw, touch.change)

    return on_raw


def _on_input(touch: Touch) -> Before:
    change, key = _on_raw(touch), touch.access.argument
    assert key is not None

    def on_input(values: Arguments) -> Arguments:
        return {**values, key: change(values[key])}

    return on_input


def _on_output(touch: Touch) -> After:
    change = _on_raw(touch)

    def on_output(_values: Arguments, output: Any) -> Any:
        tensor = first_tensor(output)
        if tensor is None:
            return output
        new = change(tensor)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return on_output
