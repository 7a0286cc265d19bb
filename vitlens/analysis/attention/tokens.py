"""Attention of every head between all tokens of a few images, and the rollout up to each layer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import (
    Chain,
    Vector,
    chained,
    mean_of_heads,
    readout_row,
    require_chain,
    without_autocast,
)
from vitlens.analysis.attention.registry import ALPHA, WHOLE
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.lens.observe import observe, require_special_first, survey_weights
from vitlens.lens.site import KIND_WORDS
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.shapes import Fused, Images

_BYTES = 1 << 28  # most bytes at a time for the means over heads of all layers, in fp32


@dataclass(frozen=True)
class TokenAttention:
    """Attention of n images between the model's tokens, in float32 on the CPU. Rows sum to 1.

    heads (whole, layers, heads, queries, keys): the weights of every head for the first images.
    means (n, layers, queries, keys): the mean weights over heads.
    rollout (n, layers, keys): the rollout from the classifier's tokens up to each layer.
    layers: the numbers of the layers.
    """

    heads: Float[Tensor, "whole layers heads query key"]
    means: Float[Tensor, "n layers query key"]
    rollout: Float[Tensor, "n layers key"]
    layers: tuple[int, ...]


def require_token_attention(model: Model) -> None:
    """Raise UnsupportedError unless the tokens of one grid attend to each other in all layers.

    All layers must have the same number of heads. A last layer with one query (class attention,
    attention pooling) does not count.
    """
    require_special_first(model)
    layout = model.anatomy.layout
    sites = survey_weights(model, probe_images(model, 1))
    for site in sites:
        if site.kind == "class":
            continue
        has_all_tokens = layout is not None and site.keys == site.queries == layout.tokens
        if site.kind != "patch" or site.part != 0 or not has_all_tokens:
            parts = "" if site.part == 0 else ", in several parts"
            raise UnsupportedError(
                "expected layers in which every patch attends to every patch, found "
                f"{site.module!r} of {model.alias}: {KIND_WORDS[site.kind]}{parts}"
            )
    heads = {site.heads for site in sites if site.kind == "patch"}
    if len(heads) != 1:
        layers = "none in which patches attend"
        if heads:
            layers = f"layers with {', '.join(map(str, sorted(heads)))}"
        raise UnsupportedError(
            f"expected layers of one number of heads in {model.alias}, found {layers}"
        )


def token_attention(
    model: Model,
    images: Images,
    *,
    whole: int = WHOLE,
    pool: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> TokenAttention:
    """Return the attention of every layer between all tokens of each image.

    Rollouts of a model with attention pooling start from the mean over patches.

    images (n, 3, height, width): images in [0, 1].
    whole: the number of first images with weights of every head in the result.
    pool: reduces weights (..., queries, keys) on the CPU to fewer queries if there are many.

    Raises UnsupportedError as require_token_attention, and InputError without images.
    """
    require_token_attention(model)
    if not len(images):
        raise InputError("expected at least one image, found none")
    sites = survey_weights(model, images[:1].to(model.device))
    layers = tuple(site.layer for site in sites if site.kind == "patch")
    size = max(1, _BYTES // (4 * len(layers) * model.layout.tokens**2))
    parts = []
    for start in range(0, len(images), size):
        batch = images[start : start + size].to(model.device)
        whole_in_batch = max(0, whole - start)
        parts.append(_attention_of_batch(model, batch, whole_in_batch, pool))
    return TokenAttention(
        heads=torch.cat([part.heads for part in parts]),
        means=torch.cat([part.means for part in parts]),
        rollout=torch.cat([part.rollouts for part in parts]),
        layers=layers,
    )


class _BatchAttention(NamedTuple):
    """Attention of one batch; see TokenAttention."""

    heads: Tensor
    means: Tensor
    rollouts: Tensor


def _attention_of_batch(
    model: Model, images: Images, whole: int, pool: Callable[[Tensor], Tensor]
) -> _BatchAttention:
    """Return the attention of one batch; arguments are those of `token_attention`."""
    heads: list[Tensor] = []
    means: list[Tensor] = []

    def take(call: AttentionCall) -> None:
        """Add one layer; called for each attention call of the pass."""
        if call.site.kind != "patch":
            return
        layer_heads = []
        layer_means = []
        with without_autocast(images.device):
            for part_images, part in call.parts():  # a slice of the batch, and the call for it
                weights = precise(part.precise().weights())
                layer_means.append(weights.mean(1))
                whole_here = max(0, whole - part_images.start)
                layer_heads.append(pool(weights[:whole_here].cpu()))
        heads.append(torch.cat(layer_heads))
        means.append(torch.cat(layer_means).float())

    observe(model, images, take)
    rollouts = rollouts_so_far(reversed(means), _readout(model, means[0])).cpu()
    pooled = [pool(mean.cpu()) for mean in means]
    return _BatchAttention(
        heads=torch.stack(heads, 1), means=torch.stack(pooled, 1), rollouts=rollouts
    )


def rollout_by_layer(model: Model, images: Images) -> Float[Tensor, "batch layers rows columns"]:
    """Return the rollout of each image up to each layer.

    It is the map that a classifier after that layer would read. If the model reads its classes by
    attention pooling, rollout starts from the mean over the patches.

    images (batch, 3, height, width): images in [0, 1].

    Raises UnsupportedError as `rollout`, and for windows, because their stages have maps of several
    sizes.
    """
    if model.anatomy.layout is None:
        raise UnsupportedError(
            f"expected one sequence of tokens in all layers, found windows in {model.alias}"
        )
    require_chain(model)
    parts = []
    for batch in images.split(fitting_batch_size(model)):
        chain = chained(model, batch.to(model.device))
        with without_autocast(model.device):
            start = _readout(model, precise(chain.calls[0].rows((0,))))
            rows = rollouts_so_far(_means_from_last(chain), start)
        parts.append(model.layout.as_map(rows))
    return torch.cat(parts)


def _means_from_last(chain: Chain) -> Iterator[Fused | None]:
    """Yield the mean weights of each layer, from the last layer back.

    None stands for class attention, which leaves the patches unchanged.
    """
    for call in reversed(chain.calls):
        yield mean_of_heads(call) if call.site.kind == "patch" else None


def rollouts_so_far(
    layers: Iterable[Fused | None], start: Vector
) -> Float[Tensor, "batch layers tokens"]:
    """Return the rollout from one row through the layers up to each layer, in forward order.

    layers: the mean weights over heads of each layer, from the last layer back. None for a layer
        that leaves the tokens unchanged.
    start: the row to start from.
    """
    # rows (batch, layers so far, tokens): rows[:, 0] is the rollout up to the layer at hand, the
    # others are those up to the layers after it. Layers come last to first, and each puts its row
    # in front, so that the rows are in forward order at the end.
    start_row = start[:, None]
    rows = start_row[:, :0]  # none yet
    for weights in layers:
        rows = torch.cat((start_row, rows), 1)
        if weights is not None:
            rows = torch.baddbmm(rows, rows, weights, beta=ALPHA, alpha=1 - ALPHA)
    return rows


def _readout(model: Model, like: Tensor) -> Vector:
    """Return the tokens that the classifier reads, as a row.

    With attention pooling this is the mean over patches.
    """
    readout = model.anatomy.readout
    if readout is None or readout == "pool":
        readout = "mean"
    return readout_row(model.layout, readout, batch=len(like), like=like)
