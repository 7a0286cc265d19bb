"""The first batch: each picture under its original, with the shares of its target."""

import numpy as np
import pytest

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.train.first_batch import first_batch

NAMES = ("tench", "a golden retriever with a long name", "cat")


def plain(count: int, *, start: int = 0) -> np.ndarray:
    images = np.zeros((count, 3, 8, 8))
    for index in range(count):
        images[index] = (index + start) / 30
    return images


@pytest.mark.parametrize("count", [1, 5, 6, 8, 12])
def test_originals_stand_above_what_is_trained_on(count):
    given, trained = plain(count), plain(count, start=15)
    targets = np.tile([0.62, 0.38, 0.0], (count, 1))
    targets[0] = [0, 0, 1]
    figure = first_batch(given=given, trained=trained, labels=[1] * count, targets=targets, classes=NAMES)
    across = min(6, count)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == 2 * count
    for index in range(count):
        row, column = divmod(index, across)
        upper = figure.axes[2 * row * across + column]
        lower = figure.axes[(2 * row + 1) * across + column]
        assert colour_at(figure, upper, 0.5, 0.5) == pytest.approx(given[index, :, 0, 0], abs=0.01)
        assert colour_at(figure, lower, 0.5, 0.5) == pytest.approx(trained[index, :, 0, 0], abs=0.01)
        assert lower.get_xlabel().startswith("tench: 0.62" if index else "cat")
    assert "as given" in texts(figure)
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_what_does_not_fit_is_refused():
    good = {"given": plain(2), "trained": plain(2), "labels": [0, 1], "targets": np.eye(3)[:2], "classes": NAMES}
    first_batch(**good)
    for changes in ({"trained": plain(3)}, {"labels": [0]}, {"targets": np.eye(3)}, {"classes": NAMES[:2]}):
        with pytest.raises(InputError):
            first_batch(**{**good, **changes})
    with pytest.raises(InputError, match=r"given in \[0, 1\]"):
        first_batch(**{**good, "given": 255 * plain(2)})
