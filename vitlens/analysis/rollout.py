"""Attention rollout (Abnar & Zuidema 2020): attention followed through the layers, with the residual stream.

Â = rows of (1 - alpha) A + alpha I, scaled to sum to 1; R = Â_L ... Â_1. One row of R needs vectors times matrices
alone, from the last layer back: O(layers N²) and not O(layers N³).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.analysis.readout import pooling_row, readout_row
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe, survey
from vitlens.lens.site import KIND_WORDS
from vitlens.models.specimen import Specimen
from vitlens.names import DEFAULT_ALPHA, FUSIONS, READOUTS, Fusion, Readout
from vitlens.shapes import Fused, Images, Maps, Weights

Vector = Float[Tensor, "batch tokens"]


@dataclass(frozen=True)
class RolloutOptions:
    """fusion: of the heads; discard: lowest fraction of each query row set to zero (CLS column kept); alpha: share of
    the identity; start_layer: the first layer that is multiplied in, from 0. Raises InputError for what cannot be."""

    fusion: Fusion = "mean"
    discard: float = 0.0
    alpha: float = DEFAULT_ALPHA
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
    """The lowest fraction of each image's each query row set to zero; the columns in keep (CLS) are never dropped."""
    count = int(fused.shape[-1] * fraction)
    if count == 0:
        return fused
    ranked = fused.clone()
    ranked[..., list(keep)] = torch.inf
    lowest = ranked.topk(count, dim=-1, largest=False).indices
    # where fewer may be dropped than the fraction says, the kept columns would be next in rank: put them back
    dropped = fused.scatter(-1, lowest, 0.0)
    dropped[..., list(keep)] = fused[..., list(keep)]
    return dropped


def step(row: Vector, fused: Fused, alpha: float, *, stochastic: bool = False) -> Vector:
    """A row of the rollout one layer further down: row · Â; stochastic: the rows of fused sum to 1 already."""
    if not stochastic:
        total = (1 - alpha) * fused.sum(-1) + alpha
        row = row / total.clamp_min(torch.finfo(total.dtype).tiny)
    row = row.unsqueeze(1)
    return torch.baddbmm(row, row, fused, beta=alpha, alpha=1 - alpha).squeeze(1)


def rollout_row(
    layers: Sequence[Fused], start: Vector, *, alpha: float = DEFAULT_ALPHA, stochastic: bool = False
) -> Vector:
    """start · Â_L ... Â_1 for head-fused weights in forward order; start (batch, tokens) is the readout's row.

    stochastic: the rows of the weights sum to 1, as those of the heads' mean do, and need no scaling; half the work.
    """
    row = start
    for fused in reversed(layers):
        row = step(row, fused, alpha, stochastic=stochastic)
    return row


def rollout_matrix(layers: Iterable[Fused], *, alpha: float = DEFAULT_ALPHA) -> Fused:
    """All rows of the rollout, R = Â_L ... Â_1 (batch, tokens, tokens): O(N³) a layer, for few tokens."""
    product: Tensor | None = None
    for fused in layers:
        eye = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
        mixed = (1 - alpha) * fused + alpha * eye
        mixed = mixed / mixed.sum(-1, keepdim=True).clamp_min(torch.finfo(fused.dtype).tiny)
        product = mixed if product is None else mixed @ product
    if product is None:
        raise InputError("expected at least one layer, found none")
    return product


def rollout(
    specimen: Specimen,
    images: Images,
    *,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    alpha: float = DEFAULT_ALPHA,
    start_layer: int = 0,
    readout: Readout | None = None,
) -> Maps:
    """The rollout of each image over its patches (batch, rows, columns), prefix columns dropped, not scaled.

    readout: what the classifier reads (the specimen's own by default). Raises UnsupportedError for a model whose
    layers are not all token-to-token (Swin, XCiT, CNNs).
    """
    way = RolloutOptions(fusion, discard, alpha, start_layer)
    return specimen.layout.as_map(follow(specimen, images, (way,), readout=readout).rows[0])


@dataclass(frozen=True)
class Followed:
    """logits (batch, classes), and one row over all tokens (batch, tokens), prefix included, for each way asked for."""

    logits: Tensor
    rows: tuple[Vector, ...]


def follow(
    specimen: Specimen, images: Images, ways: Sequence[RolloutOptions], *, readout: Readout | None = None
) -> Followed:
    """The readout's row of the rollout in several ways, from one forward pass; each row sums to 1.

    Queries and keys of all layers are kept (tokens x dim each, not heads x tokens²). Errors as `rollout`.
    """
    depth = _chain_length(specimen, images)
    late = max(way.start_layer for way in ways)
    if late >= depth:
        raise InputError(f"expected --start-layer below {depth} layers, found {late}")
    calls: list[AttentionCall] = []
    logits = observe(specimen, images, calls.append)
    chosen = readout or specimen.anatomy.readout or "mean"
    if chosen not in READOUTS:
        raise UnknownNameError("readout", chosen, READOUTS)
    return Followed(logits, tuple(_row(calls, specimen.layout, way, chosen) for way in ways))


def _row(calls: Sequence[AttentionCall], layout: TokenLayout, way: RolloutOptions, readout: Readout) -> Vector:
    if readout == "pool":
        late = [call for call in calls if call.site.kind == "class" and call.site.layer >= way.start_layer]
        pooling = [_pooling_weights(call, layout, way) for call in late]
        row = pooling_row(pooling, layout, alpha=way.alpha)
    else:
        row = readout_row(layout, readout, batch=calls[0].images, like=calls[0].rows((0,)).float())
    for call in reversed(calls):
        if call.site.kind == "patch" and call.site.layer >= way.start_layer:
            row = _step_call(row, call, way, layout.positions("cls"))
    return row


def _pooling_weights(call: AttentionCall, layout: TokenLayout, way: RolloutOptions) -> Float[Tensor, "batch keys"]:
    """The weights of a pooling query, heads fused; class attention has a CLS before this layout's tokens."""
    keep = (0,) if call.site.keys > layout.tokens else layout.positions("cls")
    return discard_lowest(fuse(call.weights().float(), way.fusion), way.discard, keep=keep)[:, 0]


def _chain_length(specimen: Specimen, images: Images) -> int:
    """How many layers can be chained; refuses a model in which some cannot."""
    layout = specimen.layout
    sites = survey(specimen, images)
    for site in sites:
        fits = site.kind == "class" or (site.kind == "patch" and site.keys == layout.tokens)
        if not fits:
            raise UnsupportedError(
                f"expected layers in which every token looks at every token, found {site.module!r} of "
                f"{specimen.alias}: "
                f"{KIND_WORDS[site.kind]}; rollout is not defined there, see vitlens attention"
            )
    return 1 + max(site.layer for site in sites)


def _step_call(row: Vector, call: AttentionCall, options: RolloutOptions, keep: Sequence[int]) -> Vector:
    """row · Â for one layer, a few images at a time."""
    rows = []
    for images, part in call.parts():
        own, weights = row[images], part.weights().float()
        if options.fusion == "mean" and options.discard == 0:
            # a row of the mean is the mean of the heads' rows, and rows of softmax sum to 1 already
            mixed = (own[:, None, None] @ weights).mean(1)[:, 0]
            rows.append((1 - options.alpha) * mixed + options.alpha * own)
        else:
            fused = discard_lowest(fuse(weights, options.fusion), options.discard, keep=keep)
            rows.append(step(own, fused, options.alpha))
    return torch.cat(rows)
