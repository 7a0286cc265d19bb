import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.errors import AccuracyBySlice, SeparationMark, error_cells, errors_by_number, separation_chart

CELLS = ["both right", "only vit wrong", "only cnn wrong", "both wrong, the same class", "both wrong, different"]


def test_bars_end_at_a_hundred():
    figure = error_cells(counts={"all": [7, 1, 1, 1, 0], "cat": [4, 0, 1, 0, 0], "dog": [3, 1, 0, 1, 0]}, cells=CELLS)
    axes = figure.axes[0]
    ends = [max(bar.get_x() + bar.get_width() for bars in axes.containers for bar in [bars[row]]) for row in range(3)]
    assert ends == pytest.approx([100, 100, 100])
    assert axes.containers[0][0].get_width() == pytest.approx(70)
    assert not cut_off(figure)
    said = texts(figure)
    assert {"all (10)", "cat (5)", *CELLS} <= set(said)


def test_of_many_classes_the_worst_are_drawn():
    counts = {f"class {index}": [index + 1, 40 - index, 0, 0, 0] for index in range(40)}
    figure = error_cells(counts={"all": [820, 820, 0, 0, 0], **counts}, cells=CELLS)
    said = texts(figure)
    assert "class 0 (41)" in said
    assert "class 39 (41)" not in said
    assert any("the 30 of 40 classes with most errors" in text for text in said)
    with pytest.raises(InputError, match="images in row cat"):
        error_cells(counts={"cat": [0, 0, 0, 0, 0]}, cells=CELLS)


def number(title: str, slices: int = 4) -> AccuracyBySlice:
    value = np.linspace(0.9, 0.5, slices)
    ends = np.stack([value, value - 0.05, value + 0.05])
    return AccuracyBySlice(title, [0.03023 * (i + 1) for i in range(slices + 1)], [10] * slices, ends, ends - 0.02)


@pytest.mark.parametrize("count", [1, 7])
def test_a_panel_for_each_number(count):
    figure = errors_by_number(numbers=[number(f"number {index}") for index in range(count)], names=("vit", "cnn"))
    assert sum(bool(axes.lines) for axes in figure.axes) == count
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"vit", "cnn", "number 0", "0.03", "0.15"} <= set(texts(figure))


def test_what_holds_is_filled():
    rows = {
        "vit": [
            SeparationMark("entropy, share of ln(keys) of the CLS row", 0.7, 0.6, 0.8, True),
            SeparationMark("contrast", 0.4, 0.3, 0.52, False),
        ],
        "cnn": [SeparationMark("blur", 0.5, None, None, False)],
    }
    figure = separation_chart(rows=rows, title="What differs between failures and successes")
    axes = figure.axes[0]
    marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
    faces = {float(mark.get_xdata()[0]): mark.get_markerfacecolor() for mark in marks}
    assert faces[0.7] != "white"
    assert faces[0.4] == faces[0.5] == "white"
    assert len(axes.collections) == 2  # intervals, where there are some
    assert not cut_off(figure)
    with pytest.raises(InputError, match="at least one property"):
        separation_chart(rows={"vit": []}, title="t")
