"""Which query and key components determine a head's attention, tested on shuffled patches.

The label is the largest of the products of logits.py, which makes up most of the attention logits.
The two products of the mean query are taken together as the same keys for every query. It is
tested on images with shuffled patches: what follows from positions stays where it is, what follows
from content moves with the patches, on the side of the query and on that of the key. The logits of
a shuffled image are correlated with those of the image, with and without its rows and columns
shuffled alike. The label holds where the correlations with the sides that it names are higher.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.heads.evidence import half_width
from vitlens.analysis.heads.geometry import geometry_of
from vitlens.analysis.heads.registry import MARGIN, MIXED, THRESHOLD, UNLABELLED
from vitlens.analysis.naming.logits import (
    PRODUCTS,
    SAME_BY_CONTENT,
    SAME_BY_POSITION,
    UNIFORM,
    LayerParts,
)
from vitlens.analysis.naming.rows import AttendsRow, OfHead
from vitlens.analysis.naming.words import EVENLY, SAME
from vitlens.data.draws import keys, uniform
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.pixels import Parts
from vitlens.renamed import RenamedAttribute
from vitlens.resampling import by_group
from vitlens.shapes import Images, TokenLayout
from vitlens.uncertainty import Estimate, student_mean, student_test

_AT_ONCE: Final = 1 << 26  # logits of all layers that are kept at a time
_OTHER_AXIS: Final = {"query": 2, "key": 1}  # of Sides of one head: the axis of the other side

# correlations by the query's side, then the key's: it stays, it moves with the patches
Sides = Float[Tensor, "images heads 2 2"]
Samples = Float[Tensor, " samples"]  # over all images, then without each group of them


@dataclass(frozen=True, kw_only=True)
class AttendsBy(AttendsRow):
    """The components that determine one head's attention, with all shares and the test's margins.

    shares: the share of every product.
    sides: for the query and the key that the label names, how much better the logits of a shuffled
        image agree with what the label predicts, the difference of two correlations.
    p: the p-value of the least certain of them, before any correction; None without a test.
    """

    shares: Mapping[str, float]
    sides: Mapping[str, Estimate]
    p: float | None

    other = RenamedAttribute("next")
    other_share = RenamedAttribute("next_share")


def attends_by(
    head: OfHead, parts: LayerParts, images: int, sides: Sides | None, groups: Tensor | None
) -> AttendsBy:
    """Return the label of one head, not yet corrected for the tests of other heads.

    images: their number; sides: of the shuffled ones, or None; groups: of these.
    """
    samples = {name: parts.shares[:, head.head, index] for index, name in enumerate(PRODUCTS)}
    shares = {name: float(share[0]) for name, share in samples.items()}
    merged = _with_same_keys(samples)
    best, second = sorted(merged, key=lambda name: -float(merged[name][0]))[:2]
    spread = float(parts.spread[head.head])
    word = _label(best, merged[best], merged[second], spread)
    margins: dict[str, Estimate] = {}
    p = None
    if sides is not None and word in merged:
        margins, p = _test_sides(word, shares, sides[:, head.head], groups)
    return AttendsBy(
        model=head.model,
        layer=head.layer,
        head=head.head,
        word=word,
        best=best,
        share=_share(merged[best], images),
        next=second,
        next_share=float(merged[second][0]),
        spread=spread,
        stays=min(margins.values(), key=lambda margin: margin.value, default=None),
        shares=shares,
        sides=margins,
        p=p,
    )


def _with_same_keys(samples: Mapping[str, Samples]) -> dict[str, Samples]:
    """Return the shares with the two products of the mean query taken together as SAME."""
    merged = {SAME: samples[SAME_BY_POSITION] + samples[SAME_BY_CONTENT]}
    for name, share in samples.items():
        if name not in (SAME_BY_POSITION, SAME_BY_CONTENT):
            merged[name] = share
    return merged


def _label(best: str, share: Samples, second_share: Samples, spread: float) -> str:
    """Return the label by the rule for patterns, from the two largest shares."""
    value = float(share[0])
    second_value = float(second_share[0])
    margin = value - second_value
    half_margin = half_width(share - second_share)
    if spread < UNIFORM:
        return EVENLY
    # without an interval, which is NaN, MARGIN decides
    if value >= THRESHOLD and margin >= MARGIN and not margin <= half_margin:
        return best
    if value + second_value >= THRESHOLD and second_value >= MARGIN:
        return MIXED
    return UNLABELLED


def _share(samples: Samples, images: int) -> Estimate:
    """Return a share with its interval over images, which a single group of images lacks."""
    value = float(samples[0])
    half = half_width(samples)
    if math.isnan(half):
        return Estimate(value, n=images)
    # between 0 and 1, or at the share: that of products that cancel each other may lie outside
    low = max(value - half, min(value, 0.0))
    high = min(value + half, max(value, 1.0))
    return Estimate(value, low, high, images)


def _test_sides(
    word: str,
    shares: Mapping[str, float],
    sides: Float[Tensor, "images 2 2"],
    groups: Tensor | None,
) -> tuple[dict[str, Estimate], float | None]:
    """Return the margin of each side that a label names, and the largest one-sided p."""
    margins: dict[str, Estimate] = {}
    p_values = []
    for side, component in _predicted_components(word, shares).items():
        stays, moves = sides.double().mean(_OTHER_AXIS[side]).unbind(1)
        margin = stays - moves if component == "position" else moves - stays
        margins[side] = student_mean(margin, groups=groups, unit="")
        sums, counts = by_group(margin.numpy(), groups)
        two_sided = student_test(sums / counts)
        p_values.append(two_sided / 2 if margins[side].value > 0 else 1 - two_sided / 2)
    return margins, max(p_values, default=None)


def _predicted_components(word: str, shares: Mapping[str, float]) -> dict[str, str]:
    """Return the component of each side that a label names.

    The same keys for every query name the component of the key with the larger share.
    """
    if word == SAME:
        largest = max((SAME_BY_POSITION, SAME_BY_CONTENT), key=lambda name: shares[name])
        return {"key": PRODUCTS[largest][1]}
    query, key = PRODUCTS[word]
    return {"query": query, "key": key}


def orders(layout: TokenLayout, count: int, *, seed: int = 0) -> Int[Tensor, "count patches"]:
    """Return a random order of the patches for each image: the patch at each place."""
    return uniform(keys(seed, torch.arange(count)), layout.patches, stream=3).argsort(1)


def shuffled(
    images: Float[Tensor, "batch channels height width"],
    layout: TokenLayout,
    order: Int[Tensor, "batch patches"],
) -> Float[Tensor, "batch channels _ _"]:
    """Return the images, resized as the model would, with their patches in this order."""
    if tuple(images.shape[-2:]) != tuple(layout.image_size):
        images = F.interpolate(
            images, size=layout.image_size, mode="bilinear", antialias=True, align_corners=False
        )
    rows, columns = layout.grid
    height, width = layout.patch_size
    on_grid = images.unflatten(2, (rows, height)).unflatten(4, (columns, width))
    patches = on_grid.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    numbers = torch.arange(len(images), device=images.device)
    moved = patches[numbers[:, None], order.to(images.device)]
    on_grid = moved.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    result: Tensor = on_grid.reshape(images.shape)
    return result


def agreement(
    model: Model,
    images: Parts,
    layers: Sequence[int],
    order: Int[Tensor, "some patches"],
    size: int,
) -> dict[int, Sides]:
    """Return how the logits of the first images agree with those after shuffling, by layer.

    Correlations are over all pairs of patches, without the mean over the keys.

    order: the order of the patches of these images.
    size: images at a time, at most.
    """
    if not layers:
        return {}
    layout = model.layout
    parts: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    size = min(size, max(1, _AT_ONCE // (len(layers) * 16 * layout.patches**2)))
    for start in range(0, len(order), size):
        batch_order = order[start : start + size]
        batch = images[start : start + len(batch_order)].to(model.device)
        before = _logits(model, batch, layers)
        after = _logits(model, shuffled(batch, layout, batch_order), layers)
        batch_order = batch_order.to(batch.device)
        for layer in layers:
            parts[layer].append(_correlations(before[layer], after[layer], batch_order))
    return {layer: torch.cat(batches) for layer, batches in parts.items()}


def _logits(model: Model, images: Images, layers: Sequence[int]) -> dict[int, Tensor]:
    """Return the attention logits between patches (images, heads, query, key) of some layers.

    The mean over keys is subtracted, and the logits of each head are scaled to length 1.
    """
    by_layer: dict[int, Tensor] = {}

    def take(call: AttentionCall) -> None:
        if call.site.layer not in layers:
            return
        geometry = geometry_of(call.site, model)
        assert geometry is not None  # as the layer has parts
        scores = call.precise().at("scores")
        assert scores is not None
        logits = scores[..., geometry.prefix :, geometry.prefix :]
        logits = logits - logits.mean(-1, keepdim=True)
        length = logits.square().sum((-1, -2), keepdim=True).sqrt()
        by_layer[call.site.layer] = logits / length.clamp_min(1e-12)

    observe(model, images, take)
    return by_layer


def _correlations(before: Tensor, after: Tensor, order: Int[Tensor, "images patches"]) -> Sides:
    """Return the correlations of shuffled logits with their predictions.

    Predictions are the logits with rows, and with columns, that stay or move with the patches.
    """
    by_row = order[:, None, :, None].expand_as(before)
    by_column = order[:, None, None, :].expand_as(before)
    by_query = []
    for rows in (before, before.gather(2, by_row)):
        by_key = []
        for predicted in (rows, rows.gather(3, by_column)):
            by_key.append((predicted * after).sum((-1, -2)))
        by_query.append(torch.stack(by_key, -1))
    return torch.stack(by_query, -2).cpu()
