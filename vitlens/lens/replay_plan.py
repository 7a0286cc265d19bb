"""The record of a clean pass, and the plan for starting the model again at one of its layers."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from vitlens.lens.attention import Tap, TensorFunction, tapped
from vitlens.lens.layers import Layer, layers
from vitlens.lens.trace import trace, traced_heads
from vitlens.models.hooks import Arguments, Forward, Key, arguments, overridden
from vitlens.models.model import Model
from vitlens.models.recording import Shape, Trace

Cache = Literal["everything", "inputs", "nothing"]


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


@dataclass
class LayerMeans:
    """Means over the images of a clean pass, by layer: heads (tokens, heads x head_dim); mlp (tokens, dim)."""

    heads: dict[int, Tensor] = field(default_factory=dict)
    mlp: dict[int, Tensor] = field(default_factory=dict)


class StopForward(Exception):  # noqa: N818  not an error
    """Stops the forward pass after the last layer that is recorded."""


@contextmanager
def recording(
    model: Model,
    records: dict[int, ReplayRecord],
    *,
    which: Collection[int],
    keep: Cache = "everything",
    stop: bool = False,
) -> Iterator[LayerMeans]:
    """Fill records of some layers during a forward pass, and take means over the images.

    keep: everything, the arguments alone, or nothing but the means. stop: raise StopForward after the last of the
    layers.
    """
    means = LayerMeans()
    with ExitStack() as stack:
        for layer in layers(model):
            if layer.index not in which:
                continue
            record = records.setdefault(layer.index, ReplayRecord())
            attention, unit = (model.module.get_submodule(name) for name in (layer.attention, layer.unit))
            stack.enter_context(overridden(attention, _attention(record, keep)))
            stack.enter_context(tapped(model, Tap((layer.attention,), joined=_heads(layer, record, means, keep))))
            if layer.mlp is not None:
                mlp = model.module.get_submodule(layer.mlp)
                stack.enter_context(overridden(mlp, _mlp(layer, means)))
            last = stop and layer.index == max(which)
            stack.enter_context(overridden(unit, _unit(record, keep, last)))
        yield means


def _unit(record: ReplayRecord, keep: Cache, last: bool) -> Callable[[Forward], Forward]:
    def wrap(forward: Forward) -> Forward:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if keep != "nothing":
                record.arguments = arguments(args, kwargs)
            output = forward(*args, **kwargs)
            if last:
                raise StopForward
            return output

        return recorded

    return wrap


def _heads(layer: Layer, record: ReplayRecord, means: LayerMeans, keep: Cache) -> TensorFunction:
    def take(heads: Tensor) -> Tensor:
        per_image = heads.unflatten(0, (-1, layer.windows)).flatten(1, 2)  # (batch, tokens, heads x head_dim)
        means.heads[layer.index] = per_image.mean(0)
        if keep == "everything":
            record.heads = heads
        return heads

    return take


def _attention(record: ReplayRecord, keep: Cache) -> Callable[[Forward], Forward]:
    def wrap(forward: Forward) -> Forward:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if keep == "everything":
                record.branch, record.rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, None)
            return result

        return recorded

    return wrap


def _mlp(layer: Layer, means: LayerMeans) -> Callable[[Forward], Forward]:
    def wrap(forward: Forward) -> Forward:
        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            output: Tensor = forward(*args, **kwargs)
            means.mlp[layer.index] = (output.flatten(1, 2) if output.dim() == 4 else output).mean(0)
            return output

        return recorded

    return wrap


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
