"""The share of heads that can be removed, of curves that are planted."""

import pytest
import torch

from tests.kit.made import curve
from vitlens.analysis.ablation.several import share_removable


@pytest.mark.parametrize(
    ("accuracies", "share"),
    [
        ((0.8, 0.8, 0.79, 0.5, 0.2), 0.5),
        ((0.8, 0.7, 0.8, 0.8, 0.2), 0.0),  # what comes after a fall does not count
        ((0.8, 0.9, 0.85, 0.81, 0.2), 0.75),
        ((0.8, 0.8, 0.79, 0.5, 0.75), None),  # all may be removed, as far as is known
        ((0.8, 0.9, 0.85, 0.81, 0.8), None),
        ((0.8, 0.8, 0.79, 0.5, 0.72), None),  # its interval ends at 0.799
    ],
)
def test_share_that_can_go(accuracies: tuple[float, ...], share: float | None) -> None:
    removable = share_removable(curve(*accuracies))
    assert (removable and removable.value) == share
    assert removable is None or (removable.n == 100 and removable.low <= share <= removable.high)


def test_the_share_is_uncertain_where_accuracy_is_near_the_bound() -> None:
    removable = share_removable(curve(0.8, 0.8, 0.795, 0.788, 0.2, n=1000))
    assert (removable.low, removable.value, removable.high) == (0.5, 0.5, 0.75)
    # one group says nothing of others
    assert share_removable(curve(0.9, 0.1), groups=torch.zeros(100)) is None
