import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from tests.figures.reading import colour_at, cut_off, overlapping, panel, texts
from vitlens.errors import InputError
from vitlens.figures.gaps import as_array_with_gaps
from vitlens.figures.stats.depth import distance_by_layer, layer_evolution
from vitlens.figures.stats.depth import token_norms as norms
from vitlens.figures.stats.heads import difference_maps, head_heatmaps
from vitlens.figures.style import MAGNITUDE, SERIES, SIGNED

NAN = float("nan")
NAMES = ("entropy, patch rows (share of the maximum)", "sparsity (Hoyer)", "mass on CLS", "mass on self", "e", "f")


def all_text(figure):
    return " ".join(texts(figure)).replace("\n", " ")


def dots(figure):
    """The heads' dots of each colour, as (place, value)."""
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    return {
        colour: np.concatenate([line.get_xydata() for line in lines if line.get_color() == colour])
        for colour in {line.get_color() for line in lines}
    }


def dashed(figure):
    return [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]


@pytest.mark.parametrize("shapes", [[(1, 1)], [(24, 16), (12, 3)], [(2, 4)] * 6])
def test_distance_is_not_cut_off(shapes, random):
    distance = [random.uniform(5, 100, shape) for shape in shapes]
    figure = distance_by_layer(
        distance=distance,
        uniform=[np.full(shape[0], 116.5) for shape in shapes],
        names=[f"a model with a long name {index}" for index in range(len(shapes))],
    )
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21
    assert "attention distance (px)" in texts(figure)
    assert figure.axes[0].get_ylim()[0] == 0


def test_a_dot_for_each_head_at_its_layer(random):
    distance = random.uniform(5, 100, (3, 4))
    distance[1, 2] = NAN
    distance[2] = NAN
    figure = distance_by_layer(distance=[torch.from_numpy(distance)], uniform=[[50.0] * 3], names=["vit-tiny"])
    (found,) = dots(figure).values()
    np.testing.assert_array_equal(found[:, 1], distance[~np.isnan(distance)])
    np.testing.assert_array_equal(np.round(found[:, 0]), [0, 0, 0, 0, 1, 1, 1])
    for layer in (0, 1):
        assert np.mean(found[np.round(found[:, 0]) == layer, 0]) == pytest.approx(layer, abs=1e-9)
    assert (np.diff(found[:4, 0]) > 0).all()
    assert "vit-tiny" in all_text(figure)
    mean = next(line for line in figure.axes[0].lines if line.get_linestyle() == "-")
    np.testing.assert_allclose(mean.get_ydata(), [distance[0].mean(), np.nanmean(distance[1]), NAN])


def test_uniform_attention_is_one_line_where_it_is_the_same(random):
    distance = [random.uniform(5, 100, (3, 4)), random.uniform(5, 100, (2, 2))]
    figure = distance_by_layer(distance=distance, uniform=[[50.0, NAN, 50.0], [50.0, 50.0]])
    (line,) = dashed(figure)
    assert set(line.get_ydata()) == {50.0}
    assert "uniform attention" in texts(figure)


def test_uniform_attention_is_a_step_for_each_layer(random):
    values = random.uniform(5, 30, (3, 4))
    figure = distance_by_layer(distance=[values], uniform=[[20.0, NAN, 40.0]])
    (line,) = dashed(figure)
    np.testing.assert_array_equal(line.get_xydata(), [[-0.5, 20], [0, 20], [1, NAN], [2, 40], [2.5, 40]])
    two = distance_by_layer(distance=[values] * 2, uniform=[[20.0] * 3, [40.0] * 3], names=["a", "b"])
    assert [line.get_color() for line in dashed(two)] == list(SERIES[:2])
    assert {"uniform attention, a", "uniform attention, b"} <= set(texts(two))


def test_two_models_stand_beside_each_other(random):
    first, second = random.uniform(5, 100, (4, 12)), random.uniform(5, 100, (4, 12))
    figure = distance_by_layer(distance=[first, second], uniform=[[90.0] * 4] * 2, names=["pretrained", "fine-tuned"])
    found = dots(figure)
    left, right = (found[colour][:, 0].reshape(4, 12) for colour in SERIES[:2])
    assert (left.max(axis=1) < right.min(axis=1)).all()
    assert (right[:-1].max(axis=1) < left[1:].min(axis=1)).all()
    np.testing.assert_array_equal(found[SERIES[1]][:, 1], second.ravel())
    assert {"pretrained: heads, mean", "fine-tuned: heads, mean"} <= set(texts(figure))


def test_intervals_are_lines_at_their_dots(random):
    distance = random.uniform(20, 100, (2, 3))
    distance[0, 1] = NAN
    figure = distance_by_layer(
        distance=[distance], uniform=[[50.0] * 2], low=[distance - 3], high=[distance + 5], names=["x"]
    )
    (found,) = dots(figure).values()
    lines = np.concatenate([one.get_segments() for one in figure.axes[0].collections])
    np.testing.assert_allclose(lines[:, :, 0], np.stack([found[:, 0]] * 2, axis=1))
    np.testing.assert_allclose(lines[:, :, 1], np.stack([found[:, 1] - 3, found[:, 1] + 5], axis=1))
    assert "95 % intervals" in all_text(figure)
    assert "95 % intervals" not in all_text(distance_by_layer(distance=[distance], uniform=[[50.0] * 2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distance": []}, "1 to 6 models, found 0"),
        ({"distance": [np.ones((2, 3))] * 7}, "1 to 6 models, found 7"),
        ({"distance": [np.ones(3)]}, r"distance of shape \(layers, heads\)"),
        ({"distance": [np.full((2, 3), NAN)]}, "number in distance, found only NaN"),
        ({"distance": [np.full((2, 3), np.inf)]}, "finite numbers in distance"),
        ({"uniform": [[1.0]]}, "2 layers of uniform"),
        ({"uniform": [[NAN, NAN]]}, "number in uniform"),
        ({"uniform": []}, "1 uniform"),
        ({"names": ["a", "b"]}, "1 names"),
        ({"low": [np.ones((2, 3))]}, "1 high"),
        ({"low": [np.ones((2, 3))], "high": [np.ones((2, 2))]}, r"high of shape \(2, 3\), found \(2, 2\)"),
    ],
)
def test_distance_refused(options, message):
    with pytest.raises(InputError, match=message):
        distance_by_layer(**{"distance": [np.ones((2, 3))], "uniform": [[1.0, 1.0]], **options})


@pytest.mark.parametrize(("shape", "count"), [((1, 1), 1), ((2, 16), 3), ((24, 16), 6), ((32, 2), 6)])
def test_heat_maps_fit_on_a_page(shape, count, random):
    values = {name: random.uniform(0, 1, shape) for name in NAMES[:count]}
    if shape != (1, 1):
        values[NAMES[0]][0, 0] = NAN
    figure = head_heatmaps(values=values, title="Statistics " * 9, units=dict.fromkeys(values, "px"))
    assert len(figure.axes) == 2 * count
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61
    assert {"head", "layer"} <= set(texts(figure))
    for labels in (figure.axes[0].get_xticklabels(), figure.axes[0].get_yticklabels()):
        assert labels[0].get_text() == "0"


def test_heat_maps_have_layers_down_and_their_own_colours():
    one, other = np.zeros((2, 3)), np.zeros((2, 3))
    one[1, 2] = 5.0
    other[0, 1] = 0.5
    figure = head_heatmaps(
        values={"one": one, "other": other}, title="x", units={"one": "px"}, limits={"other": (0.0, 1.0)}
    )
    top, middle, bottom = (np.array(colormaps[MAGNITUDE](x)[:3]) for x in (1.0, 0.5, 0.0))
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.83, 0.75), top, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.17, 0.25), bottom, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[1], 0.5, 0.25), middle, atol=0.02)
    assert {"5", "1.0", "px"} <= set(texts(figure))


def test_two_rows_of_tall_maps_with_long_names_fit_on_a_page(random):
    values = {
        f"{name}, a long name of a statistic in several lines, {name}": random.uniform(size=(32, 2)) for name in NAMES
    }
    figure = head_heatmaps(values=values, title="Statistics " * 9)
    assert figure.get_figheight() <= 9.61
    assert not cut_off(figure)


def test_no_value_is_hatched_and_said():
    values = np.ones((2, 2))
    values[0, 0] = NAN
    figure = head_heatmaps(values={"one": values, "two": np.arange(4.0).reshape(2, 2)}, title="x")
    square = panel(figure, figure.axes[0])
    corner = square[: len(square) // 2 - 2, : square.shape[1] // 2 - 2]
    assert np.ptp(corner, axis=-1).max() < 0.02  # grey
    assert len(np.unique(corner[..., 0])) > 3  # and hatched
    assert np.ptp(square[-3, -3]) > 0.1
    assert "no value" in texts(figure)
    assert "no value" not in texts(head_heatmaps(values={"one": np.eye(2)}, title="x"))


def test_equal_values_are_said_to_be_equal():
    values = 0.3 + 1e-12 * np.arange(4.0).reshape(2, 2)
    assert "all equal" in all_text(head_heatmaps(values={"one": values}, title="x"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": {}}, "1 to 6 statistics, found 0"),
        ({"values": dict.fromkeys("abcdefg", np.eye(2))}, "1 to 6 statistics, found 7"),
        ({"values": {"a": np.eye(2), "b": np.eye(3)}}, r"'b' of shape \(2, 2\), found \(3, 3\)"),
        ({"values": {"a": np.full((2, 2), NAN)}}, "number in 'a'"),
        ({"values": {"a": np.full((2, 2), np.inf)}}, "finite numbers in 'a'"),
        ({"units": {"b": "px"}}, r"names of the statistics \['a'\], found \['b'\]"),
        ({"limits": {"b": (0.0, 1.0)}}, r"names of the statistics \['a'\], found \['b'\]"),
        ({"limits": {"a": (0.0, 0.5)}}, "'a' within its limits 0 to 0.5, found 0 to 1"),
        ({"limits": {"a": (0.5, 1.0)}}, "'a' within its limits 0.5 to 1, found 0 to 1"),
    ],
)
def test_heat_maps_refused(options, message):
    with pytest.raises(InputError, match=message):
        head_heatmaps(**{"values": {"a": np.eye(2)}, "title": "x", **options})


@pytest.mark.parametrize(("shape", "count"), [((1, 1), 1), ((24, 16), 1), ((24, 16), 6)])
def test_differences_fit_on_a_page(shape, count, random):
    values = {name: random.normal(size=shape) for name in NAMES[:count]}
    figure = difference_maps(
        differences=values,
        significant={name: value > 1 for name, value in values.items()},
        first="vit-tiny",
        second="vit-tiny, untrained",
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figheight() <= 9.61
    assert "vit-tiny minus vit-tiny, untrained" in all_text(figure)


def test_differences_are_centred_and_marked():
    values = np.array([[-2.0, 0.0, 1.0], [NAN, 0.0, 0.0]])
    marks = np.array([[False, True, True], [False, False, False]])
    figure = difference_maps(differences={"a": values}, significant={"a": marks}, first="one", second="other")
    low, middle, above = (np.array(colormaps[SIGNED](x)[:3]) for x in (0.0, 0.5, 0.75))
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.05, 0.1), low, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.95, 0.9), middle, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.95, 0.1), above, atol=0.02)
    (line,) = figure.axes[0].lines
    np.testing.assert_array_equal(line.get_xydata(), [[1, 0], [2, 0]])
    assert colour_at(figure, figure.axes[0], 0.5, 0.25).max() < 0.2
    assert "a\n2 of 5 significant" in texts(figure)


def test_models_without_a_difference():
    figure = difference_maps(
        differences={"a": np.zeros((2, 2))}, significant={"a": np.zeros((2, 2), bool)}, first="one", second="other"
    )
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.2, 0.2), colormaps[SIGNED](0.5)[:3], atol=0.02)
    assert "0\nall\nequal" in texts(figure)


@pytest.mark.parametrize(
    ("significant", "message"),
    [
        ({}, r"significant for \['a'\], found it for \[\]"),
        ({"a": np.ones((3, 2), bool)}, r"significant of 'a' of shape \(2, 2\), found \(3, 2\)"),
        ({"a": np.ones((2, 2), bool)}, "difference wherever it is significant, found NaN in 'a'"),
        ({"a": np.zeros((2, 2), bool), "b": np.zeros((2, 2), bool)}, r"for \['a', 'b'\]"),
    ],
)
def test_differences_refused(significant, message):
    with pytest.raises(InputError, match=message):
        difference_maps(differences={"a": [[NAN, 1.0], [0.0, 2.0]]}, significant=significant, first="a", second="b")


@pytest.mark.parametrize(("shape", "count"), [((1, 1), 1), ((12, 12), 2), ((6, 3), 4), ((24, 16), 6)])
def test_evolution_is_not_cut_off(shape, count, random):
    values = {"patch rows": random.uniform(size=shape), "CLS row": random.uniform(size=shape)}
    figure = layer_evolution(panels=dict.fromkeys(NAMES[:count], values))
    assert len(figure.axes) == count
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert texts(figure).count("patch rows") == 1
    assert all(1.06 * 0.9 * max(map(np.max, values.values())) < axes.get_ylim()[1] for axes in figure.axes)


def test_evolution_has_means_and_ranges():
    patches = np.array([[1.0, 2.0, 6.0], [NAN, 3.0, 5.0], [NAN, NAN, NAN], [2.0, 2.0, 2.0]])
    figure = layer_evolution(panels={"a (px)": {"CLS row": patches + 1}, "b": {"patch rows": patches - 4.0}})
    first, second = (axes.lines[0] for axes in figure.axes)
    np.testing.assert_array_equal(first.get_xdata(), [0, 1, 2, 3])
    np.testing.assert_allclose(first.get_ydata(), [4, 5, NAN, 3])
    assert (first.get_color(), second.get_color()) == SERIES[:2]
    corners = np.concatenate([path.vertices for path in figure.axes[0].collections[0].get_paths()])
    for layer, low, high in ((0, 2.0, 7.0), (1, 4.0, 6.0), (3, 3.0, 3.0)):
        found = corners[corners[:, 0] == layer, 1]
        assert (found.min(), found.max()) == (low, high)
    assert 2 not in corners[:, 0]
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[1].get_ylim()[0] < -3


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ({}, "1 to 6 statistics, found 0"),
        ({"a": {}}, r"rows for every statistic, found none for \['a'\]"),
        ({"a": {str(row): np.eye(2) for row in range(7)}}, "1 to 6 kinds of rows, found 7"),
        ({"a": {"CLS row": np.eye(2)}, "b": {}}, r"found none for \['b'\]"),
        ({"a": {"CLS row": np.zeros(3)}}, r"a, CLS row of shape \(layers, heads\)"),
        ({"a": {"CLS row": np.full((2, 2), NAN)}}, "number in a, CLS row"),
    ],
)
def test_evolution_refused(panels, message):
    with pytest.raises(InputError, match=message):
        layer_evolution(panels=panels)


@pytest.mark.parametrize("layers", [1, 24])
def test_norms_have_their_numbers(layers, random):
    median = np.linspace(20, 30, layers)
    sinks = random.uniform(0, 3, (layers, 4))
    figure = norms(median=median, greatest=3 * median, high_norm=np.arange(layers) + 1, sinks=sinks, title="x")
    greatest, middle = figure.axes[0].lines
    np.testing.assert_allclose(middle.get_ydata(), median)
    np.testing.assert_allclose(greatest.get_ydata(), 3 * median)
    assert [bar.get_height() for bar in figure.axes[1].patches] == list(range(1, layers + 1))
    np.testing.assert_allclose(figure.axes[2].lines[0].get_ydata(), sinks.mean(axis=1))
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"median", "greatest", "x"} <= set(texts(figure))
    assert figure.axes[0].get_yscale() == "linear"
    assert figure.axes[0].get_ylim()[0] == 0


def test_wide_norms_are_logarithmic():
    figure = norms(median=[5.0, 10.0], greatest=[20.0, 500.0], high_norm=[0.0, 3.0])
    assert figure.axes[0].get_yscale() == "log"
    assert {"5", "10", "100"} <= set(texts(figure))
    assert len(figure.axes) == 2
    assert not cut_off(figure)


def test_no_high_norm_token_is_said():
    assert "none" in texts(norms(median=[5.0, 0.0], greatest=[6.0, 100.0], high_norm=[0.0, 0.0]))
    assert "none" not in texts(norms(median=[5.0, 6.0], greatest=[6.0, 8.0], high_norm=[0.0, 0.1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"greatest": [1.0]}, "2 layers of greatest"),
        ({"high_norm": [1.0] * 3}, "2 layers of high_norm"),
        ({"sinks": np.ones((3, 2))}, "2 layers of sinks"),
        ({"median": [1.0, NAN]}, "finite numbers in median"),
        ({"median": [1.0, -1.0]}, "median of at least 0, found -1"),
        ({"sinks": -np.ones((2, 2))}, "sinks of at least 0, found -1"),
    ],
)
def test_norms_refused(options, message):
    with pytest.raises(InputError, match=message):
        norms(**{"median": [1.0, 2.0], "greatest": [3.0, 4.0], "high_norm": [0.0, 1.0], **options})


def test_gaps_stay_and_infinite_numbers_do_not():
    found = as_array_with_gaps(torch.tensor([1.0, NAN], requires_grad=True), name="x", axes=("heads",))
    np.testing.assert_array_equal(found, [1.0, NAN])
    with pytest.raises(InputError, match="finite numbers in x"):
        as_array_with_gaps([NAN, np.inf], name="x", axes=("heads",))


def test_series_are_the_dots_colours(random):
    figure = distance_by_layer(distance=[random.uniform(5, 9, (1, 1))], uniform=[[20.0]])
    seen = panel(figure, figure.axes[0]).reshape(-1, 3)
    assert np.abs(seen - to_rgb(SERIES[0])).sum(axis=1).min() < 0.05
