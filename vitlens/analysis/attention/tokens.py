"""What looks where in few images: the attention of every head between all tokens, and the rollout
by layer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import (
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

_BYTES = 1 << 28  # of the layers' means over heads, in single precision, that are held at a time


@dataclass(frozen=True)
class TokenAttention:
    """What looks where in n images, over the model's tokens (its layout); rows sum to 1. float32,
    on the CPU.

    heads (whole, layers, heads, queries, keys): of the first images; means (n, layers, queries,
    keys): over heads; rollout (n, layers, keys): from the classifier's tokens through the layers so
    far; layers: their numbers.
    """

    heads: Float[Tensor, "whole layers heads query key"]
    means: Float[Tensor, "n layers query key"]
    rollout: Float[Tensor, "n layers key"]
    layers: tuple[int, ...]


def require_token_attention(model: Model) -> None:
    """Raise UnsupportedError unless the tokens of one grid attend to each other in all layers, with
    as many heads each; a last layer with one query (class attention, attention pooling) is left
    out.
    """
    require_special_first(model)
    layout = model.anatomy.layout
    sites = survey_weights(model, probe_images(model, 1))
    for site in sites:
        whole = layout is not None and site.keys == site.queries == layout.tokens
        if site.kind != "class" and not (site.kind == "patch" and whole and site.part == 0):
            raise UnsupportedError(
                "expected layers in which every patch attends to every patch, found "
                f"{site.module!r} of {model.alias}: "
                f"{KIND_WORDS[site.kind]}{'' if site.part == 0 else ', in several parts'}"
            )
    heads = {site.heads for site in sites if site.kind == "patch"}
    if len(heads) != 1:
        found = (
            f"layers with {', '.join(map(str, sorted(heads)))}"
            if heads
            else "none in which patches attend"
        )
        raise UnsupportedError(
            f"expected layers of one number of heads in {model.alias}, found {found}"
        )


def token_attention(
    model: Model,
    images: Images,
    *,
    whole: int = WHOLE,
    pool: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> TokenAttention:
    """Return the attention of every layer between all tokens of each image, of every head for the
    first `whole` images.

    images: (n, 3, height, width) in [0, 1]; pool: what is kept of weights (..., queries, keys) on
    the CPU, with fewer queries where they are many. Rollouts of a model with attention pooling
    start from the mean over patches. Raises UnsupportedError as require_token_attention, InputError
    for no images.
    """
    require_token_attention(model)
    if not len(images):
        raise InputError("expected at least one image, found none")

    def of_batch(batch: Images, whole: int) -> tuple[Tensor, Tensor, Tensor]:
        heads: list[Tensor] = []
        means: list[Tensor] = []

        def take(call: AttentionCall) -> None:
            if call.site.kind != "patch":
                return
            mean = []
            kept = []
            with without_autocast(batch.device):
                for part, own in call.parts():
                    weights = precise(own.precise().weights())
                    mean.append(weights.mean(1))
                    kept.append(pool(weights[: max(0, whole - part.start)].cpu()))
            heads.append(torch.cat(kept))
            means.append(torch.cat(mean).float())

        observe(model, batch, take)
        rollouts = rollouts_so_far(reversed(means), _readout(model, means[0])).cpu()
        return torch.stack(heads, 1), torch.stack([pool(mean.cpu()) for mean in means], 1), rollouts

    sites = survey_weights(model, images[:1].to(model.device))
    layers = tuple(site.layer for site in sites if site.kind == "patch")
    size = max(1, _BYTES // (4 * len(layers) * model.layout.tokens**2))
    batches = (
        (images[at : at + size].to(model.device), max(0, whole - at))
        for at in range(0, len(images), size)
    )
    heads, means, rollout = map(torch.cat, zip(*(of_batch(*each) for each in batches), strict=True))
    return TokenAttention(heads, means, rollout, layers)


def rollout_by_layer(model: Model, images: Images) -> Float[Tensor, "batch layers rows columns"]:
    """Return the rollout of each image up to each layer: the map that a classifier behind that
    layer would read.

    images: (batch, 3, height, width) in [0, 1]. Where a model reads its classes by attention
    pooling, the mean over the patches is read in its place. Raises UnsupportedError as `rollout`,
    and for windows, whose stages have maps of several sizes.
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
            # class attention leaves the patches as they are
            means = (
                mean_of_heads(call) if call.site.kind == "patch" else None
                for call in reversed(chain.calls)
            )
            rows = rollouts_so_far(means, _readout(model, precise(chain.calls[0].rows((0,)))))
        parts.append(model.layout.as_map(rows))
    return torch.cat(parts)


def rollouts_so_far(
    layers: Iterable[Fused | None], start: Vector
) -> Float[Tensor, "batch layers tokens"]:
    """Return the rollout from the same row through the layers up to each layer, in forward order;
    layers: weights averaged over heads, whose rows sum to 1, from the last layer back, None for one
    that leaves the tokens as they are.
    """
    rows = start[:, None][:, :0]
    for weights in layers:  # all rows are propagated together, so each layer is read once
        rows = torch.cat((start[:, None], rows), 1)
        if weights is not None:
            rows = torch.baddbmm(rows, rows, weights, beta=ALPHA, alpha=1 - ALPHA)
    return rows


def _readout(model: Model, like: Tensor) -> Vector:
    """Return what the classifier reads, as a row over the tokens; with attention pooling the mean
    over patches.
    """
    known = model.anatomy.readout
    return readout_row(
        model.layout, "mean" if known in (None, "pool") else known, batch=len(like), like=like
    )
