"""Localisation of maps where the place of the evidence is known: on objects with masks, and on
composite images.

Scores: pointing game, ROC AUC, average precision, IoU, mass, and what maps that ignore the image
score. Maps are interpolated bilinearly to the masks' size; every number is per image, to be
averaged over images. But for the pointing game, a mask must have both an object and background
(`has_edge`).

Composites need no masks. The grid pointing game (Böhle 2021): mosaics of confidently classified
images of distinct classes, each class explained in turn; the share of a map's positive mass in the
right cell of k x k is 1/k² by chance. Also an image shrunk onto another one, and an object pasted
on another background. Everything is drawn from a seed, and a composite does not depend on how many
are made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.faithfulness.defaults import COMPOSITES, CONFIDENT
from vitlens.analysis.faithfulness.maps import AnyMaps, PerImage, Size, enlarged, map_faults
from vitlens.analysis.faithfulness.removal import imputed
from vitlens.errors import DataError, InputError
from vitlens.shapes import Images, Labels, Logits, Maps, Masks
from vitlens.uncertainty import Estimate, bootstrap_mean

Score = Callable[[AnyMaps, Masks], PerImage]

_ROUNDING: Final = 1e-6  # of a map's greatest value; differences below it are not of the map
_CENTRE_WIDTH: Final = 1 / 4  # standard deviation of the centre Gaussian as a share of each side
# cells a side of the mean mask, which many images' masks at full size would not fit in memory for
_FINEST: Final = 32
_RIM: Final = 32  # part of the shorter side by which an object that is imputed is widened
# draws of a composite that exists already, after which there are taken to be no further ones
_TRIES: Final = 20


def pointing_hits(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the pointing game (Zhang 2018): whether each map's highest point lies on its object's
    mask, 1 or 0.

    Where several points are equally high up to rounding, the share of them that lies on the mask
    counts: the chance that one of them, drawn at random, is a hit. So a uniform map, all of whose
    points are equally high, scores the mask's area. Raises DataError when a mask is empty.
    """
    empty = (~masks.flatten(1).any(1)).nonzero()
    if len(empty):
        raise DataError(
            f"expected an object in every mask, found an empty one (image {int(empty[0])})"
        )
    flat = _in_pixels(maps, masks)
    highest = flat >= flat.amax(1, keepdim=True) - _ROUNDING * flat.abs().amax(1, keepdim=True)
    highest |= map_faults(maps).constant[
        :, None
    ]  # not what interpolation's rounding made the highest
    return (highest & masks.flatten(1)).sum(1) / highest.sum(1)


def _in_pixels(maps: AnyMaps, masks: Masks) -> Float[Tensor, "batch pixels"]:
    return enlarged(maps.float(), (masks.shape[-2], masks.shape[-1])).flatten(1)


def _ranked(maps: AnyMaps, masks: Masks) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the pixels of each map, equal where it is constant (interpolation's rounding would
    rank them), and the masks.
    """
    values = _in_pixels(maps, masks).double().masked_fill(map_faults(maps).constant[:, None], 0.0)
    return values.cpu().numpy(), masks.flatten(1).cpu().numpy()


def pointing_rate(hits: PerImage, *, groups: Tensor | None = None, seed: int = 0) -> Estimate:
    """Return the mean of `pointing_hits`: with the interval of an accuracy, or the bootstrap's
    where a map's maxima tie.
    """
    if bool(((hits == 0) | (hits == 1)).all()):
        return accuracy(hits.bool(), groups=groups)
    members = None if groups is None else groups.numpy()
    return bootstrap_mean(hits.numpy(), groups=members, seed=seed, least=0.0, most=1.0)


def roc_auc(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the probability that a pixel of the object is ranked above one outside it; ties count
    half. 0.5 is chance.
    """
    from scipy import stats  # takes half a second to import

    values, inside = _ranked(maps, masks)
    ranks = stats.rankdata(values, axis=1)
    positive = inside.sum(1)
    above = (ranks * inside).sum(1) - positive * (positive + 1) / 2
    return torch.from_numpy(above / (positive * (inside.shape[1] - positive))).float()


def average_precision(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the mean precision over the object's pixels, from the highest value down; equal values
    are taken together.

    Chance is the mask's area. As scikit-learn's average_precision_score.
    """
    found = []
    for values, inside in zip(*_ranked(maps, masks)):
        order = np.argsort(-values, kind="stable")
        hits = np.cumsum(inside[order])
        last = np.flatnonzero(
            np.diff(values[order], append=-np.inf)
        )  # the last of each run of equal values
        found.append(
            float((np.diff(hits[last] / hits[-1], prepend=0.0) * (hits[last] / (last + 1))).sum())
        )
    return torch.tensor(found, dtype=torch.float32)


def mask_iou(maps: AnyMaps, masks: Masks) -> PerImage:
    """Intersection over union of the mask and the pixels above the map's own mean."""
    marked = _above_mean(maps, masks)
    inside = masks.flatten(1)
    return (marked & inside).sum(1).float() / (marked | inside).sum(1).float()


def pixel_accuracy(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the share of pixels that are above the map's mean inside the mask, or not above it
    outside.
    """
    return (_above_mean(maps, masks) == masks.flatten(1)).float().mean(1)


def _above_mean(maps: AnyMaps, masks: Masks) -> Bool[Tensor, "batch pixels"]:
    large = _in_pixels(maps, masks)
    return large > large.mean(1, keepdim=True)


def mass_inside(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the share of the map's positive mass on the object; 0 where it has none. Chance is the
    mask's area.
    """
    return share_of_mass(_in_pixels(maps, masks), masks.flatten(1))


def share_of_mass(
    values: Float[Tensor, "batch pixels"], masks: Bool[Tensor, "batch pixels"]
) -> PerImage:
    """Return the share of the positive values that lies on the mask; 0 where there are none."""
    positive = values.clamp_min(0)
    total = positive.sum(1)
    mass = (positive * masks.to(positive.device)).sum(1)
    return torch.where(total > 0, mass / total.clamp_min(torch.finfo(total.dtype).tiny), 0.0)


SCORES: Final[Mapping[str, Score]] = {
    "roc_auc": roc_auc,
    "average_precision": average_precision,
    "iou": mask_iou,
    "pixel_accuracy": pixel_accuracy,
    "mass": mass_inside,
    "pointing": pointing_hits,
}


def baseline_scores(
    score: Score, maps: AnyMaps, masks: Masks, *, groups: Tensor | None = None, seed: int = 0
) -> dict[str, PerImage]:
    """Return the scores of maps that ignore the image, on the grid of `maps`, image by image: what
    a localisation must exceed.

    A uniform map; a Gaussian at the centre; the mean mask of the other images; the map of another
    image, drawn with the seed. Others are of other groups (batch,); without any, the last two are
    left out.
    """
    rows, columns = maps.shape[-2:]
    found = {
        "a uniform map": score(maps.new_ones(len(maps), rows, columns), masks),
        "a map of the centre": score(centre_maps(len(maps), (rows, columns)), masks),
    }
    own = torch.arange(len(maps)) if groups is None else groups
    other = other_images(own, seed=seed)
    if other is None:
        return found
    _, group = own.unique(return_inverse=True)
    sizes = group.bincount()
    shapes = F.adaptive_avg_pool2d(
        masks[:, None].float(), (min(rows, _FINEST), min(columns, _FINEST))
    )[:, 0]
    sums = shapes.new_zeros(len(sizes), *shapes.shape[1:]).index_add_(0, group, shapes)
    means = (shapes.sum(0) - sums) / (len(maps) - sizes)[:, None, None]
    found["the mean mask of the other images"] = score(means[group], masks)
    found["the map of another image"] = score(maps[other], masks)
    return found


def other_images(groups: Tensor, *, seed: int = 0) -> Tensor | None:
    """For each image (n,) one of another group, drawn with the seed; None where all are of one.

    Images are ordered by group, then at random: the image after the end of one's own group, and as
    many further as drawn.
    """
    _, group = groups.unique(return_inverse=True)
    sizes = group.bincount()
    if len(sizes) < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(group), generator=generator)
    order = order[group[order].argsort(stable=True)]
    further = (torch.rand(len(group), generator=generator) * (len(group) - sizes[group])).long()
    return order[(sizes.cumsum(0)[group] + further) % len(group)]


def random_maps(count: int, grid: Size, *, seed: int = 0) -> Maps:
    """Return a map of uniform noise for each of count images; a map does not depend on count."""
    return torch.rand(count, *grid, generator=torch.Generator().manual_seed(seed))


def centre_maps(count: int, grid: Size) -> Maps:
    """Return the same map for every image: a Gaussian at its centre, where the object of a
    photograph often is.
    """
    rows, columns = (torch.linspace(-0.5, 0.5, side + 1)[:-1] + 0.5 / side for side in grid)
    gaussian = torch.exp(-(rows[:, None] ** 2 + columns[None, :] ** 2) / (2 * _CENTRE_WIDTH**2))
    return gaussian.expand(count, *grid).clone()


def has_edge(masks: Masks) -> Bool[Tensor, " batch"]:
    """Return whether a mask has both an object and background; localisation is not defined
    otherwise.
    """
    flat = masks.flatten(1)
    return flat.any(1) & ~flat.all(1)


@dataclass(frozen=True)
class Composites:
    """Composite images, and the classes that are explained on them."""

    images: Float[Tensor, "composites 3 height width"]
    which: Int[Tensor, " batch"]  # the composite of each map
    targets: Labels  # the class that it explains
    masks: Masks  # where the evidence for this class lies
    sources: Int[Tensor, "composites parts"]  # the given images of which each composite is made

    def __len__(self) -> int:
        return len(self.which)

    @property
    def chance(self) -> float:
        """Return the mean share of a composite that the evidence covers: the mass that a uniform
        map has there.
        """
        return float(self.masks.float().mean())


def cell_mass(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the share of each map's positive mass in its cell; 0 where it has none. Chance is the
    cell's area.

    The mass of a patch lies evenly on its pixels, so that a map of whole patches in the cell has 1
    (bilinear interpolation would move mass across the cell's edge).
    """
    large = F.interpolate(
        maps.double().unsqueeze(1), size=masks.shape[-2:], mode="nearest-exact"
    ).flatten(1)
    return share_of_mass(large, masks.flatten(1)).float()


COMPOSITE_SCORES: Final[Mapping[str, Score]] = {
    "mass": cell_mass,
    "pointing": pointing_hits,
    "roc_auc": roc_auc,
}


def confident_images(
    logits: Logits, labels: Labels, *, least: float = CONFIDENT
) -> Int[Tensor, " usable"]:
    """Return the images that are classified as their label with at least this probability, in their
    order.
    """
    found = logits.float().softmax(-1)
    own = labels.to(logits.device)
    sure = found.gather(1, own[:, None]).squeeze(1) >= least
    return (sure & (found.argmax(-1) == own)).nonzero().squeeze(1)


def recognised(logits: Logits, targets: Labels, parts: int) -> Bool[Tensor, " batch"]:
    """Return whether each target is among the most probable classes of its composite, as many as it
    has parts.
    """
    most = logits.topk(min(parts, logits.shape[1]), dim=1).indices
    return (most == targets.to(most.device)[:, None]).any(1).cpu()


def mosaics(
    images: Images,
    labels: Labels,
    _masks: Masks | None = None,
    *,
    side: int = 2,
    count: int = COMPOSITES,
    seed: int = 0,
) -> Composites:
    """At most count mosaics of side x side images of distinct classes, in the images' size; every
    cell is explained.

    Raises InputError for fewer distinct classes than cells.
    """
    cells = side * side
    drawn = _drawn(labels, count, cells, seed)
    canvas = images.new_zeros(len(drawn), *images.shape[1:])
    masks = torch.zeros(cells, *images.shape[-2:], dtype=torch.bool)
    ends = (
        [round(extent * part / side) for part in range(side + 1)] for extent in images.shape[-2:]
    )
    rows, columns = (list(pairwise(each)) for each in ends)  # as equal as whole pixels can be
    for cell in range(cells):
        (top, bottom), (left, right) = rows[cell // side], columns[cell % side]
        canvas[..., top:bottom, left:right] = _shrunk(
            images[drawn[:, cell]], (bottom - top, right - left)
        )
        masks[cell, top:bottom, left:right] = True
    which = torch.arange(len(drawn)).repeat_interleave(cells)
    return Composites(
        canvas, which, labels.cpu()[drawn].flatten(), masks.repeat(len(drawn), 1, 1), drawn
    )


def embedded(
    images: Images,
    labels: Labels,
    _masks: Masks | None = None,
    *,
    count: int = COMPOSITES,
    seed: int = 0,
) -> Composites:
    """At most count images, shrunk to half their sides, each at a random place on an image of
    another class.

    Raises InputError for fewer than two classes.
    """
    drawn = _drawn(labels, count, 2, seed)
    height, width = (int(side) for side in images.shape[-2:])
    size = max(1, round(height / 2)), max(1, round(width / 2))
    canvas = images[drawn[:, 1]].clone()
    small = _shrunk(images[drawn[:, 0]], size)
    masks = torch.zeros(len(drawn), height, width, dtype=torch.bool)
    for place in range(len(drawn)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
        top = int(torch.randint(height - size[0] + 1, (1,), generator=generator))
        left = int(torch.randint(width - size[1] + 1, (1,), generator=generator))
        canvas[place, :, top : top + size[0], left : left + size[1]] = small[place]
        masks[place, top : top + size[0], left : left + size[1]] = True
    return Composites(canvas, torch.arange(len(drawn)), labels.cpu()[drawn[:, 0]], masks, drawn)


def pasted(
    images: Images, labels: Labels, masks: Masks, *, count: int = COMPOSITES, seed: int = 0
) -> Composites:
    """At most count objects, each on the background of another class, from which its own object is
    imputed with a rim, as a mask's edge leaves some of its object's outline.

    Raises InputError for fewer than two classes of images with an object and background.
    """
    known = has_edge(masks.cpu()).nonzero().squeeze(1)
    drawn = known[_drawn(labels[known.to(labels.device)], count, 2, seed)]
    objects, others = (masks.to(images.device)[drawn[:, part]] for part in (0, 1))
    reach = -(-min(masks.shape[-2:]) // _RIM)
    wide = F.max_pool2d(others.float().unsqueeze(1), 2 * reach + 1, stride=1, padding=reach) > 0
    holes = torch.where(
        wide.flatten(1).all(1).view(-1, 1, 1, 1), others.unsqueeze(1), wide
    )  # something must be left
    ground = imputed(images[drawn[:, 1]], holes, noise=0.0)
    canvas = torch.where(objects.unsqueeze(1), images[drawn[:, 0]], ground)
    return Composites(
        canvas, torch.arange(len(drawn)), labels.cpu()[drawn[:, 0]], objects.cpu(), drawn
    )


def _drawn(labels: Labels, count: int, parts: int, seed: int) -> Int[Tensor, "composites parts"]:
    """Different draws of images of distinct classes; images that were used less are drawn first.

    Raises InputError for fewer classes than parts.
    """
    classes = labels.tolist()
    if len(set(classes)) < parts:
        raise InputError(
            f"expected images of at least {parts} distinct classes, found {len(set(classes))}"
        )
    generator = torch.Generator().manual_seed(seed)
    used = torch.zeros(len(classes))
    draws = dict[tuple[int, ...], None]()
    repeats = 0
    while len(draws) < count and repeats < _TRIES:
        order = (used + torch.rand(len(classes), generator=generator)).argsort().tolist()
        by_class: dict[int, int] = {}
        for index in order:
            by_class.setdefault(classes[index], index)
        chosen = list(by_class.values())[:parts]
        shuffled = tuple(
            chosen[place] for place in torch.randperm(parts, generator=generator).tolist()
        )
        repeats = repeats + 1 if shuffled in draws else 0
        draws[shuffled] = None
        used[list(shuffled)] += 1
    return torch.tensor(list(draws))


def _shrunk(images: Images, size: Size) -> Float[Tensor, "batch 3 _ _"]:
    return F.interpolate(
        images, size=size, mode="bilinear", antialias=True, align_corners=False
    ).clamp(0, 1)
