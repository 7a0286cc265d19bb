"""Disturbances of images at several levels, free of torch: common corruptions, and filters, shuffles and coverings.

Each is one operation of operations.py, called as function(images, level, keys); lengths are shares of the shorter side.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

Size = tuple[int, int]

SEVERITIES: Final = (1, 2, 3, 4, 5)
_MOST_TILES: Final = 16  # along a side
_OPERATIONS: Final = "vitlens.analysis.failures.operations"


@dataclass(frozen=True)
class Disturbance:
    """One disturbance. description: what it does, or what its level is; function: "module:function"; levels: of a
    common corruption its strengths at severities 1 to 5, of the others those of which the first changes nothing (none:
    tiles, which depend on the size)."""

    title: str
    description: str
    function: str
    levels: tuple[float, ...] = ()

    def at(self, size: Size) -> tuple[float, ...]:
        """The levels for images of this size; of tiles 1 and numbers that divide the sides, each at least 1.7 times the
        one before."""
        if self.levels:
            return self.levels
        chosen = [1]
        for parts in range(2, _MOST_TILES + 1):
            if math.gcd(*size) % parts == 0 and parts >= 1.7 * chosen[-1]:
                chosen.append(parts)
        return tuple(float(parts) for parts in chosen)


def _table(rows: Mapping[str, tuple[str, str, str, tuple[float, ...]]]) -> Mapping[str, Disturbance]:
    return MappingProxyType({
        name: Disturbance(title, description, f"{_OPERATIONS}:{function}", levels)
        for name, (title, description, function, levels) in rows.items()
    })  # fmt: skip


# after Hendrycks & Dietterich 2019; occlusion is none of theirs
CORRUPTIONS: Final = _table({
    "noise": ("noise", "Gaussian noise of this standard deviation", "gaussian_noise", (0.04, 0.06, 0.08, 0.12, 0.18)),
    "blur": ("blur", "a Gaussian blur of this share of the shorter side", "gaussian_blur",
             (0.01, 0.015, 0.02, 0.03, 0.045)),
    "brightness": ("brightness", "pixels multiplied by 1 plus this, and clipped", "brightness",
                   (0.2, 0.4, 0.6, 0.8, 1.0)),
    "contrast": ("contrast", "this share of the contrast is left", "contrast", (0.6, 0.45, 0.3, 0.2, 0.1)),
    "jpeg": ("JPEG", "JPEG of this quality", "jpeg", (60.0, 40.0, 25.0, 15.0, 8.0)),
    "pixelate": ("pixelate", "shown in this share of the pixels of a side", "pixelate", (0.75, 0.6, 0.4, 0.3, 0.25)),
    "occlusion": ("occlusion", "a square of this share of the shorter side filled with the mean colour", "occlusion",
                  (0.15, 0.25, 0.35, 0.45, 0.55)),
})  # fmt: skip
DISTURBANCES: Final = _table({
    "low-pass": ("only coarse detail (low-pass)", "kept up to (share of Nyquist's frequency)", "low_pass",
                 (1.5, 1.0, 0.7, 0.45, 0.3, 0.2, 0.1, 0.05)),
    "high-pass": ("only fine detail (high-pass)", "removed up to (share of Nyquist's frequency)", "high_pass",
                  (0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.7)),
    "shuffle": ("tiles shuffled", "tiles along a side", "shuffled", ()),
    "occlusion": ("squares covered", "squares covered (share)", "covered", (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)),
})  # fmt: skip
