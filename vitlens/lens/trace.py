"""Trace: one recorded forward pass, with one and with two images of noise: which modules ran, when, on what shapes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from vitlens.devices import evaluating
from vitlens.lens.attention import Attended, Stage, Tap, TensorFunction, attention_module, tapped
from vitlens.lens.observe import survey
from vitlens.models.hooks import Arguments, Key, first_tensor, watching
from vitlens.models.memo import per_model
from vitlens.models.model import Model
from vitlens.shapes import Images

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TracedTensor:
    """A tensor that was an argument: its shape and its bytes; number: equal for the same object."""

    shape: Shape
    bytes: int
    number: int


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: when it began and ended, its arguments that are tensors, and its first output.

    output: the shape, None where that is no tensor; bytes, number: of the output where it is one tensor, else 0.
    """

    module: str
    begin: int
    end: int
    arguments: Mapping[Key, TracedTensor]
    output: Shape | None
    bytes: int
    number: int


@dataclass(frozen=True)
class Trace:
    """The calls of all modules of a model in one forward pass, in the order of their ends; the model itself is "".

    logits: their shape.
    """

    calls: tuple[ModuleCall, ...]
    logits: Shape

    @cached_property
    def by_module(self) -> Mapping[str, tuple[ModuleCall, ...]]:
        """Each module's calls, in their order."""
        found: dict[str, tuple[ModuleCall, ...]] = {}
        for call in self.calls:
            found[call.module] = (*found.get(call.module, ()), call)
        return found


@per_model
def trace(model: Model, images: int) -> Trace:
    """The trace of a forward pass of so many images."""
    numbers: Any = WeakIdKeyDictionary()  # by object, while it lives
    count, clock, begun = 0, 0, []
    calls: list[ModuleCall] = []

    def traced(tensor: Tensor) -> TracedTensor:
        nonlocal count
        if tensor not in numbers:
            count += 1
            numbers[tensor] = count
        return TracedTensor(tuple(tensor.shape), tensor.numel() * tensor.element_size(), numbers[tensor])

    def enter(_name: str, values: Arguments) -> None:
        nonlocal clock
        clock += 1
        begun.append((clock, {key: traced(value) for key, value in values.items() if isinstance(value, Tensor)}))

    def leave(name: str, _values: Arguments, output: Any) -> None:
        nonlocal clock
        clock += 1
        begin, arguments = begun.pop()
        first = first_tensor(output)
        whole = traced(output) if isinstance(output, Tensor) else None
        size, number = (0, 0) if whole is None else (whole.bytes, whole.number)
        shape = None if first is None else tuple(first.shape)
        calls.append(ModuleCall(name, begin, clock, arguments, shape, size, number))

    names = [name for name, _ in model.module.named_modules()]
    with evaluating(model), torch.no_grad(), _exact(model.device), watching(model.module, names, leave, before=enter):
        logits: Tensor = model(probe_images(model, images))
    return Trace(tuple(calls), tuple(logits.shape))


@dataclass
class TracedHeads:
    """What one attention module computed in a forward pass.

    shapes: by stage, None where it has several calls; joined: of the heads' outputs concatenated, one shape a call;
    branch: whether the module's output is that of its projection; bytes: of the output and of the heads'.
    """

    shapes: dict[Stage, Shape | None] = field(default_factory=dict)
    joined: list[Shape] = field(default_factory=list)
    branch: bool = False
    bytes: int = 0


@per_model
def traced_heads(model: Model, images: int) -> Mapping[str, TracedHeads]:
    """The heads of every attention module of the survey in a forward pass of so many images."""
    names = tuple(dict.fromkeys(site.module for site in survey(model, probe_images(model, 1))))
    found = {name: TracedHeads() for name in names}
    latest: dict[str, Tensor] = {}

    def read(call: Attended) -> None:
        shapes = found[call.module].shapes
        for stage in get_args(Stage):
            tensor = call.at(stage)
            if tensor is not None:
                shapes[stage] = None if stage in shapes else tuple(tensor.shape)

    def keep(name: str) -> TensorFunction:
        def joined(tensor: Tensor) -> Tensor:
            found[name].joined.append(tuple(tensor.shape))
            latest.setdefault(name, tensor)
            return tensor

        return joined

    def leave(name: str, _values: Arguments, result: Any) -> None:
        output = first_tensor(result)
        heads, projection = latest.pop(name, None), attention_module(model, name).projection
        found[name].branch = False
        found[name].bytes = sum(each.numel() * each.element_size() for each in (heads, output) if each is not None)
        if heads is not None and output is not None and projection is not None and not output.is_meta:
            projected = nn.functional.linear(heads, projection.weight, projection.bias)
            same = projected.shape == output.shape
            found[name].branch = same and torch.allclose(projected, output, atol=1e-5, rtol=1e-4)

    taps = [Tap((name,), joined=keep(name)) for name in names]
    with (
        evaluating(model),
        torch.no_grad(),
        _exact(model.device),
        tapped(model, Tap(names, read=read), *taps),
        watching(model.module, names, leave),
    ):
        model(probe_images(model, images))
    return found


def _exact(device: torch.device) -> AbstractContextManager[None]:
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)  # no meta device


def probe_images(model: Model, count: int) -> Images:
    """Images of uniform noise, from which shapes and the order of modules are read."""
    noise = torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device)
