"""Patterns sought in the errors themselves: a mark at a fixed place, and a pair of classes.

Both are chosen among many by the errors, so that their p-values count all that could have been
chosen.
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
_DRAWS: Final = 2000
_CHANNELS: Final = (
    ("brighter", "darker"),
    ("redder", "less red"),
    ("greener", "less green"),
    ("bluer", "less blue"),
)
_PREFERRED: Final = 1.1  # times the score of luminance, from which on another channel is taken
_LARGEST: Final = 1 / 8  # of the places: a larger region is no mark


@dataclass(frozen=True)
class Mark:
    """The place at which images of errors and of correct predictions differ most.

    index: the index of the cell in the flattened cells.
    box: the box of the mark, px.
    values: (n,) of the channel there, without the image's mean.
    p: that any place differs so much by chance.
    detail, place: in words, how errors differ and where.
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

    p: counts all pairs; pairs: their number; values: (n,) whether an image is of one of the two.
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

    cells: (n, places), centred; residuals: (..., n), of mean 0.
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
    of_channel = all_scores.reshape(len(_CHANNELS), rows, columns)[channel]
    row, column = np.unravel_index(int(np.abs(of_channel).argmax()), of_channel.shape)
    best = of_channel[row, column]
    index = (channel * rows + int(row)) * columns + int(column)
    p, limit = p_of_any_place(flat, residuals, all_scores[index], seed=seed)
    is_alike = of_channel * np.sign(best) >= min(limit, abs(best))
    box = _box_of(_region_around(is_alike, int(row), int(column)), size)
    more, less = _CHANNELS[channel]
    return Mark(
        index,
        box,
        cells.flatten(1)[:, index].float(),
        p,
        more if best > 0 else less,
        _place_in_words(box, size),
    )


def _channel_of(all_scores: Array) -> int:
    """Return the channel of the best score; luminance unless another one is clearly better."""
    by_channel = np.abs(all_scores).reshape(len(_CHANNELS), -1).max(1)
    if by_channel.max() > _PREFERRED * by_channel[0]:
        return int(by_channel.argmax())
    return 0


def _region_around(is_alike: NDArray[np.bool_], row: int, column: int) -> NDArray[np.bool_]:
    """Return the connected region of a cell; the cell only, where the region is large."""
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
    first = int(inside[0]) * side // count
    last = -(-(int(inside[-1]) + 1) * side // count)
    return first, last


def _place_in_words(box: Box, size: tuple[int, int]) -> str:
    top, left, bottom, right = box
    down = ("upper", "", "lower")[min(2, int(3 * (top + bottom) / 2 / size[0]))]
    across = ("left", "", "right")[min(2, int(3 * (left + right) / 2 / size[1]))]
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

    None of two classes. Fisher's exact test: are images of the two taken for each other more often
    than images of other classes are misclassified at all? Errors that are as frequent in all
    classes are then no pair, wherever they go. indices: of the images that count.
    """
    truth = labels.numpy()[indices]
    answers = predictions.numpy()[indices]
    present = np.unique(truth)
    if classes < 3 or len(present) < 3:
        return None
    counts = np.bincount(truth * classes + answers, minlength=classes**2).reshape(classes, classes)
    of_class = counts.sum(1)
    wrong_of_class = of_class - counts.diagonal()
    pairs = list(combinations(present.tolist(), 2))
    best: tuple[float, int, int] = (1.0, *pairs[0])
    for first, second in pairs:
        images = of_class[first] + of_class[second]
        confused = counts[first, second] + counts[second, first]
        elsewhere = of_class.sum() - images
        wrong_elsewhere = wrong_of_class.sum() - wrong_of_class[first] - wrong_of_class[second]
        if confused * elsewhere <= wrong_elsewhere * images:
            continue
        wrong = confused + wrong_elsewhere
        p = float(stats.hypergeom.sf(confused - 1, images + elsewhere, wrong, images))
        best = min(best, (p, first, second))
    p, first, second = best
    values = ((labels == first) | (labels == second)).float()
    return Pair(first, second, values, min(1.0, p * len(pairs)), len(pairs))
