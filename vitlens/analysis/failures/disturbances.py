"""Disturbances of images at several levels, free of torch: low-pass, high-pass, shuffled tiles, covered squares."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

Size = tuple[int, int]

_CUTOFFS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
_MOST_TILES = 16  # along a side
_COVERED = 8  # squares along a side, nearly
_OPERATIONS: Final = "vitlens.analysis.failures.disturbed"


@dataclass(frozen=True)
class Disturbance:
    """One disturbance.

    title, axis: for figures; description: what it does, in a sentence; levels: for images of a size (height, width),
    the first of which changes nothing; function: "module:function", called as function(images, level, keys), returns
    images in [0, 1].
    """

    title: str
    axis: str
    description: str
    levels: Callable[[Size], tuple[float, ...]]
    function: str


def _divisors(size: Size, most: int) -> tuple[int, ...]:
    common = math.gcd(*size)
    return tuple(parts for parts in range(1, most + 1) if common % parts == 0)


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


def _shuffles(size: Size) -> tuple[float, ...]:
    """1 and numbers that divide the sides, each at least 1.7 times the one before."""
    chosen = [1]
    for parts in _divisors(size, _MOST_TILES):
        if parts >= 1.7 * chosen[-1]:
            chosen.append(parts)
    return tuple(float(parts) for parts in chosen)


DISTURBANCES: Final[Mapping[str, Disturbance]] = MappingProxyType(
    {
        "low-pass": Disturbance(
            "only coarse detail (low-pass)", "kept up to (% of Nyquist's frequency)",
            "detail finer than the cut-off removed",
            lambda _size: (1.5, *_CUTOFFS[::-1]), f"{_OPERATIONS}:without_fine_detail",
        ),
        "high-pass": Disturbance(
            "only fine detail (high-pass)", "removed up to (% of Nyquist's frequency)",
            "detail coarser than the cut-off removed, the mean colour kept",
            lambda _size: (0.0, *_CUTOFFS[:-1]), f"{_OPERATIONS}:without_coarse_detail",
        ),
        "shuffle": Disturbance(
            "tiles shuffled", "tiles along a side",
            "cut into tiles in random order, which destroys shape before texture",
            _shuffles, f"{_OPERATIONS}:in_shuffled_tiles",
        ),
        "occlusion": Disturbance(
            "squares covered", "squares covered (%)",
            "squares off the grid of a ViT's patches (5 px wide and shifted by 3 px in images of 32 px, 29 and 15 in "
            "224 px), as whole patches would favour it, filled with the image's mean colour at random places",
            lambda _size: _SHARES, f"{_OPERATIONS}:covered",
        ),
    }
)  # fmt: skip
