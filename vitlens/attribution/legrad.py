"""LeGrad (Bousselham 2025): gradients of scores of blocks with respect to attention weights.

The score s_l of block l is the target's logit where the final norm, readout and classifier of the
model read the output of the block. With the attention weights A_l (heads, query, key) the map is
Σ_l mean over heads and queries of (∂s_l/∂A_l)⁺, at the keys that are patches. The gradient is not
multiplied by the weights, and layers are summed, not multiplied. Where the classifier reads the
patches by attention (SigLIP, CaiT), A_l are the weights of this pooling on the output of block l.

Each block is differentiated from a constant input, so one backward pass gives all gradients, each
through one block only.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import differentiate_calls, require_chain, without_autocast
from vitlens.analysis.attention.methods import require_start
from vitlens.analysis.patching.logit_lens import logits_by_depth
from vitlens.analysis.patching.stream import blocks_of, logits_from
from vitlens.attribution.registry import LAST_BLOCKS
from vitlens.devices import evaluating
from vitlens.errors import UnknownNameError, UnsupportedError
from vitlens.lens.call import AttentionCall
from vitlens.lens.differentiable import needs_gradients, require_no_steps
from vitlens.lens.observe import observe, observing
from vitlens.lens.trace import Layer, layers, probe_images
from vitlens.models.hooks import Forward, Key, arguments, as_call, overridden
from vitlens.models.language_image import is_language_image
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
    """Return the maps of LeGrad (batch, rows, columns): raw, not negative, summed over layers.

    start_layer: the first layer of the sum. None: all layers, as in the paper, but only the last
        LAST_BLOCKS of a language-image model, as in the authors' code.
    readout: how the score reads the output of a block: as the model does, or "mean" (all tokens
        averaged before the final norm). None: the mean for a language-image model without attention
        pooling, as in the authors' code, else as the model does.

    Raises InputError for a layer that does not exist, UnknownNameError or UnsupportedError for
    another readout.
    """
    blocks = blocks_of(model, pooled=True)
    averaged = _is_averaged(model, readout)
    chosen = [layer for layer in layers(model) if layer.unit in blocks]
    if start_layer is not None:
        require_start(start_layer, 1 + chosen[-1].index)
        chosen = [layer for layer in chosen if layer.index >= start_layer]
    elif is_language_image(model):
        chosen = chosen[-LAST_BLOCKS:]

    def compute_calls() -> tuple[AttentionCall, ...]:
        return _differentiated_calls(model, images, targets, chosen, averaged=averaged)

    def gradients_of(calls: Sequence[AttentionCall]) -> list[Tensor | None]:
        return [call.gradient for call in calls]

    layout = model.layout
    # `compute_calls` runs again only if a gradient is zero for all images
    calls = require_no_steps(model, compute_calls, gradients_of)
    maps = list[Tensor]()  # of each call (batch, patches)
    with torch.no_grad(), without_autocast(model.device):
        for call in calls:
            # (batch, keys) for the call of one layer. The one call of an attention pooling reads
            # the outputs of all blocks: (layers x batch, keys), layer by layer.
            at_keys = _mean_positive_gradient(call)
            summed_over_layers = at_keys.unflatten(0, (-1, len(images))).sum(0)
            maps.append(summed_over_layers[:, -layout.patches :])
        total: Maps = torch.stack(maps).sum(0).unflatten(-1, layout.grid)
    return total


def _mean_positive_gradient(call: AttentionCall) -> Float[Tensor, "batch key"]:
    """Return the mean over heads and queries of the positive part of the gradient, at each key."""
    parts = list[Tensor]()  # of a few images each
    for _, part in call.parts():
        gradient = part.precise().weight_gradient()  # (images, heads, query, key)
        if gradient is not None:
            parts.append(gradient.clamp_min(0).mean((1, 2)))
    return torch.cat(parts)


def _differentiated_calls(
    model: Model, images: Images, targets: Labels, chosen: Sequence[Layer], *, averaged: bool
) -> tuple[AttentionCall, ...]:
    """Return the attention of the chosen layers with the gradients of the scores.

    There is one call for each layer. With attention pooling there is one call in all: the pooling
    on the outputs of all blocks, with a batch of (layers x batch), layer by layer.

    averaged: True if the classifier reads the mean of all tokens, see `_is_averaged`.
    """
    blocks = blocks_of(model, pooled=True)
    calls, outputs = _separate_blocks(model, images, chosen)
    with evaluating(model), torch.enable_grad():
        stacked = torch.cat(outputs)  # (layers x batch, tokens, dim)
        if model.anatomy.readout == "pool":
            calls = []  # the call of the pooling replaces those of the blocks
            stacked = stacked.detach().requires_grad_()
            with observing(model, calls.append):
                logits = logits_from(model, stacked, blocks=blocks)
        else:
            if averaged:  # whatever token the classifier reads, it is the mean
                stacked = stacked.mean(1, keepdim=True).expand_as(stacked)
            logits = logits_from(model, stacked, blocks=blocks)
        total = logits.gather(1, targets.repeat(len(outputs))[:, None]).sum()
    return differentiate_calls(total, calls)


@requirement("depths")
def require_legrad(model: Model) -> None:
    """Raise UnsupportedError unless the classifier can read the output of every block.

    It must read it as it reads that of the last block.
    """
    require_chain.check(model)
    blocks = blocks_of(model, pooled=True)
    with torch.autocast(model.device.type, enabled=False):
        logits_by_depth(model, probe_images(model, 1), blocks)


def _is_averaged(model: Model, readout: Readout | None) -> bool:
    """Return True if all tokens are averaged before the final norm, not read as the model does."""
    if readout is not None and readout not in READOUTS:
        raise UnknownNameError("readout", readout, READOUTS)
    readout_of_model = model.anatomy.readout
    # A model that reads the mean needs no change. The map of an attention pooling is that of the
    # weights with which it reads different tokens; averaged tokens would all be equal.
    can_be_averaged = readout_of_model not in ("mean", "pool")
    if readout is None:
        return can_be_averaged and is_language_image(model)
    if readout == readout_of_model:
        return False
    if readout == "mean" and can_be_averaged:
        return True
    expected = str(readout_of_model)
    if can_be_averaged:
        expected += " or mean"
    raise UnsupportedError(f"expected the readout {expected} for {model.alias}, found {readout}")


def _separate_blocks(
    model: Model, images: Images, chosen: Sequence[Layer]
) -> tuple[list[AttentionCall], list[Tokens]]:
    """Return the attention of the chosen layers and the outputs of their blocks.

    Each block has an autograd graph that begins at its input. The numbers of the one forward pass
    are those of the plain model. Calls and outputs are in the order of the forward pass.
    """
    attention_modules = {layer.attention for layer in chosen}
    calls: list[AttentionCall] = []
    outputs: list[Tokens] = []

    def from_constant(stream: Key | None) -> Callable[[Forward], Forward]:
        """Return a function that wraps the forward of a block, see `overridden`.

        stream: the block's argument that holds the tokens.
        """
        assert stream is not None  # other blocks are refused by require_legrad

        def wrap(forward: Forward) -> Forward:
            def forward_from_constant(*args: Any, **kwargs: Any) -> Tensor:
                values = arguments(args, kwargs)
                tokens = values[stream].detach().requires_grad_()
                args, kwargs = as_call({**values, stream: tokens})
                with torch.enable_grad():
                    output: Tensor = forward(*args, **kwargs)
                outputs.append(output)
                return output

            return forward_from_constant

        return wrap

    def keep(call: AttentionCall) -> None:
        if call.site.module in attention_modules:
            calls.append(call)

    with ExitStack() as stack:
        for layer in chosen:
            block = model.module.get_submodule(layer.unit)
            stack.enter_context(overridden(block, from_constant(layer.stream)))
        observe(model, images, keep)
    return calls, outputs
