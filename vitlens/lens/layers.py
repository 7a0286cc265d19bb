"""The layers of a model as interventions address them: attention, heads, block and MLP, read in one forward pass."""

import math
from dataclasses import dataclass

from torch import nn

from vitlens.lens.observe import survey
from vitlens.lens.trace import probe_images as probe_images
from vitlens.lens.trace import trace, traced_heads
from vitlens.models.hooks import Key, once_per_model
from vitlens.models.model import Model


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
    sites = {site.layer: site for site in reversed(survey(model, probe_images(model, 1)))}  # a layer's first call
    calls, heads = trace(model, 1).by_module, traced_heads(model, 1)
    found = []
    for index in range(len(sites)):
        site = sites[index]
        blocks = [block for block in model.anatomy.blocks if site.module.startswith(f"{block}.")]
        unit = max(blocks, key=len, default=site.module)
        windows, _, width = ((1, 0, 0), *heads[site.module].joined)[-1]  # (calls, tokens, heads x head_dim)
        part = model.anatomy.parts.get(site.module)
        mlp = None if part is None else part.mlp
        if mlp is None and isinstance(getattr(model.module.get_submodule(unit), "mlp", None), nn.Module):
            mlp = f"{unit}.mlp"
        if part is not None and part.heads not in (0, site.heads):
            width = 0  # not one softmax for each head that the projection reads
        call = calls[unit][-1]
        same = [key for key, value in call.arguments.items() if value.shape == call.output]
        stream = next(iter((*same, *call.arguments)), None)
        shape = () if stream is None else call.arguments[stream].shape
        tokens_first = len(shape) == 3 and shape[0] > 1 == shape[1]
        tokens = 0 if stream is None else shape[0] if tokens_first else math.prod(shape[1:-1])
        size = (site.heads, width // site.heads, windows, site.queries, site.keys)
        if tokens_first:
            stream, same = None, []
        found.append(Layer(index, site.module, unit, mlp, *size, stream, tokens, bool(same), tokens_first))
    return tuple(found)
