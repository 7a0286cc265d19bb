import numpy as np
import pytest
from matplotlib.colors import to_rgb
from vitlens.charts.overlays import overlay_rows

from tests.figures.reading import colour_at, crosses, cut_off, overlapping, panel, pixels, texts
from vitlens.charts.style import RIGHT, WRONG
from vitlens.errors import InputError


def rows(images, maps, **options):
    titles = [f"map {index}" for index in range(np.shape(maps)[1])]
    return overlay_rows(images=images, maps=maps, titles=titles, title="Maps", label="share (%)", **options)


def test_panels_titles_and_names(images, random):
    figure = rows(images, random.uniform(size=(3, 2, 4, 4)), names=["cat", "dog", "a very long name of a class (73 %)"])
    assert len(figure.axes) == 3 * 3 + 1
    assert {"input", "map 0", "map 1", "cat", "dog", "Maps", "share (%)"} <= set(texts(figure))
    assert texts(figure).count("input") == 1
    assert not cut_off(figure)


def test_same_value_same_colour_in_all_panels(random):
    maps = random.uniform(0, 1, (2, 2, 2, 2))
    maps[:, :, 0, 0] = 0.7
    figure = rows(np.full((2, 3, 16, 16), 0.5), maps, smooth=False)
    seen = [colour_at(figure, figure.axes[index], 0.2, 0.2) for index in (1, 2, 4, 5)]
    np.testing.assert_allclose(seen, [seen[0]] * 4, atol=1 / 255)
    assert np.abs(seen[0] - colour_at(figure, figure.axes[1], 0.8, 0.8)).max() > 0.02


def test_input_is_drawn_in_its_own_colours():
    images = np.zeros((1, 3, 16, 16))
    images[0, 0, :, 8:] = 1  # the right half red
    figure = rows(images, np.arange(4.0).reshape(1, 1, 2, 2))
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.75, 0.5), [1, 0, 0])
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.25, 0.5), [0, 0, 0])


def test_mask_is_outlined_and_peak_marked():
    images = np.full((1, 3, 32, 32), 0.2)
    mask = np.zeros((1, 32, 32), bool)
    mask[0, :16, :16] = True
    maps = np.zeros((1, 2, 4, 4))
    maps[0, 0, 1, 1], maps[0, 1, 3, 3] = 1, 1
    figure = rows(images, maps, masks=mask, hits=[[True, False]])
    assert {"✓ hit", "✗ miss"} <= set(texts(figure))
    assert panel(figure, figure.axes[0]).max() > 0.9  # the white line
    for axes, (x, y), colour in ((1, (0.375, 0.375), RIGHT), (2, (0.875, 0.875), WRONG)):
        np.testing.assert_allclose(colour_at(figure, figure.axes[axes], x, y), to_rgb(colour), atol=0.02)
    bare = rows(images, maps)
    assert panel(bare, bare.axes[0]).max() < 0.25


def test_constant_map_is_said(images):
    figure = rows(images, np.full((3, 1, 4, 4), 0.25), hits=np.ones((3, 1)))
    assert texts(figure).count("uniform") == 3
    assert [len(crosses(axes)) for axes in figure.axes[:-1]] == [0, 2] * 3
    assert not [line for axes in figure.axes for line in axes.lines if line.get_marker() in ("o", "X")]  # no maximum
    assert "✓ hit" not in texts(figure)
    assert np.isfinite(pixels(figure)).all()


@pytest.mark.parametrize(("shape", "grid"), [((32, 48), (2, 3)), ((64, 8), (8, 1))])
def test_images_that_are_not_square(shape, grid, random):
    figure = rows(random.uniform(size=(2, 3, *shape)), random.uniform(size=(2, 3, *grid)), names=["a", "b"])
    box = figure.axes[1].get_window_extent()
    assert box.height / box.width == pytest.approx(shape[0] / shape[1], rel=0.02)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figheight() < 10.5


@pytest.mark.parametrize("panels", [1, 12])
def test_one_image_is_broken_into_lines(panels, images, random):
    figure = rows(images[:1], random.uniform(size=(1, panels, 4, 4)))
    assert len(figure.axes) == panels + 2
    assert figure.get_figwidth() <= 7.21
    assert not cut_off(figure)


def test_many_photographs_stay_small(random):
    figure = rows(random.uniform(size=(8, 3, 8, 8)), random.uniform(size=(8, 5, 4, 4)))
    areas = [axes.get_position().width * axes.get_position().height for axes in figure.axes[:-1]]
    assert sum(areas) * figure.get_figwidth() * figure.get_figheight() <= 22.1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"maps": np.zeros((2, 1, 4, 4))}, "expected 3 sets of maps"),
        ({"names": ["one"]}, "expected 3 names"),
        ({"masks": np.zeros((3, 4, 4))}, r"expected masks of shape \(3, 16, 16\), found \(3, 4, 4\)"),
        ({"hits": np.zeros((3, 2))}, r"expected hits of shape \(3, 1\)"),
        ({"maps": np.full((3, 1, 4, 4), np.nan)}, "finite numbers in maps"),
    ],
)
def test_refused(images, changed, message):
    with pytest.raises(InputError, match=message):
        rows(**({"images": images, "maps": np.ones((3, 1, 4, 4))} | changed))
