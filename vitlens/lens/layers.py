"""The layers of a model as interventions address them: attention, heads, block and MLP, read in one forward pass."""

import math
from dataclasses import dataclass

from torch import nn

from vitlens.lens.observe import survey
from vitlens.lens.site import Site
from vitlens.lens.trace import probe_images as probe_images
from vitlens.lens.trace import trace, traced_heads
from vitlens.models.hooks import Key, once_per_model
from vitlens.models.model import Model
from vitlens.models.recording import ModuleCall


@dataclass(frozen=True)
class Layer:
    """One layer, counted from 0 in the order of the forward pass.

    attention: module name; unit: the block that contains it, or attention itself where none does (SigLIP's pooling);
    mlp: the block's MLP, or None; head_dim: 0 where there is no output projection over all heads; windows: calls per
    image; queries, keys: of one call; stream: the argument of the unit that is the residual stream, or None; tokens:
    their number in the stream; removable: whether the unit's output has the shape of that argument; tokens_first:
    whether the stream is (tokens, batch, width), as nn.TransformerEncoderLayer's default is, and cannot be changed.
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


@once_per_model
def layers(model: Model) -> tuple[Layer, ...]:
    """Every attention layer with its block, MLP and heads; read once per model.

    Raises UnsupportedError for a model without attention (a CNN).
    """
    image = probe_images(model, 1)
    sites = {site.layer: site for site in reversed(survey(model, image))}  # a layer's first call
    units = [_unit(model, sites[index].module) for index in range(len(sites))]
    calls, heads = trace(model, 1).by_module, traced_heads(model, 1)
    return tuple(
        _layer(
            model,
            sites[index],
            unit,
            ((1, 0, 0), *heads[sites[index].module].joined)[-1],
            _stream(calls[unit][-1]),
        )
        for index, unit in enumerate(units)
    )


def _layer(
    model: Model, site: Site, unit: str, joined: tuple[int, ...], stream: tuple[Key | None, int, bool, bool]
) -> Layer:
    """joined: the shape of the output projection's input, (calls, tokens, heads x head_dim)."""
    block = model.module.get_submodule(unit)
    calls, _, width = joined
    part = model.anatomy.parts.get(site.module)
    mlp = part.mlp if part is not None else None
    if mlp is None and isinstance(getattr(block, "mlp", None), nn.Module):
        mlp = f"{unit}.mlp"
    if part is not None and part.heads not in (0, site.heads):
        width = 0  # not one softmax for each head that the projection reads
    size = (site.heads, width // site.heads, calls, site.queries, site.keys)
    return Layer(site.layer, site.module, unit, mlp, *size, *stream)


def _unit(model: Model, attention: str) -> str:
    blocks = [block for block in model.anatomy.blocks if attention.startswith(f"{block}.")]
    return max(blocks, key=len) if blocks else attention


def _stream(call: ModuleCall) -> tuple[Key | None, int, bool, bool]:
    """Which argument of a block is the residual stream, how many tokens it has, if the output has its shape, and if
    its first axis is that of tokens, for one image."""
    same = [key for key, value in call.arguments.items() if value.shape == call.output]
    key = next(iter((*same, *call.arguments)), None)
    shape = () if key is None else call.arguments[key].shape
    if len(shape) == 3 and shape[0] > 1 == shape[1]:
        return None, shape[0], False, True
    return key, math.prod(shape[1:-1]) if key is not None else 0, bool(same), False
