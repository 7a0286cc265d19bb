"""Recorded forward passes of one and of two images of noise, and the layers of a model in them.

A trace holds which modules ran, when, and on which shapes. From it follow the layers, as changes of
places and replay address them: attention, heads, block and MLP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

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

# largest difference of an output from that of a projection, by rounding in fp32
_ATOL: Final = 1e-5
_RTOL: Final = 1e-4


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

    shapes: the shape of each stage's tensor; None if the module has several calls.
    joined: the shape of the concatenated outputs of the heads, for each call.
    branch: whether the module's output is that of its output projection.
    bytes: the size of the module's output and of its heads' outputs.
    """

    shapes: dict[Stage, Shape | None] = field(default_factory=dict)
    joined: list[Shape] = field(default_factory=list)
    branch: bool = False
    bytes: int = 0


@per_model
def traced_heads(model: Model, images: int) -> Mapping[str, TracedHeads]:
    """Return the heads of each attention module of the survey, in a pass of so many images."""
    names = tuple(dict.fromkeys(site.module for site in survey(model, probe_images(model, 1))))
    traced = {name: TracedHeads() for name in names}
    # the concatenated heads of each module that is running, until it ends
    heads_of_call: dict[str, Tensor] = {}

    def read(call: AttentionCall, scored: Tensor | None) -> None:
        shapes = traced[call.site.module].shapes
        for stage in get_args(Stage):
            tensor = call.at(stage, scored=scored)
            if tensor is not None:
                shapes[stage] = None if stage in shapes else tuple(tensor.shape)

    def record_heads(name: str) -> TensorFunction:
        def record(tensor: Tensor) -> Tensor:
            traced[name].joined.append(tuple(tensor.shape))
            heads_of_call.setdefault(name, tensor)
            return tensor

        return record

    def leave(name: str, _values: Arguments, result: Any) -> None:
        output = first_tensor(result)
        heads = heads_of_call.pop(name, None)
        projection = projection_of(model, name)
        traced[name].branch = False
        traced[name].bytes = _bytes(heads) + _bytes(output)
        if heads is None or output is None or projection is None or output.is_meta:
            return
        projected = nn.functional.linear(heads, projection.weight, projection.bias)
        if projected.shape == output.shape:
            traced[name].branch = torch.allclose(projected, output, atol=_ATOL, rtol=_RTOL)

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
    """One attention layer, or a block without attention.

    index: the number of its block, from 0 in the order of the forward pass (see
        models/numbering.py).
    attention: the name of the attention module, or "" for a block without attention.
    unit: the name of the block that contains the attention, or of the attention itself if no block
        does (SigLIP's pooling).
    mlp: the name of the block's MLP, or None.
    heads: the number of heads, 0 for a block without attention.
    head_dim: the width of a head, 0 if no output projection reads all heads.
    windows: the number of calls per image.
    queries: the number of queries in one call.
    keys: the number of keys in one call.
    stream: the argument of the unit that is the residual stream, or None.
    tokens: the number of tokens in the stream.
    removable: whether the unit's output has the shape of that argument.
    tokens_first: whether the stream is (tokens, batch, width), as by default in
        nn.TransformerEncoderLayer. It cannot be changed then.
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

    Raises InputError if there is no such block, or if it has no attention.
    """
    model_layers = layers(model)
    for layer in model_layers:
        if layer.index == number:
            return layer
    raise InputError(no_layer([layer.index for layer in model_layers], number, model.alias))


def block_at(model: Model, number: int) -> Layer:
    """Return the layer, or the block without attention, of this number, which must exist."""
    return next(block for block in blocks(model) if block.index == number)


def depth(model: Model) -> int:
    """Return the number of layers and blocks without attention.

    Raises UnsupportedError for a model without attention (a CNN).
    """
    modules = {site.module for site in survey(model, probe_images(model, 1))}
    return len(modules) + len(model.anatomy.without_attention)


@once_per_model
def blocks(model: Model) -> tuple[Layer, ...]:
    """Return every attention layer and every block without attention, in the order of numbers.

    Raises UnsupportedError for a model without attention (a CNN).
    """
    # of a layer with several calls, the first one remains
    sites = {site.layer: site for site in reversed(survey(model, probe_images(model, 1)))}
    numbered = [_layer(model, site) for site in sites.values()]
    parts = model.anatomy.parts
    # for each layer, how many blocks without attention are before it
    blocks_before = [
        parts[layer.attention].blocks_before for layer in numbered if layer.attention in parts
    ]
    calls = trace(model, 1).by_module
    for rank, name in enumerate(model.anatomy.without_attention):
        if len(calls.get(name, ())) == 1:
            # Its number is the count of all blocks and layers before it: `rank` blocks without
            # attention, and the attention layers that have at most `rank` such blocks before them.
            layers_before = sum(count <= rank for count in blocks_before)
            numbered.append(_block(model, rank + layers_before, name))
    return tuple(sorted(numbered, key=lambda layer: layer.index))


def _layer(model: Model, site: Site) -> Layer:
    """Return the layer of an attention site, with its block, MLP and heads."""
    around = [block for block in model.anatomy.blocks if site.module.startswith(f"{block}.")]
    unit = max(around, key=len, default=site.module)
    part = model.anatomy.parts.get(site.module)
    mlp = None if part is None else part.mlp  # as a forward pass has shown it
    windows = 1
    width = 0
    joined = traced_heads(model, 1)[site.module].joined
    if joined:
        windows, _, width = joined[-1]  # (calls, tokens, heads x head_dim)
    if part is not None and part.heads not in (0, site.heads):
        width = 0  # the projection reads other heads than those with a softmax
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
    """Return a block without its attention; mlp: the name of its MLP, if it is known."""
    named_mlp = getattr(model.module.get_submodule(unit), "mlp", None)  # timm's name, and ours
    if mlp is None and isinstance(named_mlp, nn.Module):
        mlp = f"{unit}.mlp"
    call = trace(model, 1).by_module[unit][-1]
    same_shape = [key for key, value in call.arguments.items() if value.shape == call.output]
    removable = bool(same_shape)
    stream: Key | None = None
    tokens = 0
    tokens_first = False
    if call.arguments:
        candidates = same_shape or list(call.arguments)
        stream = candidates[0]
        shape = call.arguments[stream].shape
        # the trace is of one image: an axis of length 1 in second place is the batch
        tokens_first = len(shape) == 3 and shape[0] > 1 and shape[1] == 1
        tokens = shape[0] if tokens_first else math.prod(shape[1:-1])
    if tokens_first:
        stream = None
        removable = False
    return Layer(
        index=index,
        attention="",
        unit=unit,
        mlp=mlp,
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
