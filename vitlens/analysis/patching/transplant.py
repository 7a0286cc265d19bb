"""One part of a donor's run at a time put into a receiver's: heads, blocks, MLPs, tokens."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.devices import evaluating
from vitlens.lens.capture import watching_mlps
from vitlens.lens.interventions import HeadReplaced, Intervention, MLPReplaced, StreamPatched
from vitlens.lens.layers import Layer, layers
from vitlens.lens.replay import Replay
from vitlens.models.model import Model
from vitlens.shapes import Heads, Images, Tokens

Part = Literal["heads", "blocks", "mlps", "positions"]
PARTS: tuple[Part, ...] = get_args(Part)
Runs = Float[Tensor, "places pairs classes"]


def transplants(
    donor: Replay, receiver: Replay, *, mlps: dict[int, Tokens], tokens: Sequence[int] | None = None
) -> dict[Part, Iterator[Runs]]:
    """The receiver's logits with each part of the donor's run in it, layer by layer, run when they are asked for.

    mlps: the donor's (`mlp_outputs`), by layer; tokens: which positions (None: all; the others are NaN).
    """
    found = layers(receiver.model)
    return {
        "heads": (_patch_heads(donor, receiver, layer) for layer in found),
        "blocks": (_patch_block(donor, receiver, layer, mlps) for layer in found),
        "mlps": (_patch_mlp(receiver, layer, mlps) for layer in found),
        "positions": (_patch_tokens(donor, receiver, layer, tokens) for layer in found),
    }


def _patch_heads(donor: Replay, receiver: Replay, layer: Layer) -> Runs:
    what = heads_given(layer, donor.head_output(layer.index))
    return receiver.run([*what], replacements=what)


def heads_given(layer: Layer, outputs: Heads) -> dict[Intervention, Tensor]:
    """Every head of a layer as an intervention, with the output to put in its place."""
    return {HeadReplaced(layer.index, head, "given"): outputs[:, head] for head in range(layer.heads)}


def _patch_block(donor: Replay, receiver: Replay, layer: Layer, mlps: dict[int, Tokens]) -> Runs:
    what = heads_given(layer, donor.head_output(layer.index))
    if layer.index in mlps:
        what[MLPReplaced(layer.index, "given")] = mlps[layer.index]
    return receiver.run([tuple(what)], replacements=what)


def _patch_mlp(receiver: Replay, layer: Layer, mlps: dict[int, Tokens]) -> Runs:
    if layer.index not in mlps:
        return torch.full_like(receiver.logits.unsqueeze(0), torch.nan)
    what = MLPReplaced(layer.index, "given")
    return receiver.run([what], replacements={what: mlps[layer.index]})


def _patch_tokens(donor: Replay, receiver: Replay, layer: Layer, tokens: Sequence[int] | None) -> Runs:
    stream = donor.block_input(layer.index)
    count = stream.shape[1]
    places = range(count) if tokens is None else [place for place in tokens if place < count or not layer.index]
    what = tokens_given(layer, stream, places)
    result = receiver.logits.new_full((count, *receiver.logits.shape), torch.nan)
    if what:  # not where patches were merged until there is no such token
        result[list(places)] = receiver.run([*what], replacements=what)
    return result


def tokens_given(layer: Layer, stream: Tokens, places: Sequence[int]) -> dict[Intervention, Tensor]:
    """Every token position at a block's input as an intervention, with the residual stream to put in its place."""
    return {StreamPatched(layer.index, (place,)): stream[:, place : place + 1] for place in places}


def mlp_outputs(model: Model, images: Images) -> dict[int, Tokens]:
    """The output of each layer's MLP, (images, tokens, dim), by layer."""
    with evaluating(model), torch.no_grad(), watching_mlps(model, layers(model)) as outputs:
        model(images)
    return outputs
