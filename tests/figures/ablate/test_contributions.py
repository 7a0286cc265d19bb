import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from tests.figures.reading import colour_at, cut_off, overlapping
from vitlens.errors import InputError
from vitlens.figures.ablate.contributions import contribution_bars, logit_lens
from vitlens.figures.style import BLUE, GREY, SIGNED, VERMILLION

NAN = float("nan")


def shade(share):
    return np.array(colormaps[SIGNED]((1 + share) / 2)[:3])


def titled(figure, title):
    return next(axes for axes in figure.axes if axes.get_title() == title)


@pytest.mark.parametrize(("shape", "unit"), [((1, 1), "logit"), ((24, 6), "probability")])
def test_lens_is_not_cut_off(shape, unit, random):
    figure = logit_lens(
        values=random.uniform(0, 1, shape),
        names=["a class with a long name, and longer"] * shape[1],
        title="x",
        unit=unit,
    )
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21


def test_lens_has_a_line_a_class():
    values = np.array([[0.1, 0.9], [0.5, 0.5], [0.8, 0.2]])
    logits = logit_lens(values=values, names=["cat", "dog"], title="x").axes[0]
    cat, dog = logits.lines
    np.testing.assert_array_equal(cat.get_xydata(), [[0, 0.1], [1, 0.5], [2, 0.8]])
    assert cat.get_linewidth() > dog.get_linewidth()
    assert (cat.get_label(), dog.get_label()) == ("cat", "dog")
    shares = logit_lens(values=torch.from_numpy(values), names=["cat", "dog"], title="x", unit="probability").axes[0]
    np.testing.assert_allclose(shares.lines[1].get_ydata(), [90, 50, 20])
    assert (logits.get_ylabel(), shares.get_ylabel()) == ("logit", "probability (%)")
    assert shares.get_ylim()[1] >= 100


def test_lens_has_the_accuracy_on_all_images_beside_the_example():
    accuracy = np.array([[0.1, 0.9], [0.05, 0.8], [0.2, 0.95]])
    figure = logit_lens(values=np.eye(2), names=["cat", "dog"], title="x", unit="probability", accuracy=accuracy, n=64)
    overall, example = figure.axes
    np.testing.assert_allclose(overall.lines[0].get_ydata(), [10, 90])
    assert len(overall.collections) == 1
    assert "64 images" in overall.get_title()
    assert (overall.get_ylabel(), example.get_ylabel()) == ("accuracy (%)", "probability (%)")
    assert len(example.lines) == 2
    assert not cut_off(figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accuracy": np.ones((3, 5))}, r"accuracy of shape \(3, 2\)"),
        ({"accuracy": np.full((3, 2), 90.0)}, "accuracy as fractions"),
        ({"names": ["a"]}, "2 names"),
        ({"values": np.ones((2, 7)), "names": list("abcdefg")}, "1 to 6 classes, found 7"),
        ({"values": [[NAN, 1.0]]}, "finite numbers in values"),
        ({"values": [[10.0, 1.0]], "unit": "probability"}, "probabilities as fractions, found 1 to 10"),
        ({"values": [1.0, 2.0]}, r"values of shape \(layers, classes\)"),
    ],
)
def test_lens_refused(options, message):
    with pytest.raises(InputError, match=message):
        logit_lens(**{"values": np.eye(2), "names": ["a", "b"], "title": "x", **options})


@pytest.mark.parametrize(("shape", "size"), [((1, 1), 50.0), ((24, 16), 1.0), ((24, 16), 50.0)])
def test_contributions_fit_on_a_page(shape, size, random):
    figure = contribution_bars(
        heads=random.normal(size=shape),
        mlps=size * random.normal(size=shape[0]),
        rest=-1234.5,
        title="Contributions " * 6,
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61


def test_sums_add_up_to_the_logit():
    heads = np.array([[1.0, 2.0], [NAN, -4.0]])
    figure = contribution_bars(heads=heads, mlps=[3.0, 2.0], rest=0.5, title="x")
    axes = titled(figure, "sums")
    assert [bar.get_width() for bar in axes.patches] == [-1.0, 5.0, 0.5, 4.5]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["heads", "MLPs", "rest", "all = logit"]
    assert [text.get_text() for text in axes.texts] == ["-1.00", "5.00", "0.50", "4.50"]
    colours = [bar.get_facecolor()[:3] for bar in axes.patches]
    assert colours == [to_rgb(colour) for colour in (BLUE, VERMILLION, VERMILLION, GREY)]
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.75, 0.75), shade(-1.0), atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[1], 0.5, 0.25), shade(0.75), atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlps": [1.0]}, "2 layers of MLP"),
        ({"mlps": [1.0, NAN]}, "finite numbers in mlps"),
        ({"rest": NAN}, "finite numbers in rest"),
        ({"heads": np.full((2, 2), NAN)}, "number in heads"),
    ],
)
def test_contributions_refused(options, message):
    with pytest.raises(InputError, match=message):
        contribution_bars(**{"heads": np.eye(2), "mlps": [1.0, 1.0], "rest": 0.0, "title": "x", **options})
