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
_CHANNELS: Final = (  # errors with more and with less of each channel
    ("brighter", "darker"),
    ("redder", "less red"),
    ("greener", "less green"),
    ("bluer", "less blue"),
)
_PREFERRED: Final = 1.1  # another channel is taken if its score is so many times that of luminance
_LARGEST: Final = 1 / 8  # a region of more than this part of the places is no mark


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
    sizes = np.sqrt((cells**2).sum(0))
    spread = np.sqrt((residuals**2).sum(-1))[..., None]
    products: Array = residuals @ cells
    varies = sizes > 1e-6 * len(cells) ** 0.5
    return np.where(varies, products / np.maximum(sizes * spread, 1e-12), 0.0)


def p_of_any_place(
    cells: Array, residuals: Array, observed: float, *, seed: int
) -> tuple[float, float]:
    """Return the p-value of the best place of all, and the score that 5 % of permutations exceed.

    The p-value is the share of permutations in which any place scores at least as much.
    """
    maxima = list[Array]()
    for permuted in permutations(residuals, None, draws=_DRAWS, seed=seed):
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
    rows, columns = cells.shape[-2:]
    flat = cells.flatten(1)[torch.from_numpy(indices)].double().numpy()
    residuals = wrong[indices] - wrong[indices].mean()
    flat -= flat.mean(0)
    all_scores = scores(flat, residuals)
    channel = _channel_of(all_scores)
    channel_scores = all_scores.reshape(len(_CHANNELS), rows, columns)[channel]
    row, column = np.unravel_index(int(np.abs(channel_scores).argmax()), channel_scores.shape)
    best = channel_scores[row, column]
    index = (channel * rows + int(row)) * columns + int(column)
    p, limit = p_of_any_place(flat, residuals, all_scores[index], seed=seed)
    # the mark is the region of significant scores with the same sign
    is_alike = channel_scores * np.sign(best) >= min(limit, abs(best))
    box = _box_of(_region_around(is_alike, int(row), int(column)), size)
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
    inside = np.flatnonzero(occupied)
    count = len(occupied)
    first = int(inside[0]) * side // count  # rounded down
    end = -(-(int(inside[-1]) + 1) * side // count)  # rounded up
    return first, end


def _place_in_words(box: Box, size: tuple[int, int]) -> str:
    top, left, bottom, right = box
    height, width = size
    third_down = int(3 * (top + bottom) / 2 / height)  # the third of the image: 0, 1 or 2
    third_across = int(3 * (left + right) / 2 / width)
    down = ("upper", "", "lower")[min(2, third_down)]
    across = ("left", "", "right")[min(2, third_across)]
    if down and across:
        return f"at the {down} {across}"
    if down == "upper":
        return "at the top"
    if down == "lower":
        return "at the bottom"
    return f"at the {across}" if across else "in the middle"


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
    counts = np.bincount(truth * classes + answers, minlength=classes**2).reshape(classes, classes)
    images_of_class = counts.sum(1)
    errors_of_class = images_of_class - counts.diagonal()
    pairs = list(combinations(present.tolist(), 2))
    best: tuple[float, int, int] = (1.0, *pairs[0])
    for first, second in pairs:
        images = images_of_class[first] + images_of_class[second]
        confused = counts[first, second] + counts[second, first]
        images_elsewhere = images_of_class.sum() - images
        errors_elsewhere = errors_of_class.sum() - errors_of_class[first] - errors_of_class[second]
        if confused * images_elsewhere <= errors_elsewhere * images:
            continue  # the rate of the pair is not higher
        both = confused + errors_elsewhere
        p = float(stats.hypergeom.sf(confused - 1, images + images_elsewhere, both, images))
        best = min(best, (p, first, second))
    p, first, second = best
    values = ((labels == first) | (labels == second)).float()
    return Pair(
        first=first, second=second, values=values, p=min(1.0, p * len(pairs)), pairs=len(pairs)
    )
