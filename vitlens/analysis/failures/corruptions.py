"""Common corruptions by name, free of torch: after Hendrycks & Dietterich 2019, five severities each.

Strengths are set for images of any size: lengths are shares of the shorter side.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

SEVERITIES: Final = (1, 2, 3, 4, 5)

_OPERATIONS: Final = "vitlens.analysis.failures.common_corruptions"


@dataclass(frozen=True)
class CommonCorruption:
    """One corruption.

    group: of the benchmark's four, or "occlusion", which it does not have; description: of the operation and its
    strength; strengths: of severities 1 to 5; function: "module:function", called as function(images, strength, keys),
    returns the images before they are clamped to [0, 1].
    """

    title: str
    group: Literal["noise", "blur", "weather", "digital", "occlusion"]
    description: str
    strengths: tuple[float, float, float, float, float]
    function: str


CORRUPTIONS: Final[Mapping[str, CommonCorruption]] = MappingProxyType(
    {
        "noise": CommonCorruption(
            "noise", "noise", "Gaussian noise of this standard deviation", (0.04, 0.06, 0.08, 0.12, 0.18),
            f"{_OPERATIONS}:gaussian_noise",
        ),
        "blur": CommonCorruption(
            "blur", "blur", "a Gaussian blur of this share of the shorter side", (0.01, 0.015, 0.02, 0.03, 0.045),
            f"{_OPERATIONS}:gaussian_blur",
        ),
        "brightness": CommonCorruption(
            "brightness", "weather", "pixels multiplied by 1 plus this, and clipped", (0.2, 0.4, 0.6, 0.8, 1.0),
            f"{_OPERATIONS}:brightness",
        ),
        "contrast": CommonCorruption(
            "contrast", "digital", "this share of the contrast is left", (0.6, 0.45, 0.3, 0.2, 0.1),
            f"{_OPERATIONS}:contrast",
        ),
        "jpeg": CommonCorruption(
            "JPEG", "digital", "JPEG of this quality", (60.0, 40.0, 25.0, 15.0, 8.0), f"{_OPERATIONS}:jpeg"
        ),
        "pixelate": CommonCorruption(
            "pixelate", "digital", "shown in this share of the pixels of a side", (0.75, 0.6, 0.4, 0.3, 0.25),
            f"{_OPERATIONS}:pixelate",
        ),
        "occlusion": CommonCorruption(
            "occlusion", "occlusion", "a square of this share of the shorter side filled with the mean colour",
            (0.15, 0.25, 0.35, 0.45, 0.55), f"{_OPERATIONS}:occlusion",
        ),
    }
)  # fmt: skip
