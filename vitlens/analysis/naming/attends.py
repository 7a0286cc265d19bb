"""Which query and key components determine a head's attention, tested on shuffled patches.

logits.py cuts the attention logits into products of a query component and a key component. The
label is the product with the largest share of the logits' variance. The two products of the mean
query count together: they make every query attend to the same keys.

The label is tested on images with shuffled patches. What follows from positions stays in place, and
what follows from content moves with the patches. This holds for the rows of the logits (queries)
and for their columns (keys). So the logits of a shuffled image are correlated with four
predictions: the logits of the original image, with and without its rows and its columns in the new
order. The label holds if the predictions that agree with it correlate more than the others.
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
from vitlens.data.draws import keys
from vitlens.data.draws import uniform as draw_uniform
from vitlens.lens.call import AttentionCall
from vitlens.lens.observe import observe
from vitlens.models.model import Model
from vitlens.pixels import Parts
from vitlens.renamed import RenamedAttribute
from vitlens.resampling import by_group
from vitlens.shapes import Images, TokenLayout
from vitlens.uncertainty import Estimate, student_mean, student_test

_AT_ONCE: Final = 1 << 26  # most logits, of all layers together, that are kept at a time
_MOST_HEADS: Final = 16  # of a layer, assumed for the memory of its logits
# the axis of the other side in `Correlations` of one head, (images, query, key)
_OTHER_AXIS: Final = {"query": 2, "key": 1}
_SHUFFLE_STREAM: Final = 3  # a stream of random numbers that no other draw uses
_TINY: Final = 1e-12  # avoids a division by 0

# correlations with the four predictions; axes: image, head, query (0 stays in place, 1 moves with
# the patches), key (0 stays, 1 moves)
Correlations = Float[Tensor, "images heads 2 2"]
Samples = Float[Tensor, " samples"]  # the value on all images, then without each group of them


@dataclass(frozen=True, kw_only=True)
class AttendsBy(AttendsRow):
    """The components that determine one head's attention, with all shares and the test's margins.

    shares: the share of every product.
    sides: the margins of the test, for "query" and "key" if the label names their component. A
        margin is the correlation with the predictions that agree with the label, minus that with
        the others.
    p: the largest p-value of the margins, before any correction. None without a test.
    """

    shares: Mapping[str, float]
    sides: Mapping[str, Estimate]
    p: float | None

    # earlier names of the fields: reading them warns
    other = RenamedAttribute("next")
    other_share = RenamedAttribute("next_share")


def attends_by(
    head: OfHead,
    parts: LayerParts,
    images: int,
    correlations: Correlations | None,
    groups: Tensor | None,
) -> AttendsBy:
    """Return the label of one head, not yet corrected for the tests of other heads.

    images: the number of images behind `parts`.
    correlations: those of the shuffled images, None without a test.
    groups: the source of each shuffled image.
    """
    samples = {name: parts.shares[:, head.head, index] for index, name in enumerate(PRODUCTS)}
    shares = {name: float(share[0]) for name, share in samples.items()}
    merged = _with_same_keys(samples)
    best, second = sorted(merged, key=lambda name: -float(merged[name][0]))[:2]
    spread = float(parts.spread[head.head])
    word = _label(best, merged[best], merged[second], spread)
    margins: dict[str, Estimate] = {}
    p = None
    has_product = word in merged  # the other labels name no component that could be tested
    if correlations is not None and has_product:
        margins, p = _test_sides(word, shares, correlations[:, head.head], groups)
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
    """Return the shares, with those of the two products of the mean query added up as SAME."""
    merged = {SAME: samples[SAME_BY_POSITION] + samples[SAME_BY_CONTENT]}
    for name, share in samples.items():
        if name not in (SAME_BY_POSITION, SAME_BY_CONTENT):
            merged[name] = share
    return merged


def _label(best: str, share: Samples, second_share: Samples, spread: float) -> str:
    """Return the label for the two largest shares, by the rule for patterns of attention."""
    value = float(share[0])
    second_value = float(second_share[0])
    margin = value - second_value
    half_margin = half_width(share - second_share)
    if spread < UNIFORM:
        return EVENLY
    # half_margin is NaN for a single group of images: then MARGIN alone decides
    is_margin_uncertain = margin <= half_margin
    if value >= THRESHOLD and margin >= MARGIN and not is_margin_uncertain:
        return best
    if value + second_value >= THRESHOLD and second_value >= MARGIN:
        return MIXED
    return UNLABELLED


def _share(samples: Samples, images: int) -> Estimate:
    """Return a share with its interval over images; a single group of images has none."""
    value = float(samples[0])
    half = half_width(samples)
    if math.isnan(half):
        return Estimate(value, n=images)
    # The interval is cut at 0 and 1. If products cancel each other, a share may lie outside: then
    # the interval is cut at the share.
    low = max(value - half, min(value, 0.0))
    high = min(value + half, max(value, 1.0))
    return Estimate(value, low, high, images)


def _test_sides(
    word: str,
    shares: Mapping[str, float],
    correlations: Float[Tensor, "images 2 2"],
    groups: Tensor | None,
) -> tuple[dict[str, Estimate], float | None]:
    """Return the margin of each side that a label names, and the largest one-sided p-value."""
    margins: dict[str, Estimate] = {}
    p_values = []
    for side, component in _predicted_components(word, shares).items():
        # the mean over the axis of the other side leaves (images, stays or moves)
        side_correlations = correlations.double().mean(_OTHER_AXIS[side])
        stays = side_correlations[:, 0]
        moves = side_correlations[:, 1]
        if component == "position":
            margin = stays - moves
        else:
            margin = moves - stays
        margins[side] = student_mean(margin, groups=groups, unit="")
        sums, counts = by_group(margin.numpy(), groups)
        p_two_sided = student_test(sums / counts)
        is_as_predicted = margins[side].value > 0
        p_values.append(p_two_sided / 2 if is_as_predicted else 1 - p_two_sided / 2)
    return margins, max(p_values, default=None)


def _predicted_components(word: str, shares: Mapping[str, float]) -> dict[str, str]:
    """Return the component that a label names, for the query and the key.

    The label "same keys" names a component of the key only: the one with the larger share.
    """
    if word == SAME:
        largest = max((SAME_BY_POSITION, SAME_BY_CONTENT), key=lambda name: shares[name])
        return {"key": PRODUCTS[largest][1]}
    query, key = PRODUCTS[word]
    return {"query": query, "key": key}


def orders(layout: TokenLayout, count: int, *, seed: int = 0) -> Int[Tensor, "count patches"]:
    """Return a random order of the patches for each image: the patch that moves to each place."""
    numbers = draw_uniform(keys(seed, torch.arange(count)), layout.patches, stream=_SHUFFLE_STREAM)
    return numbers.argsort(1)


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
    # as (batch, channels, rows, height, columns, width)
    on_grid = images.unflatten(2, (rows, height)).unflatten(4, (columns, width))
    # as (batch, patches, channels, height, width)
    patches = on_grid.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    image_numbers = torch.arange(len(images), device=images.device)
    moved = patches[image_numbers[:, None], order.to(images.device)]
    # back to (batch, channels, rows, height, columns, width)
    on_grid = moved.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    result: Tensor = on_grid.reshape(images.shape)
    return result


def agreement(
    model: Model,
    images: Parts,
    layers: Sequence[int],
    order: Int[Tensor, "some patches"],
    size: int,
) -> dict[int, Correlations]:
    """Return the correlations of the first images' logits before and after shuffling, by layer.

    Correlations are over all pairs of patches. The mean over the keys is subtracted first.

    order: the order of the patches in each of these images.
    size: the largest number of images at a time.
    """
    if not layers:
        return {}
    layout = model.layout
    parts: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    logits_of_image = len(layers) * _MOST_HEADS * layout.patches**2
    size = min(size, max(1, _AT_ONCE // logits_of_image))
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
        assert geometry is not None  # `layers` are those that logits.py could read
        scores = call.precise().at("scores")
        assert scores is not None
        logits = scores[..., geometry.prefix :, geometry.prefix :]
        logits = logits - logits.mean(-1, keepdim=True)
        length = logits.square().sum((-1, -2), keepdim=True).sqrt()
        by_layer[call.site.layer] = logits / length.clamp_min(_TINY)

    observe(model, images, take)
    return by_layer


def _correlations(
    before: Tensor, after: Tensor, order: Int[Tensor, "images patches"]
) -> Correlations:
    """Return the correlations of shuffled logits with the four predictions.

    before, after (images, heads, query, key): logits of length 1, so a product is a correlation.
    """
    row_order = order[:, None, :, None].expand_as(before)
    column_order = order[:, None, None, :].expand_as(before)
    queries_moved = before.gather(2, row_order)
    by_query = []
    for rows in (before, queries_moved):
        keys_moved = rows.gather(3, column_order)
        by_key = []
        for prediction in (rows, keys_moved):
            by_key.append((prediction * after).sum((-1, -2)))
        by_query.append(torch.stack(by_key, -1))
    return torch.stack(by_query, -2).cpu()
