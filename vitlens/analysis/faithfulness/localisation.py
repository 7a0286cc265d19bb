"""Localisation of maps where the place of the evidence is known.

On objects with masks (SCORES) the scores are the pointing game, ROC AUC, average precision, IoU and
mass, compared with those of maps that ignore the image (`baseline_scores`). Maps are interpolated
bilinearly to the size of the masks; every number is per image, to be averaged over images. Except
for the pointing game, a mask must have both an object and background (`has_edge`).

Composites (COMPOSITE_SCORES) need no masks. The grid pointing game (Böhle 2021) uses mosaics of
confidently classified images of distinct classes, each class explained in turn. The share of a
map's positive mass in the right cell of k x k is 1/k² by chance. Other composites are an image
shrunk onto another one, and an object pasted on another background. Everything is drawn from a
seed, and the first composites are the same however many are drawn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.faithfulness.defaults import COMPOSITES, CONFIDENT
from vitlens.analysis.faithfulness.imputation import impute
from vitlens.analysis.faithfulness.maps import AnyMaps, PerImage, Size, enlarge_maps, map_faults
from vitlens.errors import DataError, InputError
from vitlens.shapes import Images, Labels, Logits, Maps, Masks
from vitlens.uncertainty import Estimate, bootstrap_mean

Score = Callable[[AnyMaps, Masks], PerImage]

_ROUNDING: Final = 1e-6  # smaller differences, as a part of a map's greatest value, are ties
_CENTRE_WIDTH: Final = 1 / 4  # standard deviation of the centre Gaussian as a share of each side
# cells a side of the mean mask, at most; the masks of many images at full size need much memory
_FINEST: Final = 32
_RIM: Final = 1 / 32  # width by which an object that is imputed is widened, of the shorter side
# after so many draws in a row of composites that exist already, there are taken to be no others
_TRIES: Final = 20
_SEED_STEP: Final = 1_000_003  # a prime, so that (seed, place) gives a distinct seed


def pointing_hits(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the hits of the pointing game (Zhang 2018).

    A map scores 1 where its highest point lies on the object, else 0. If several points are equally
    high up to rounding, the share of them on the mask counts: the chance that one of them, drawn at
    random, is a hit. So a uniform map scores the area of the mask.

    Raises DataError for an empty mask.
    """
    empty = (~masks.flatten(1).any(1)).nonzero()
    if len(empty):
        raise DataError(
            f"expected an object in every mask, found an empty one (image {int(empty[0])})"
        )
    pixels = _in_pixels(maps, masks)
    rounding = _ROUNDING * pixels.abs().amax(1, keepdim=True)
    is_highest = pixels >= pixels.amax(1, keepdim=True) - rounding
    # all points of a constant map are equally high, despite the rounding of the interpolation
    is_highest |= map_faults(maps).constant[:, None]
    return (is_highest & masks.flatten(1)).sum(1) / is_highest.sum(1)


def _in_pixels(maps: AnyMaps, masks: Masks) -> Float[Tensor, "batch pixels"]:
    return enlarge_maps(maps.float(), (masks.shape[-2], masks.shape[-1])).flatten(1)


def _values_and_masks(maps: AnyMaps, masks: Masks) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the pixels of each map, and the masks, each (images, pixels).

    The pixels of a constant map are 0, as rounding of the interpolation would rank them.
    """
    is_constant = map_faults(maps).constant[:, None]
    values = _in_pixels(maps, masks).double().masked_fill(is_constant, 0.0)
    return values.cpu().numpy(), masks.flatten(1).cpu().numpy()


def pointing_rate(hits: PerImage, *, groups: Tensor | None = None, seed: int = 0) -> Estimate:
    """Return the mean of `pointing_hits`.

    The interval is that of an accuracy, or that of the bootstrap where the maxima of a map tie.
    """
    has_ties = not bool(((hits == 0) | (hits == 1)).all())
    if not has_ties:
        return accuracy(hits.bool(), groups=groups)
    members = None if groups is None else groups.numpy()
    return bootstrap_mean(hits.numpy(), groups=members, seed=seed, least=0.0, most=1.0)


def roc_auc(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the probability that a pixel of the object is ranked above one outside it.

    Ties count half, and 0.5 is chance.
    """
    from scipy import stats  # takes half a second to import

    values, inside = _values_and_masks(maps, masks)
    # the statistic of Mann and Whitney: the pairs of pixels in which that of the object is higher
    ranks = stats.rankdata(values, axis=1)
    inside_count = inside.sum(1)
    outside_count = inside.shape[1] - inside_count
    lowest_rank_sum = inside_count * (inside_count + 1) / 2
    won_pairs = (ranks * inside).sum(1) - lowest_rank_sum
    return torch.from_numpy(won_pairs / (inside_count * outside_count)).float()


def average_precision(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the mean precision over the object's pixels, from the highest value down.

    Equal values are taken together. Chance is the area of the mask. The definition is that of
    scikit-learn's average_precision_score.
    """
    precisions = list[float]()
    all_values, all_masks = _values_and_masks(maps, masks)
    for values, inside in zip(all_values, all_masks):
        order = np.argsort(-values, kind="stable")
        hits = np.cumsum(inside[order])
        # the index of the last of each run of equal values
        last = np.flatnonzero(np.diff(values[order], append=-np.inf))
        recall = hits[last] / hits[-1]
        precision = hits[last] / (last + 1)
        precisions.append(float((np.diff(recall, prepend=0.0) * precision).sum()))
    return torch.tensor(precisions, dtype=torch.float32)


def mask_iou(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the intersection over union of the mask and the pixels above the mean of the map."""
    is_marked, is_inside = _above_mean_and_masks(maps, masks)
    intersection = (is_marked & is_inside).sum(1).float()
    return intersection / (is_marked | is_inside).sum(1).float()


def pixel_accuracy(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the share of pixels above the map's mean inside the mask, or not above it outside."""
    is_marked, is_inside = _above_mean_and_masks(maps, masks)
    return (is_marked == is_inside).float().mean(1)


def _above_mean_and_masks(
    maps: AnyMaps, masks: Masks
) -> tuple[Bool[Tensor, "batch pixels"], Bool[Tensor, "batch pixels"]]:
    """Return the pixels above the mean of each map, and the masks. A constant map has none."""
    values, inside = _values_and_masks(maps, masks)
    is_above = values > values.mean(1, keepdims=True)
    return torch.from_numpy(is_above), torch.from_numpy(inside)


def mass_inside(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the share of the map's positive mass on the object; 0 where it has none.

    Chance is the area of the mask.
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
    """Return the scores of maps that ignore the image, which a localisation must exceed.

    There are four, by name: a uniform map, a Gaussian at the centre, the mean mask of the other
    images, and the map of another image, drawn with the seed. They have the grid of `maps`. Other
    images are those of other groups. Without any, the last two are left out.

    groups (n,): the source of each image.
    """
    rows, columns = maps.shape[-2:]
    scores = {
        "a uniform map": score(maps.new_ones(len(maps), rows, columns), masks),
        "a map of the centre": score(centre_maps(len(maps), (rows, columns)), masks),
    }
    if groups is None:
        groups = torch.arange(len(maps))
    other = other_images(groups, seed=seed)
    if other is None:
        return scores
    _, group_of_image = groups.unique(return_inverse=True)
    sizes = group_of_image.bincount()
    grid = (min(rows, _FINEST), min(columns, _FINEST))
    coverage = F.adaptive_avg_pool2d(masks[:, None].float(), grid)[:, 0]
    # for each group (groups, rows, columns)
    sum_of_group = coverage.new_zeros(len(sizes), *coverage.shape[1:])
    sum_of_group.index_add_(0, group_of_image, coverage)
    sum_of_others = coverage.sum(0) - sum_of_group
    other_count = len(maps) - sizes
    mean_of_others = sum_of_others / other_count[:, None, None]
    scores["the mean mask of the other images"] = score(mean_of_others[group_of_image], masks)
    scores["the map of another image"] = score(maps[other], masks)
    return scores


def other_images(groups: Tensor, *, seed: int = 0) -> Tensor | None:
    """Return for each image (n,) the index of one of another group, drawn with the seed.

    It is None if all images are of one group.
    """
    _, group_of_image = groups.unique(return_inverse=True)
    sizes = group_of_image.bincount()
    if len(sizes) < 2:
        return None
    count = len(group_of_image)
    generator = torch.Generator().manual_seed(seed)
    # images ordered by group, then at random
    shuffled = torch.randperm(count, generator=generator)
    order = shuffled[group_of_image[shuffled].argsort(stable=True)]
    # The order is a circle of groups: the other_count places after the end of a group hold all
    # images of other groups. One of these places is drawn.
    other_count = count - sizes[group_of_image]
    further = (torch.rand(count, generator=generator) * other_count).long()
    end_of_group = sizes.cumsum(0)[group_of_image]
    return order[(end_of_group + further) % count]


def random_maps(count: int, grid: Size, *, seed: int = 0) -> Maps:
    """Return a map of uniform noise for each image. A map does not depend on the count."""
    return torch.rand(count, *grid, generator=torch.Generator().manual_seed(seed))


def centre_maps(count: int, grid: Size) -> Maps:
    """Return the same map for every image: a Gaussian at its centre.

    The object of a photograph is often there.
    """
    rows = _cell_centres(grid[0])
    columns = _cell_centres(grid[1])
    gaussian = torch.exp(-(rows[:, None] ** 2 + columns[None, :] ** 2) / (2 * _CENTRE_WIDTH**2))
    return gaussian.expand(count, *grid).clone()


def _cell_centres(count: int) -> Float[Tensor, " cells"]:
    """Return the centres of cells along an axis from -0.5 to 0.5."""
    return torch.linspace(-0.5, 0.5, count + 1)[:-1] + 0.5 / count


def has_edge(masks: Masks) -> Bool[Tensor, " batch"]:
    """Return True for masks with both an object and background.

    Localisation is not defined for others.
    """
    flat = masks.flatten(1)
    return flat.any(1) & ~flat.all(1)


@dataclass(frozen=True)
class Composites:
    """Composite images, and the classes that are explained on them, one map for each.

    images: the composites.
    which: the index of the composite of each map.
    targets: the class that each map explains.
    masks: the place of the evidence for this class, for each map.
    sources: the indices of the images of which each composite is made.
    """

    images: Float[Tensor, "composites 3 height width"]
    which: Int[Tensor, " batch"]
    targets: Labels
    masks: Masks
    sources: Int[Tensor, "composites parts"]

    def __len__(self) -> int:
        return len(self.which)

    @property
    def chance(self) -> float:
        """Return the mean share of a composite that the evidence covers.

        It is the mass of a uniform map there.
        """
        return float(self.masks.float().mean())


def cell_mass(maps: AnyMaps, masks: Masks) -> PerImage:
    """Return the share of each map's positive mass in its cell; 0 where it has none.

    Chance is the area of the cell. The mass of a patch lies evenly on its pixels, so that a map of
    patches in the cell has 1. Bilinear interpolation would move mass across the edge of the cell.
    """
    size = masks.shape[-2:]
    large = F.interpolate(maps.double().unsqueeze(1), size=size, mode="nearest-exact")
    return share_of_mass(large.flatten(1), masks.flatten(1)).float()


COMPOSITE_SCORES: Final[Mapping[str, Score]] = {
    "mass": cell_mass,
    "pointing": pointing_hits,
    "roc_auc": roc_auc,
}


def confident_images(
    logits: Logits, labels: Labels, *, least: float = CONFIDENT
) -> Int[Tensor, " usable"]:
    """Return the indices of images classified as their label with at least this probability."""
    probabilities = logits.float().softmax(-1)
    labels = labels.to(logits.device)
    is_confident = probabilities.gather(1, labels[:, None]).squeeze(1) >= least
    is_correct = probabilities.argmax(-1) == labels
    return (is_confident & is_correct).nonzero().squeeze(1)


def is_recognised(logits: Logits, targets: Labels, parts: int) -> Bool[Tensor, " batch"]:
    """Return True for targets among the most probable classes of their composite.

    As many classes count as a composite has parts.
    """
    top = logits.topk(min(parts, logits.shape[1]), dim=1).indices
    return (top == targets.to(top.device)[:, None]).any(1).cpu()


def mosaics(
    images: Images,
    labels: Labels,
    _masks: Masks | None = None,
    *,
    side: int = 2,
    count: int = COMPOSITES,
    seed: int = 0,
) -> Composites:
    """Return at most `count` mosaics of side x side images of distinct classes.

    They have the size of the images, and every cell is explained. Raises InputError for fewer
    distinct classes than cells.
    """
    cells = side * side
    drawn = _draw_composites(labels, count=count, parts=cells, seed=seed)
    height, width = images.shape[-2:]
    canvas = images.new_zeros(len(drawn), *images.shape[1:])
    masks = torch.zeros(cells, height, width, dtype=torch.bool)
    rows = _part_edges(height, side)
    columns = _part_edges(width, side)
    for cell in range(cells):
        top, bottom = rows[cell // side]
        left, right = columns[cell % side]
        small = _shrunk(images[drawn[:, cell]], (bottom - top, right - left))
        canvas[..., top:bottom, left:right] = small
        masks[cell, top:bottom, left:right] = True
    return Composites(
        images=canvas,
        which=torch.arange(len(drawn)).repeat_interleave(cells),
        targets=labels.cpu()[drawn].flatten(),
        masks=masks.repeat(len(drawn), 1, 1),
        sources=drawn,
    )


def _part_edges(extent: int, parts: int) -> list[tuple[int, int]]:
    """Return the first pixel of each part of a side and the one after its last, nearly equal."""
    edges = [round(extent * part / parts) for part in range(parts + 1)]
    return list(pairwise(edges))


def embedded(
    images: Images,
    labels: Labels,
    _masks: Masks | None = None,
    *,
    count: int = COMPOSITES,
    seed: int = 0,
) -> Composites:
    """Return at most `count` images that are shrunk onto images of other classes.

    Each has half its sides, and a random place. Raises InputError for fewer than two classes.
    """
    drawn = _draw_composites(labels, count=count, parts=2, seed=seed)
    foreground, background = drawn.unbind(1)
    height, width = images.shape[-2:]
    small_height = max(1, round(height / 2))
    small_width = max(1, round(width / 2))
    canvas = images[background].clone()
    small = _shrunk(images[foreground], (small_height, small_width))
    masks = torch.zeros(len(drawn), height, width, dtype=torch.bool)
    for number in range(len(drawn)):
        # drawn one by one, so that a place does not depend on the number of composites
        generator = torch.Generator().manual_seed(seed * _SEED_STEP + number)
        top = int(torch.randint(height - small_height + 1, (1,), generator=generator))
        left = int(torch.randint(width - small_width + 1, (1,), generator=generator))
        bottom = top + small_height
        right = left + small_width
        canvas[number, :, top:bottom, left:right] = small[number]
        masks[number, top:bottom, left:right] = True
    return Composites(
        images=canvas,
        which=torch.arange(len(drawn)),
        targets=labels.cpu()[foreground],
        masks=masks,
        sources=drawn,
    )


def pasted(
    images: Images, labels: Labels, masks: Masks, *, count: int = COMPOSITES, seed: int = 0
) -> Composites:
    """Return at most `count` objects, each on the background of another class.

    The object of the background is imputed with a rim, as the edge of a mask leaves some of its
    outline. Raises InputError for fewer than two classes of images with an object and background.
    """
    usable = has_edge(masks.cpu()).nonzero().squeeze(1)
    usable_labels = labels[usable.to(labels.device)]
    drawn = usable[_draw_composites(usable_labels, count=count, parts=2, seed=seed)]
    foreground, background = drawn.unbind(1)
    masks = masks.to(images.device)
    objects = masks[foreground]
    removed = masks[background].unsqueeze(1)
    rim = ceil(min(masks.shape[-2:]) * _RIM)
    widened = F.max_pool2d(removed.float(), 2 * rim + 1, stride=1, padding=rim) > 0
    # an image without any pixel left cannot be imputed
    covers_all = widened.flatten(1).all(1).view(-1, 1, 1, 1)
    holes = torch.where(covers_all, removed, widened)
    ground = impute(images[background], holes, noise=0.0)
    return Composites(
        images=torch.where(objects.unsqueeze(1), images[foreground], ground),
        which=torch.arange(len(drawn)),
        targets=labels.cpu()[foreground],
        masks=objects.cpu(),
        sources=drawn,
    )


def _draw_composites(
    labels: Labels, *, count: int, parts: int, seed: int
) -> Int[Tensor, "composites parts"]:
    """Return different draws of images of distinct classes; rarely used images come first.

    Raises InputError for fewer classes than parts.
    """
    classes = labels.tolist()
    if len(set(classes)) < parts:
        raise InputError(
            f"expected images of at least {parts} distinct classes, found {len(set(classes))}"
        )
    generator = torch.Generator().manual_seed(seed)
    uses = torch.zeros(len(classes))  # of each image so far
    draws = list[tuple[int, ...]]()
    repeats = 0
    while len(draws) < count and repeats < _TRIES:
        # a number in [0, 1) orders images with equal uses at random
        order = (uses + torch.rand(len(classes), generator=generator)).argsort().tolist()
        first_of_class: dict[int, int] = {}
        for index in order:
            first_of_class.setdefault(classes[index], index)
        chosen = list(first_of_class.values())[:parts]
        places = torch.randperm(parts, generator=generator).tolist()
        shuffled = tuple(chosen[place] for place in places)
        uses[list(shuffled)] += 1
        if shuffled in draws:
            repeats += 1
        else:
            repeats = 0
            draws.append(shuffled)
    return torch.tensor(draws)


def _shrunk(images: Images, size: Size) -> Float[Tensor, "batch 3 _ _"]:
    small = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
    return small.clamp(0, 1)
