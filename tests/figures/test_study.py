import numpy as np
import pytest

from tests.figures.reading import cut_off, texts
from vitlens.errors import InputError
from vitlens.figures.study import SummaryBar, study_summary

VIT, CNN = SummaryBar("vit-digits", 0.92, 0.9, 0.94, 900), SummaryBar("cnn-digits", 1.0, 0.99, 1.0, 900)
POINT = SummaryBar("rollout, mean", 0.45, 0.41, 0.49, 900)


def test_bars_intervals_and_baseline():
    figure = study_summary(accuracy=[VIT, CNN], pointing=[POINT], mask_area=0.12, title="vit and cnn on digits")
    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == [92, 100]
    assert "92.0  [90.0, 94.0]" in texts(figure)
    assert list(right.lines[-1].get_xdata()) == [12, 12]
    assert any("12.0 %" in text for text in texts(figure))
    assert "vit-digits\n(n = 900)" in texts(figure)
    assert not cut_off(figure)


@pytest.mark.parametrize("models", [1, 4])
def test_without_pointing_there_is_one_panel(models):
    figure = study_summary(accuracy=[VIT] * models, title="one model")
    assert len(figure.axes) == 1
    assert not cut_off(figure)


def test_refused():
    with pytest.raises(InputError):
        study_summary(accuracy=[], title="nothing")
    with pytest.raises(InputError, match="finite numbers in estimates"):
        study_summary(accuracy=[SummaryBar("vit", np.nan, 0.0, 1.0, 9)], title="NaN")
    with pytest.raises(InputError, match="finite numbers in mask_area"):
        study_summary(accuracy=[VIT], pointing=[POINT], mask_area=np.nan, title="NaN")
