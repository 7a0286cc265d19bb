import numpy as np
import pytest
import torch
from vitlens.figures.attention import attention_grid, attention_overlays

from tests.figures.reading import colour_at, cut_off, overlapping, panel, texts
from vitlens.errors import InputError


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((1, 1, 4, 4), "figure"), ((2, 3, 3, 5), "layer"), ((1, 12, 7, 7), "figure"), ((12, 3, 2, 2), "layer")],
)
def test_grid_has_a_panel_for_every_head(shape, scale, random, image):
    figure = attention_grid(maps=random.dirichlet(np.ones(np.prod(shape[2:])), shape[:2]).reshape(shape), scale=scale)
    bar = 1 if scale == "figure" else 0
    assert len(figure.axes) == shape[0] * shape[1] + bar
    found = texts(figure)
    assert "layer 0" in found
    assert "head 0" in found
    assert not {f"layer {shape[0]}", f"head {shape[1]}"} & set(found)
    assert str(shape[0] - 1) in " ".join(found)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21


def test_twelve_by_twelve(random, image):
    figure = attention_grid(maps=random.uniform(size=(12, 12, 2, 3)), image=image)
    assert len(figure.axes) == 12 * 12 + 2
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21


def test_layer_and_head_stand_where_the_labels_say(random):
    maps = random.uniform(0, 0.01, (3, 2, 2, 2))
    maps[2, 1, 0, 1] = 1.0
    figure = attention_grid(maps=maps)
    bright = [panel(figure, axes).max() > 0.9 for axes in figure.axes[:6]]
    assert bright == [False] * 5 + [True]
    np.testing.assert_array_less(0.9, colour_at(figure, figure.axes[5], 0.75, 0.25)[0])
    assert figure.axes[4].get_ylabel() == "2"
    assert figure.axes[1].get_title() == "1"


def test_layers_run_across_where_they_are_many(random):
    maps = random.uniform(0, 0.01, (5, 2, 2, 2))
    maps[4, 0, 0, 0] = 1.0
    figure = attention_grid(maps=maps)
    assert [panel(figure, axes).max() > 0.9 for axes in figure.axes[:5]] == [False] * 4 + [True]
    assert figure.axes[0].get_title() == "layer 0"
    assert figure.axes[4].get_title() == "4"
    assert figure.axes[5].get_ylabel() == "1"


def test_labels_of_a_later_stage(random):
    figure = attention_grid(maps=random.uniform(size=(2, 2, 2, 2)), numbers=[10, 11])
    assert {"layer 10", "11", "head 0", "1"} <= set(texts(figure))


def test_scale_is_shared_in_the_figure_or_in_the_layer():
    maps = np.zeros((2, 2, 2, 2))
    maps[:, :, 0, 0] = [[0.5, 1.0], [0.05, 0.1]]
    shared = attention_grid(maps=maps)
    by_layer = attention_grid(maps=maps, scale="layer")

    def corner(figure, index):
        return colour_at(figure, figure.axes[index], 0.25, 0.25)

    np.testing.assert_allclose(corner(by_layer, 0), corner(by_layer, 2), atol=0.02)
    np.testing.assert_allclose(corner(by_layer, 1), corner(by_layer, 3), atol=0.02)
    assert np.abs(corner(shared, 0) - corner(shared, 2)).max() > 0.1
    assert "one scale for all" in " ".join(texts(shared)).replace("\n", " ")
    assert "one scale per layer" in " ".join(texts(by_layer)).replace("\n", " ")
    assert any(" to\n" in text for text in texts(by_layer))


def test_grid_with_its_image(random, image):
    figure = attention_grid(maps=random.uniform(size=(2, 2, 4, 6)), image=torch.from_numpy(image).float())
    assert "input" in texts(figure)
    assert not cut_off(figure)
    assert not overlapping(figure)
    box = figure.axes[0].get_window_extent()
    assert box.height / box.width == pytest.approx(32 / 48, rel=0.02)


def test_constant_maps_are_marked_and_counted(random):
    maps = random.uniform(size=(2, 2, 3, 3))
    maps[1, 1] = 1 / 9
    figure = attention_grid(maps=maps)
    assert texts(figure).count("=") == 1
    assert "1 of the maps all equal" in " ".join(texts(figure)).replace("\n", " ")
    assert not cut_off(attention_grid(maps=np.full((1, 1, 2, 2), 0.25), scale="layer"))


@pytest.mark.parametrize("wrong", [np.full((1, 1, 2, 2), np.nan), np.zeros((2, 2, 2)), np.zeros((0, 1, 2, 2))])
def test_grid_refuses(wrong):
    with pytest.raises(InputError, match=r"(in|expected) maps"):
        attention_grid(maps=wrong)


def test_overlays_count_from_zero(images, random):
    figure = attention_overlays(images=images, maps=random.uniform(size=(3, 2, 4, 4)), layer=11)
    assert {"head 0", "head 1"} <= set(texts(figure))
    assert any(text.startswith("Layer 11:") for text in texts(figure))
