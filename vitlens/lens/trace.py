"""Trace: one recorded forward pass, with one and with two images of noise: which modules ran, when, on what shapes."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from vitlens.devices import evaluating
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

    output: the shape, None where that is no tensor; bytes: of the output where it is one tensor, else 0.
    """

    module: str
    begin: int
    end: int
    arguments: Mapping[Key, TracedTensor]
    output: Shape | None
    bytes: int


@dataclass(frozen=True)
class Trace:
    """The calls of all modules of a model in one forward pass, in the order of their ends; the model itself is ""."""

    calls: tuple[ModuleCall, ...]

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
        size = output.numel() * output.element_size() if isinstance(output, Tensor) else 0
        calls.append(ModuleCall(name, begin, clock, arguments, None if first is None else tuple(first.shape), size))

    names = [name for name, _ in model.module.named_modules()]
    kind = model.device.type
    exact = nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)  # it knows no meta device
    with evaluating(model), torch.no_grad(), exact, watching(model.module, names, leave, before=enter):
        model(probe_images(model, images))
    return Trace(tuple(calls))


def probe_images(model: Model, count: int) -> Images:
    """Images of uniform noise, from which shapes and the order of modules are read."""
    noise = torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device)
