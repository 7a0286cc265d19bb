"""The record of a clean pass, and the plan for starting the model again at one of its layers."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.lens.attention import Tap, TensorFunction, attention_module, tapped
from vitlens.lens.hooks import Arguments, Forward, Key, arguments, overridden, watching
from vitlens.lens.layers import Layer, layers, probe_images
from vitlens.models.model import Model

Cache = Literal["everything", "inputs", "nothing"]
Shape = tuple[int, ...]


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


class _Calls:
    """Every module's calls in one forward pass: when each began and ended, and the shape of its output."""

    def __init__(self) -> None:
        self.clock = 0
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.shapes: dict[str, Shape | None] = {}
        self.arguments: dict[str, Arguments] = {}
        self.branch: dict[str, bool] = {}
        self.sizes: dict[str, int] = {}
        self._begun: list[int] = []

    @contextmanager
    def watching(self, model: Model) -> Iterator[None]:
        """Watch all modules, and the inside of attention, for one forward pass."""
        units = {layer.unit for layer in layers(model)}

        def enter(name: str, call_arguments: Arguments) -> None:
            self.clock += 1
            self._begun.append(self.clock)
            if name in units:
                self.arguments[name] = call_arguments

        def leave(name: str, _arguments: Arguments, output: Any) -> None:
            self.clock += 1
            self.spans.setdefault(name, []).append((self._begun.pop(), self.clock))
            self.shapes[name] = tuple(output.shape) if isinstance(output, Tensor) else None

        names = [name for name, _ in model.module.named_modules()]
        with ExitStack() as stack:
            stack.enter_context(watching(model.module, names, leave, before=enter))
            for layer in layers(model):
                joined: list[Tensor] = []
                stack.enter_context(tapped(model, Tap((layer.attention,), joined=_into(joined))))
                attention = model.module.get_submodule(layer.attention)
                stack.enter_context(overridden(attention, self._attention(model, layer, joined)))
            yield

    def _attention(self, model: Model, layer: Layer, joined: list[Tensor]) -> Callable[[Forward], Forward]:
        projection = attention_module(model, layer.attention).projection

        def wrap(forward: Forward) -> Forward:
            def watched(*args: Any, **kwargs: Any) -> Any:
                joined.clear()
                result = forward(*args, **kwargs)
                output = result[0] if isinstance(result, tuple) else result
                branch = False
                if joined and projection is not None and layer.attention != layer.unit:
                    projected = torch.nn.functional.linear(joined[0], projection.weight, projection.bias)
                    branch = projected.shape == output.shape and torch.allclose(projected, output, atol=1e-5, rtol=1e-4)
                self.branch[layer.attention] = branch
                self.sizes[layer.attention] = sum(map(_bytes, (*joined[:1], output)))
                return result

            return watched

        return wrap


def _into(found: list[Tensor]) -> TensorFunction:
    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    return keep


def make_plan(model: Model) -> ReplayPlan:
    """The plan of a model, from a forward pass of one image and of two: the axis that doubles is the batch."""
    single, double = _Calls(), _Calls()
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        for count, calls in ((1, single), (2, double)):
            with calls.watching(model):
                model(probe_images(model, count))
    starts = tuple(_start(model, layer, single, double) for layer in layers(model))
    batched = [shape for name, shape in single.shapes.items() if shape and _is_batched(name, single, double)]
    largest = max(4 * torch.Size(shape).numel() for shape in batched)
    return ReplayPlan(starts, largest)


def _start(model: Model, layer: Layer, single: _Calls, double: _Calls) -> ReplayStart:
    begin = double.spans[layer.unit][0][0]
    batch_arguments, single_arguments = double.arguments[layer.unit], single.arguments[layer.unit]
    batched = frozenset(
        key
        for key, value in batch_arguments.items()
        if isinstance(value, Tensor) and value.dim() and len(value) == 2 * len(single_arguments[key])
    )
    carried = tuple(
        (later.index, there, here)
        for later in layers(model)[layer.index + 1 :]
        for there, value in double.arguments[later.unit].items()
        for here in batched
        if value is batch_arguments[here]
    )
    skipped = tuple(_skippable(model.module, "", begin, single, double))
    sizes = sum(_bytes(single_arguments[key]) for key in batched), single.sizes[layer.attention]
    branch = double.branch[layer.attention] and single.branch[layer.attention]
    return ReplayStart(skipped, batched, carried, branch, sizes)


def _skippable(module: nn.Module, name: str, begin: int, single: _Calls, double: _Calls) -> Iterator[tuple[str, Shape]]:
    """The outermost modules whose calls end before `begin` and whose outputs have the batch as their first axis."""
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        spans = double.spans.get(full, [])
        if spans and all(end < begin for _, end in spans) and _is_batched(full, single, double):
            shape = single.shapes[full]
            assert shape is not None
            yield full, shape
        else:
            yield from _skippable(child, full, begin, single, double)


def _is_batched(name: str, single: _Calls, double: _Calls) -> bool:
    first, second = single.shapes.get(name), double.shapes.get(name)
    return bool(first) and second is not None and second == (2 * first[0], *first[1:])  # type: ignore[index]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
