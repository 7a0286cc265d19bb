"""LeGrad (Bousselham 2025): the gradient of each block's own score with respect to the block's
attention weights.

The score s_l of block l is the target's logit where the model's own final norm, readout and
classifier read the block's output. With the attention weights A_l (heads, query, key) the map is
Σ_l mean over heads and queries of (∂s_l/∂A_l)⁺, at the keys that are patches: the gradient alone,
not times the weights, and no product over layers. Where the classifier reads the patches by
attention (SigLIP, CaiT), A_l are the pooling's weights, computed on the block's output.

Each block is differentiated from a constant input, so one backward pass gives all gradients, each
through its own block alone.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from vitlens.analysis.attention.chain import differentiated, require_chain, without_autocast
from vitlens.analysis.attention.methods import require_start
from vitlens.analysis.patching.contribution import blocks_of, logits_by_depth, logits_from
from vitlens.attribution.registry import LAST_BLOCKS
from vitlens.devices import evaluating
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.lens.call import AttentionCall
from vitlens.lens.differentiable import needs_gradients, require_no_steps
from vitlens.lens.observe import observe, observing
from vitlens.lens.trace import Layer, layers, probe_images
from vitlens.models.hooks import Forward, Key, arguments, as_call, overridden
from vitlens.models.language_image import has_text_tower
from vitlens.models.model import Model
from vitlens.models.requirement import requirement
from vitlens.names import READOUTS, Readout
from vitlens.shapes import Images, Labels, Maps, Tokens


@needs_gradients
def legrad(
    model: Model,
    images: Images,
    targets: Labels,
    *,
    start_layer: int | None = None,
    readout: Readout | None = None,
) -> Maps:
    """LeGrad's maps (batch, rows, columns): raw, not negative, summed over the layers from
    start_layer on.

    start_layer: None for all layers, as in the paper, but of a language-image model the last
    LAST_BLOCKS, as in the authors' code. readout: how the score reads a block's output: as the
    model itself does, or "mean", all tokens averaged before the final norm; None for the mean where
    a language-image model has no attention pooling (the authors' code), else for the model's own.
    Raises InputError for a layer that does not exist, UnknownNameError or UnsupportedError for
    another readout.
    """
    blocks = blocks_of(model, pooled=True)
    averaged = _is_averaged(model, readout)
    chosen = [
        layer for layer in layers(model) if layer.unit in blocks
    ]  # a block that lost its heads has none
    last = chosen
    if start_layer is not None:
        require_start(start_layer, 1 + chosen[-1].index)
        last = [layer for layer in chosen if layer.index >= start_layer]
    elif has_text_tower(model):
        last = chosen[-LAST_BLOCKS:]

    def compute() -> tuple[AttentionCall, ...]:
        return _differentiated_calls(model, images, targets, last, averaged=averaged)

    layout = model.layout
    calls = require_no_steps(model, compute, lambda result: [call.gradient for call in result])
    with torch.no_grad(), without_autocast(model.device):
        by_image = []
        for call in calls:  # at each key the mean over heads and queries of the positive part
            gradients = (part.precise().weight_gradient() for _, part in call.parts())
            at_keys = torch.cat(
                [own.clamp_min(0).mean((1, 2)) for own in gradients if own is not None]
            )
            by_image.append(at_keys.unflatten(0, (-1, len(images))).sum(0)[:, -layout.patches :])
        maps: Maps = torch.stack(by_image).sum(0).unflatten(-1, layout.grid)
    return maps


def _differentiated_calls(
    model: Model, images: Images, targets: Labels, chosen: Sequence[Layer], *, averaged: bool
) -> tuple[AttentionCall, ...]:
    """Return the attention of the chosen layers, or the pooling on each block's output, with the
    gradients of the scores.
    """
    blocks = blocks_of(model, pooled=True)
    calls, streams = _apart(model, images, chosen)
    with evaluating(model), torch.enable_grad():
        stacked = torch.cat(streams)  # (layers x batch, tokens, dim)
        if model.anatomy.readout == "pool":
            calls = []
            stacked = stacked.detach().requires_grad_()
            with observing(model, calls.append):
                logits = logits_from(model, stacked, blocks=blocks)
        else:
            read = stacked.mean(1, keepdim=True).expand_as(stacked) if averaged else stacked
            logits = logits_from(model, read, blocks=blocks)
        total = logits.gather(1, targets.repeat(len(streams))[:, None]).sum()
    return differentiated(total, calls)


@requirement("depths")
def require_legrad(model: Model) -> None:
    """Raise UnsupportedError unless the classifier reads the output of every block as it reads that
    of the last one.
    """
    require_chain.check(model)
    blocks = blocks_of(model, pooled=True)
    with torch.autocast(model.device.type, enabled=False):
        logits_by_depth(model, probe_images(model, 1), blocks)


def _is_averaged(model: Model, readout: Readout | None) -> bool:
    """Return True if all tokens are averaged before the final norm, rather than read by the model's
    own readout.
    """
    if readout is not None and readout not in READOUTS:
        raise UnknownNameError("readout", readout, READOUTS)
    own = model.anatomy.readout
    chosen = readout or ("mean" if has_text_tower(model) and own != "pool" else own)
    if chosen not in (own, "mean") or (own == "pool" != chosen):
        known = own if own in ("pool", "mean") else f"{own} or mean"
        raise UnsupportedError(f"expected the readout {known} for {model.alias}, found {chosen}")
    return chosen != own


def _apart(
    model: Model, images: Images, chosen: Sequence[Layer]
) -> tuple[list[AttentionCall], list[Tokens]]:
    """Return the attention of the chosen layers and the outputs of their blocks, each block with an
    autograd graph of its own from its input on.

    One forward pass, whose numbers are those of the plain model.
    """
    names = {layer.attention for layer in chosen}
    calls: list[AttentionCall] = []
    streams: list[Tokens] = []

    def from_constant(stream: Key | None) -> Callable[[Forward], Forward]:
        assert stream is not None  # other blocks are refused by require_legrad

        def wrap(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Tensor:
                given = arguments(args, kwargs)
                args, kwargs = as_call({**given, stream: given[stream].detach().requires_grad_()})
                with torch.enable_grad():
                    streams.append(forward(*args, **kwargs))
                return streams[-1]

            return run

        return wrap

    def keep(call: AttentionCall) -> None:
        if call.site.module in names:
            calls.append(call)

    with ExitStack() as stack:
        for layer in chosen:
            stack.enter_context(
                overridden(model.module.get_submodule(layer.unit), from_constant(layer.stream))
            )
        observe(model, images, keep)
    return calls, streams
