"""Charts of images: pictures and maps in their places, consistent colours; read off the axes."""

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_rgb

from tests.kit.axes import array, crosses, cut_off, overlapping, shown
from vitlens.charts import Picture, amplification, images, pixels

GREY = np.array([0.2126, 0.7152, 0.0722])
RIGHT = to_rgb("#0072B2")
WRONG = to_rgb("#D55E00")
FLAT = np.full((3, 16, 16), 0.5)


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(0)


def large(values, size, *, smooth=True):
    """Enlarge a map to an image's size by torch."""
    mode = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest"}
    return torch.nn.functional.interpolate(torch.from_numpy(values)[None, None], size, **mode)[
        0, 0
    ].numpy()


def halves() -> np.ndarray:
    """Return a map that is positive on the left and negative on the right."""
    values = np.zeros((4, 4))
    values[:, 0], values[:, 3] = 3.0, -3.0
    return values


@pytest.mark.parametrize(
    ("prediction", "below", "frame"),
    [
        (("cat", 0.5, "cat"), "✓ cat, 50 %", RIGHT),
        (("dog", 1, None), "dog, 100 %", None),
        (("a long name of a dog", 1, "cat"), "✗ a long name of…\n100 %\nis cat", WRONG),
    ],
)
def test_right_and_wrong_by_colour_and_symbol(prediction, below, frame):
    picture = Picture.predicted(FLAT, *prediction, row="r")
    (axes,) = images()([picture], "a title").axes
    assert picture.below == below
    assert axes.get_xlabel().replace("\u00a0", " ").split() == below.split()
    assert axes.spines["left"].get_visible() == (frame is not None)
    assert frame is None or to_rgb(axes.spines["left"].get_edgecolor()[:3]) == frame


@pytest.mark.parametrize(
    ("shape", "count", "maps", "under"),
    [((16, 40), 13, 0, False), ((40, 16), 1, 12, True), ((16, 40), 3, 13, False)],
)
def test_a_page_holds_every_row_and_column_and_cuts_nothing_off(count, maps, under, shape, random):
    rows = []
    for index in range(count):
        image = random.uniform(size=(3, *shape))
        row = f"{index}: golden retriever (97 %)" if maps else ""
        below = "" if maps else "black-and-gold garden spider, Argiope aurantia"
        rows.append(Picture(image, row=row, column="image" if maps else "", below=below))
        every = random.uniform(size=(maps, 4, 6))
        rows += [
            Picture(image, values, row, f"map {k}", signed=under or None)
            for k, values in enumerate(every)
        ]
    figure = images(scale="joint", label="share", under=under)(rows, "Maps by method")
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert len(shown(figure)) == count * (maps + 1)
    assert {f"map {k}" for k in range(maps)} <= {axes.get_title() for axes in figure.axes}
    box = figure.axes[0].get_window_extent()
    assert box.height / box.width == pytest.approx(shape[0] / shape[1], rel=0.02)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 10.6


def test_of_more_columns_than_fit_each_map_has_its_panel(random):
    maps = random.uniform(0, 0.01, (13, 2, 2, 2))
    maps[6, 1, 1, 0] = 1.0  # the seventh map of the second image
    image = np.zeros((3, 8, 8))
    cells = []
    for at, name in enumerate("ab"):
        cells += [Picture(image, row=name, column="image")]
        cells += [
            Picture(image, values[at], name, f"map {number}") for number, values in enumerate(maps)
        ]
    axes = shown(images(scale="joint", smooth=False)(cells, "Maps"))
    assert [array(panel).max() > 0.6 for panel in axes] == [
        number == 14 + 7 for number in range(28)
    ]


@pytest.mark.parametrize(("grid", "smooth"), [((3, 5), True), ((3, 5), False), ((1, 1), True)])
def test_a_map_over_an_image_is_the_one_that_torch_enlarges_on_a_scale_for_all(
    grid, smooth, random
):
    image = random.uniform(size=(3, 240, 260))
    maps = random.uniform(1, 2, (2, *grid))
    cells = [Picture(image, values, column=str(at)) for at, values in enumerate(maps)]
    figure = images(scale="joint", smooth=smooth)(cells, "")
    low = maps.min()
    high = np.percentile(maps, 99.5)
    for axes, heat_map in zip(shown(figure), maps):
        shares = np.clip((large(heat_map, (240, 260), smooth=smooth) - low) / (high - low), 0, 1)
        grey = np.tensordot(GREY, image, 1)[..., None]
        expected = (
            grey.repeat(3, -1)
            if heat_map.size == 1
            else 0.35 * grey + 0.65 * colormaps["viridis"](shares)[..., :3]
        )
        np.testing.assert_allclose(array(axes), expected, atol=0.01)


def test_maps_of_their_own_scale_begin_at_zero():
    one = np.array([[0.25, 0.5]])
    other = np.array([[0.5, 1.0]])
    cells = [Picture(FLAT, values, column=str(at)) for at, values in enumerate((one, other))]
    own_scale, same = map(array, shown(images(scale="own", smooth=False)(cells, "")))
    np.testing.assert_allclose(own_scale, same)
    joint, different = map(array, shown(images(scale="joint", smooth=False)(cells, "")))
    assert np.abs(joint - different).max() > 0.1
    middle = colormaps["viridis"](0.5)[:3]
    np.testing.assert_allclose(own_scale[0, 0], 0.35 * 0.5 + 0.65 * np.array(middle), atol=0.01)


@pytest.mark.parametrize(("signed", "factor", "offset"), [(True, 1000, 0), (False, 1, 100)])
def test_maps_drawn_as_shares_have_no_unit_and_their_largest_values_hide_the_image(
    signed, factor, offset, random
):
    image = random.uniform(size=(3, 224, 224))
    values = halves() if signed else np.abs(halves())
    one = array(shown(images()([Picture(image, values, signed=signed)], ""))[0])
    other = array(shown(images()([Picture(image, factor * values + offset, signed=signed)], ""))[0])
    np.testing.assert_allclose(one, other, atol=1e-9)
    shares = large(values / 3, (224, 224))
    grey = np.tensordot(GREY, image, 1)[..., None]
    weight = 0.85 * np.abs(shares)[..., None]
    colours = colormaps["RdBu_r"](0.5 + shares / 2)[..., :3]
    np.testing.assert_allclose(one, (1 - weight) * grey + weight * colours, atol=0.02)


def test_the_object_is_outlined_and_the_highest_point_marked():
    image = np.full((3, 32, 32), 0.2)
    mask = np.zeros((32, 32), bool)
    values = np.zeros((2, 4, 4))
    mask[:16, :16] = True
    values[0, 1, 1], values[1, 3, 3] = 1, 1
    cells = [Picture(image, column="image", mask=mask)]
    cells += [
        Picture(image, values, column=str(hit), mask=mask, hit=hit)
        for values, hit in zip(values, (True, False))
    ]
    figure = images()([*cells, Picture(image, column="bare")], "Maps")
    first, hit, miss, bare = figure.axes
    assert [len(axes.collections) for axes in figure.axes] == [2, 2, 2, 0]  # white over black
    ends = first.collections[1].get_paths()[0].get_extents()
    # of 224
    np.testing.assert_allclose(
        [ends.x0, ends.y0, ends.x1, ends.y1], [-0.5, -0.5, 111.5, 111.5], atol=0.6
    )
    for axes, place, colour in ((hit, 1.5 / 4, RIGHT), (miss, 3.5 / 4, WRONG)):
        (mark,) = axes.lines
        np.testing.assert_allclose(mark.get_xydata()[0] / 224, place, atol=0.12)
        assert to_rgb(mark.get_color()) == colour
    assert not bare.lines
    alone = pixels(cells[0])
    assert alone.shape == (224, 224, 3)
    assert (alone[0, 50] == 255).all()
    assert (alone[50, 50] == 51).all()


@pytest.mark.parametrize(
    ("value", "flaw", "signed"), [(2.5, "uniform", None), (np.nan, "not finite", True)]
)
def test_a_map_that_says_nothing_is_not_drawn_and_a_reason_crosses_one_out_that_stays(
    value, flaw, signed, random
):
    image = random.uniform(size=(3, 16, 16))
    cells = [
        Picture(image, halves(), column="a", signed=signed),
        Picture(image, np.full((4, 4), value), column="b", signed=signed),
        Picture(image, halves(), column="c", crossed="failed", signed=signed),
    ]
    axes = shown(images()(cells, "Maps"))
    assert [len(crosses(panel)) for panel in axes] == [0, 2, 2]
    assert [[text.get_text() for text in panel.texts] for panel in axes] == [[], [flaw], ["failed"]]
    spread = [np.ptp(array(panel), axis=2).max() for panel in axes]
    assert spread[1] < 1e-9  # grey
    assert min(spread[0], spread[2]) > 0.1
    rounding = Picture(image, 3 + 1e-9 * halves())
    assert (rounding.flaw, Picture(image, np.array([[0.0, 1e-12]])).flaw) == ("uniform", "")


def test_maps_alone_have_the_colours_of_their_numbers():
    values = np.array([[-1.0, 0.0], [np.nan, 0.5]])
    (axes,) = shown(images(scale="signed", label="cosine similarity")([Picture(None, values)], ""))
    drawn = axes.images[0]
    np.testing.assert_allclose(drawn.norm(np.array([-1.0, 0.0, 0.5])), [0, 0.5, 0.75])
    assert drawn.get_cmap().name == "RdBu_r"
    assert np.ptp(drawn.get_cmap().get_bad()[:3]) == 0  # grey
    (axes,) = shown(images()([Picture(None, np.array([[0.0, 4.0]]))], ""))
    assert (axes.images[0].get_cmap().name, float(axes.images[0].norm(1.0))) == ("viridis", 0.25)


def ends(low, high):
    """Return a map of two values, each in half of the cells."""
    return np.repeat([low, high], 200).reshape(20, 20)


PEAK = np.zeros((30, 30))
PEAK[3, 3] = 1


@pytest.mark.parametrize(
    ("scale", "values", "ticks"),
    [
        # on nothing a peak is not clipped away
        (
            "joint",
            PEAK,
            ["0", "0.2", "0.4", "0.6", "0.8", "1.0"],
        ),
        # clipped at 1.99
        (
            "joint",
            np.append(np.linspace(0, 2, 500), 90.0)[None],
            ["0", "0.5", "1.0", "1.5"],
        ),
        ("joint", ends(0.02, 21.04), ["0", "5", "10", "15", "20"]),  # no 5.26, 10.5, 15.8
        ("joint", ends(-2e-9, 3e-9), ["-2e-09", "-1e-09", "0", "1e-09", "2e-09", "3e-09"]),
        ("joint", np.array([[3.0, 3.0]]), ["3\nall\nequal"]),
        # symmetric; the ends, rather than 0.4
        (
            "signed",
            np.array([[0.1, -0.5]]),
            ["-0.5", "0", "0.5"],
        ),
        ("signed", np.append(np.ones(60), 9.0)[None], ["≤ -1.0", "-0.5", "0", "0.5", "≥ 1.0"]),
        ("signed", np.array([[np.nan, 2.0]]), ["-2", "-1", "0", "1", "2"]),
    ],
)
def test_a_bar_says_its_range_at_round_numbers(scale, values, ticks):
    bar = images(scale=scale, label="attention (%)")([Picture(None, values)], "").axes[-1]
    assert ([label.get_text() for label in bar.get_yticklabels()], bar.get_ylabel()) == (
        ticks,
        "attention (%)",
    )


def test_changes_are_amplified_by_a_round_factor_within_the_colours():
    factors = [
        amplification(np.array([[0.0, -largest]])) for largest in (0.5, 0.25, 8 / 255, 1 / 255, 0.0)
    ]
    assert factors == [1, 2, 10, 100, 1]


def colour_bars(figure):
    return [axes for axes in figure.axes if not axes.images and axes.get_ylabel()]


def test_maps_without_negative_values_have_a_bar_from_zero():
    for signed, low in ((False, 0), (True, -1)):
        pictures = [
            Picture(FLAT, halves().clip(0), "a", "b", signed=signed),
            Picture(FLAT, halves().clip(0), "c", "b"),
        ]
        (bar,) = colour_bars(images()(pictures, "a title"))
        assert bar.get_ylim() == (low, 1)


def test_maps_up_to_their_own_maximum_have_a_bar_from_none_to_all_of_it():
    pictures = [
        Picture(FLAT, size * halves().clip(0), "a", name) for size, name in ((1, "b"), (9, "c"))
    ]
    (bar,) = colour_bars(images(label="share of the maximum")(pictures, "a title"))
    assert bar.get_ylim() == (0, 1)
    assert not colour_bars(images()(pictures, "a title"))


def test_layers_that_are_dark_on_the_scale_of_all_say_their_largest_value():
    maps = {"0": np.full((4, 4), 0.01), "1": np.eye(4)}
    maps["0"][0, 0] = 0.1
    columns = images(scale="joint")(
        [Picture(FLAT, values, "a", name) for name, values in maps.items()], ""
    )
    titles = [axes.get_title() for axes in columns.axes if axes.images]
    assert ["0.1" in title for title in titles[:2]] == [True, False]
    rows = images(scale="joint")(
        [Picture(FLAT, values, name, "a") for name, values in maps.items()], ""
    )
    assert sum("0.1" in text.get_text() for text in rows.texts) == 1


@pytest.mark.parametrize("largest", [0.8, 1.35, 2.0])
def test_no_picture_is_larger_than_asked(largest):
    figure = images(largest=largest)([Picture(FLAT, row="a"), Picture(FLAT, row="b")], "t")
    width = figure.get_figwidth()
    sides = [axes.get_position().width * width for axes in figure.axes]
    np.testing.assert_allclose(sides, largest)


def test_a_column_without_a_picture_in_the_first_row_has_its_title():
    pictures = [Picture(FLAT, row=row, column=column) for row, column in ("aA", "bA", "bB")]
    titles = [axes.get_title() for axes in images()(pictures, "t").axes]
    assert sorted(filter(None, titles)) == ["A", "B"]


@pytest.mark.parametrize("scale", ["own", "joint", "signed"])
def test_the_map_of_a_head_that_its_layer_lacks_is_empty(scale):
    empty = np.full((2, 2), np.nan)
    pictures = [Picture(None, empty, row="0"), Picture(None, empty, row="1")]
    assert not any(crosses(axes) for axes in images(scale=scale)(pictures, "t").axes)
