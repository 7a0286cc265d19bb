"""What the epochs of a training show by themselves: overfitting, and whether accuracy still rose; free of torch."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vitlens.training.metrics import EpochMetrics
from vitlens.uncertainty import Estimate, difference_of, wilson

_TENTH: Final = 10
_MIXING: Final = ("mixup", "cutmix")


def is_mixed(recipe: Mapping[str, Any]) -> bool:
    """Whether training images were mixed, so that accuracy on them is not that on images of one class."""
    return any(float(recipe.get(name) or 0.0) > 0 for name in _MIXING)


def generalisation_gap(history: Sequence[EpochMetrics], tested: Estimate, *, images: int) -> Estimate | None:
    """Accuracy on the training images of the last epoch, as they were augmented, minus that on the test images; points.

    The former is a mean over the epoch, in which the weights still improve, on images that are harder than plain ones:
    the gap is a lower bound. None without epochs.
    """
    if not history or not images:
        return None
    return difference_of(wilson(round(history[-1].train_accuracy * images), images), tested)


def gain(history: Sequence[EpochMetrics], *, tested: int) -> Estimate | None:
    """The rise of test accuracy over the last tenth of the epochs (at least the last one), in points.

    Both are of the same images: the interval is too wide rather than too narrow. None without two evaluations.
    """
    pair = last_tenth(history)
    if pair is None:
        return None
    before, last = (wilson(round((row.test_accuracy or 0.0) * tested), tested) for row in pair)
    return difference_of(last, before)


def last_tenth(history: Sequence[EpochMetrics]) -> tuple[EpochMetrics, EpochMetrics] | None:
    """The last evaluation, and the latest one that is at least a tenth of the epochs earlier."""
    evaluated = [row for row in history if row.test_accuracy is not None]
    if not evaluated:
        return None
    last = evaluated[-1]
    earlier = [row for row in evaluated if last.epoch - row.epoch >= max(1, len(history) // _TENTH)]
    return (earlier[-1], last) if earlier else None
