import numpy as np
import pytest
import torch
from matplotlib import colormaps
from vitlens.figures.patching import patching_maps

from tests.figures.reading import colour_at, cut_off, overlapping, panel, texts
from vitlens.charts.style import SIGNED
from vitlens.errors import InputError

NAN = float("nan")
RED, SKY = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.5, 1.0])


def shade(share):
    return np.array(colormaps[SIGNED]((1 + share) / 2)[:3])


def flat(colour, size=(32, 48)):
    return np.broadcast_to(colour[:, None, None], (3, *size))


def patched(**options):
    return patching_maps(**{"clean": flat(RED), "corrupted": flat(SKY), "title": "Patching", **options})


def titled(figure, title):
    return next(axes for axes in figure.axes if axes.get_title() == title)


@pytest.mark.parametrize(
    ("shape", "prefix"),
    [
        ((1, 1), ()),
        ((12, 3), ("CLS", "distillation")),
        ((24, 16), ("CLS", "register 1", "register 2", "register 3", "register 4")),
    ],
)
def test_patching_fits_on_a_page(shape, prefix, random):
    tokens = {name: random.normal(size=shape[0]) for name in prefix}
    grids = random.normal(size=(shape[0], 14, 14))
    figure = patched(
        heads=random.normal(size=shape),
        positions=grids,
        prefix=tokens,
        names=("tabby", "n" * 40),
        title="Patching " * 12,
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() == pytest.approx(7.2)
    assert figure.get_figheight() <= 9.61
    assert {"heads patched", "layer 0", "tabby", *prefix} <= set(texts(figure))


@pytest.mark.parametrize(("size", "kind"), [((32, 96), "heads"), ((96, 32), "positions")])
def test_one_kind_alone_fits(size, kind, random):
    values = {"heads": random.normal(size=(6, 3)), "positions": random.normal(size=(6, 2, 5))}
    figure = patched(clean=flat(RED, size), corrupted=flat(SKY, size), **{kind: values[kind]})
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert ("heads patched" in texts(figure)) == (kind == "heads")


def test_images_and_heads_are_where_they_are_named():
    heads = torch.tensor([[0.5, NAN], [-1.0, 0.0]])
    figure = patched(heads=heads, names=("cat", "dog"), unit="logits")
    for name, colour in (("cat", RED), ("dog", SKY)):
        np.testing.assert_allclose(panel(figure, titled(figure, name)).mean(axis=(0, 1)), colour, atol=0.02)
    axes = titled(figure, "heads patched")
    for x, y, share in ((0.25, 0.25, 0.5), (0.25, 0.75, -1.0), (0.75, 0.75, 0.0)):
        np.testing.assert_allclose(colour_at(figure, axes, x, y), shade(share), atol=0.02)
    assert np.ptp(colour_at(figure, axes, 0.75, 0.25)) < 0.02
    assert any("colours: logits" in text for text in texts(figure))
    assert {"1.0", "0", "-1.0"} <= set(texts(figure))


def test_grids_share_one_scale_and_may_differ_in_size():
    first, second = np.zeros((2, 3)), np.zeros((1, 1))
    first[0, 2], second[0, 0] = -2.0, 1.0
    figure = patched(positions=[first, second], prefix={"CLS": [0.25, -0.5]})
    one, other = titled(figure, "layer 0"), titled(figure, "1")
    np.testing.assert_allclose(colour_at(figure, one, 0.9, 0.3), shade(-1.0), atol=0.02)
    np.testing.assert_allclose(colour_at(figure, one, 0.1, 0.3), shade(0.0), atol=0.02)
    np.testing.assert_allclose(colour_at(figure, other, 0.5, 0.5), shade(0.5), atol=0.02)
    tokens = next(axes for axes in figure.axes if "CLS" in [label.get_text() for label in axes.get_yticklabels()])
    assert [text.get_text() for text in tokens.texts] == [".25", "-.50"]
    np.testing.assert_allclose(colour_at(figure, tokens, 0.55, 0.2), shade(-1.0), atol=0.02)
    assert [label.get_text() for label in tokens.get_xticklabels()] == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "heads or positions, found neither"),
        ({"heads": np.ones(3)}, r"heads of shape \(layers, heads\)"),
        ({"heads": np.full((2, 2), NAN)}, "number in heads"),
        ({"positions": np.ones((2, 3))}, r"positions of shape \(rows, columns\)"),
        ({"positions": np.full((2, 3, 3), NAN)}, "finite numbers in positions"),
        ({"positions": np.ones((2, 3, 3)), "prefix": {"CLS": [1.0]}}, "2 layers of CLS"),
        ({"heads": np.eye(2), "prefix": {"CLS": [1.0, 1.0]}}, "0 layers of CLS"),
        ({"heads": np.eye(2), "clean": np.ones((1, 4, 4))}, "clean of shape"),
        ({"heads": np.eye(2), "corrupted": 255 * flat(RED)}, r"corrupted in \[0, 1\]"),
    ],
)
def test_patching_refused(options, message):
    with pytest.raises(InputError, match=message):
        patched(**options)
