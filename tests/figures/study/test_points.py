"""The figure of a study of points: every point is there, where it belongs, and nothing is cut off."""

from dataclasses import replace

import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.study.points import StudyPoint, points_along, points_in_rows

POINT = StudyPoint("one head", 0.42, 0.35, 0.49, (0.4, 0.43, 0.43), 21_000, 1.5e6, 3200.0)


def some(count: int) -> list[StudyPoint]:
    return [
        replace(POINT, name=f"point number {index}", accuracy=0.1 * index, low=0.08 * index, high=0.11 * index,
                seeds=(0.09 * index, 0.11 * index), flops=10.0**index, images_per_second=9000.0 / (index + 1))
        for index in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 9])
def test_every_point_is_shown_with_its_numbers(count):
    figure = points_in_rows(points=some(count), chance=0.1, title="Nine points: 3 seeds, 6 epochs")
    shown = texts(figure)
    for index in range(count):
        assert any(f"point number {index}\n" in text for text in shown)
        assert f"{10 * index:.1f} [{8 * index:.1f}, {11 * index:.1f}]" in shown
    left = figure.axes[0]
    dots = [line for line in left.lines if line.get_marker() == "o"]
    assert [dot.get_xdata()[0] for dot in dots] == pytest.approx([10.0 * index for index in range(count)])
    assert [dot.get_ydata()[0] for dot in dots] == list(range(count))
    ticks = [line for line in left.lines if line.get_marker() == "|"]
    assert np.concatenate([line.get_xdata() for line in ticks]) == pytest.approx(
        [value for index in range(count) for value in (9.0 * index, 11.0 * index)]
    )
    assert list(left.lines[0].get_xdata()) == [10, 10]  # guessing
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_points_along_an_axis_are_at_their_places_and_two_series_side_by_side():
    places = {"ViT": [5, 10, 25, 50, 100], "CNN": [5, 10, 25, 50, 100]}
    series = {name: some(5) for name in places}
    figure = points_along(
        series=series, places=places, axis="share (%)", chance=0.1, title="Share of the data", costs=False
    )
    [axes] = figure.axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["5", "10", "25", "50", "100"]
    vit, cnn = (container.lines[0] for container in axes.containers)
    assert (vit.get_xdata() < cnn.get_xdata()).all()
    assert vit.get_xdata() == pytest.approx(places["ViT"], rel=0.02)
    assert vit.get_ydata() == pytest.approx([0, 10, 20, 30, 40])
    assert {"ViT", "CNN", "share (%)"} <= set(texts(figure))
    assert not cut_off(figure)


def test_costs_have_panels_and_numbers_of_their_own():
    figure = points_along(
        series={"ViT": some(4)}, places={"ViT": [2, 4, 8, 16]}, axis="patch size (px)", chance=0.1, title="Patches"
    )
    assert len(figure.axes) == 3
    for text in ("1e-06", "1e-05", "9,000", "4,500", "3,000", "2,250"):
        assert text in texts(figure)
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_refused():
    with pytest.raises(InputError):
        points_in_rows(points=[], chance=0.1, title="none")
    with pytest.raises(InputError, match="finite numbers in accuracies"):
        points_in_rows(points=[replace(POINT, low=np.nan)], chance=0.1, title="NaN")
    with pytest.raises(InputError, match="costs above 0"):
        points_in_rows(points=[replace(POINT, flops=0.0)], chance=0.1, title="free")
    for places in ([1.0], [0.0, 1.0]):
        with pytest.raises(InputError, match="2 places above 0"):
            points_along(series={"ViT": some(2)}, places={"ViT": places}, axis="x", chance=0.1, title="places")
