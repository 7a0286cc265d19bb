"""Predictions after interventions and their controls, and corrected p-values of their rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.reliance.rows import ReliancePairRow, RelianceRow
from vitlens.shapes import Labels
from vitlens.uncertainty import holm

OutcomeName = tuple[str, str]  # a cue and an intervention, or a disturbance and its level
Row = TypeVar("Row", RelianceRow, ReliancePairRow)


@dataclass(frozen=True)
class Outcome:
    """The predictions after one intervention, or after a level of a disturbance.

    predictions (models, 2, n): the predictions after it and after its control. A level has no
        control, and 1 instead of 2.
    size (2, n): the mean absolute distance of the pixels for both.
    visible (n,): True if it changes the image.
    """

    predictions: Int[Tensor, "models 2 batch"]
    size: Float[Tensor, "2 batch"]
    visible: Bool[Tensor, " batch"]


def join_batches(batches: Sequence[Outcome]) -> Outcome:
    """Return the outcome of all batches."""
    return Outcome(
        torch.cat([batch.predictions for batch in batches], -1),
        torch.cat([batch.size for batch in batches], -1),
        torch.cat([batch.visible for batch in batches]),
    )


class Effect:
    """The predictions of one model on the images (n,) that an intervention changes.

    correct_before, correct_after, correct_after_control: True for correct predictions before, after
        the intervention and after its control.
    moved, moved_by_control: True for predictions that the intervention, or its control, changes.
    groups: the group of each image, None if images are independent.
    """

    def __init__(
        self,
        predictions: Int[Tensor, "2 batch"],
        clean: Int[Tensor, " batch"],
        labels: Labels,
        *,
        visible: Bool[Tensor, " batch"],
        groups: NDArray[Any] | None,
    ) -> None:
        """Take the predictions of one model after an intervention and its control.

        clean: the predictions without a change.
        visible: True for images that the intervention changes.
        groups: the group of each image.
        """
        before = clean[visible]
        after, after_control = predictions[:, visible]
        labels = labels[visible]
        self.correct_before: NDArray[np.bool_] = (before == labels).numpy()
        self.correct_after: NDArray[np.bool_] = (after == labels).numpy()
        self.correct_after_control: NDArray[np.bool_] = (after_control == labels).numpy()
        self.moved: NDArray[np.bool_] = (after != before).numpy()
        self.moved_by_control: NDArray[np.bool_] = (after_control != before).numpy()
        self.groups = None if groups is None else groups[visible.numpy()]

    @property
    def beyond(self) -> NDArray[np.int64]:
        """Return the change of each prediction beyond the control.

        It is 1 if only the intervention changes the prediction, -1 if only the control does, else
        0.
        """
        return self.moved.astype(np.int64) - self.moved_by_control

    @property
    def accuracy_lost(self) -> NDArray[np.int64]:
        """Return the loss of each correct prediction beyond the control.

        It is 1 if the prediction is right only after the control, -1 if it is right only after the
        intervention, else 0.
        """
        return self.correct_after_control.astype(np.int64) - self.correct_after


def correct_p_values(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows with p-values corrected by Holm over all matched rows; others have none."""
    matched = [index for index, row in enumerate(rows) if row.is_matched]
    # corrected p-values by the index of the row
    p_holm = dict(zip(matched, holm([rows[index].p for index in matched])))
    p_lost_holm = dict(zip(matched, holm([rows[index].p_lost for index in matched])))
    p_gained_holm = _correct_gains(rows)
    for index, row in enumerate(rows):
        corrected = replace(row, p_holm=p_holm.get(index), p_lost_holm=p_lost_holm.get(index))
        if isinstance(corrected, RelianceRow):
            corrected = replace(corrected, p_gained_holm=p_gained_holm.get(index))
        yield corrected


def _correct_gains(rows: Sequence[RelianceRow | ReliancePairRow]) -> dict[int, float]:
    """Return the corrected p-values of the accuracy gained, by the index of the row.

    Rows about pairs of models have none.
    """
    p_values = {
        index: row.p_gained
        for index, row in enumerate(rows)
        if isinstance(row, RelianceRow) and row.is_matched
    }
    return dict(zip(p_values, holm(list(p_values.values()))))
