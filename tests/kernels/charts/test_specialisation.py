from itertools import pairwise

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.colors import to_hex

from tests.kit.axes import colour_at, cut_off, drawn, overlapping, texts
from vitlens.analysis.heads.labels import LABELS
from vitlens.charts.specialisation import HIGH, LOW, specialisation_matrix
from vitlens.charts.style import MAGNITUDE

NAN = float("nan")


def matrix(heads, grid=(3, 4), labels=None, **options):
    """Uniform attention everywhere, with one label for all or those given."""
    shape = (2 * grid[0] - 1, 2 * grid[1] - 1)
    given = {
        "ratios": [np.ones((count, *shape)) for count in heads],
        "labels": [["uniform"] * count for count in heads] if labels is None else labels,
        "scores": [[0.93] * count for count in heads],
        "layers": range(len(heads)),
        "title": "Every head",
    }
    return specialisation_matrix(**{**given, **options})


def shade(ratio):
    return np.array(colormaps[MAGNITUDE]((np.log2(ratio) - LOW) / (HIGH - LOW))[:3])


def grey(colour):
    return np.ptp(colour) < 0.02 and 0.6 < colour.max() < 0.95  # neither a map's colour nor bare paper


def frame(axes):
    return to_hex(axes.spines["left"].get_edgecolor()).upper() if axes.spines["left"].get_visible() else None


@pytest.mark.parametrize(
    ("grid", "shape"),
    [
        ((3, 3), (1, 1)),
        ((2, 4), (4, 4)),  # the longest name on a wide panel
        ((3, 3), (32, 2)),
        *[pytest.param(grid, (24, 16), marks=pytest.mark.slow) for grid in [(3, 3), (2, 4)]],  # 384 panels
    ],
)
def test_nothing_is_cut_off(shape, grid):
    longest = "background"
    figure = matrix([shape[1]] * shape[0], grid, labels=[[longest] * shape[1]] * shape[0], title="A long title " * 4)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61
    assert len(figure.axes) == shape[0] * shape[1] + 1
    assert {"head 0", "layer 0"} <= set(texts(figure))
    assert str(max(shape) - 1) in texts(figure) or max(shape) == 1


@pytest.mark.slow
def test_twelve_by_twelve_bears_codes_and_scores():
    names = list(LABELS)
    labels = [[names[(layer + head) % len(names)] for head in range(12)] for layer in range(12)]
    figure = matrix([12] * 12, (7, 7), labels)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61
    written = texts(figure)
    for name, label in LABELS.items():
        assert written.count(f"{label.code} .93") == sum(row.count(name) for row in labels)
    renderer = drawn(figure).get_renderer()
    first = [axes.texts[0].get_window_extent(renderer) for axes in figure.axes[:12]]
    assert all(one.x1 < other.x0 for one, other in pairwise(first))
    below = figure.axes[12].get_window_extent()
    assert all(one.y0 > below.y1 for one in first)


def test_narrow_panels_bear_no_codes_but_their_colours():
    middling = texts(matrix([15] * 2, (10, 7)))
    assert (middling.count("unif"), middling.count("unif .93")) == (30, 0)
    figure = matrix([32] * 2, (3, 3))
    assert not any("unif " in text or text == "unif" for text in texts(figure))
    assert "uniform (unif): 64" in texts(figure)
    assert figure.axes[0].get_title(loc="right") == "head 0"  # leaves room for the next
    assert {frame(axes) for axes in figure.axes[:-1]} == {LABELS["uniform"].colour}


def test_layer_and_head_stand_where_the_labels_say():
    labels = [["self", "next"], ["previous", "CLS"], ["mixed", "local"]]
    figure = matrix([2, 2, 2], labels=labels)
    assert [frame(axes) for axes in figure.axes[:6]] == [LABELS[label].colour for row in labels for label in row]
    assert figure.axes[4].get_ylabel() == "2"
    assert [axes.get_title() for axes in figure.axes[:2]] == ["head 0", "1"]
    counted = {"self: 1", "next: 1", "previous (prev): 1", "CLS: 1", "mixed: 1", "local: 1"}
    assert counted <= set(texts(figure))
    assert not any("sink" in text for text in texts(figure))  # the legend lists the labels that occur


def test_layers_run_across_where_they_are_many():
    labels = [["self", "next"], *[["mixed", "mixed"]] * 4]
    figure = matrix([2] * 5, labels=labels)
    assert [frame(figure.axes[index]) for index in (0, 5)] == [LABELS["self"].colour, LABELS["next"].colour]
    assert figure.axes[4].get_title() == "4"
    assert figure.axes[5].get_ylabel() == "1"


def test_offsets_are_coloured_by_the_logarithm_of_their_ratio():
    ratios = np.ones((1, 3, 5))
    ratios[0, 0, 0] = 0.5
    ratios[0, 1, 2] = 1000.0  # the query itself, beyond the scale
    ratios[0, 2, 4] = 0.0  # below the scale
    ratios[0, 0, 4] = NAN
    figure = matrix([1], (2, 3), ratios=[ratios])
    axes = figure.axes[0]
    for x, y, colour in ((0.14, 0.2, shade(0.5)), (0.5, 0.5, shade(32)), (0.86, 0.8, shade(1 / 8))):
        np.testing.assert_allclose(colour_at(figure, axes, x, y), colour, atol=0.02)
    np.testing.assert_allclose(colour_at(figure, axes, 0.3, 0.2), shade(1), atol=0.02)
    assert grey(colour_at(figure, axes, 0.86, 0.2))
    assert {"≤ 1/8", "1/2", "1", "≥ 32"} <= set(texts(figure))
    assert any("hatched: never occurs" in text for text in texts(figure))


def test_ticks_stand_at_the_query():
    axes = matrix([1], (2, 3)).axes[0]
    assert (list(axes.get_xticks()), list(axes.get_yticks())) == ([2], [1])


def test_layers_may_differ_in_heads_and_grid():
    figure = matrix(
        [1, 3],
        labels=[["self"], ["next", "CLS", "sink"]],
        ratios=[np.ones((1, 9, 9)), np.ones((3, 3, 3))],
        scores=[[0.5], [NAN, 0.25, 1.0]],
    )
    assert [frame(axes) for axes in figure.axes[:6]] == [
        None if label is None else LABELS[label].colour for label in ("self", None, None, "next", "CLS", "sink")
    ]
    assert {"head 0", "1", "2", "self .50", "next", "CLS .25", "sink 1.00"} <= set(texts(figure))
    assert not cut_off(figure)


def test_a_layer_without_patches_as_queries_keeps_its_labels():
    figure = matrix([2, 2], ratios=[np.ones((2, 3, 3)), None])
    assert not figure.axes[2].images
    assert frame(figure.axes[2]) == LABELS["uniform"].colour
    assert grey(colour_at(figure, figure.axes[2], 0.4, 0.6))
    assert not cut_off(matrix([2], ratios=[None]))


def test_colours_and_codes_tell_the_labels_apart():
    assert (
        len({one.code for one in LABELS.values()}) == len({one.colour for one in LABELS.values()}) == len(LABELS) == 23
    )
