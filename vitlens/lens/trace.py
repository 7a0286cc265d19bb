"""Trace: one recorded forward pass, with one and with two images of noise: which modules ran, when,
on what shapes.

From it the layers of a model follow, as changes of places and replay address them: attention,
heads, block and MLP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.attention import projection_of, tapped
from vitlens.lens.call import AttentionCall, Stage
from vitlens.lens.observe import exact, survey
from vitlens.lens.site import Site
from vitlens.lens.tap import Tap, TensorFunction
from vitlens.models.hooks import Arguments, Key, first_tensor, watching
from vitlens.models.memo import once_per_model, per_model
from vitlens.models.model import Model
from vitlens.models.numbering import no_layer
from vitlens.models.recording import Recorder, Shape, Trace
from vitlens.shapes import Images


@per_model
def trace(model: Model, images: int) -> Trace:
    """Return the trace of a forward pass of so many images."""
    recorder = Recorder()
    with evaluating(model), torch.no_grad(), exact(model.device), recorder.watching(model.module):
        logits: Tensor = model(probe_images(model, images))
    return Trace(tuple(recorder.calls), tuple(logits.shape))


@dataclass
class TracedHeads:
    """The shapes that one attention module computed in a forward pass.

    shapes: by stage, None where it has several calls.
    joined: of the heads' outputs concatenated, one shape a call.
    branch: whether the module's output is that of its projection.
    bytes: the size in bytes of the output and of the heads'.
    """

    shapes: dict[Stage, Shape | None] = field(default_factory=dict)
    joined: list[Shape] = field(default_factory=list)
    branch: bool = False
    bytes: int = 0


@per_model
def traced_heads(model: Model, images: int) -> Mapping[str, TracedHeads]:
    """Return the heads of every attention module of the survey in a forward pass of so many
    images."""
    names = tuple(dict.fromkeys(site.module for site in survey(model, probe_images(model, 1))))
    traced = {name: TracedHeads() for name in names}
    latest: dict[str, Tensor] = {}

    def read(call: AttentionCall, scored: Tensor | None) -> None:
        shapes = traced[call.site.module].shapes
        for stage in get_args(Stage):
            tensor = call.at(stage, scored=scored)
            if tensor is not None:
                shapes[stage] = None if stage in shapes else tuple(tensor.shape)

    def record_heads(name: str) -> TensorFunction:
        def record(tensor: Tensor) -> Tensor:
            traced[name].joined.append(tuple(tensor.shape))
            latest.setdefault(name, tensor)
            return tensor

        return record

    def leave(name: str, _values: Arguments, result: Any) -> None:
        output = first_tensor(result)
        heads = latest.pop(name, None)
        projection = projection_of(model, name)
        module = traced[name]
        module.branch = False
        module.bytes = _bytes(heads) + _bytes(output)
        if (
            heads is not None
            and output is not None
            and projection is not None
            and not output.is_meta
        ):
            projected = nn.functional.linear(heads, projection.weight, projection.bias)
            same_shape = projected.shape == output.shape
            module.branch = same_shape and torch.allclose(projected, output, atol=1e-5, rtol=1e-4)

    taps = [Tap((name,), joined=record_heads(name)) for name in names]
    with (
        evaluating(model),
        torch.no_grad(),
        exact(model.device),
        tapped(model, Tap(names, read=read), *taps),
        watching(model.module, names, leave),
    ):
        model(probe_images(model, images))
    return traced


def _bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Layer:
    """One layer, or a block without attention.

    index: the number of its block, from 0 in the order of the forward pass (see
        models/numbering.py).
    attention: module name, "" where the block has none.
    unit: the block that contains it, or attention itself where none does (SigLIP's pooling).
    mlp: the block's MLP, or None.
    heads: 0 of a block without attention.
    head_dim: 0 where there is no output projection over all heads.
    windows: calls per image.
    queries, keys: of one call.
    stream: the argument of the unit that is the residual stream, or None.
    tokens: their number in the stream.
    removable: whether the unit's output has the shape of that argument.
    tokens_first: whether the stream is (tokens, batch, width), as nn.TransformerEncoderLayer's
        default is, and cannot be changed.
    """

    index: int
    attention: str
    unit: str
    mlp: str | None
    heads: int
    head_dim: int
    windows: int
    queries: int
    keys: int
    stream: Key | None
    tokens: int
    removable: bool
    tokens_first: bool = False


def layers(model: Model) -> tuple[Layer, ...]:
    """Return every attention layer with its block, MLP and heads; read once per model.

    Raises UnsupportedError for a model without attention (a CNN).
    """
    return tuple(block for block in blocks(model) if block.attention)


def layer_at(model: Model, number: int) -> Layer:
    """Return the layer of this number.

    Raises InputError where its block has no attention, and where there is none.
    """
    model_layers = layers(model)
    for layer in model_layers:
        if layer.index == number:
            return layer
    raise InputError(no_layer([layer.index for layer in model_layers], number, model.alias))


def block_at(model: Model, number: int) -> Layer:
    """Return the layer, or the block without attention, of this number; there is one."""
    return next(block for block in blocks(model) if block.index == number)


def depth(model: Model) -> int:
    """Return how many numbers there are: of layers, and of blocks without attention.

    Raises UnsupportedError for a model without attention (a CNN).
    """
    modules = {site.module for site in survey(model, probe_images(model, 1))}
    return len(modules) + len(model.anatomy.without_attention)


@once_per_model
def blocks(model: Model) -> tuple[Layer, ...]:
    """Return every attention layer and every block without attention that is a module, in the order
    of their numbers.

    Raises UnsupportedError for a model without attention (a CNN).
    """
    # a layer's first call
    sites = {site.layer: site for site in reversed(survey(model, probe_images(model, 1)))}
    numbered = [_layer(model, site) for site in sites.values()]
    parts = model.anatomy.parts
    before = [
        parts[layer.attention].blocks_before for layer in numbered if layer.attention in parts
    ]
    calls = trace(model, 1).by_module
    for rank, name in enumerate(model.anatomy.without_attention):
        if len(calls.get(name, ())) == 1:
            number = rank + sum(count <= rank for count in before)
            numbered.append(_block(model, number, name))
    return tuple(sorted(numbered, key=lambda layer: layer.index))


def _layer(model: Model, site: Site) -> Layer:
    """Return the layer of an attention site, with its block, MLP and heads."""
    around = [block for block in model.anatomy.blocks if site.module.startswith(f"{block}.")]
    unit = max(around, key=len, default=site.module)
    part = model.anatomy.parts.get(site.module)
    mlp = None if part is None else part.mlp
    windows = 1
    width = 0
    joined = traced_heads(model, 1)[site.module].joined
    if joined:
        windows, _, width = joined[-1]  # (calls, tokens, heads x head_dim)
    if part is not None and part.heads not in (0, site.heads):
        width = 0  # not one softmax for each head that the projection reads
    return replace(
        _block(model, site.layer, unit, mlp=mlp),
        attention=site.module,
        heads=site.heads,
        head_dim=width // site.heads,
        windows=windows,
        queries=site.queries,
        keys=site.keys,
    )


def _block(model: Model, index: int, unit: str, *, mlp: str | None = None) -> Layer:
    """Return a block without its attention; mlp: its MLP, where it is known."""
    if mlp is None and isinstance(
        getattr(model.module.get_submodule(unit), "mlp", None), nn.Module
    ):
        mlp = f"{unit}.mlp"
    call = trace(model, 1).by_module[unit][-1]
    same_shape = [key for key, value in call.arguments.items() if value.shape == call.output]
    removable = bool(same_shape)
    stream: Key | None = None
    tokens = 0
    tokens_first = False
    if call.arguments:
        stream = (same_shape or list(call.arguments))[0]
        shape = call.arguments[stream].shape
        tokens_first = len(shape) == 3 and shape[0] > 1 and shape[1] == 1
        tokens = shape[0] if tokens_first else math.prod(shape[1:-1])
    if tokens_first:
        stream = None
        removable = False
    return Layer(
        index,
        "",
        unit,
        mlp,
        heads=0,
        head_dim=0,
        windows=1,
        queries=0,
        keys=0,
        stream=stream,
        tokens=tokens,
        removable=removable,
        tokens_first=tokens_first,
    )


def probe_images(model: Model, count: int) -> Images:
    """Return images of uniform noise, from which shapes and the order of modules are read."""
    noise = torch.rand(count, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    return noise.to(model.device)
