import numpy as np
import pytest
from vitlens.figures.calibration import Calibration, reliability_diagram

from tests.figures.reading import cut_off, texts
from vitlens.charts.style import SERIES
from vitlens.errors import InputError


def model(name: str = "vit", **changed: object) -> Calibration:
    given = {"confidence": [np.nan, 0.5, 0.9], "accuracy": [np.nan, 0.25, 0.75], "count": [0, 10, 30], "error": 0.175}
    return Calibration(name=name, **(given | changed))  # type: ignore[arg-type]


def test_empty_bins_are_left_out():
    figure = reliability_diagram(models=[model()])
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == [25, 75]
    assert [bar.get_height() for bar in lower.patches] == [25, 75]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in upper.patches] == [50, 83]
    assert "vit: ECE 17.5 points" in texts(figure)
    assert "confidence (%), n = 40" in texts(figure)
    assert not cut_off(figure)


def test_bins_of_few_images_are_hollow():
    figure = reliability_diagram(models=[model(count=[0, 9, 30])], few=10)
    few, known = figure.axes[0].patches
    assert few.get_facecolor()[3] == 0
    assert known.get_facecolor()[3] > 0.5
    assert [line.get_markerfacecolor() for line in figure.axes[0].lines[1:]] == [SERIES[0], "white"]
    assert "fewer than 10 images" in texts(figure)
    assert not cut_off(figure)
    full = reliability_diagram(models=[model(count=[0, 10, 30])], few=10)
    assert "fewer than 10 images" not in texts(full)


def test_two_models_side_by_side():
    figure = reliability_diagram(models=[model("vit-digits"), model("a name that is much too long for it")])
    assert len(figure.axes) == 4
    assert figure.get_figwidth() <= 7.21
    assert not cut_off(figure)


@pytest.mark.parametrize(
    "changed", [{"count": [0, 0, 0]}, {"count": [1, 10, 30]}, {"accuracy": [0.1, 0.2]}, {"count": [np.nan, 1, 1]}]
)
def test_refused(changed):
    with pytest.raises(InputError):
        reliability_diagram(models=[model(**changed)])


def test_no_model():
    with pytest.raises(InputError, match="at least one model"):
        reliability_diagram(models=[])
