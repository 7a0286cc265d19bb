import numpy as np
import pytest
from matplotlib import colormaps

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.stats.animation import training_animation
from vitlens.figures.stats.training import heads_over_training, positions_over_training
from vitlens.figures.style import SERIES, SIGNED

NAN = float("nan")
EPOCHS = [0, 5, 10, 15]


def courses(values, **options):
    return heads_over_training(epochs=EPOCHS[: len(values)], values=values, title="x", label="distance (px)", **options)


@pytest.mark.parametrize("shape", [(1, 1), (12, 4), pytest.param((24, 16), marks=pytest.mark.slow)])
def test_courses_fit_on_a_page(shape, random):
    figure = courses(random.uniform(0, 9, (4, *shape)), uniform=np.full(shape[0], 8.0))
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [f"layer {layer}" for layer in range(shape[0])]
    assert len({axes.get_ylim() for axes in shown}) == 1
    assert shown[0].get_ylim()[0] == 0
    assert {"epoch", "distance (px)", "uniform attention"} <= set(texts(figure))


def test_a_line_for_each_head_and_their_mean():
    values = np.arange(16.0).reshape(4, 2, 2)
    values[:, 1, 1] = NAN
    first, second = courses(values).axes
    for head, line in enumerate(first.lines[:2]):
        np.testing.assert_array_equal(line.get_xdata(), EPOCHS)
        np.testing.assert_array_equal(line.get_ydata(), values[:, 0, head])
        assert line.get_color() == SERIES[head]
    np.testing.assert_array_equal(first.lines[2].get_ydata(), values[:, 0].mean(1))
    np.testing.assert_array_equal(second.lines[-1].get_ydata(), values[:, 1, 0])


def test_a_layer_without_values_is_left_out_and_uniform_attention_is_a_line_where_it_is_known():
    values = np.ones((4, 3, 2))
    values[:, 1] = NAN
    figure = courses(values, uniform=[5.0, NAN, NAN])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == ["layer 0", "layer 2"]
    assert [sum(line.get_linestyle() == "--" for line in axes.lines) for axes in shown] == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": np.full((4, 2, 2), NAN)}, "number in values, found only NaN"),
        ({"values": np.ones((4, 2))}, r"values of shape \(checkpoints, layers, heads\)"),
        ({"values": np.ones((3, 2, 2))}, "3 epochs, one for each of the checkpoints of values, found 4"),
        ({"uniform": [1.0]}, "2 layers of uniform"),
        ({"epochs": [0, 5, 5, 6]}, "ascending epochs"),
    ],
)
def test_courses_refused(options, message):
    with pytest.raises(InputError, match=message):
        heads_over_training(**{"epochs": EPOCHS, "values": np.ones((4, 2, 2)), "title": "x", "label": "y", **options})


def similar(checkpoints, random, shape=(5, 7)):
    maps = random.uniform(-0.5, 0.5, (checkpoints, *shape))
    maps[:, shape[0] // 2, shape[1] // 2] = 1.0
    return maps


@pytest.mark.parametrize(("checkpoints", "shape"), [(1, (1, 1)), (6, (5, 27)), (2, (27, 5))])
def test_position_maps_are_not_cut_off(checkpoints, shape, random):
    figure = positions_over_training(epochs=list(range(checkpoints)), similarity=similar(checkpoints, random, shape))
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert "epoch 0" in texts(figure)


def test_position_maps_share_a_scale_that_leaves_the_middle_out():
    maps = np.zeros((2, 3, 3))
    maps[:, 1, 1] = 1.0
    maps[0, 0, 0], maps[1, 2, 2] = 0.2, -0.4
    figure = positions_over_training(epochs=[0, 9], similarity=maps)
    high, low, middle = (np.array(colormaps[SIGNED](x)[:3]) for x in (0.75, 0.0, 0.5))
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.17, 0.17), high, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[1], 0.83, 0.83), low, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[1], 0.17, 0.83), middle, atol=0.02)
    assert any(word.startswith("≥ 0.4") for word in texts(figure))


@pytest.mark.parametrize(
    ("similarity", "message"),
    [
        (np.ones((2, 4, 3)), r"\(checkpoints, 2 down \+ 1, 2 across \+ 1\), found \(2, 4, 3\)"),
        (np.full((2, 3, 3), 1.5), r"\[-1, 1\], found 1.5"),
        (np.ones((3, 3, 3)), "3 epochs, one for each of the checkpoints"),
    ],
)
def test_position_maps_refused(similarity, message):
    with pytest.raises(InputError, match=message):
        positions_over_training(epochs=[0, 1], similarity=similarity)
    with pytest.raises(InputError, match="1 to 6 checkpoints, found 7"):
        positions_over_training(epochs=range(7), similarity=np.ones((7, 3, 3)))


def animation(random, **options):
    values = {"distance (px)": random.uniform(1, 9, (4, 3, 2)), "entropy": random.uniform(0, 1, (4, 3, 2))}
    return values, training_animation(
        **{"epochs": EPOCHS, "values": values, "similarity": similar(4, random), "name": "vit", **options}
    )


def test_a_film_changes_its_numbers_and_nothing_else(random):
    values, shown = animation(random)
    assert shown.frames == 4
    first, second, third = shown.figure.axes[:3]
    limits, norms, bars = set(), set(), []
    for frame, epoch in enumerate(EPOCHS):
        shown.show(frame)
        assert f"vit: epoch {epoch} of 15 (dots: heads; line: their mean)" in texts(shown.figure)
        np.testing.assert_array_equal(first.lines[0].get_ydata(), values["distance (px)"][frame].ravel())
        np.testing.assert_array_equal(first.lines[1].get_ydata(), values["distance (px)"][frame].mean(1))
        limits.add((first.get_ylim(), second.get_ylim(), third.get_xlim()))
        norms.add((third.images[0].norm.vmin, third.images[0].norm.vmax))
        bars.append(colour_at(shown.figure, shown.figure.axes[3], 0.5, 0.1))
        assert not cut_off(shown.figure)
    assert len(limits) == len(norms) == 1
    assert np.ptp(bars, axis=0).max() == 0
    assert not overlapping(shown.figure)
    assert shown.figure.get_figwidth() <= 7.21


def test_a_film_shows_each_moments_positions(random):
    maps = np.zeros((4, 3, 3))
    maps[:, 1, 1] = 1.0
    maps[2, 0, 0] = 0.3
    _, shown = animation(random, similarity=maps)
    panel = shown.figure.axes[2]
    colours = []
    for frame in range(4):
        shown.show(frame)
        colours.append(colour_at(shown.figure, panel, 0.17, 0.17))
    np.testing.assert_allclose(colours[2], colormaps[SIGNED](1.0)[:3], atol=0.02)
    np.testing.assert_allclose(colours[1], colours[3], atol=1e-6)
    np.testing.assert_allclose(colours[1], colormaps[SIGNED](0.5)[:3], atol=0.02)


def test_a_film_without_positions_has_no_map(random):
    _, shown = animation(random, similarity=None)
    assert len(shown.figure.axes) == 2
    assert not cut_off(shown.figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": {}}, "1 or 2 statistics, found 0"),
        ({"values": {"a": np.ones((3, 2, 2))}}, "4 checkpoints of a, one for each of the epochs, found 3"),
        ({"similarity": np.ones((3, 3, 3))}, "4 checkpoints of similarity"),
    ],
)
def test_films_refused(random, options, message):
    with pytest.raises(InputError, match=message):
        animation(random, **options)
