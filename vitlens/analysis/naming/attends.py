"""By what a head attends, in a word, and whether the word holds when the patches of an image change
places.

The word is the largest of the products of logits.py that makes up most of the attention logits, the
two of the mean query taken together as the same keys whoever asks. It is tested on images whose
patches are shuffled: what follows from positions stays where it is, what follows from content moves
with the patches, on the side of the query and on that of the key. The logits of a shuffled image
are correlated with those of the image, whose rows, and whose columns, stay or are shuffled
likewise; the word holds where the correlations with the sides that it names are the higher ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.heads.geometry import geometry_of
from vitlens.analysis.heads.registry import MARGIN, MIXED, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.specialisation import half_width
from vitlens.analysis.naming.logits import PRODUCTS, UNIFORM, LayerParts
from vitlens.analysis.naming.words import EVENLY, SAME
from vitlens.data.draws import keys, uniform
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.pixels import Parts
from vitlens.resampling import by_group
from vitlens.shapes import Images, TokenLayout
from vitlens.uncertainty import Estimate, student_mean, student_test

_AT_ONCE: Final = 1 << 26  # logits of all layers that are kept at a time

Sides = Float[
    Tensor, "images heads 2 2"
]  # by the query's side, then the key's: it stays, it moves with the patches


@dataclass(frozen=True)
class AttendsBy:
    """By what one head attends.

    word: SAME, a product, "uniform" (nothing to tell apart), or `mixed` and `no single pattern`, as
    a head's label; best, other: the two largest; share, other_share: of the logits' variance, the
    first with its interval over images; shares: of every product; spread: the standard deviation of
    the logits of a row, nats; sides: for the query and the key that the word names, how much better
    the logits of a shuffled image agree with what it predicts, the difference of two correlations;
    p: of the least certain of them, before any correction; None without a test.
    """

    word: str
    best: str
    share: Estimate
    other: str
    other_share: float
    shares: Mapping[str, float]
    spread: float
    sides: Mapping[str, Estimate]
    p: float | None


def attends_by(
    layer: LayerParts, head: int, images: int, sides: Sides | None, groups: Tensor | None
) -> AttendsBy:
    """Return the word for one head; images: their number; sides: of the shuffled ones, or None;
    groups: of these.
    """
    samples = {name: layer.shares[:, head, index] for index, name in enumerate(PRODUCTS)}
    shares = {name: float(each[0]) for name, each in samples.items()}
    merged = {SAME: torch.zeros_like(layer.shares[:, head, 0])}
    for name, each in samples.items():
        if PRODUCTS[name][0] == "mean":
            merged[SAME] = merged[SAME] + each
        else:
            merged[name] = each
    best, other = sorted(merged, key=lambda name: -float(merged[name][0]))[:2]
    value = float(merged[best][0])
    below = float(merged[other][0])
    half = half_width(merged[best])
    of_margin = half_width(merged[best] - merged[other])
    spread = float(layer.spread[head])
    if spread < UNIFORM:
        word = EVENLY
    elif value >= THRESHOLD and value - below >= MARGIN and not value - below <= of_margin:
        word = best
    else:
        word = MIXED if value + below >= THRESHOLD and below >= MARGIN else UNLABELLED
    if math.isnan(half):
        share = Estimate(value, n=images)
    else:
        # between 0 and 1, or at the share itself: of products that cancel each other it may lie
        # outside
        low = max(value - half, min(value, 0.0))
        high = min(value + half, max(value, 1.0))
        share = Estimate(value, low, high, images)
    of_sides = {}
    p = None
    if sides is not None and word in merged:
        for side, part in _predicted(word, shares).items():
            over = (3, 2)[["query", "key"].index(side)]  # the axis of the other side
            stays, moves = sides[:, head].double().mean(over - 1).unbind(1)
            margins = stays - moves if part == "position" else moves - stays
            of_sides[side] = student_mean(margins, groups=groups, unit="")
            sums, counts = by_group(margins.numpy(), groups)
            found = student_test(sums / counts)
            worse = found / 2 if of_sides[side].value > 0 else 1 - found / 2
            p = worse if p is None else max(p, worse)
    return AttendsBy(word, best, share, other, below, shares, spread, of_sides, p)


def _predicted(word: str, shares: Mapping[str, float]) -> dict[str, str]:
    """Return what each side that a word names follows; of the same keys, the larger of the two
    products.
    """
    if word != SAME:
        return dict(zip(("query", "key"), PRODUCTS[word]))
    largest = max(
        (name for name in PRODUCTS if PRODUCTS[name][0] == "mean"), key=lambda name: shares[name]
    )
    return {"key": PRODUCTS[largest][1]}


def orders(layout: TokenLayout, count: int, *, seed: int = 0) -> Int[Tensor, "count patches"]:
    """Return an order of the patches of each image: which one is at each place when they are
    shuffled.
    """
    return uniform(keys(seed, torch.arange(count)), layout.patches, stream=3).argsort(1)


def shuffled(
    images: Float[Tensor, "batch channels height width"],
    layout: TokenLayout,
    order: Int[Tensor, "batch patches"],
) -> Float[Tensor, "batch channels _ _"]:
    """Images, resized as the model would, whose patches are put in this order."""
    if tuple(images.shape[-2:]) != tuple(layout.image_size):
        images = F.interpolate(
            images, size=layout.image_size, mode="bilinear", antialias=True, align_corners=False
        )
    (down, across), (tall, wide) = layout.grid, layout.patch_size
    order = order.to(images.device)
    cut = (
        images.unflatten(2, (down, tall))
        .unflatten(4, (across, wide))
        .permute(0, 2, 4, 1, 3, 5)
        .flatten(1, 2)
    )
    moved = cut[torch.arange(len(images), device=images.device)[:, None], order]
    laid: Tensor = (
        moved.unflatten(1, (down, across)).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    )
    return laid


def agreement(
    model: Model,
    images: Parts,
    layers: Sequence[int],
    order: Int[Tensor, "some patches"],
    size: int,
) -> dict[int, Sides]:
    """Return how the attention logits of the first images, shuffled in this order, agree with those
    of the images, by layer: correlations over all pairs of patches, without the mean over the keys.
    size: images at a time, at most.
    """
    if not layers:
        return {}
    layout = model.layout
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    size = min(size, max(1, _AT_ONCE // (len(layers) * 16 * layout.patches**2)))
    for start, own in zip(range(0, len(order), size), order.split(size)):
        batch = images[start : start + len(own)].to(model.device)
        known, again = (
            _logits(model, each, layers) for each in (batch, shuffled(batch, layout, own))
        )
        for layer in layers:
            found[layer].append(_correlations(known[layer], again[layer], own.to(batch.device)))
    return {layer: torch.cat(parts) for layer, parts in found.items()}


def _logits(model: Model, images: Images, layers: Sequence[int]) -> dict[int, Tensor]:
    """Return the attention logits between patches (images, heads, query, key) of some layers,
    without their mean over keys, each head's of one length.
    """
    found: dict[int, Tensor] = {}

    def take(call: AttentionCall) -> None:
        if call.site.layer in layers:
            place = geometry_of(call.site, model)
            assert place is not None  # as the layer has parts
            scores = call.precise().at("scores")
            assert scores is not None
            logits = scores[..., place.prefix :, place.prefix :]
            logits = logits - logits.mean(-1, keepdim=True)
            found[call.site.layer] = logits / logits.square().sum(
                (-1, -2), keepdim=True
            ).sqrt().clamp_min(1e-12)

    observe(model, images, take)
    return found


def _correlations(known: Tensor, again: Tensor, order: Int[Tensor, "images patches"]) -> Sides:
    rows = order[:, None, :, None].expand_as(known)
    moved = known.gather(2, rows)
    columns = order[:, None, None, :].expand_as(known)
    pairs = [[each, each.gather(3, columns)] for each in (known, moved)]
    return torch.stack(
        [torch.stack([(each * again).sum((-1, -2)) for each in row], -1) for row in pairs], -2
    ).cpu()
