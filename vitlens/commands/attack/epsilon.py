"""Epsilons in the unit of the command line, and in words.

The unit is 1/255 for L∞, pixel units for L2, and a share of the pixels for a patch.
"""

from collections.abc import Mapping
from typing import Final

from vitlens.attacks.registry import UNIT, NormName

AXES: Final[Mapping[NormName, str]] = {  # units of epsilon
    "linf": "1/255",
    "l2": "pixel units",
    "patch": "share of the pixels",
}
EPSILON_TERM: Final = (
    "the largest change that an attack may make: of one pixel in 1/255 (L∞), or the distance (L2)"
)


def scale_of(norm: NormName) -> float:
    """Return the factor from pixel units to the unit of the command line: 255 for L∞, else 1."""
    return UNIT if norm == "linf" else 1.0


def typed_epsilon(epsilon: float, norm: NormName) -> float:
    """Return an epsilon in the unit of the command line (4, 0.5), which metrics use as well.

    epsilon: pixel units.
    """
    # rounded, because 4 / 255 * 255 need not be exactly 4
    return float(f"{round(epsilon * scale_of(norm), 6):g}")


def epsilon_words(epsilon: float, norm: NormName) -> str:
    """Return an epsilon in words: "4/255", "an L2 distance of 0.5".

    epsilon: in the unit of the command line.
    """
    if norm == "patch":
        return f"{100 * epsilon:.3g} % of the pixels covered"
    if norm == "linf":
        return f"{epsilon:g}/255"
    return f"an L2 distance of {epsilon:g}"
