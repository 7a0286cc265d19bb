import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.style import BLUE, VERMILLION
from vitlens.figures.train.beside import Bar, side_by_side

STUDENT, TEACHER = Bar("vit-tiny", "taught", 0.88, 0.87, 0.89), Bar("resnet18", "its teacher", 0.93, 0.92, 0.94)
PLAIN = Bar("vit-tiny-plain-and-long", "without a teacher", 0.86, 0.85, 0.87)
AGREES, AGREES_LESS = (
    Bar(bar.name, bar.role, value, value - 0.01, value + 0.01) for bar, value in ((STUDENT, 0.9), (PLAIN, 0.8))
)


def test_both_panels_and_one_colour_a_model():
    bars = [STUDENT, TEACHER, PLAIN]
    figure = side_by_side(accuracy=bars, agreement=[AGREES, AGREES_LESS], n=5000, title="A student")
    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == pytest.approx([88, 93, 86])
    assert [bar.get_width() for bar in right.patches] == pytest.approx([90, 80])
    assert left.patches[2].get_facecolor() == right.patches[1].get_facecolor()
    assert len({bar.get_facecolor() for bar in left.patches}) == 3
    assert BLUE != VERMILLION
    assert "vit-tiny\ntaught" in texts(figure)
    assert "88.0  [87.0, 89.0]" in texts(figure)
    assert "Accuracy on 5,000 test images (%)" in texts(figure)
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_one_panel_without_a_teacher():
    figure = side_by_side(accuracy=[STUDENT], n=10, title="Alone")
    assert len(figure.axes) == 1
    assert not cut_off(figure)


def test_refused():
    with pytest.raises(InputError):
        side_by_side(accuracy=[], n=1, title="nothing")
    with pytest.raises(InputError, match="finite numbers in bars"):
        side_by_side(accuracy=[Bar("vit", "taught", np.nan, 0.0, 1.0)], n=1, title="NaN")
