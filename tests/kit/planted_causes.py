"""Rows on a planted cause, and what a report says of it by the generating factors."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.shared.planted import PLANTED, FactorRow, factor_rows, judgement
from vitlens.uncertainty import Estimate

__all__ = ["PLANTED", "factor_row", "judgement", "rows_of"]
FACTOR = "hue_agrees"
N = 200


def factor_row(model: str, difference: float, *, half: float = 4.0) -> FactorRow:
    """Return the row of a model that is better by these points where the cause shows the label."""
    accuracies = [
        Estimate(0.6 + shift, 0.55 + shift, 0.65 + shift, N) for shift in (difference / 100, 0.0)
    ]
    return FactorRow(
        model=model,
        factor=FACTOR,
        accuracy_true=accuracies[0],
        accuracy_false=accuracies[1],
        difference=Estimate(difference, difference - half, difference + half, N, "points"),
    )


def rows_of(
    holds: NDArray[np.bool_],
    correct: Mapping[str, NDArray[np.bool_]],
    groups: NDArray[np.integer] | None = None,
) -> Sequence[FactorRow]:
    """Return the rows of models by where the cause predicts the label, and where they are right."""
    return tuple(factor_rows({FACTOR: holds}, correct, groups))
