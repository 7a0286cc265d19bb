"""Attention rollout (Abnar & Zuidema 2020): attention multiplied through the layers, with the residual connection.

Â = rows of (1 - alpha) A + alpha I, scaled to sum to 1; R = Â_L ... Â_1. One row of R needs only products of a vector
and a matrix, from the last layer back: O(layers N²), not O(layers N³).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.attention.chain import Chain, chain_length, over_batches
from vitlens.analysis.attention.defaults import ALPHA
from vitlens.analysis.attention.readout import pooling_row
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.call import AttentionCall, precise
from vitlens.models.model import Model
from vitlens.names import FUSIONS, Fusion, Readout
from vitlens.pixels import AnyImages, as_parts, takes_images
from vitlens.shapes import Fused, Images, Maps, Weights

Vector = Float[Tensor, "batch tokens"]


@dataclass(frozen=True)
class RolloutSettings:
    """fusion: of the heads; discard: lowest fraction of each query row set to zero (CLS column kept); alpha: weight of
    the identity; start_layer: the first layer included, from 0. Raises InputError for values out of range."""

    fusion: Fusion = "mean"
    discard: float = 0.0
    alpha: float = ALPHA
    start_layer: int = 0

    def __post_init__(self) -> None:
        if self.fusion not in FUSIONS:
            raise UnknownNameError("fusion", self.fusion, FUSIONS)
        if not 0 <= self.discard < 1:
            raise InputError(f"expected --discard in [0, 1), found {self.discard}")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"expected --alpha in [0, 1], found {self.alpha}")
        if self.start_layer < 0:
            raise InputError(f"expected --start-layer of at least 0, found {self.start_layer}")


def fuse(weights: Weights, fusion: Fusion) -> Fused:
    """One weight per query and key: the mean, maximum or minimum over heads."""
    if fusion == "mean":
        return weights.mean(1)
    return weights.amax(1) if fusion == "max" else weights.amin(1)


def discard_lowest(fused: Fused, fraction: float, *, keep: Sequence[int] = ()) -> Fused:
    """The lowest fraction of every query row set to zero, except the columns in keep (CLS)."""
    count = int(fused.shape[-1] * fraction)
    if count == 0:
        return fused
    ranked = fused.clone()
    ranked[..., list(keep)] = torch.inf
    lowest = ranked.topk(count, dim=-1, largest=False).indices
    # with a large fraction the kept columns may be among the lowest: restore them
    dropped = fused.scatter(-1, lowest, 0.0)
    dropped[..., list(keep)] = fused[..., list(keep)]
    return dropped


def step(row: Vector, fused: Fused, alpha: float, *, stochastic: bool = False) -> Vector:
    """One step of the rollout towards the input: row · Â; stochastic: the rows of fused sum to 1 already."""
    if not stochastic:
        total = (1 - alpha) * fused.sum(-1) + alpha
        row = row / total.clamp_min(torch.finfo(total.dtype).tiny)
    row = row.unsqueeze(1)
    return torch.baddbmm(row, row, fused, beta=alpha, alpha=1 - alpha).squeeze(1)


def rollout_row(layers: Sequence[Fused], start: Vector, *, alpha: float = ALPHA, stochastic: bool = False) -> Vector:
    """start · Â_L ... Â_1 for head-fused weights in forward order; start (batch, tokens) is the readout's row.

    stochastic: the rows of the weights sum to 1, as those of the heads' mean do, so no scaling is needed.
    """
    row = start
    for fused in reversed(layers):
        row = step(row, fused, alpha, stochastic=stochastic)
    return row


def rollout_matrix(layers: Iterable[Fused], *, alpha: float = ALPHA) -> Fused:
    """The whole rollout matrix, R = Â_L ... Â_1 (batch, tokens, tokens): O(N³) a layer, only for few tokens."""
    product: Tensor | None = None
    for fused in layers:
        eye = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
        mixed = (1 - alpha) * fused + alpha * eye
        mixed = mixed / mixed.sum(-1, keepdim=True).clamp_min(torch.finfo(fused.dtype).tiny)
        product = mixed if product is None else mixed @ product
    if product is None:
        raise InputError("expected at least one layer, found none")
    return product


@takes_images
def rollout(
    model: Model,
    images: AnyImages,
    *,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    alpha: float = ALPHA,
    start_layer: int = 0,
    readout: Readout | None = None,
) -> Maps:
    """The rollout of each image over its patches (batch, rows, columns), without the prefix, not scaled.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; fusion: of the heads, "mean",
    "max" or "min"; discard: the lowest fraction of each row, set to 0 (CLS kept); alpha: weight of the identity;
    start_layer: the first layer included, from 0; readout: what the classifier reads (the model's own by default). Of a
    windowed model (Swin, Hiera) the map is that of the first stage; where patches are merged or queries pooled, each of
    the four gets an equal share. Raises UnsupportedError for a model whose layers are not all token-to-token or windows
    (XCiT, PVT, CNNs), or that has convolutions between them (MaxViT).

    >>> import torch, vitlens
    >>> vitlens.rollout(vitlens.load("vit-digits"), torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 8, 8])
    """
    settings, images = RolloutSettings(fusion, discard, alpha, start_layer), as_parts(images)
    require_start(settings.start_layer, chain_length(model, images[:1]))
    return over_batches(model, images, lambda chain: rollout_maps(chain, **vars(settings)), readout=readout)


def rollout_maps(
    chain: Chain, *, fusion: Fusion = "mean", discard: float = 0.0, alpha: float = ALPHA, start_layer: int = 0
) -> Maps:
    """The rollout maps of a chain."""
    return chain.as_map(rollout_of(chain, RolloutSettings(fusion, discard, alpha, start_layer)))


def require_start(start_layer: int, depth: int) -> None:
    """Raise InputError unless the model has this layer."""
    if not 0 <= start_layer < depth:
        raise InputError(f"expected --start-layer of at least 0 and below {depth} layers, found {start_layer}")


def rollout_of(chain: Chain, settings: RolloutSettings) -> Vector:
    """The readout's row of the rollout of a chain, over all tokens; it sums to 1."""
    layout = chain.model.anatomy.layout
    keep = () if layout is None else layout.positions("cls")

    def one_step(row: Vector, weights: Weights, _gradient: Weights | None, whole: bool) -> Vector:
        if settings.fusion == "mean" and settings.discard == 0 and whole:
            # a row of the mean is the mean of the heads' rows, and rows of softmax sum to 1 already
            mixed = (row[:, None, None] @ weights).mean(1)[:, 0]
            return (1 - settings.alpha) * mixed + settings.alpha * row
        return step(row, discard_lowest(fuse(weights, settings.fusion), settings.discard, keep=keep), settings.alpha)

    def pooling(call: AttentionCall) -> Float[Tensor, "batch keys"]:
        # class attention has a CLS before this layout's tokens
        own = (0,) if layout is not None and call.site.keys > layout.tokens else keep
        row = discard_lowest(fuse(precise(call.precise().weights()), settings.fusion), settings.discard, keep=own)[:, 0]
        return row / row.sum(-1, keepdim=True)

    def pool(rows: Sequence[Float[Tensor, "batch keys"]]) -> Vector:
        return pooling_row(rows, chain.model.layout, alpha=settings.alpha)

    row = chain.start(pooling=pooling, pool=pool, start_layer=settings.start_layer)
    return chain.follow(row, one_step, start_layer=settings.start_layer)


def rollout_by_layer(
    model: Model, images: Images, *, alpha: float = ALPHA
) -> Float[Tensor, "batch layers rows columns"]:
    """The rollout of each image up to each layer: the map that a classifier behind that layer would read.

    images: (batch, 3, height, width) in [0, 1]; alpha: weight of the identity. Where a model reads its classes by
    attention pooling, the mean over the patches is read in its place. Raises UnsupportedError as `rollout`, and for
    windows, whose stages have maps of several sizes.
    """
    if model.anatomy.layout is None:
        raise UnsupportedError(f"expected one sequence of tokens in all layers, found windows in {model.alias}")
    depth, settings = chain_length(model, images[:1]), RolloutSettings(alpha=alpha)
    readout: Readout = "mean" if model.anatomy.readout in (None, "pool") else model.anatomy.readout

    def follow(chain: Chain) -> Float[Tensor, "batch layers rows columns"]:
        lower = (tuple(call for call in chain.calls if call.site.layer <= layer) for layer in range(depth))
        return torch.stack([chain.as_map(rollout_of(replace(chain, calls=calls), settings)) for calls in lower], 1)

    return over_batches(model, images, follow, readout=readout)
