"""LeGrad (Bousselham 2025): the gradient of each block's own score with respect to the block's attention weights.

The score s_l of block l is the target's logit where the model's own final norm, readout and classifier read the block's
output. With the attention weights A_l (heads, query, key) the map is Σ_l mean over heads and queries of (∂s_l/∂A_l)⁺,
at the keys that are patches: the gradient alone, not times the weights, and no product over layers. Where the
classifier reads the patches by attention (SigLIP, CaiT), A_l are the pooling's weights, computed on the block's output.

Each block is differentiated from a constant input, so one backward pass gives all gradients, each through its own block
alone.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import require_chain, without_autocast
from vitlens.analysis.attention.gradients import differentiated
from vitlens.analysis.attention.methods import require_start
from vitlens.analysis.patching.contribution import logits_by_depth
from vitlens.analysis.patching.stream_to_logits import blocks_before_readout, logits_from
from vitlens.attribution.defaults import LAST_BLOCKS
from vitlens.devices import evaluating
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.lens.call import AttentionCall
from vitlens.lens.layers import Layer, layers, probe_images
from vitlens.lens.observe import observe, observing
from vitlens.models.hooks import Forward, arguments, as_call, overridden
from vitlens.models.language_image import has_text_tower
from vitlens.models.model import Model
from vitlens.names import READOUTS, Readout
from vitlens.shapes import Images, Labels, Maps, Tokens


def legrad(
    model: Model, images: Images, targets: Labels, *, start_layer: int | None = None, readout: Readout | None = None
) -> Maps:
    """LeGrad's maps (batch, rows, columns): raw, not negative, summed over the layers from start_layer on.

    start_layer: None for all layers, as in the paper, but of a language-image model the last LAST_BLOCKS, as in the
    authors' code. readout: how the score reads a block's output: as the model itself does, or "mean", all tokens
    averaged before the final norm; None for the mean where a language-image model has no attention pooling (the
    authors' code), else for the model's own. Raises InputError for a layer that does not exist, UnknownNameError or
    UnsupportedError for another readout.
    """
    blocks, averaged = blocks_before_readout(model), _is_averaged(model, readout)
    calls, streams = _apart(model, images, _chosen(model, blocks, start_layer))
    with evaluating(model), torch.enable_grad():
        stacked = torch.cat(streams)  # (layers x batch, tokens, dim)
        if model.anatomy.readout == "pool":
            calls, stacked = [], stacked.detach().requires_grad_()
            with observing(model, calls.append):
                logits = logits_from(model, stacked, blocks=blocks)
        else:
            read = stacked.mean(1, keepdim=True).expand_as(stacked) if averaged else stacked
            logits = logits_from(model, read, blocks=blocks)
        total = logits.gather(1, targets.repeat(len(streams))[:, None]).sum()
    layout = model.layout
    with torch.no_grad(), without_autocast(model.device):
        rows = [_at_keys(call) for call in differentiated(total, calls)]
        by_image = [row.unflatten(0, (-1, len(images))).sum(0)[:, -layout.patches :] for row in rows]
        maps: Maps = torch.stack(by_image).sum(0).unflatten(-1, layout.grid)
    return maps


def require_legrad(model: Model) -> None:
    """Raise UnsupportedError unless the classifier reads the output of every block as it reads that of the last one."""
    require_chain(model)
    blocks = blocks_before_readout(model)
    with torch.autocast(model.device.type, enabled=False):
        logits_by_depth(model, probe_images(model, 1), blocks)


def _is_averaged(model: Model, readout: Readout | None) -> bool:
    """Whether all tokens are averaged before the final norm, rather than read by the model's own readout."""
    if readout is not None and readout not in READOUTS:
        raise UnknownNameError("readout", readout, READOUTS)
    own = model.anatomy.readout
    chosen = readout or ("mean" if has_text_tower(model) and own != "pool" else own)
    if chosen not in (own, "mean") or (own == "pool" != chosen):
        known = own if own in ("pool", "mean") else f"{own} or mean"
        raise UnsupportedError(f"expected the readout {known} for {model.alias}, found {chosen}")
    return chosen != own


def _chosen(model: Model, blocks: Sequence[str], start_layer: int | None) -> list[Layer]:
    """The layers that are summed. A block that lost its heads has none."""
    known = [layer for layer in layers(model) if layer.unit in blocks]
    if start_layer is None:
        return known[-LAST_BLOCKS:] if has_text_tower(model) else known
    require_start(start_layer, len(known))
    return known[start_layer:]


def _apart(model: Model, images: Images, chosen: Sequence[Layer]) -> tuple[list[AttentionCall], list[Tokens]]:
    """The attention of the chosen layers and the outputs of their blocks, each block with an autograd graph of its own.

    One forward pass, whose numbers are those of the plain model.
    """
    names = {layer.attention for layer in chosen}
    calls: list[AttentionCall] = []
    streams: list[Tokens] = []

    def keep(call: AttentionCall) -> None:
        if call.site.module in names:
            calls.append(call)

    with ExitStack() as stack:
        for layer in chosen:
            block = model.module.get_submodule(layer.unit)
            stack.enter_context(overridden(block, _from_constant(layer, streams)))
        observe(model, images, keep)
    return calls, streams


def _from_constant(layer: Layer, streams: list[Tokens]) -> Callable[[Forward], Forward]:
    """Runs a block with gradients from its input on, and keeps its output with them."""

    def wrap(forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            given = arguments(args, kwargs)
            assert layer.stream is not None  # other blocks are refused by require_legrad
            args, kwargs = as_call({**given, layer.stream: given[layer.stream].detach().requires_grad_()})
            with torch.enable_grad():
                streams.append(forward(*args, **kwargs))
            return streams[-1]

        return run

    return wrap


def _at_keys(call: AttentionCall) -> Float[Tensor, "batch keys"]:
    """The positive part of the gradient at each key, mean over heads and queries."""
    gradients = (part.precise().weight_gradient() for _, part in call.parts())
    return torch.cat([gradient.clamp_min(0).mean((1, 2)) for gradient in gradients if gradient is not None])
