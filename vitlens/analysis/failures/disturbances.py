"""Ways to make images harder level by level, free of torch: without fine or coarse detail, shuffled, partly covered."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

Size = tuple[int, int]

_CUTOFFS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
_MOST_TILES = 16  # along a side
_COVERED = 8  # tiles along a side, where that many pixels divide; else the next number that does
_OPERATIONS: Final = "vitlens.analysis.failures.disturbed"


@dataclass(frozen=True)
class Disturbance:
    """One way to make images harder.

    title, axis: for figures; says: what it does, in a sentence; levels: those tried for images of a size (height,
    width), the first of which changes nothing; function: "module:function", called as function(images, level, keys),
    gives images in [0, 1].
    """

    title: str
    axis: str
    says: str
    levels: Callable[[Size], tuple[float, ...]]
    function: str


def _divisors(size: Size, most: int) -> tuple[int, ...]:
    common = math.gcd(*size)
    return tuple(parts for parts in range(1, most + 1) if common % parts == 0)


def tiles_along(size: Size) -> int:
    """8 where that divides the sides, else the number that divides them and is nearest to 8."""
    return min(_divisors(size, _MOST_TILES), key=lambda parts: (abs(parts - _COVERED), parts))


def _shuffles(size: Size) -> tuple[float, ...]:
    """1 and, of the numbers that divide the sides, those that at least about double from step to step."""
    chosen = [1]
    for parts in _divisors(size, _MOST_TILES):
        if parts >= 1.7 * chosen[-1]:
            chosen.append(parts)
    return tuple(float(parts) for parts in chosen)


DISTURBANCES: Final[Mapping[str, Disturbance]] = MappingProxyType(
    {
        "low-pass": Disturbance(
            "only coarse detail (low-pass)", "kept up to (% of Nyquist's frequency)",
            "detail finer than the cut-off taken out",
            lambda _size: (1.5, *_CUTOFFS[::-1]), f"{_OPERATIONS}:without_fine_detail",
        ),
        "high-pass": Disturbance(
            "only fine detail (high-pass)", "taken out up to (% of Nyquist's frequency)",
            "detail as coarse as the cut-off taken out, the mean colour kept",
            lambda _size: (0.0, *_CUTOFFS[:-1]), f"{_OPERATIONS}:without_coarse_detail",
        ),
        "shuffle": Disturbance(
            "tiles shuffled", "tiles along a side",
            "cut into tiles that are laid out at random: shape is lost before texture is",
            _shuffles, f"{_OPERATIONS}:in_shuffled_tiles",
        ),
        "occlusion": Disturbance(
            "tiles covered", "tiles covered (%)",
            "tiles filled with the image's mean colour, at random places",
            lambda _size: _SHARES, f"{_OPERATIONS}:covered",
        ),
    }
)  # fmt: skip
