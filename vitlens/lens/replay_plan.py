"""How to start a model again from one of its layers: which modules to skip, what to put in, read from its own calls."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.lens.inside import Inside, overridden, projection_of
from vitlens.lens.layers import Key, Layer, arguments, layers, probe_images
from vitlens.models.model import Model

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Start:
    """How to start at one layer.

    skipped: modules that are over before it begins, and the shape of what they put out for one image; batched: which
    arguments of its unit go with the images; carried: arguments that a later unit is given unchanged (layer, its name
    there, its name here); branch: whether attention puts out what its projection made, so that changes of heads can be
    added to it; bytes: an image's arguments and, apart, the branch with the heads' outputs.
    """

    skipped: tuple[tuple[str, Shape], ...]
    batched: frozenset[Key]
    carried: tuple[tuple[int, Key, Key], ...]
    branch: bool
    bytes: tuple[int, int]


@dataclass(frozen=True)
class Plan:
    """starts: one a layer; largest: bytes of the largest tensor that a module puts out for one image."""

    starts: tuple[Start, ...]
    largest: int


class _Calls:
    """What every module did in one forward pass: when it began and ended, and the shape of what it put out."""

    def __init__(self) -> None:
        self.clock = 0
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self.shapes: dict[str, Shape | None] = {}
        self.arguments: dict[str, dict[Key, Any]] = {}
        self.branch: dict[str, bool] = {}
        self.sizes: dict[str, int] = {}
        self._begun: list[int] = []

    @contextmanager
    def watching(self, model: Model) -> Iterator[None]:
        """Hooks on all modules, overrides on units and attentions; gone on exit."""
        units = {layer.unit for layer in layers(model)}
        with ExitStack() as stack:
            for name, module in model.module.named_modules():
                before = module.register_forward_pre_hook(self._enter(name, name in units), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(self._leave(name)).remove)
            for layer in layers(model):
                module = model.module.get_submodule(layer.attention)
                stack.enter_context(overridden(module, self._attention(layer, module)))
            yield

    def _enter(self, name: str, unit: bool) -> Callable[..., None]:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.clock += 1
            self._begun.append(self.clock)
            if unit:
                self.arguments[name] = arguments(args, kwargs)

        return enter

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            self.clock += 1
            self.spans.setdefault(name, []).append((self._begun.pop(), self.clock))
            self.shapes[name] = tuple(output.shape) if isinstance(output, Tensor) else None

        return leave

    def _attention(self, layer: Layer, module: nn.Module) -> Callable[..., Any]:
        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                joined: list[Tensor] = []
                with Inside(module, joined=lambda outputs: joined.append(outputs) or outputs):  # type: ignore[func-returns-value]
                    result = forward(*args, **kwargs)
                output = result[0] if isinstance(result, tuple) else result
                projection = projection_of(module)
                branch = False
                if joined and projection is not None and layer.attention != layer.unit:
                    made = torch.nn.functional.linear(joined[0], projection.weight, projection.bias)
                    branch = made.shape == output.shape and torch.allclose(made, output, atol=1e-5, rtol=1e-4)
                self.branch[layer.attention] = branch
                self.sizes[layer.attention] = sum(map(_bytes, (*joined, output)))
                return result

            return watched

        return wrap


def make_plan(model: Model) -> Plan:
    """The plan of a model, from one forward pass of one image and one of two (what doubles goes with the images)."""
    one, two = _Calls(), _Calls()
    with evaluating(model), torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        for count, calls in ((1, one), (2, two)):
            with calls.watching(model):
                model(probe_images(model, count))
    starts = tuple(_start(model, layer, one, two) for layer in layers(model))
    largest = max(4 * torch.Size(shape).numel() for name, shape in one.shapes.items() if _doubles(name, one, two))  # type: ignore[arg-type]
    return Plan(starts, largest)


def _start(model: Model, layer: Layer, one: _Calls, two: _Calls) -> Start:
    begin = two.spans[layer.unit][0][0]
    own, own_one = two.arguments[layer.unit], one.arguments[layer.unit]
    batched = frozenset(
        key
        for key, value in own.items()
        if isinstance(value, Tensor) and value.dim() and len(value) == 2 * len(own_one[key])
    )
    carried = tuple(
        (later.index, there, here)
        for later in layers(model)[layer.index + 1 :]
        for there, value in two.arguments[later.unit].items()
        for here in batched
        if value is own[here]
    )
    skipped = tuple(_skippable(model.module, "", begin, one, two))
    sizes = sum(_bytes(own_one[key]) for key in batched), one.sizes[layer.attention]
    return Start(skipped, batched, carried, two.branch[layer.attention] and one.branch[layer.attention], sizes)


def _skippable(module: nn.Module, name: str, begin: int, one: _Calls, two: _Calls) -> Iterator[tuple[str, Shape]]:
    """The outermost modules whose calls are all over before `begin`, and which put out tensors that go with images."""
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        spans = two.spans.get(full, [])
        if spans and all(end < begin for _, end in spans) and _doubles(full, one, two):
            shape = one.shapes[full]
            assert shape is not None
            yield full, shape
        else:
            yield from _skippable(child, full, begin, one, two)


def _doubles(name: str, one: _Calls, two: _Calls) -> bool:
    first, second = one.shapes.get(name), two.shapes.get(name)
    return bool(first) and second is not None and second == (2 * first[0], *first[1:])  # type: ignore[index]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
