"""All figures: settings and threads change nothing, names stay as they are; feature figures."""

import threading
from dataclasses import dataclass, replace
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from tests.kit.axes import cut_off, overlapping, pixels, shown
from tests.kit.pages import said
from vitlens.charts import bars, lines, matrix
from vitlens.charts.features import (
    Cloud,
    Matches,
    PatchMap,
    correspondences,
    feature_space,
    patch_map,
    place_colours,
)
from vitlens.record import col


@dataclass(frozen=True)
class Row:
    name: str = col("name")
    x: float = col("x")
    y: float = col("y")


@dataclass(frozen=True)
class Point:
    x: float = col("x")
    y: float = col("y")
    reference: float = col("reference")


@dataclass(frozen=True)
class CellRow:
    panel: str
    line: str = col("method")
    column: str = col("replacement")
    number: float = col("gap")


ROWS = [Row("a", 0.0, 0.0), Row("a", 1.0, 1.0)]


def chart(title: str = "x"):
    return lines("x", "y")(ROWS, title)


@dataclass(frozen=True)
class Timed:
    size: float = col("image size (px)", unit="px")
    time: float = col("one forward pass", unit="s")


def test_a_unit_is_left_out_only_if_the_title_has_it_as_a_word():
    figure = lines("size", "time")([Timed(1.0, 2.0), Timed(2.0, 3.0)], "x")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "image size (px)"
    assert "one forward pass (s)" in [text.get_text() for text in figure.findobj(Text)]


def test_neither_user_settings_nor_threads_nor_errors_change_a_figure_or_stay():
    plain = pixels(chart())
    figures = []
    with matplotlib.rc_context(
        {"font.size": 30, "axes.facecolor": "red", "xtick.labelsize": 40, "lines.linewidth": 9}
    ):
        before = dict(matplotlib.rcParams)
        with pytest.raises(AttributeError):
            lines("x", "no column")(ROWS, "x")
        threads = [threading.Thread(target=lambda: figures.append(chart())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dict(matplotlib.rcParams) == before
    for other in figures:
        np.testing.assert_array_equal(pixels(other), plain)


def test_names_are_written_as_they_are_and_numbers_as_formulas(tmp_path):
    names = ["$x^2$", "$\\nocommand$", "\x1b[31m", "\U000ffff0", said(name="a*b`c")]
    odd_names = ["$x^2$", "$\\nocommand$", "\\x1b[31m", "\\U000ffff0", "a*b`c"]
    rows = [Row(name, at + 1.0, 1000.0**at) for at, name in enumerate(names)]
    listed = lines("x", "y", of="name", log=True)(rows, " ".join(names))
    scatter = bars("name", "x")(rows, " ".join(names))
    for figure in (listed, scatter):
        # an unknown command, or a lacking glyph, would be an error
        figure.savefig(tmp_path / "a.png")
        assert figure.get_suptitle() == " ".join(odd_names)
    assert [text.get_text() for text in listed.legends[0].get_texts()] == odd_names
    assert [
        label.get_text().replace("\\$", "$") for label in scatter.axes[0].get_yticklabels()
    ] == odd_names
    labels = listed.axes[0].get_yticklabels()
    assert any("10^" in label.get_text() and label.get_parse_math() for label in labels)


def dashed(figure) -> list[tuple[list[float], list[float]]]:
    """Return x and y of the dashed lines of the first panel."""
    lines_of_panel = figure.axes[0].lines
    return [
        (list(line.get_xdata()), list(line.get_ydata()))
        for line in lines_of_panel
        if line.get_linestyle() == "--"
    ]


def test_a_reference_is_a_level_or_follows_x():
    rows = [Point(0.0, 1.0, 5.0), Point(0.0, 2.0, 5.0), Point(1.0, 3.0, 5.0)]
    level = dashed(lines("x", "y", reference="reference")(rows, "x"))
    assert [ys for _, ys in level] == [[5.0, 5.0]]
    rows[-1] = replace(rows[-1], reference=7.0)
    changing = dashed(lines("x", "y", reference="reference")(rows, "x"))
    assert changing == [([0.0, 1.0], [5.0, 7.0])]


@pytest.mark.parametrize("ends", [(60.0, 90.0), (20.0, 700.0)])
def test_a_short_logarithmic_axis_has_plain_numbers(ends):
    rows = [Row("a", float(at), end) for at, end in enumerate(ends)]
    figure = lines("x", "y", log=True)(rows, "x")
    pixels(figure)
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    texts = [
        text.get_text()
        for place, text in zip(axes.get_yticks(), axes.get_yticklabels())
        if low <= place <= high
    ]
    assert len(texts) > 1
    assert all(text.isdecimal() for text in texts)


def test_an_axis_says_of_what_its_numbers_are():
    heads = [Row("0", 1.0, 0.0), Row("1", 2.0, 0.0)]
    assert bars("name", "x")(heads, "x").axes[0].get_ylabel() == "name"
    assert bars("name", "x")(ROWS, "x").axes[0].get_ylabel() == ""
    several = lines("x", "x", "y", y_title="norm")(ROWS, "x")
    assert several.axes[0].get_ylabel() == "norm"


def cloud(count: int = 60, classes: int = 3, **changes: object) -> Cloud:
    defaults = {
        "labels": np.arange(count) % classes,
        "wrong": np.arange(count) < 5,
        "by": "by the model",
    }
    points = np.random.default_rng(0).normal(size=(count, 2))
    return Cloud(
        **{
            "title": "t-SNE",
            "points": points,
            "classes": ("cat", "dog", "owl"),
            **defaults,
            **changes,
        }
    )


def listed(figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_classes_are_named_and_errors_marked():
    figure = feature_space(
        [replace(cloud(), classes=("cat", "dog", "a class of a long name")), cloud(title="PCA")],
        "space",
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert [axes.get_title() for axes in figure.axes] == ["t-SNE", "PCA"]
    assert listed(figure) == ["cat", "dog", "a class of a long…", "misclassified by the model"]
    points, crosses = figure.axes[0].collections
    assert len(points.get_offsets()) == 60
    np.testing.assert_allclose(crosses.get_offsets(), cloud().points[:5])


def test_classes_with_the_same_first_letters_have_an_entry_each():
    names = ("a class of a long name", "a class of a long note", "dog")
    figure = feature_space([replace(cloud(wrong=None), classes=names)], "space")
    assert listed(figure) == ["a class of a long…", "a class of a long…", "dog"]


def test_a_class_has_one_colour_in_all_panels_and_the_list():
    some = cloud(2, points=np.ones((2, 2)), labels=np.array([2, 2]), wrong=None)
    figure = feature_space([cloud(6, wrong=None), some], "space")
    all_colours, part = (axes.collections[0].get_facecolors() for axes in figure.axes)
    np.testing.assert_array_equal(part, np.stack([all_colours[2], all_colours[5]]))
    assert listed(figure) == ["cat", "dog", "owl"]
    assert to_rgb(figure.legends[0].legend_handles[2].get_color()) == tuple(all_colours[2][:3])
    # names that would lie on each other are left to the list
    apart = np.array([[0.0, 0.0], [0.01, 0.0], [1.0, 1.0]])
    figure = feature_space([cloud(3, points=apart, wrong=None)], "space")
    assert [text.get_text() for text in figure.axes[0].texts] == ["cat", "owl"]


def test_many_classes_are_right_or_wrong_and_without_labels_points_are_grey():
    (axes,) = feature_space([replace(cloud(100, 50), classes=[*map(str, range(50))])], "space").axes
    (points,) = axes.collections
    assert len({tuple(colour) for colour in points.get_facecolors()}) == 2
    assert axes.get_xlabel() == "orange: misclassified by the model"
    (axes,) = feature_space([cloud(labels=None, wrong=None)], "space").axes
    assert len({tuple(colour) for colour in axes.collections[0].get_facecolors()}) == 1


def test_thumbnails_stand_in_place_of_points():
    pictures = np.zeros((8, 3, 16, 8))
    pictures[:, 1] = np.linspace(0, 1, 8)[:, None, None]
    full = cloud(16, 2, points=np.stack([np.arange(16) / 2, np.zeros(16)], 1))
    chosen = np.arange(0, 16, 2)
    (axes,) = feature_space([full.with_thumbnails(chosen, pictures)], "space").axes
    assert [box.xy for box in axes.artists] == [tuple(point) for point in full.points[chosen]]
    for box, picture in zip(axes.artists, pictures):
        np.testing.assert_array_equal(box.offsetbox.get_data(), picture.transpose(1, 2, 0))
        # of the longer side, 44 px at 200 dots an inch
        assert box.offsetbox.get_zoom() == pytest.approx(44 / 16 / 2)
    assert axes.get_title() == "8 of them as thumbnails"


def test_arcs_from_patch_to_patch():
    picture = np.random.default_rng(0).uniform(size=(3, 32, 48))
    similarity = np.array([0.9, 0.5])
    sources = np.array([(0, 0), (1, 2)])
    targets = np.array([(1, 1), (0, 0)])
    figure = correspondences(
        2 * [Matches("cats", picture, picture, sources, targets, similarity, (2, 3))], "Matches"
    )
    left, right, *arrows = figure.axes
    assert len(arrows) == 2
    for axes, places in ((left, sources), (right, targets)):
        np.testing.assert_allclose(
            [line.get_xydata()[0] for line in axes.lines], places[:, ::-1] + 0.5
        )
    assert not cut_off(figure)
    assert not overlapping(figure)
    box = left.get_window_extent()
    assert box.height / box.width == pytest.approx(32 / 48, rel=0.02)  # as the pictures
    assert "0.50 (dark) to 0.90 (light)" in " ".join(figure.get_suptitle().split())


def test_patches_are_coloured_by_place_and_drawn_as_pictures():
    places = np.array([[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])
    points = np.array([[0, 0], [1, 1], [0.95, 0.95], [0, 1], [0.02, 0.98], [0.5, 0.5]])
    blue = np.zeros((2, 3, 8, 8))
    blue[:, 2] = 1
    patches = PatchMap(
        model="m",
        points=points,
        content=points[::-1],
        places=places,
        grid=(2, 3),
        captions=("one", "two"),
        cut=np.array([1, 4]),
        pixels=blue,
    )
    figure = patch_map(
        [patches], "The patch embeddings of a-vision-transformer, before any attention"
    )
    left, right = figure.axes[:2]
    colours = left.collections[0].get_facecolors()[:, :3]
    np.testing.assert_allclose(colours, place_colours(places, (2, 3)))
    assert len({tuple(colour) for colour in colours}) == 6
    np.testing.assert_allclose(right.collections[0].get_offsets(), patches.content)
    assert [box.xy for box in right.artists] == [tuple(patches.content[at]) for at in (1, 4)]
    (key,) = left.child_axes
    np.testing.assert_allclose(
        key.images[0].get_array()[1, 2], place_colours(np.array([[1, 2]]), (2, 3))[0]
    )
    assert right.get_title() == "without the mean of each place; 2 as pictures"
    assert not cut_off(figure)
    assert not overlapping(figure)


@pytest.mark.parametrize("panels", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "names", [("blur", "imputed"), ("imputation", "counterfactual", "of two words", "x")]
)
def test_names_around_a_matrix_do_not_touch_however_many_panels_there_are(panels, names):
    rows = []
    for panel in range(panels):
        for line in ("grad-cam:gradcam-elementwise", "random", "centre"):
            for column in names:
                rows.append(CellRow(f"model {panel}", line, column, 0.25))
    figure = matrix("line", "column", "number", panel="panel")(rows, "Gap by replacement")
    assert not overlapping(figure)
    assert not cut_off(figure)
    for axes in shown(figure):
        labels = axes.get_xticklabels()
        boxes = [label.get_window_extent() for label in labels]
        if not any(label.get_rotation() for label in labels):  # slanted ones lie side by side
            assert all(before.x1 < after.x0 for before, after in pairwise(boxes))
        inches = axes.get_window_extent().width / figure.dpi
        assert inches / len(names) >= 0.3
