import numpy as np
import pytest
from matplotlib.colors import to_rgb

from tests.figures.reading import cut_off, pixels, texts
from vitlens.errors import InputError
from vitlens.figures.evaluate import per_class_bars, prediction_grid
from vitlens.figures.style import RIGHT, WRONG


def has(figure, colour) -> bool:
    return bool((np.abs(pixels(figure) - to_rgb(colour)).max(-1) < 0.01).any())


def test_right_and_wrong_by_colour_and_symbol(images):
    figure = prediction_grid(
        images=images, predicted=[0, 1, 1], probability=[0.5, 0.994, 1], truth=[0, 0, 1], classes=["cat", "dog"]
    )
    assert {"✓ cat, 50 %", "✗ dog, 99 %\nis cat", "✓ dog, 100 %"} <= set(texts(figure))
    assert any("2 of these 3 right" in text for text in texts(figure))
    assert len(figure.axes) == 3
    assert has(figure, RIGHT)
    assert has(figure, WRONG)
    assert not cut_off(figure)
    right = prediction_grid(images=images[:1], predicted=[0], probability=[1], truth=[0], classes=["cat"])
    assert not has(right, WRONG)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_long_names_fit(shape, random):
    names = ["mortarboard, academic cap", "black-and-gold garden spider, Argiope aurantia"]
    figure = prediction_grid(
        images=random.uniform(size=(13, 3, *shape)),
        predicted=np.zeros(13, int),
        probability=np.ones(13),
        truth=np.arange(13) % 2,
        classes=names,
    )
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"predicted": [0, 1]}, "expected 3 predictions"),
        ({"truth": [0, 1, 2]}, "expected truth from 0 to 1, found 0 to 2"),
        ({"predicted": [-1, 0, 0]}, "expected predicted from 0 to 1"),
        ({"probability": [np.nan, 1, 1]}, "finite numbers in probability"),
    ],
)
def test_predictions_refused(images, changed, message):
    given = {"predicted": [0, 1, 1], "probability": [1, 1, 1], "truth": [0, 0, 1]} | changed
    with pytest.raises(InputError, match=message):
        prediction_grid(images=images, classes=["cat", "dog"], **given)


def bars(models: int, classes: int, random):
    accuracy = random.uniform(0.2, 0.9, (models, classes))
    return accuracy, per_class_bars(
        accuracy=accuracy,
        low=accuracy - 0.1,
        high=accuracy + 0.1,
        n=np.full(classes, 45),
        classes=[f"class {index}" for index in range(classes)],
        models=[f"model-{index}" for index in range(models)],
    )


@pytest.mark.parametrize(("models", "classes"), [(1, 1), (1, 30), (2, 100)])
def test_bars_have_their_lengths(models, classes, random):
    accuracy, figure = bars(models, classes, random)
    widths = sorted(patch.get_width() for patch in figure.axes[0].patches)
    shown = np.argsort(accuracy.mean(axis=0))[:30]
    np.testing.assert_allclose(widths, np.sort(100 * accuracy[:, shown], axis=None))
    assert not cut_off(figure)
    said = " ".join(texts(figure)).replace("\n", " ")
    assert ("the 30 lowest of 100 classes" in said) == (classes == 100)
    assert f"class {shown[0]} (45)" in said
    assert ("model-1" in said) == (models == 2)


def test_lowest_class_comes_first(random):
    accuracy, figure = bars(1, 50, random)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == f"class {accuracy[0].argmin()} (45)"


def test_bars_refused():
    good = {"low": [[0.1, 0.1]], "high": [[0.9, 0.9]], "n": [3, 3], "classes": ["a", "b"], "models": ["m"]}
    with pytest.raises(InputError, match=r"expected accuracies of shape \(1, 2\), found \(1, 3\)"):
        per_class_bars(accuracy=[[0.5, 0.5, 0.5]], **good)
    with pytest.raises(InputError, match="finite numbers in accuracy"):
        per_class_bars(accuracy=[[0.5, np.nan]], **good)
    with pytest.raises(InputError, match="expected 2 n"):
        per_class_bars(accuracy=[[0.5, 0.5]], **(good | {"n": [3]}))
