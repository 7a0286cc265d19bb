"""Epsilons as they are typed, stored and said; free of torch."""

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
    """What an epsilon in pixel units is multiplied by where a person reads it: L∞ in 1/255."""
    return UNIT if norm == "linf" else 1.0


def typed(epsilon: float, norm: NormName) -> str:
    """An epsilon as it is typed, and as metrics are named: "4", "0.5"."""
    return f"{round(epsilon * scale_of(norm), 6):g}"


def epsilon_words(epsilon: float, norm: NormName) -> str:
    """An epsilon in the unit in which it is typed, as a sentence says it: "4/255", "an L2 distance of 0.5"."""
    if norm == "patch":
        return f"{100 * epsilon:.3g} % of the pixels covered"
    return f"{epsilon:g}/255" if norm == "linf" else f"an L2 distance of {epsilon:g}"
