"""Charts of images: every picture and map at its place, colours that mean one thing, nothing cut off."""

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from tests.kit.axes import colour_at, crosses, cut_off, overlapping, panel, pixels, texts
from vitlens.charts import Picture, images
from vitlens.charts.pictures import images_on_a_page, mosaic, of_heads, with_maps
from vitlens.charts.style import MAGNITUDE, RIGHT, SIGNED, WRONG


def shown(figure):
    """The axes of pictures, without a colour bar's."""
    return [axes for axes in figure.axes if axes.images]


def has(figure, colour) -> bool:
    return bool((np.abs(pixels(figure) - to_rgb(colour)).max(-1) < 0.01).any())


def halves() -> np.ndarray:
    """Positive on the left, negative on the right."""
    values = np.zeros((4, 4))
    values[:, 0], values[:, 3] = 3.0, -3.0
    return values


def predicted(pictures, *given):
    """Pictures, each with prediction, probability and label."""
    return images()([Picture.predicted(image, *each) for image, each in zip(pictures, given)], "a title")


def test_right_and_wrong_by_colour_and_symbol(pictures):
    figure = predicted(pictures, ("cat", 0.5, "cat"), ("dog", 0.994, "cat"), ("dog", 1, None))
    assert {"✓ cat, 50 %", "✗ dog, 99 %\nis cat", "dog, 100 %"} <= set(texts(figure))
    assert len(figure.axes) == 3
    assert has(figure, RIGHT)
    assert has(figure, WRONG)
    assert not cut_off(figure)
    assert not has(predicted(pictures, ("cat", 1, "cat")), WRONG)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_long_names_fit_and_pictures_keep_their_shape(shape, random):
    names = ["mortarboard, academic cap", "black-and-gold garden spider, Argiope aurantia"]
    given = [(names[0], 1.0, names[index % 2]) for index in range(13)]
    figure = predicted(random.uniform(size=(13, 3, *shape)), *given)
    box = figure.axes[0].get_window_extent()
    assert box.height / box.width == pytest.approx(shape[0] / shape[1], rel=0.02)
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21


@pytest.mark.parametrize(("count", "maps", "under"), [(1, 1, False), (1, 12, True), (6, 3, True), (3, 13, False)])
def test_a_page_holds_every_row_and_column(count, maps, under, random):
    rows = []
    for index in range(count):
        image, row = random.uniform(size=(3, 48, 16)), f"{index}: golden retriever (97 %)"
        rows.append(Picture(image, row=row, column="image"))
        every = random.uniform(size=(maps, 4, 6))
        rows += [Picture(image, own, row, f"map {k}", signed=under or None) for k, own in enumerate(every)]
    figure = images(scale="joint", label="share", under=under)(rows, "Maps by method")
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert len(shown(figure)) == count * (maps + 1)
    assert {"image", *(f"map {k}" for k in range(maps))} <= set(texts(figure))
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 10.6


def test_columns_that_do_not_fit_are_further_blocks(random):
    maps = random.uniform(0, 0.01, (13, 2, 2, 2))
    maps[6, 1, 1, 0] = 1.0  # the seventh map of the second image
    cells = list(with_maps(np.zeros((2, 3, 8, 8)), list(maps), [f"map {at}" for at in range(13)], ["a", "b"]))
    figure = images(scale="joint", smooth=False)(cells, "Maps")
    found = [panel(figure, axes).max() > 0.6 for axes in shown(figure)]
    assert found == [number == 14 + 7 for number in range(28)]
    bright = shown(figure)[21]
    assert colour_at(figure, bright, 0.25, 0.75)[0] > 0.5
    assert bright.get_position().x0 == pytest.approx(shown(figure)[0].get_position().x0)  # a block of seven columns
    assert [images_on_a_page(panels) for panels in (3, 7, 8, 12, 24, 80)] == [6, 6, 3, 3, 1, 1]


def test_one_value_has_one_colour_in_all_panels():
    coarse, fine = np.full((2, 2), 0.25), np.full((4, 4), 0.0625)
    coarse[0, 0] = fine[0, 0] = 0.5
    image = np.full((3, 16, 16), 0.5)
    cells = [Picture(image, coarse, column="a"), Picture(image, fine, column="b")]
    joint, own = (shown(images(scale=scale, smooth=False)(cells, "")) for scale in ("joint", "own"))
    for axes, same in ((joint, False), (own, False)):
        np.testing.assert_allclose(
            colour_at(axes[0].figure, axes[0], 0.1, 0.1), colour_at(axes[1].figure, axes[1], 0.1, 0.1)
        )
        other = colour_at(axes[0].figure, axes[0], 0.8, 0.8) - colour_at(axes[1].figure, axes[1], 0.8, 0.8)
        assert bool(np.abs(other).max() < 0.02) is same


def test_the_object_is_outlined_and_the_highest_point_marked():
    image, mask, values = np.full((3, 32, 32), 0.2), np.zeros((32, 32), bool), np.zeros((2, 4, 4))
    mask[:16, :16] = True
    values[0, 1, 1], values[1, 3, 3] = 1, 1
    cells = [Picture(image, column="image", mask=mask)]
    cells += [Picture(image, own, column=str(hit), mask=mask, hit=hit) for own, hit in zip(values, (True, False))]
    figure = images()([*cells, Picture(image, column="bare")], "Maps")
    assert panel(figure, figure.axes[0]).max() > 0.9  # the white line
    assert panel(figure, figure.axes[3]).max() < 0.25
    for axes, (x, y), colour in ((1, (0.375, 0.375), RIGHT), (2, (0.875, 0.875), WRONG)):
        np.testing.assert_allclose(colour_at(figure, figure.axes[axes], x, y), to_rgb(colour), atol=0.02)


def test_a_patch_is_outlined_in_each_maps_own_grid():
    maps = [np.linspace(0, 0.1, 8).reshape(1, 2, 4), np.linspace(0, 0.1, 2).reshape(1, 1, 2)]
    first, one, other = with_maps(np.zeros((1, 3, 32, 64)), maps, ["a", "b"], patches=[(1, 2), (0, 1)])
    expected = np.zeros((32, 64), bool)
    expected[16:, 32:48] = True
    np.testing.assert_array_equal(first.mask, expected)
    np.testing.assert_array_equal(one.mask, expected)
    np.testing.assert_array_equal(np.argwhere(other.mask)[[0, -1]], [(0, 32), (31, 63)])


@pytest.mark.parametrize("signed", [None, True])
@pytest.mark.parametrize(("value", "words"), [(2.5, "uniform"), (np.nan, "not finite")])
def test_a_map_that_says_nothing_is_not_drawn_and_a_reason_crosses_one_out_that_stays(pictures, value, words, signed):
    cells = [
        Picture(pictures[0], halves(), column="a", signed=signed),
        Picture(pictures[0], np.full((4, 4), value), column="b", signed=signed),
        Picture(pictures[0], halves(), column="c", crossed="failed", signed=signed),
    ]
    figure = images()(cells, "Maps")
    assert [len(crosses(axes)) for axes in shown(figure)] == [0, 2, 2]
    assert [texts(figure).count(word) for word in (words, "failed")] == [1, 1]
    spread = [np.ptp(np.asarray(axes.images[0].get_array()), axis=2).max() for axes in shown(figure)]
    assert spread[1] < 1e-9
    assert min(spread[0], spread[2]) > 0.1


def test_red_is_positive_and_blue_negative():
    image = np.full((3, 16, 16), 0.5)
    cells = [Picture(image, values, column=str(values[0, 0]), signed=True) for values in (halves(), -halves())]
    figure = images()(cells, "")
    for axes, positive, negative in zip(shown(figure), (0.06, 0.94), (0.94, 0.06)):
        red, _, blue = colour_at(figure, axes, positive, 0.5)
        assert red > blue + 0.2
        red, _, blue = colour_at(figure, axes, negative, 0.5)
        assert blue > red + 0.2
        np.testing.assert_allclose(colour_at(figure, axes, 0.5, 0.5), 0.5, atol=0.06)  # the grey image


@pytest.mark.parametrize(("signed", "factor", "offset"), [(True, 1000, 0), (False, 1, 100)])
def test_maps_drawn_as_shares_have_no_unit_and_start_where_their_signs_say(pictures, signed, factor, offset):
    values = halves() if signed else np.abs(halves())
    one, other = (
        shown(images()([Picture(pictures[0], each, signed=signed)], ""))[0].images[0].get_array()
        for each in (values, factor * values + offset)
    )
    np.testing.assert_allclose(one, other, atol=1e-9)


def test_maps_alone_have_the_colours_of_their_numbers():
    values = np.array([[-1.0, 0.0], [np.nan, 1.0]])
    figure = images(scale="signed", label="cosine similarity")([Picture(None, values)], "")
    for (x, y), share in (((0.25, 0.25), 0.0), ((0.75, 0.25), 0.5), ((0.75, 0.75), 1.0)):
        np.testing.assert_allclose(colour_at(figure, figure.axes[0], x, y), colormaps[SIGNED](share)[:3], atol=0.02)
    assert np.ptp(colour_at(figure, figure.axes[0], 0.25, 0.75)) < 0.02  # grey
    assert "cosine similarity" in texts(figure)
    figure = images()([Picture(None, np.array([[0.0, 4.0]]))], "")
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.75, 0.5), colormaps[MAGNITUDE](1.0)[:3], atol=0.02)


@pytest.mark.parametrize(("layers", "heads"), [(3, 2), (5, 2), (24, 16)])
def test_heads_stand_where_the_labels_say(layers, heads, image):
    maps = np.full((layers, heads, 2, 2), 0.1)
    maps[..., 0, 0] = 10.0 * np.arange(layers)[:, None] + np.arange(heads)
    cells = list(of_heads(maps, range(4, 4 + layers), image))
    across = layers > 2 * heads
    for each in cells[1:]:
        layer, head = (each.column, each.row) if across else (each.row, each.column)
        assert each.map[0, 0] == 10.0 * (int(layer.split()[-1]) - 4) + int(head.split()[-1])
    if layers < 24:
        figure = images(scale="joint", label="attention (%)")(cells, "Attention")
        assert {"image", "layer 4", "head 0", "1"} <= set(texts(figure))
        assert len(shown(figure)) == layers * heads + 1
        assert not cut_off(figure)
        assert not overlapping(figure)
        assert figure.get_figwidth() <= 7.21


def test_a_mosaic_holds_every_map_at_its_place():
    values = np.eye(6)
    values[0, 5] = values[5, 0] = 0.5  # top left with bottom right of 2 x 3 positions
    found = mosaic(values, (2, 3))
    assert found.shape == (5, 11)  # one empty line between maps of 2 x 3
    assert np.isnan(found[2]).all()
    assert np.isnan(found[:, [3, 7]]).all()
    assert (found[1, 2], found[3, 8]) == (0.5, 0.5)
    assert found[0, 0] == found[4, 10] == 0.5  # with itself: as the greatest of two different
    assert np.nansum(found) == 0.5 * 8
