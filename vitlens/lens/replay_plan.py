"""The record of a clean pass, and the plan for starting the model again at one of its layers."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from vitlens.lens.attention import Tap, tapped
from vitlens.lens.trace import Layer, layers, trace, traced_heads
from vitlens.models.hooks import Arguments, Forward, Key, arguments, overridden
from vitlens.models.model import Model
from vitlens.models.recording import Shape, Trace


@dataclass
class ReplayRecord:
    """What is kept of one layer in a clean pass.

    arguments: of its unit, by position or name; branch: its attention's output, before LayerScale; rest: further return
    values of the attention; heads: the output projection's input, (calls, tokens, heads x head_dim).
    """

    arguments: Arguments = field(default_factory=dict)
    branch: Tensor | None = None
    rest: tuple[Any, ...] | None = None
    heads: Tensor | None = None

    def taking_arguments(self, forward: Forward) -> Forward:
        """The forward of the layer's unit, which keeps its arguments."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.arguments = arguments(args, kwargs)
            return forward(*args, **kwargs)

        return recorded

    def taking_branch(self, forward: Forward) -> Forward:
        """The forward of the layer's attention, which keeps its output."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self.branch, self.rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
            return result

        return recorded

    def take_heads(self, heads: Tensor) -> Tensor:
        """Keep the heads' outputs."""
        self.heads = heads
        return heads


class StopForward(Exception):  # noqa: N818  not an error
    """Stops the forward pass after the layer that is recorded."""


@contextmanager
def recording(model: Model, keep: Mapping[int, bool], *, stop: bool = False) -> Iterator[dict[int, ReplayRecord]]:
    """Inside, a forward pass fills the records of some layers.

    keep: the layers, each with whether its attention's outputs are kept beside its unit's arguments. stop: raise
    StopForward after the first of them.
    """
    records = {index: ReplayRecord() for index in keep}
    with ExitStack() as stack:
        for index, record in records.items():
            layer = layers(model)[index]
            unit = model.module.get_submodule(layer.unit)
            if keep[index]:
                attention = model.module.get_submodule(layer.attention)
                stack.enter_context(overridden(attention, record.taking_branch))
                stack.enter_context(tapped(model, Tap((layer.attention,), joined=record.take_heads)))
            stack.enter_context(overridden(unit, record.taking_arguments))
            if stop:
                stack.enter_context(overridden(unit, _stopping))
        yield records


def _stopping(forward: Forward) -> Forward:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        forward(*args, **kwargs)
        raise StopForward

    return stopped


@dataclass(frozen=True)
class ReplayStart:
    """How to start a forward pass at one layer.

    skipped: modules whose calls end before it begins, and the shape of their output for one image; batched: arguments
    of its unit whose first axis is the batch; carried: arguments that are passed unchanged to a later unit (layer, name
    there, name here); branch: whether attention's output is that of its projection, so that changes of heads can be
    added to it; bytes: of one image's arguments, and of its branch with the heads' outputs.
    """

    skipped: tuple[tuple[str, Shape], ...]
    batched: frozenset[Key]
    carried: tuple[tuple[int, Key, Key], ...]
    branch: bool
    bytes: tuple[int, int]


@dataclass(frozen=True)
class ReplayPlan:
    """starts: one per layer; largest: bytes of the largest module output for one image."""

    starts: tuple[ReplayStart, ...]
    largest: int

    def kept(self, images: int, budget: int) -> dict[int, bool]:
        """Which layers' arguments are kept of so many images, and whether their attention's outputs are, too.

        budget: bytes; arguments come first, as without them all layers before run again.
        """
        keep: dict[int, bool] = {}
        for outputs in (False, True):
            for index, start in enumerate(self.starts):
                size = start.bytes[outputs] * images
                if size <= budget and (index in keep or not outputs):
                    keep[index] = outputs
                    budget -= size
        return keep


def make_plan(model: Model) -> ReplayPlan:
    """The plan of a model, from the traces of one image and of two: the axis that doubles is the batch."""
    single, double = trace(model, 1), trace(model, 2)
    starts = tuple(_start(model, layer, single, double) for layer in layers(model))
    shapes = [shape for name in single.by_module if (shape := _batched_shape(name, single, double)) is not None]
    return ReplayPlan(starts, max(4 * math.prod(shape) for shape in shapes))


def _start(model: Model, layer: Layer, single: Trace, double: Trace) -> ReplayStart:
    heads = [traced_heads(model, count)[layer.attention] for count in (1, 2)]
    begin = double.by_module[layer.unit][0].begin
    of_one, of_two = (each.by_module[layer.unit][-1].arguments for each in (single, double))
    batched = frozenset(
        key for key, value in of_two.items() if value.shape and value.shape[0] == 2 * of_one[key].shape[0]
    )
    carried = tuple(
        (later.index, there, here)
        for later in layers(model)[layer.index + 1 :]
        for there, value in double.by_module[later.unit][-1].arguments.items()
        for here in batched
        if value.number == of_two[here].number
    )
    skipped = tuple(_skippable(model.module, "", begin, single, double))
    sizes = sum(of_one[key].bytes for key in batched), heads[0].bytes
    branch = layer.attention != layer.unit and all(each.branch for each in heads)
    return ReplayStart(skipped, batched, carried, branch, sizes)


def _skippable(module: nn.Module, name: str, begin: int, single: Trace, double: Trace) -> Iterator[tuple[str, Shape]]:
    """The outermost modules whose calls end before `begin` and whose outputs have the batch as their first axis."""
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        shape, calls = _batched_shape(full, single, double), double.by_module.get(full, ())
        if shape is not None and all(call.end < begin for call in calls):
            yield full, shape
        else:
            yield from _skippable(child, full, begin, single, double)


def _batched_shape(name: str, single: Trace, double: Trace) -> Shape | None:
    """The shape of a module's output for one image where it is one tensor whose first axis is the batch, else None."""
    one, two = (each.by_module.get(name, (None,))[-1] for each in (single, double))
    if one is None or two is None or not (one.bytes and two.bytes and one.output and two.output):
        return None
    return one.output if two.output == (2 * one.output[0], *one.output[1:]) else None
