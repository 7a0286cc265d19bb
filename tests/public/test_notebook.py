"""The figures for notebooks, without a display and without state of pyplot."""

import sys
from functools import partial

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import vitlens
from tests.kit.axes import crosses
from tests.kit.models.handwritten import ViT, noise, wrapped
from tests.kit.models.handwritten_rare import RegistersLast
from tests.kit.tiny import images as made
from tests.kit.tiny import ours, timm_model
from vitlens.errors import InputError, UnknownNameError, UnsupportedError


@pytest.fixture(scope="module")
def vit():
    return ours()


@pytest.fixture(scope="module")
def images(vit):
    return made(vit.input_size)


def panels(figure):
    """Return the axes that show an image."""
    return [axes for axes in figure.axes if axes.images]


def shown(figure) -> list[np.ndarray]:
    return [np.asarray(axes.images[0].get_array()) for axes in panels(figure)]


def test_maps_over_images_are_drawn_with_their_own_values_and_equal_ones_crossed_out(vit, images):
    maps = vitlens.rollout(vit, images)
    before = maps.clone()
    settings = dict(mpl.rcParams)
    figure = vitlens.show(images, maps, title="Rollout", label="share", names=["a", "b"])
    assert isinstance(figure, Figure)
    assert len(panels(figure)) == 4  # two images, each with its map
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == "share"]
    low, high = bar.get_ylim()  # up to the 99.5th percentile
    assert low in (0, pytest.approx(maps.min().item()))
    assert high == pytest.approx(np.percentile(maps.numpy(), 99.5))
    assert torch.equal(maps, before)
    assert dict(mpl.rcParams) == settings
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
    equal = vitlens.show(images, torch.stack((torch.zeros(2, 3), torch.rand(2, 3))))
    assert [len(crosses(axes)) for axes in panels(equal)] == [0, 0, 2, 0]


def test_several_methods_images_alone_and_files_in_every_form(vit, images, pictures):
    by_method = {
        name: vitlens.explain(vit, images, method=name) for name in ("rollout", "input-x-gradient")
    }
    assert len(panels(vitlens.show(images, by_method))) == 6
    alone = vitlens.show(images, by_method["input-x-gradient"])
    assert [axes.get_ylabel() for axes in alone.axes if "share" in axes.get_ylabel()]
    pixels = (images * 255).round().byte()
    assert [len(panels(vitlens.show(source))) for source in (images[0], pixels)] == [1, 2]
    array = pixels.permute(0, 2, 3, 1).numpy()
    drawn = [shown(vitlens.show(source))[0] for source in (array, list(array), pixels)]
    for panel in drawn:
        np.testing.assert_array_equal(panel, drawn[0])
    assert len(panels(vitlens.show(vitlens.load_data("digits", limit=12)))) == 12
    with pytest.raises(InputError):
        vitlens.show(vitlens.load_data("digits", limit=13))
    figure = vitlens.show(pictures, vitlens.rollout(vit, pictures), model=vit, names=[3, 5, 8])
    height, width = vit.input_size
    first = shown(figure)[0]
    assert first.shape[0] / first.shape[1] == height / width
    assert [axes.get_xlabel() for axes in figure.axes[:3]] == ["3", "5", "8"]


def test_an_open_picture_is_turned_like_its_file(tmp_path):
    upright = np.zeros((6, 8, 3), np.uint8)
    upright[..., 0] = np.arange(8) * 30
    turned = Image.Exif()
    turned[0x0112] = 6  # "turn me clockwise to see me upright"
    stored = Image.fromarray(upright).transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "a.png", exif=turned)
    with Image.open(tmp_path / "a.png") as opened:
        (drawn,) = shown(vitlens.show(opened))
    (expected,) = shown(vitlens.show(upright))
    assert np.array_equal(drawn, expected)


def test_heads_of_weights_are_the_rows_of_cls(vit, images):
    weights = vitlens.attention(vit, images)
    expected = torch.stack([layer[:, :, 0, 1:] for layer in weights]).unflatten(-1, vit.layout.grid)
    layers = len(expected)
    heads = expected.shape[2]
    for source in (weights, vitlens.attention(vit, images, rows="cls")):
        # next to the image
        drawn_heads = shown(vitlens.show_heads(source, images, model=vit, image=1))[1:]
        assert len(drawn_heads) == layers * heads
        for index, drawn_head in enumerate(drawn_heads):
            layer, head = divmod(index, heads)
            np.testing.assert_allclose(
                drawn_head, 100 * expected[layer, 1, head].numpy(), rtol=1e-4
            )
    assert len(panels(vitlens.show_heads(expected))) == layers * heads
    assert len(panels(vitlens.show_heads(vit, images, layer=1))) == 2 * (heads + 1)
    one = vitlens.show_heads(vit, images, layer=1)
    other = vitlens.show_heads(weights, images, model=vit, layer=1)
    for first, second in zip(shown(one), shown(other), strict=True):
        # rounding may turn a colour into its neighbour
        np.testing.assert_allclose(first, second, atol=0.02)


def test_the_heads_of_one_image_are_drawn_of_any_number_of_images(vit):
    many = made(vit.input_size, batch=14)
    expected = shown(vitlens.show_heads(vit, many[13:]))
    weights = vitlens.attention(vit, many)
    drawn = {
        "weights": vitlens.show_heads(weights, many, model=vit, image=13),
        "model": vitlens.show_heads(vit, many, image=13),
    }
    for name, figure in drawn.items():
        for first, second in zip(shown(figure), expected, strict=True):
            np.testing.assert_allclose(first, second, atol=0.02, err_msg=name)
    for wrong in (lambda: vitlens.show_heads(vit, many, layer=1), lambda: vitlens.show(many)):
        with pytest.raises(InputError, match=r"images\[:12\]"):  # how to choose some
            wrong()
    with pytest.raises(InputError):
        vitlens.show_heads(vit, many, image=14)


def test_heads_of_a_model_with_windows():
    swin = timm_model("swin_tiny_patch4_window7_224")
    pictures = made(batch=1)
    assert len(panels(vitlens.show_heads(swin, pictures, layer=3))) == 1 + 4
    with pytest.raises(InputError, match="layer="):
        vitlens.show_heads(swin, pictures)
    with pytest.raises(UnsupportedError):
        vitlens.show_heads(vitlens.attention(swin, pictures), pictures, model=swin)


def test_boards_of_statistics_importance_and_tables(vit, images):
    table = vitlens.statistics(vit, images)
    (panel,) = [
        axes
        for axes in panels(vitlens.show_board(table, "distance"))
        if axes.get_xlabel() == "head"
    ]
    np.testing.assert_array_equal(np.asarray(panel.images[0].get_array()), table.distance.numpy())
    assert vitlens.show_board(table).axes
    importance = vitlens.ablate(vit, images, torch.tensor([0, 1]), replace="zero")
    drawn = shown(vitlens.show_board(importance))
    assert any(array.shape == importance.delta_loss.shape for array in drawn)
    assert vitlens.show_board(
        torch.tensor([[0.0, 1.0], [torch.nan, -2.0]]), title="x", unit="y"
    ).axes
    assert vitlens.show_board({"a": torch.rand(2, 3), "b": torch.rand(2, 3)}).axes
    with pytest.raises(UnknownNameError, match="did you mean 'distance'"):
        vitlens.show_board(table, "distnce")


def test_a_notebook_displays_figures_with_the_label_of_small_numbers_within_them(images):
    figure = vitlens.show(images, torch.rand(2, 14, 14) / 100, label="share of 1")
    assert figure._repr_png_().startswith(b"\x89PNG")
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel() == "share of 1"]
    assert bar.yaxis.label.get_window_extent().x1 < figure.bbox.x1


def test_figures_fit_a_column_of_a_paper_with_fonts_as_its_publisher_wants_them(
    vit, images, tmp_path
):
    maps = vitlens.rollout(vit, images)
    figures = {
        "maps": vitlens.show(images, {"rollout": maps, "again": maps}, width="column"),
        "heads": vitlens.show_heads(vit, images, width="column"),
        "board": vitlens.show_board(vitlens.statistics(vit, images), width="column"),
    }
    for name, figure in figures.items():
        assert figure.get_figwidth() < 3.3001, name
    figures["board"].savefig(tmp_path / "x.pdf")
    written = (tmp_path / "x.pdf").read_bytes()
    assert b"/Type3" not in written
    assert b"/CIDFontType2" in written
    with pytest.raises(UnknownNameError, match="column"):
        vitlens.show(images, width="colum")


def test_the_heads_of_a_model_of_registers_are_not_said_to_be_cls():
    model = wrapped(partial(ViT, prefix=0))
    registers = wrapped(partial(RegistersLast, last=False))
    for tested in (model, registers):
        weights = vitlens.attention(tested, noise())
        figure = vitlens.show_heads(weights, noise(), model=tested, image=0)
        assert "CLS" not in figure.get_suptitle()
    maps = [layer.mean(2).unflatten(-1, (3, 4)) for layer in vitlens.attention(model, noise())]
    assert "CLS" not in vitlens.show_heads(maps, noise(), image=0).get_suptitle()
