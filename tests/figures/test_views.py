import numpy as np
import pytest
from vitlens.figures.views import (
    images_on_a_page,
    panel_view,
    shared_scale,
)

from tests.figures.reading import colour_at, crosses, cut_off, overlapping, panel, texts
from vitlens.errors import InputError


def view(images, maps, **options):
    return panel_view(images=images, maps=maps, titles=[f"map {i + 1}" for i in range(len(maps))], title="T", **options)


@pytest.mark.parametrize(
    ("panels", "shape"),
    [(1, (48, 16)), pytest.param(6, (48, 16), marks=pytest.mark.slow), (12, (32, 48)), (25, (48, 16))],
)
def test_every_panel_is_there_on_one_page(panels, shape, random):
    batch = images_on_a_page(panels)
    images = random.uniform(size=(batch, 3, *shape))
    names = ["a", "a very long name of a file.png", *"bcdef"][:batch]
    figure = view(images, list(random.uniform(size=(panels, batch, 4, 4))), names=names)
    assert len(figure.axes) == batch * (panels + 1) + 1
    assert {"input", f"map {panels}", "a", "attention (%)"} <= set(texts(figure))
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 10.2


def test_pages():
    assert [images_on_a_page(panels) for panels in (3, 6, 7, 12, 13, 24, 80)] == [6, 6, 3, 3, 3, 1, 1]


def test_panels_stand_in_order(random):
    maps = random.uniform(0, 0.01, (8, 2, 2, 2))
    maps[6, 1, 1, 0] = 1.0  # the seventh map of the second image, on its second line
    figure = view(np.zeros((2, 3, 8, 8)), list(maps), smooth=False)
    found = [panel(figure, axes).max() > 0.6 for axes in figure.axes[:-1]]
    assert found == [number == 9 + 7 for number in range(18)]
    assert figure.axes[16].get_title() == "map 7"
    assert colour_at(figure, figure.axes[16], 0.25, 0.75)[0] > 0.5


def test_grids_may_differ_and_share_a_scale():
    coarse, fine = np.full((1, 2, 2), 0.25), np.full((1, 4, 4), 0.0625)
    coarse[0, 0, 0] = fine[0, 0, 0] = 0.5
    figure = view(np.full((1, 3, 16, 16), 0.5), [coarse, fine], smooth=False)
    np.testing.assert_allclose(colour_at(figure, figure.axes[1], 0.1, 0.1), colour_at(figure, figure.axes[2], 0.1, 0.1))
    assert np.abs(colour_at(figure, figure.axes[1], 0.8, 0.8) - colour_at(figure, figure.axes[2], 0.8, 0.8)).max() > 0.1
    scale = shared_scale([coarse, fine])
    assert (scale.low, scale.high) == (6.25, 50.0)


def test_the_patch_is_outlined_on_the_input_and_in_each_panels_own_grid():
    maps = [np.linspace(0, 0.1, 8).reshape(1, 2, 4), np.linspace(0, 0.1, 2).reshape(1, 1, 2)]
    figure = view(np.zeros((1, 3, 32, 64)), maps, patches=[(1, 2), (0, 1)], smooth=False)
    for axes, (x, y, width, height) in zip(figure.axes, [(0.5, 0.5, 0.25, 0.5)] * 2 + [(0.5, 0, 0.5, 1)]):
        tall, wide = axes.images[0].get_array().shape[:2]
        for rectangle in axes.patches:
            corner = (rectangle.get_x() + 0.5) / wide, (rectangle.get_y() + 0.5) / tall
            assert corner == pytest.approx((x, y))
            assert (rectangle.get_width() / wide, rectangle.get_height() / tall) == pytest.approx((width, height))
        assert len(axes.patches) == 2
    assert panel(figure, figure.axes[0]).max() > 0.9  # the white line on a black image
    assert panel(view(np.zeros((1, 3, 32, 64)), maps), figure.axes[0]).max() < 0.1


def test_a_uniform_map_is_crossed_out(images, random):
    maps = random.uniform(0, 0.01, (2, 3, 4, 4))
    maps[1, 1] = 1.0 / 16
    figure = panel_view(images=images, maps=list(maps), titles=["untrained", "epoch 12"], title="Training")
    assert {"untrained", "epoch 12", "uniform"} <= set(texts(figure))
    assert len(crosses(figure.axes[5])) == 2  # second image, second epoch
    assert not cut_off(figure)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"titles": ["a"]}, "expected 2 titles"),
        ({"names": ["a"]}, "expected 3 names"),
        ({"patches": [(0, 0)]}, "expected 2 patches"),
        ({"maps": [np.zeros((2, 2, 2))] * 2}, "expected 3 maps in a panel"),
        ({"maps": [np.full((3, 2, 2), np.nan)] * 2}, "finite numbers in maps"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message, images):
    given = {"images": images, "maps": [np.zeros((3, 2, 2))] * 2, "titles": ["a", "b"], "title": "T", **changed}
    with pytest.raises(InputError, match=message):
        panel_view(**given)
