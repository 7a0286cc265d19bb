"""Relevance (Chefer 2021, "generic attention-model explainability"): attention weighted by the gradient of a logit.

Ā = mean over heads of (∂logit/∂A ⊙ A)⁺ (equation 5); R ← R + Ā R from R = I, layer by layer (equation 6). One row of R
needs only products of a vector and a matrix, from the last layer back.
"""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import Chain, chain_length, over_batches
from vitlens.analysis.attention.defaults import ALPHA
from vitlens.analysis.attention.readout import pooling_row
from vitlens.analysis.attention.rollout import RolloutSettings, require_start, step
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.models.model import Model
from vitlens.names import Readout
from vitlens.pixels import AnyImages, Parts, Targets, as_parts, as_targets, takes_images
from vitlens.shapes import Fused, Maps, Weights

Vector = Float[Tensor, "batch tokens"]


def gradient_weighted(weights: Weights, gradient: Weights) -> Fused:
    """Ā: the attention that raises the target's logit, mean over heads (Chefer 2021, equation 5)."""
    return (weights * gradient).clamp_min(0).mean(1)


def relevance_matrix(layers: Iterable[Fused]) -> Fused:
    """The whole relevance matrix, R ← R + Ā R from R = I in forward order: O(N³) a layer, only for few tokens."""
    product: Tensor | None = None
    for fused in layers:
        before = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device) if product is None else product
        product = before + fused @ before
    if product is None:
        raise InputError("expected at least one layer, found none")
    return product


@takes_images
def relevance(
    model: Model,
    images: AnyImages,
    *,
    targets: Targets = "predicted",
    start_layer: int = 0,
    readout: Readout | None = None,
) -> Maps:
    """The relevance of each patch for a target class through attention: (batch, rows, columns), not scaled.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; targets: "predicted", "label"
    (of a Split or class folders), a class by name or index, or class indices (batch,). The target's logit is
    differentiated, not its probability. readout: what the classifier reads (the model's own by default). Of a windowed
    model (Swin) the map is that of the first stage. Raises InputError for a class that does not exist, UnsupportedError
    as `rollout`.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> vitlens.relevance(vit, torch.rand(2, 3, 32, 32), targets=torch.tensor([3, 8])).shape
    torch.Size([2, 8, 8])
    """
    images = as_parts(images)
    _require_chain(model, images, start_layer)
    return over_batches(
        model,
        images,
        lambda chain: relevance_maps(chain, start_layer=start_layer),
        targets=as_targets(targets),
        gradient=True,
        readout=readout,
    )


@takes_images
def gradient_rollout(
    model: Model,
    images: AnyImages,
    *,
    targets: Targets = "predicted",
    alpha: float = ALPHA,
    start_layer: int = 0,
    readout: Readout | None = None,
) -> Maps:
    """Attention rollout with Ā in place of the heads' mean: (batch, rows, columns). Arguments as in `relevance`.

    alpha: weight of the identity; a row without any positive gradient becomes that of the identity.
    """
    RolloutSettings(alpha=alpha)  # raises for values out of range
    images = as_parts(images)
    _require_chain(model, images, start_layer)
    return over_batches(
        model,
        images,
        lambda chain: gradient_rollout_maps(chain, alpha=alpha, start_layer=start_layer),
        targets=as_targets(targets),
        gradient=True,
        readout=readout,
    )


def relevance_maps(chain: Chain, *, start_layer: int = 0) -> Maps:
    """The relevance maps of a chain with gradients."""
    return chain.as_map(relevance_of(chain, start_layer=start_layer))


def gradient_rollout_maps(chain: Chain, *, alpha: float = ALPHA, start_layer: int = 0) -> Maps:
    """The gradient-weighted rollout maps of a chain with gradients."""
    return chain.as_map(gradient_rollout_of(chain, alpha=alpha, start_layer=start_layer))


def relevance_of(chain: Chain, *, start_layer: int = 0) -> Vector:
    """The readout's row of R - I of a chain with gradients, over all tokens."""

    def one_step(row: Vector, weights: Weights, gradient: Weights | None, whole: bool) -> Vector:  # noqa: ARG001
        return row + (row.unsqueeze(1) @ _required(weights, gradient)).squeeze(1)

    def pool(rows: Sequence[Float[Tensor, "batch keys"]]) -> Vector:
        return pooled_relevance(rows, tokens=chain.model.layout.tokens)

    start = chain.start(pooling=_pooling, pool=pool, start_layer=start_layer)
    row = chain.follow(start, one_step, start_layer=start_layer)
    if chain.readout == "pool":  # a pooling query is no token, so its row contains no identity
        return row
    return row - chain.follow(
        start, one_step, start_layer=len(chain.calls)
    )  # the identity, through the merging of patches only


def gradient_rollout_of(chain: Chain, *, alpha: float = ALPHA, start_layer: int = 0) -> Vector:
    """The readout's row of the gradient-weighted rollout of a chain, over all tokens.

    It sums to 1, or to 0 for a pooling query without any positive gradient, which has no token of its own.
    """

    def one_step(row: Vector, weights: Weights, gradient: Weights | None, whole: bool) -> Vector:  # noqa: ARG001
        return step(row, _required(weights, gradient), alpha)

    def pool(rows: Sequence[Float[Tensor, "batch keys"]]) -> Vector:
        return pooling_row(rows, chain.model.layout, alpha=alpha)

    row = chain.start(pooling=_pooling, pool=pool, start_layer=start_layer)
    return chain.follow(row, one_step, start_layer=start_layer)


def pooled_relevance(layers: Sequence[Float[Tensor, "batch keys"]], *, tokens: int) -> Vector:
    """The relevance of the tokens for a pooling query or class attention; layers: Ā of its rows, in forward order.

    A pooling query (SigLIP) has all tokens as keys. Class attention (CaiT) has keys (CLS, tokens): R ← R + Ā R with CLS
    as the one row that changes.
    """
    if not layers:
        raise UnsupportedError("expected attention pooling for --readout pool, found none; try --readout cls or mean")
    if layers[-1].shape[-1] == tokens:
        return layers[-1]
    own, row = torch.ones_like(layers[-1][:, :1]), torch.zeros_like(layers[-1][:, 1:])
    for fused in reversed(layers):
        row, own = row + own * fused[:, 1:], own + own * fused[:, :1]
    return row


def _required(weights: Weights, gradient: Weights | None) -> Fused:
    assert gradient is not None  # the chain was made with gradients
    return gradient_weighted(weights, gradient)


def _pooling(call: AttentionCall) -> Float[Tensor, "batch keys"]:
    exact = call.precise()
    return _required(precise(exact.weights()), exact.weight_gradient())[:, 0]


def _require_chain(model: Model, images: Parts, start_layer: int) -> None:
    require_start(start_layer, chain_length(model, images[:1]))
