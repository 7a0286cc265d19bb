"""Images made harder step by step: without fine or coarse detail, cut into tiles and shuffled, partly covered.

What is random is decided by an image's own key, not by its place in a batch; at a higher level of covering, what was
covered stays covered.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from vitlens.analysis.failures.spectrum import high_pass, low_pass
from vitlens.data.draws import uniform
from vitlens.errors import InputError
from vitlens.shapes import Images

Keys = Int[Tensor, " batch"]
Size = tuple[int, int]

_CUTOFFS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0)
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
_MOST_TILES = 16  # along a side
_COVERED = 8  # tiles along a side, where that many pixels divide; else the next number that does


@dataclass(frozen=True)
class Disturbance:
    """One way to make images harder.

    title, axis: for figures; says: what it does, in a sentence; levels: those tried for images of a size (height,
    width), the first of which changes nothing; apply: (images, level, keys) -> images in [0, 1].
    """

    title: str
    axis: str
    says: str
    levels: Callable[[Size], tuple[float, ...]]
    apply: Callable[[Images, float, Keys], Images]


def shuffled(images: Images, parts: int, keys: Keys) -> Images:
    """Each image cut into parts x parts equal tiles, laid out at random (another order for each key).

    Raises InputError when the sides are not multiples of parts.
    """
    tiles = _tiles(images, parts)
    order = uniform(keys.to(images.device), tiles.shape[1], stream=1).argsort(1)
    return _joined(tiles[torch.arange(len(images), device=images.device)[:, None], order], images)


def covered(images: Images, share: float, keys: Keys) -> Images:
    """Each image with that share of its tiles (8 x 8 where that divides the sides) filled with its own mean colour.

    share: a fraction; the number of tiles is rounded. Raises InputError outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise InputError(f"expected a share of tiles from 0 to 1, found {share}")
    tiles = _tiles(images, _tiles_along((images.shape[-2], images.shape[-1])))
    rank = uniform(keys.to(images.device), tiles.shape[1], stream=2).argsort(1).argsort(1)
    gone = rank < round(share * tiles.shape[1])
    mean = images.mean((-2, -1))[:, None, :, None, None]
    return _joined(torch.where(gone[:, :, None, None, None], mean, tiles), images)


def _tiles(images: Images, parts: int) -> Tensor:
    """(batch, parts * parts, 3, rows, columns)."""
    height, width = images.shape[-2:]
    if parts < 1 or height % parts or width % parts:
        raise InputError(f"expected sides that {parts} tiles divide, found images of {height}x{width} px")
    cut = images.unflatten(2, (parts, height // parts)).unflatten(4, (parts, width // parts))
    tiles: Tensor = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    return tiles


def _joined(tiles: Tensor, images: Images) -> Images:
    parts = math.isqrt(tiles.shape[1])
    laid: Tensor = tiles.unflatten(1, (parts, parts)).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    return laid


def _divisors(size: Size, most: int) -> tuple[int, ...]:
    common = math.gcd(*size)
    return tuple(parts for parts in range(1, most + 1) if common % parts == 0)


def _tiles_along(size: Size) -> int:
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
            lambda _size: (1.5, *_CUTOFFS[::-1]), lambda images, level, _keys: low_pass(images, cutoff=level),
        ),
        "high-pass": Disturbance(
            "only fine detail (high-pass)", "taken out up to (% of Nyquist's frequency)",
            "detail as coarse as the cut-off taken out, the mean colour kept",
            lambda _size: (0.0, *_CUTOFFS[:-1]), lambda images, level, _keys: high_pass(images, cutoff=level),
        ),
        "shuffle": Disturbance(
            "tiles shuffled", "tiles along a side",
            "cut into tiles that are laid out at random: shape is lost before texture is",
            _shuffles, lambda images, level, keys: shuffled(images, int(level), keys),
        ),
        "occlusion": Disturbance(
            "tiles covered", "tiles covered (%)",
            "tiles filled with the image's mean colour, at random places",
            lambda _size: _SHARES, covered,
        ),
    }
)  # fmt: skip
