"""The charts that several commands show: the numbers that they draw are those of the record."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.kit.axes import cut_off, texts
from vitlens.commands.shared.calibration import CalibrationRow, reliability
from vitlens.commands.shared.receptive import FieldArrays, FieldRow, field_charts
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow, class_sections
from vitlens.uncertainty import Estimate, wilson


def confusions(counts):
    """A record of one model with these counts (class, prediction)."""
    names = [f"class {index}" for index in range(len(counts))]
    found = [
        ConfusionRow("a", names[row], names[column], int(count))
        for (row, column), count in np.ndenumerate(counts)
        if count
    ]
    rows = [ClassRow("a", name, int(own.sum())) for name, own in zip(names, counts)]
    return SimpleNamespace(aliases=["a"], confusion=found[::-1], per_class=rows)


def test_confusions_are_counts_coloured_by_the_share_of_their_class():
    counts = np.array([[8, 2, 0], [0, 5, 0], [1, 1, 2]])
    (chart,) = class_sections()[1].charts
    figure = chart.draw(list(chart.rows(confusions(counts))), "Confusions")
    (axes,) = figure.axes
    np.testing.assert_allclose(axes.images[0].get_array(), 100 * counts / counts.sum(1, keepdims=True))
    written = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts}
    assert {at: int(word or 0) for at, word in written.items()} == dict(np.ndenumerate(counts))
    assert not cut_off(figure)
    many = np.diag([9] * 30)
    many[20, 25] = 4
    cells = list(chart.rows(confusions(many)))  # those that are confused most
    names = list(dict.fromkeys(cell.truth for cell in cells))
    assert len(cells) == len(names) ** 2 < 900
    assert {"class 20", "class 25"} <= set(names)
    assert names == sorted(names, key=lambda name: int(name.split()[1]))


def test_bins_have_the_interval_of_their_accuracy_and_empty_ones_are_left_out():
    bins = (CalibrationRow("a", 0.9, 0.75, 40), CalibrationRow("a", 0.0, 0.0, 0), CalibrationRow("b", 0.5, 1.0, 60))
    scores = [SimpleNamespace(model=name, calibration_error=Estimate(0.05)) for name in "ab"]
    chart = reliability()
    rows = chart.rows(SimpleNamespace(scores=scores, calibration=bins, images=100))
    assert [row.accuracy for row in rows] == [wilson(30, 40), wilson(60, 60)]
    assert "a: ECE 5.0 points" in texts(chart.draw(rows, "Calibration"))
    assert not chart.rows(SimpleNamespace(scores=scores, calibration=bins, images=99))


@pytest.mark.parametrize("models", [1, 2])
def test_fields_by_layer_and_their_maps(models):
    field = np.zeros((6, 8))
    field[2:4, 3:6] = 4.0
    rows = [
        FieldRow(f"m{model}", f"model {model}", layer, f"block {layer}", Estimate(layer + 1.0, 0.5, 9.0, 4, "px"), 3.0,
                 Estimate(0.1), 0.1 * layer)
        for model in range(models) for layer in range(3)
    ]  # fmt: skip
    record = SimpleNamespace(
        receptive_fields=rows, field_maps=FieldArrays({at: (at + 1) ** 2 * field for at in range(len(rows))})
    )
    depth, seen, maps = field_charts()
    (distance, *_) = depth.draw(rows, "Fields").axes
    np.testing.assert_allclose(distance.lines[0].get_xydata(), [[0, 1], [1, 2], [2, 3]])
    np.testing.assert_allclose(seen.draw(rows, "Seen").axes[0].lines[0].get_ydata(), [0, 10, 20])
    pictures = list(maps.rows(record))
    assert len(pictures) == 3 * models
    for at, picture in enumerate(pictures):
        np.testing.assert_array_equal(np.isnan(picture.map), field == 0)
        assert np.nanmax(picture.map) == pytest.approx(2 * (at + 1))
    figure = maps.draw(pictures, "Maps")
    assert {"layer 0", "layer 2"} <= set(texts(figure))
    assert not cut_off(figure)
