"""Accuracy on disturbed images level by level, and the operations that disturb them.

Random numbers depend on an image's own key, not on its index in a batch; a square that is covered at one level is
also covered at higher levels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.analysis.answers.classes import reading
from vitlens.analysis.answers.evaluate import fitting_batch_size, require_labels
from vitlens.analysis.failures.spectrum import frequency_bands
from vitlens.data.draws import uniform
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Images

Keys = Int[Tensor, " batch"]
Size = tuple[int, int]
Change = Callable[[Images, float, Keys], Tensor]

_CUTOFFS: Final = (0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0)
_MOST_TILES: Final = 16  # along a side
_COVERED: Final = 8  # squares along a side, nearly


def low_pass(images: Images, cutoff: float, _keys: Keys) -> Images:
    """The images without frequencies above the cut-off, clipped to [0, 1]; from sqrt(2) on, the images themselves."""
    return frequency_bands(images, cutoff=cutoff)[0].clamp(0, 1)


def high_pass(images: Images, cutoff: float, _keys: Keys) -> Images:
    """The images without frequencies up to the cut-off, plus their mean colour, clipped to [0, 1].

    A cut-off of 0 changes nothing, as the mean is added again.
    """
    return (frequency_bands(images, cutoff=cutoff)[1] + images.mean((-2, -1), keepdim=True)).clamp(0, 1)


def shuffled(images: Images, parts: float, keys: Keys) -> Images:
    """Each image cut into parts x parts equal tiles in random order (a different order for each key).

    Raises InputError when the sides are not multiples of parts.
    """
    side, (height, width) = int(parts), images.shape[-2:]
    if side < 1 or height % side or width % side:
        raise InputError(f"expected sides that {side} tiles divide, found images of {height}x{width} px")
    cut = images.unflatten(2, (side, height // side)).unflatten(4, (side, width // side))
    tiles = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (batch, tiles, 3, rows, columns)
    order = uniform(keys.to(images.device), tiles.shape[1], stream=1).argsort(1)
    mixed = tiles[torch.arange(len(images), device=images.device)[:, None], order]
    laid: Tensor = mixed.unflatten(1, (side, side)).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    return laid


def covered(images: Images, share: float, keys: Keys) -> Images:
    """Each image with that share of its squares filled with its own mean colour, off the grid of a ViT's patches.

    The squares, of `square_side` px, begin `square_offset` px outside the image: squares of the patches' own grid would
    remove whole tokens and leave the others as they are. share: a fraction; the number of squares is rounded, and as
    those at the edges are cut, the share of pixels is this one on average. Raises InputError outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise InputError(f"expected a share of squares from 0 to 1, found {share}")
    size = images.shape[-2], images.shape[-1]
    rows, columns = ((torch.arange(whole) + square_offset(size)) // square_side(size) for whole in size)
    number = (rows[:, None] * (int(columns[-1]) + 1) + columns).to(images.device)
    squares = int(number[-1, -1]) + 1
    rank = uniform(keys.to(images.device), squares, stream=2).argsort(1).argsort(1)
    gone = (rank < round(share * squares))[:, number]
    return torch.where(gone[:, None], images.mean((-2, -1), keepdim=True), images)


def square_side(size: Size) -> int:
    """The side of covered squares, px: about an eighth of the image, no multiple or part of any patch."""
    return _coprime(max(2, -(-min(size) // _COVERED)), size)


def square_offset(size: Size) -> int:
    """How far the first squares stick out above and to the left of the image, px: about half their side."""
    return _coprime(square_side(size) // 2, size)


def _coprime(least: int, size: Size) -> int:
    """The smallest number from `least` on that has no divisor in common with a side, as patches that divide it have."""
    while any(math.gcd(least, whole) > 1 for whole in size):
        least += 1
    return least


def _tiles(size: Size) -> tuple[float, ...]:
    """1 and numbers that divide the sides, each at least 1.7 times the one before."""
    chosen = [1.0]
    for parts in range(2, _MOST_TILES + 1):
        if math.gcd(*size) % parts == 0 and parts >= 1.7 * chosen[-1]:
            chosen.append(float(parts))
    return tuple(chosen)


# function and levels, for images of a size (height, width), of which the first changes nothing
DISTURBANCES: Final[Mapping[str, tuple[Change, Callable[[Size], tuple[float, ...]]]]] = MappingProxyType(
    {
        "low-pass": (low_pass, lambda _size: (1.5, *_CUTOFFS[::-1])),
        "high-pass": (high_pass, lambda _size: (0.0, *_CUTOFFS[:-1])),
        "shuffle": (shuffled, _tiles),
        "occlusion": (covered, lambda _size: (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)),
    }
)


def levels_of(size: Size) -> list[tuple[str, float]]:
    """Every disturbance at every one of its levels, for images of a size."""
    return [(kind, level) for kind, (_, levels) in DISTURBANCES.items() for level in levels(size)]


def correct_after(
    model: Model,
    split: Split,
    changes: Sequence[tuple[Change, float]],
    *,
    keys: Keys,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Bool[Tensor, "changes batch"]:
    """Which images are classified correctly after each change, called as function(images, level, keys), in [0, 1].

    keys: (n,), one per image, which seeds its random numbers, so that all models and processes have the same pixels.
    Images are changed at the split's own size, before the model resizes them. advance: called with the number of passes
    over an image just done. Raises DataError without labels, InputError when the classes do not match.
    """
    truth = require_labels(split).cpu()
    read = reading(model.classes, split.classes).read
    size = batch_size or fitting_batch_size(model)
    right = torch.zeros(len(changes), len(split), dtype=torch.bool)
    with torch.inference_mode(), evaluating(model), autocast(model.device, precision):
        for batch in split.batches(size, device=model.device):
            own = batch.indices.cpu()
            for row, (change, level) in enumerate(changes):
                predicted = read(model(change(batch.images, level, keys[own]).clamp(0, 1))).argmax(-1).cpu()
                right[row, own] = predicted == truth[own]
                advance(len(own))
    return right


def robustness(model: Model, split: Split, *, seed: int = 0, **passes: Any) -> Bool[Tensor, "levels batch"]:
    """Which images of a labelled split are classified correctly at each of `levels_of` its size.

    Images have their index in the split as key. passes: as `correct_after`, which also says what is raised.
    """
    changes = [(DISTURBANCES[kind][0], level) for kind, level in levels_of(split.size)]
    return correct_after(model, split, changes, keys=torch.arange(len(split)) + (seed << 20), **passes)
