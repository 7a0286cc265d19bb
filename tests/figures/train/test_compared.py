import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.train.compared import learning_compared

FROZEN = [(epoch, 20.0 + 0.01 * epoch, 0.7 + 0.001 * epoch) for epoch in range(1, 51)]
FULL = [(1, 60.0, 0.5), (2, 120.0, 0.8), (3, 180.0, 0.9)]


def test_accuracy_by_epoch_and_by_time():
    figure = learning_compared(
        ways={"backbone frozen": FROZEN, "everything trained": FULL}, title="frozen against full"
    )
    by_epoch, by_time = figure.axes
    assert list(by_epoch.lines[1].get_xdata()) == [1, 2, 3]
    assert list(by_time.lines[1].get_xdata()) == [60, 120, 180]
    assert list(by_time.lines[1].get_ydata()) == pytest.approx([50, 80, 90])
    assert by_time.get_xscale() == "log"
    assert {"backbone frozen", "everything trained"} <= set(texts(figure))
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_one_epoch_is_a_point():
    figure = learning_compared(ways={"frozen": FROZEN[:1], "full": FULL[:1]}, title="one")
    assert not cut_off(figure)


def test_refused():
    with pytest.raises(InputError, match="found none"):
        learning_compared(ways={}, title="nothing")
    with pytest.raises(InputError, match="points of full"):
        learning_compared(ways={"full": []}, title="nothing")
    with pytest.raises(InputError, match="finite numbers in points of full"):
        learning_compared(ways={"full": [(1, 1.0, np.nan)]}, title="NaN")
