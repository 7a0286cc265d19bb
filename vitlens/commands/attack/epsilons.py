"""Epsilons as typed on the command line, stored and printed; free of torch."""

from collections.abc import Mapping
from typing import Final

from vitlens.attacks.registry import NormName

UNIT: Final = 255.0  # --epsilon is in 1/255
AXES: Final[Mapping[NormName, str]] = {
    "linf": "epsilon (1/255)",
    "l2": "L2 distance (pixel units)",
    "patch": "share of the pixels covered",
}


def scale_of(norm: NormName) -> float:
    """The factor from pixel units to the unit of the command line: 255 for L∞, else 1."""
    return UNIT if norm == "linf" else 1.0


def typed_epsilon(epsilon: float, norm: NormName) -> str:
    """An epsilon in pixel units as on the command line and in names of metrics: "4", "0.5"."""
    return f"{round(epsilon * scale_of(norm), 6):g}"


def epsilon_words(epsilon: float, norm: NormName) -> str:
    """An epsilon in the unit of the command line, in words: "4/255", "an L2 distance of 0.5"."""
    if norm == "patch":
        return f"{100 * epsilon:.3g} % of the pixels covered"
    return f"{epsilon:g}/255" if norm == "linf" else f"an L2 distance of {epsilon:g}"
