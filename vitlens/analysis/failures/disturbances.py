"""Disturbances of images at several levels; free of torch.

They are common corruptions, filters, shuffled tiles and covered squares. Each is an operation of
operations.py at a level. Lengths are shares of the shorter side.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

Size = tuple[int, int]

SEVERITIES: Final = (1, 2, 3, 4, 5)
_MOST_TILES: Final = 16  # most tiles along a side
_TILE_STEP: Final = 1.7  # least ratio of consecutive numbers of tiles


@dataclass(frozen=True)
class Disturbance:
    """One disturbance of images.

    title: its name in tables and figures.
    description: its effect, or the meaning of its level.
    operation: the name of the operation in operations.py.
    levels: the levels. Those of a common corruption are its strengths at severities 1 to 5. The
        first level of other disturbances changes nothing. The levels of tiles are empty, because
        they depend on the size.
    """

    title: str
    description: str
    operation: str
    levels: tuple[float, ...] = ()

    def at(self, size: Size) -> tuple[float, ...]:
        """Return the levels for images of this size.

        For tiles they are 1 and numbers that divide the sides, each at least 1.7 times the one
        before.
        """
        if self.levels:
            return self.levels
        counts = [1]
        for count in range(2, _MOST_TILES + 1):
            if math.gcd(*size) % count == 0 and count >= _TILE_STEP * counts[-1]:
                counts.append(count)
        return tuple(float(count) for count in counts)


# after Hendrycks & Dietterich 2019, who have no occlusion
CORRUPTIONS: Final[Mapping[str, Disturbance]] = MappingProxyType(
    {
        "noise": Disturbance(
            title="noise",
            description="Gaussian noise of this standard deviation",
            operation="noise",
            levels=(0.04, 0.06, 0.08, 0.12, 0.18),
        ),
        "blur": Disturbance(
            title="blur",
            description="a Gaussian blur of this share of the shorter side",
            operation="blur",
            levels=(0.01, 0.015, 0.02, 0.03, 0.045),
        ),
        "brightness": Disturbance(
            title="brightness",
            description="pixels multiplied by 1 plus this, and clipped",
            operation="brightness",
            levels=(0.2, 0.4, 0.6, 0.8, 1.0),
        ),
        "contrast": Disturbance(
            title="contrast",
            description="this share of the contrast is left",
            operation="contrast",
            levels=(0.6, 0.45, 0.3, 0.2, 0.1),
        ),
        "jpeg": Disturbance(
            title="JPEG",
            description="JPEG of this quality",
            operation="jpeg",
            levels=(60.0, 40.0, 25.0, 15.0, 8.0),
        ),
        "pixelate": Disturbance(
            title="pixelate",
            description="shown in this share of the pixels of a side",
            operation="pixelate",
            levels=(0.75, 0.6, 0.4, 0.3, 0.25),
        ),
        "occlusion": Disturbance(
            title="one square covered",
            description="a square of this share of the shorter side filled with the mean colour",
            operation="occlusion",
            levels=(0.15, 0.25, 0.35, 0.45, 0.55),
        ),
    }
)
DISTURBANCES: Final[Mapping[str, Disturbance]] = MappingProxyType(
    {
        "low-pass": Disturbance(
            title="only coarse detail (low-pass)",
            description="kept up to (share of Nyquist's frequency)",
            operation="low-pass",
            levels=(1.5, 1.0, 0.7, 0.45, 0.3, 0.2, 0.1, 0.05),
        ),
        "high-pass": Disturbance(
            title="only fine detail (high-pass)",
            description="removed up to (share of Nyquist's frequency)",
            operation="high-pass",
            levels=(0.0, 0.05, 0.1, 0.2, 0.3, 0.45, 0.7),
        ),
        "shuffle": Disturbance(
            title="tiles shuffled", description="tiles along a side", operation="shuffle"
        ),
        "occlusion": Disturbance(
            title="many squares covered",
            description="squares covered (share)",
            operation="cover",
            levels=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9),
        ),
    }
)
