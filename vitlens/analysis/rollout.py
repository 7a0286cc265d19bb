"""Attention rollout (Abnar & Zuidema 2020): attention followed through the layers, with the residual stream.

Â = rows of (1 - alpha) A + alpha I, scaled to sum to 1; R = Â_L ... Â_1. One row of R needs vectors times matrices
alone, from the last layer back: O(layers N²) and not O(layers N³).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.layout import TokenLayout
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe, survey
from vitlens.lens.site import KIND_WORDS
from vitlens.models.specimen import Specimen
from vitlens.names import DEFAULT_ALPHA, FUSIONS, Fusion, Readout
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


def step(row: Vector, fused: Fused, alpha: float) -> Vector:
    """A row of the rollout one layer further down: row · Â."""
    total = (1 - alpha) * fused.sum(-1) + alpha
    row = row / total.clamp_min(torch.finfo(total.dtype).tiny)
    mixed = torch.baddbmm(row.unsqueeze(1), row.unsqueeze(1), fused, beta=alpha, alpha=1 - alpha)
    return mixed.squeeze(1)


def rollout_row(layers: Sequence[Fused], start: Vector, *, alpha: float = DEFAULT_ALPHA) -> Vector:
    """start · Â_L ... Â_1 for head-fused weights in forward order; start (batch, tokens) is the readout's row."""
    row = start
    for fused in reversed(layers):
        row = step(row, fused, alpha)
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


def readout_row(layout: TokenLayout, readout: Readout, *, batch: int, like: Tensor) -> Vector:
    """Where the classifier reads, as a row over the tokens that sums to 1: CLS, both class tokens, or all patches."""
    row = torch.zeros(batch, layout.tokens, dtype=like.dtype, device=like.device)
    if readout == "mean":
        row[:, len(layout.prefix) :] = 1 / layout.patches
        return row
    places = layout.positions("cls") + (layout.positions("distillation") if readout == "cls+distillation" else ())
    if not places or (readout == "cls+distillation" and len(places) < 2):
        raise UnsupportedError(
            f"expected a {readout} token for this readout, found prefix {layout.prefix}; try --readout mean"
        )
    row[:, list(places)] = 1 / len(places)
    return row


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
    options = RolloutOptions(fusion, discard, alpha, start_layer)
    row = rollout_tokens(specimen, images, options=options, readout=readout)
    return specimen.layout.as_map(row)


def rollout_tokens(
    specimen: Specimen, images: Images, *, options: RolloutOptions, readout: Readout | None = None
) -> Vector:
    """The readout's row of the rollout over all tokens (batch, tokens), prefix included; it sums to 1."""
    layout, depth = specimen.layout, _chain_length(specimen, images)
    if options.start_layer >= depth:
        raise InputError(f"expected --start-layer below {depth} layers, found {options.start_layer}")
    kept: list[AttentionCall] = []
    logits = observe(specimen, images, kept.append)  # queries and keys are kept: N x dim a layer, not heads x N²
    pooling = [call for call in kept if call.site.kind == "class"]
    patch = [call for call in kept if call.site.kind == "patch"]
    chosen = readout or specimen.anatomy.readout or "mean"
    if chosen == "pool":
        row = _pool_row(pooling, layout, options)
    else:
        row = readout_row(layout, chosen, batch=len(images), like=logits.float())
    keep = layout.positions("cls")
    for call in reversed(patch):
        if call.site.layer >= options.start_layer:
            row = _step_call(row, call, options, keep)
    return row


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
    return len(sites)


def _step_call(row: Vector, call: AttentionCall, options: RolloutOptions, keep: Sequence[int]) -> Vector:
    """row · Â for one layer, one image at a time, so that the weights stay in the processor's cache."""
    rows = []
    for image in range(call.images):
        own = row[image : image + 1]
        single = call.pick(image)
        if options.fusion == "mean" and options.discard == 0:
            # a row of the mean is the mean of the heads' rows, and rows of softmax sum to 1 already
            weights = single.weights().float()
            mixed = (own.view(1, 1, 1, -1).expand(1, weights.shape[1], 1, -1) @ weights).mean(1)[:, 0]
            rows.append((1 - options.alpha) * mixed + options.alpha * own)
        else:
            fused = discard_lowest(fuse(single.weights().float(), options.fusion), options.discard, keep=keep)
            rows.append(step(own, fused, options.alpha))
    return torch.cat(rows)


def _pool_row(pooling: Sequence[AttentionCall], layout: TokenLayout, options: RolloutOptions) -> Vector:
    """The row of an attention pooling over the patches: a pooling query (SigLIP), or CLS in class attention (CaiT).

    Class attention has keys (CLS, patches) and lets CLS keep alpha of itself in each layer, as rollout does.
    """
    if not pooling:
        raise UnsupportedError("expected attention pooling for --readout pool, found none; try --readout cls or mean")
    last, patches = pooling[-1], layout.patches
    if last.site.keys == patches:
        return fuse(last.weights().float(), options.fusion)[:, 0]
    row = torch.zeros(last.images, 1 + patches, device=last.rows((0,)).device)
    row[:, 0] = 1
    for call in reversed(pooling):
        fused = fuse(call.weights().float(), options.fusion)[:, 0]  # CLS's weights over (CLS, patches)
        fused = fused / fused.sum(-1, keepdim=True)
        own = row[:, :1]
        looked = (1 - options.alpha) * fused * own
        row = torch.cat((looked[:, :1] + options.alpha * own, row[:, 1:] + looked[:, 1:]), 1)
    # what is left on CLS itself has no place in the image; the rest is handed to the patches
    return row[:, 1:] / row[:, 1:].sum(-1, keepdim=True)
