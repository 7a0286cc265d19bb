"""Trace: one recorded forward pass, with one and with two images of noise: which modules ran, when, on what shapes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.lens.attention import Attended, Stage, Tap, TensorFunction, attention_module, tapped
from vitlens.lens.observe import survey
from vitlens.models.hooks import Arguments, first_tensor, per_model, watching
from vitlens.models.model import Model
from vitlens.models.recording import Recorder, Shape, Trace
from vitlens.shapes import Images


@per_model
def trace(model: Model, images: int) -> Trace:
    """The trace of a forward pass of so many images."""
    recorder = Recorder()
    with evaluating(model), torch.no_grad(), _exact(model.device), recorder.watching(model.module):
        logits: Tensor = model(probe_images(model, images))
    return Trace(tuple(recorder.calls), tuple(logits.shape))


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
