"""One image cut into the patches of several models: every line stands between two patches, every text is shown."""

import numpy as np
import pytest

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.study.cuts import Cut, image_cuts

LINES = ("65 tokens (8×8 patches)", "30.3 MFLOPs", "accuracy 90.1 % [87.0, 93.2]", "training 12 s (11 s to 13 s)")


@pytest.mark.parametrize("sides", [(8,), (16, 8), (16, 8, 4, 2), (16, 8, 4, 2, 1, 32, 2)])
def test_nothing_is_cut_off_and_all_is_said(sides):
    cuts = [Cut(f"patch {32 // side} px", (side, side), LINES) for side in sides]
    figure = image_cuts(image=np.full((3, 32, 32), 0.3), cuts=cuts, title="One image")
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    shown = [axes for axes in figure.axes if axes.images]
    assert len(shown) == len(sides)
    assert "\n".join(LINES) in texts(figure)


def test_lines_lie_between_patches_and_not_inside_them():
    figure = image_cuts(image=np.zeros((3, 32, 64)), cuts=[Cut("2×4", (2, 4), ["8 patches"])], title="One image")
    (axes,) = figure.axes
    for x, y in ((0.25, 0.2), (0.5, 0.2), (0.75, 0.2), (0.1, 0.5)):
        assert colour_at(figure, axes, x, y).min() > 0.5  # white on black, antialiased
    for x, y in ((0.125, 0.25), (0.375, 0.75), (0.9, 0.6)):
        assert colour_at(figure, axes, x, y).max() < 0.1


@pytest.mark.parametrize(
    ("cuts", "match"), [([], "found none"), ([Cut("a", (5, 4), [])], "divides 32x32 px, found 5x4")]
)
def test_refused(cuts, match):
    with pytest.raises(InputError, match=match):
        image_cuts(image=np.zeros((3, 32, 32)), cuts=cuts, title="One image")
