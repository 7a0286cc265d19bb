"""Patterns that are sought in the errors themselves: a mark at a fixed place, a pair of classes.

The errors choose both among many, so their p-values count all that could have been chosen.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy import ndimage, stats
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.operations import luminance
from vitlens.analysis.failures.separation import permutations
from vitlens.shapes import Images, Labels

Array = NDArray[np.float64]
Cells = Float[Tensor, "batch channels rows columns"]
Box = tuple[int, int, int, int]  # the first row and column, and those after the last, px
GRID: Final = 16  # places along a side
_DRAWS: Final = 2000  # permutations
_CHANNELS: Final = (  # errors with more and with less of each channel of `cells_of`
    ("brighter", "darker"),
    ("redder", "less red"),
    ("greener", "less green"),
    ("bluer", "less blue"),
)
_PREFERRED: Final = 1.1  # another channel is taken if its score is so many times that of luminance
_LARGEST: Final = 1 / 8  # a region of more than this part of the places is no mark
_LEAST_VARIATION: Final = 1e-6  # a cell with a smaller standard deviation does not vary
_TINY: Final = 1e-12  # avoids a division by 0


@dataclass(frozen=True)
class Mark:
    """The place at which images of errors and of correct predictions differ most.

    index: the index of the best cell in the flattened cells.
    box: the box of the mark in px.
    values (n,): the value of the channel there, without the image's mean.
    p: the p-value of such a difference at any place.
    detail: how errors differ, e.g. "brighter".
    place: the place in words.
    """

    index: int
    box: Box
    values: Float[Tensor, " batch"]
    p: float
    detail: str
    place: str


@dataclass(frozen=True)
class Pair:
    """Two classes that are confused more often than others are misclassified.

    first, second: the numbers of the classes.
    values (n,): 1 for images of one of the two classes, else 0.
    p: the p-value, corrected for the number of pairs.
    pairs: the number of pairs of classes.
    """

    first: int
    second: int
    values: Float[Tensor, " batch"]
    p: float
    pairs: int


def cells_of(images: Images) -> Cells:
    """Return luminance and colours of places on a grid, each without the mean of its image."""
    grid = (min(GRID, images.shape[-2]), min(GRID, images.shape[-1]))
    channels = torch.cat([luminance(images)[:, None], images], 1)
    places: Tensor = F.adaptive_avg_pool2d(channels, grid)
    return places - places.mean((2, 3), keepdim=True)


def scores(cells: Array, residuals: Array) -> Array:
    """Return the correlation of each column of cells with residuals.

    cells (n, places): values with the mean 0 over images.
    residuals (..., n): values with the mean 0.
    """
    cell_norms = np.sqrt((cells**2).sum(0))
    residual_norms = np.sqrt((residuals**2).sum(-1))[..., None]
    products: Array = residuals @ cells
    standard_deviations = cell_norms / len(cells) ** 0.5
    varies = standard_deviations > _LEAST_VARIATION
    norms = np.maximum(cell_norms * residual_norms, _TINY)
    return np.where(varies, products / norms, 0.0)


def p_of_any_place(
    cells: Array, residuals: Array, observed: float, *, seed: int
) -> tuple[float, float]:
    """Return the p-value of the best place of all, and the score that 5 % of permutations exceed.

    The p-value is the share of permutations in which any place scores at least as much.
    """
    maxima = list[Array]()
    for permuted in permutations(residuals, groups=None, draws=_DRAWS, seed=seed):
        maxima.append(np.abs(scores(cells, permuted)).max(-1))
    largest = np.concatenate(maxima)
    exceeding = int((largest >= abs(observed)).sum())
    return (1 + exceeding) / (1 + _DRAWS), float(np.quantile(largest, 0.95))


def find_mark(
    cells: Cells,
    wrong: NDArray[np.bool_],
    indices: NDArray[np.intp],
    size: tuple[int, int],
    seed: int,
) -> Mark:
    """Return the place that separates errors best among the images at these indices."""
    grid = (cells.shape[-2], cells.shape[-1])
    flat = cells.flatten(1)[torch.from_numpy(indices)].double().numpy()
    residuals = wrong[indices] - wrong[indices].mean()
    flat -= flat.mean(0)
    all_scores = scores(flat, residuals)  # (channels * rows * columns,)
    channel = _channel_of(all_scores)
    channel_scores = all_scores.reshape(len(_CHANNELS), *grid)[channel]
    best_place = int(np.abs(channel_scores).argmax())  # in the flattened grid
    row, column = divmod(best_place, grid[1])
    best = channel_scores[row, column]
    index = channel * channel_scores.size + best_place
    p, limit = p_of_any_place(flat, residuals, all_scores[index], seed=seed)
    # The mark is the region of significant scores with the same sign. If even the best score is not
    # significant, the region is that of scores as large.
    is_alike = channel_scores * np.sign(best) >= min(limit, abs(best))
    box = _box_of(_region_around(is_alike, row, column), size)
    more, less = _CHANNELS[channel]
    return Mark(
        index=index,
        box=box,
        values=cells.flatten(1)[:, index].float(),
        p=p,
        detail=more if best > 0 else less,
        place=_place_in_words(box, size),
    )


def _channel_of(all_scores: Array) -> int:
    """Return the channel of the best score; luminance unless another one is clearly better."""
    by_channel = np.abs(all_scores).reshape(len(_CHANNELS), -1).max(1)
    if by_channel.max() > _PREFERRED * by_channel[0]:
        return int(by_channel.argmax())
    return 0


def _region_around(is_alike: NDArray[np.bool_], row: int, column: int) -> NDArray[np.bool_]:
    """Return the connected region around a cell, or only the cell if the region is large."""
    labels, _ = ndimage.label(is_alike)
    region: NDArray[np.bool_] = labels == labels[row, column]
    if region.mean() > _LARGEST:
        region = np.zeros_like(region)
        region[row, column] = True
    return region


def _box_of(region: NDArray[np.bool_], size: tuple[int, int]) -> Box:
    """Return the box around the cells of a region, px."""
    height, width = size
    top, bottom = _ends(np.asarray(region.any(1)), height)
    left, right = _ends(np.asarray(region.any(0)), width)
    return top, left, bottom, right


def _ends(occupied: NDArray[np.bool_], side: int) -> tuple[int, int]:
    """Return the first pixel of the occupied cells along an axis, and the one after the last."""
    cells = np.flatnonzero(occupied)
    count = len(occupied)
    first_cell = int(cells[0])
    end_cell = int(cells[-1]) + 1
    start = first_cell * side // count  # rounded down
    end = -(-end_cell * side // count)  # rounded up
    return start, end


def _place_in_words(box: Box, size: tuple[int, int]) -> str:
    top, left, bottom, right = box
    height, width = size
    # the third of the image in which the middle of the box lies: 0, 1 or 2
    third_down = int(3 * (top + bottom) / 2 / height)
    third_across = int(3 * (left + right) / 2 / width)
    vertical = ("upper", "", "lower")[min(2, third_down)]
    horizontal = ("left", "", "right")[min(2, third_across)]
    if vertical and horizontal:
        return f"at the {vertical} {horizontal}"
    if horizontal:
        return f"at the {horizontal}"
    if vertical == "upper":
        return "at the top"
    if vertical == "lower":
        return "at the bottom"
    return "in the middle"


def find_pair(
    labels: Labels, predictions: Labels, indices: NDArray[np.intp], classes: int
) -> Pair | None:
    """Return the two classes that are confused most beyond the errors of all other classes.

    Fisher's exact test compares two rates: images of the two that are taken for each other, and
    images of other classes that are misclassified at all. If errors are as frequent in all classes,
    no pair is significant, whatever class is predicted. The result is None for two classes.

    indices: the indices of the images that count.
    """
    truth = labels.numpy()[indices]
    answers = predictions.numpy()[indices]
    present = np.unique(truth)
    if classes < 3 or len(present) < 3:
        return None
    # the confusion matrix (label, prediction)
    cell_of_image = truth * classes + answers
    counts = np.bincount(cell_of_image, minlength=classes**2).reshape(classes, classes)
    images_of_class = counts.sum(1)
    errors_of_class = images_of_class - counts.diagonal()
    pairs = list(combinations(present.tolist(), 2))
    all_images = images_of_class.sum()
    best_pair = pairs[0]
    best_p = 1.0
    for first, second in pairs:
        images = images_of_class[first] + images_of_class[second]
        confused = counts[first, second] + counts[second, first]
        images_elsewhere = all_images - images
        errors_elsewhere = errors_of_class.sum() - errors_of_class[first] - errors_of_class[second]
        # compares the rates confused / images and errors / images elsewhere without a division by 0
        if confused * images_elsewhere <= errors_elsewhere * images:
            continue  # the rate of the pair is not higher
        successes = confused + errors_elsewhere
        # the chance of at least so many confused: `sf` is the chance of more than its argument
        p = float(stats.hypergeom.sf(confused - 1, M=all_images, n=successes, N=images))
        if p < best_p:
            best_pair = (first, second)
            best_p = p
    first, second = best_pair
    values = ((labels == first) | (labels == second)).float()
    corrected_p = min(1.0, best_p * len(pairs))  # Bonferroni
    return Pair(first=first, second=second, values=values, p=corrected_p, pairs=len(pairs))
