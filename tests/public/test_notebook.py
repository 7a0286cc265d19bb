"""The figures for notebooks: of what the other functions give, without a display, and no state of pyplot."""

import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import vitlens
from tests.kit.axes import crosses
from tests.lens.tiny import images as made
from tests.lens.tiny import ours
from vitlens.analysis.attention.weights import attention_maps
from vitlens.charts.overlay import joint_scale
from vitlens.errors import InputError, UnknownNameError, UnsupportedError


@pytest.fixture(scope="module")
def vit():
    return ours()


@pytest.fixture(scope="module")
def images(vit):
    return made(vit.input_size)


def panels(figure):
    """The axes that show an image."""
    return [axes for axes in figure.axes if axes.images]


def test_maps_over_images_are_drawn_with_their_own_values(vit, images):
    maps = vitlens.rollout(vit, images)
    before, settings = maps.clone(), dict(mpl.rcParams)
    figure = vitlens.show(images, maps, title="Rollout", label="share", names=["a", "b"])
    assert isinstance(figure, Figure)
    assert len(panels(figure)) == 4  # two images, each with its map
    scale = joint_scale(maps.numpy())
    bar = next(axes for axes in figure.axes if axes.get_ylabel() == "share")
    assert bar.get_ylim() == pytest.approx((scale.low, scale.high))
    assert torch.equal(maps, before)
    assert dict(mpl.rcParams) == settings
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_several_methods_and_signed_maps_are_shares(vit, images):
    named = {name: vitlens.explain(vit, images, method=name) for name in ("rollout", "input-x-gradient")}
    assert len(panels(vitlens.show(images, named))) == 6
    (bar,) = [axes for axes in vitlens.show(images, named["input-x-gradient"]).axes if "share" in axes.get_ylabel()]
    assert bar.get_ylabel() == "share of the map's largest value"


def test_images_alone_in_every_form(images):
    pixels = (images * 255).round().byte()
    one, both = vitlens.show(images[0]), vitlens.show(pixels)
    assert [len(panels(figure)) for figure in (one, both)] == [1, 2]
    array = pixels.permute(0, 2, 3, 1).numpy()
    drawn = [np.asarray(panels(vitlens.show(given))[0].images[0].get_array()) for given in (array, list(array), pixels)]
    for found in drawn:
        np.testing.assert_array_equal(found, drawn[0])
    assert len(panels(vitlens.show(vitlens.load_data("digits", limit=12)))) == 12
    with pytest.raises(InputError, match="at most 12 images in a figure, found 13"):
        vitlens.show(vitlens.load_data("digits", limit=13))


def test_maps_of_other_images_are_refused(images):
    for maps in (torch.zeros(3, 2, 2), torch.zeros(2, 2, 2, 2)):
        with pytest.raises(InputError, match=r"expected maps \(2, rows, columns\)"):
            vitlens.show(images, maps)


def test_heads_of_weights_are_those_of_attention_maps(vit, images):
    expected = torch.stack([layer.maps for layer in attention_maps(vit, images)])
    for weights in (vitlens.attention(vit, images), vitlens.attention(vit, images, rows="cls")):
        figure = vitlens.show_heads(weights, images, model=vit, image=1)
        found = [np.asarray(axes.images[0].get_array()) for axes in panels(figure)][1:]
        layers, heads = expected.shape[0], expected.shape[2]
        assert len(found) == layers * heads  # beside the image
        for index in range(layers * heads):
            layer, head = divmod(index, heads)
            np.testing.assert_allclose(found[index], 100 * expected[layer, 1, head].numpy(), rtol=1e-4)
    assert len(panels(vitlens.show_heads(expected))) == layers * heads
    assert len(panels(vitlens.show_heads(attention_maps(vit, images), images, layer=1))) == 2 * (heads + 1)


def test_what_is_no_attention_is_refused(vit, images):
    weights = vitlens.attention(vit, images)
    with pytest.raises(InputError, match="expected image from 0 to 1, found 2"):
        vitlens.show_heads(weights, model=vit, image=2)
    with pytest.raises(InputError, match="expected layer from 0 to 1, found 7"):
        vitlens.show_heads(weights, images, model=vit, layer=7)
    with pytest.raises(InputError, match="expected images under the heads"):
        vitlens.show_heads(weights, model=vit, layer=1)
    with pytest.raises(InputError, match="expected weights"):
        vitlens.show_heads([torch.zeros(2, 3)])
    with pytest.raises(InputError, match=r"over the \d+ tokens of"):
        vitlens.show_heads([torch.zeros(1, 2, 3, 3)], model=vit)
    with pytest.raises(UnsupportedError):
        vitlens.show_heads(weights, model=vitlens.load("cnn-digits"))


def test_boards_of_statistics_importance_and_tables(vit, images):
    table = vitlens.statistics(vit, images)
    (panel,) = [axes for axes in panels(vitlens.show_board(table, "distance")) if axes.get_xlabel() == "head"]
    np.testing.assert_array_equal(np.asarray(panel.images[0].get_array()), table.distance.numpy())
    assert vitlens.show_board(table).axes
    importance = vitlens.ablate(vit, images, torch.tensor([0, 1]), replace="zero")
    drawn = [np.asarray(axes.images[0].get_array()) for axes in panels(vitlens.show_board(importance))]
    assert any(array.shape == importance.delta_loss.shape for array in drawn)
    assert vitlens.show_board(torch.tensor([[0.0, 1.0], [torch.nan, -2.0]]), title="x", unit="y").axes
    assert vitlens.show_board({"a": torch.rand(2, 3), "b": torch.rand(2, 3)}).axes
    with pytest.raises(UnknownNameError, match="did you mean 'distance'"):
        vitlens.show_board(table, "distnce")
    with pytest.raises(InputError, match=r"\(layers, heads\)"):
        vitlens.show_board(torch.rand(3))
    with pytest.raises(InputError, match="statistics"):
        vitlens.show_board(torch.rand(3, 3), "distance")


def test_a_notebook_displays_the_figures_without_pyplot(vit, images):
    for figure in (vitlens.show(images), vitlens.show_board(torch.rand(2, 3))):
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_the_label_of_small_numbers_is_within_the_figure(images):
    figure = vitlens.show(images, torch.rand(2, 14, 14) / 100, label="share of 1")
    figure.draw_without_rendering()
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == "share of 1"]
    assert bar.yaxis.label.get_window_extent().x1 < figure.bbox.x1


def test_files_are_shown_with_the_crop_of_the_model(vit, pictures):
    maps = vitlens.rollout(vit, pictures)
    figure = vitlens.show(pictures, maps, model=vit, names=[3, 5, 8])
    height, width = vit.input_size
    shown = np.asarray(panels(figure)[0].images[0].get_array())
    assert shown.shape[0] / shown.shape[1] == height / width
    assert [axes.get_xlabel() for axes in figure.axes[:3]] == ["3", "5", "8"]


def test_maps_that_are_all_equal_say_so(images):
    figure = vitlens.show(images, torch.stack((torch.zeros(2, 3), torch.rand(2, 3))))
    assert [len(crosses(axes)) for axes in panels(figure)] == [0, 0, 2, 0]


def test_heads_of_a_model_with_windows(vit, images):
    one = vitlens.show_heads(vit, images, layer=1)
    other = vitlens.show_heads(vitlens.attention(vit, images), images, model=vit, layer=1)
    for first, second in zip(panels(one), panels(other), strict=True):
        drawn = [np.asarray(axes.images[0].get_array()) for axes in (first, second)]
        np.testing.assert_allclose(*drawn, atol=0.02)  # rounding may turn a colour into its neighbour
    swin = vitlens.load("timm:swin_tiny_patch4_window7_224", random_weights=True)
    pictures = torch.rand(1, 3, 224, 224)
    assert len(panels(vitlens.show_heads(swin, pictures, layer=3))) == 1 + 6
    with pytest.raises(InputError, match="choose one by layer="):
        vitlens.show_heads(swin, pictures)
    with pytest.raises(UnsupportedError, match="give the model itself"):
        vitlens.show_heads(vitlens.attention(swin, pictures), pictures, model=swin)
