import numpy as np
import pytest
from matplotlib import colormaps
from vitlens.figures.confusion import confusion_matrix

from tests.figures.reading import colour_at, cut_off, texts
from vitlens.charts.style import COUNTS
from vitlens.errors import InputError


def names(classes: int) -> list[str]:
    return [f"class number {index}" for index in range(classes)]


@pytest.mark.parametrize("classes", [1, 20, 21, 1000])
def test_nothing_is_cut_off(classes, random):
    counts = random.poisson(0.02, (classes, classes)) + 5 * np.eye(classes)
    figure = confusion_matrix(counts=counts, classes=names(classes), model="vit")
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21
    assert ("Most confused: images, truth → prediction" in texts(figure)) == (classes > 20)


def test_cells_bear_their_counts_and_rows_their_share():
    figure = confusion_matrix(counts=[[1, 3], [0, 400]], classes=["a", "b"])
    assert {"1", "3", "400"} <= set(texts(figure))
    assert any("401 of 404 on the diagonal" in text for text in texts(figure))
    axes = figure.axes[0]
    for (x, y), share in (((0.6, 0.9), 1.0), ((0.6, 0.1), 0.75), ((0.1, 0.1), 0.25), ((0.1, 0.9), 0.0)):
        expected = colormaps[COUNTS](share**0.5)[:3]
        np.testing.assert_allclose(colour_at(figure, axes, x, y), expected, atol=0.01)


def test_class_without_images_is_grey():
    figure = confusion_matrix(counts=[[0, 0], [0, 4]], classes=["a", "b"])
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.1, 0.1), [200 / 255] * 3)


def test_most_confused_pairs_are_listed():
    counts = 10 * np.eye(30)
    counts[3, 7], counts[7, 3] = 8, 2
    found = texts(confusion_matrix(counts=counts, classes=names(30)))
    assert found.index("class number 3 → class number 7") < found.index("class number 7 → class number 3")
    assert "8" in found
    assert len([text for text in found if "→" in text and text.startswith("class")]) == 2
    assert "none" in texts(confusion_matrix(counts=10 * np.eye(30), classes=names(30)))


def test_places_are_not_called_the_models_indices():
    """Classes without an image are left out by the caller: the 30th shown may be class 340 of ImageNet."""
    (axes, *_) = confusion_matrix(counts=np.eye(30), classes=[f"c{index}" for index in range(30)]).axes
    assert axes.get_ylabel() == "truth (classes shown, counted from 0)"


def test_one_confusion_in_a_thousand_classes_is_seen():
    clean, counts = np.eye(1000), np.eye(1000)
    counts[100, 901] = 3
    figures = [confusion_matrix(counts=given, classes=names(1000)) for given in (clean, counts)]
    seen = [colour_at(figure, figure.axes[0], 901.5 / 1000, 100.5 / 1000) for figure in figures]
    assert seen[0].sum() - seen[1].sum() > 0.5
    assert any("maximum of 8×8 cells" in text for text in texts(figures[0]))


@pytest.mark.parametrize("counts", [np.ones((2, 3)), np.zeros((2, 2)), -np.eye(2)])
def test_refused(counts):
    with pytest.raises(InputError, match="expected square counts"):
        confusion_matrix(counts=counts, classes=["a", "b"])


def test_classes_must_be_as_many():
    with pytest.raises(InputError, match="expected 3 rows of counts"):
        confusion_matrix(counts=np.eye(2), classes=["a", "b", "c"])
