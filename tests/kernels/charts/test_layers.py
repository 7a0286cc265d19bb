"""The picture of how a model works: a row for each layer, nothing cut off."""

import re
from dataclasses import replace
from typing import get_args

import pytest

from tests.kit.axes import cut_off, overlapping, shown, texts
from tests.kit.layer_views import drawn, views
from vitlens.names import FigureWidth
from vitlens.uncertainty import Estimate

SHAPES = [(1, 1), (6, 3), (12, 12), (40, 16)]


@pytest.mark.parametrize("width", get_args(FigureWidth))
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_is_cut_off_or_covers_another_panel(shape, width):
    figure = drawn(views(*shape), width)
    assert figure.get_figwidth() <= (7.2 if width == "page" else 3.3) + 1e-6
    assert figure.get_figheight() <= 9.61
    assert cut_off(figure) == []
    assert not overlapping(figure)


def test_every_layer_has_a_row_with_a_map_of_every_head():
    figure = drawn(views(6, 3))
    assert {f"L{layer}" for layer in range(6)} <= set(texts(figure))
    assert len(shown(figure)) == 1 + 6 * (3 + 2)  # the image, then maps and exemplars


def test_of_many_heads_the_most_important_are_shown_and_the_picture_says_so():
    rows = views(1, 12)
    figure = drawn(rows)
    assert "of 12 heads" in "\n".join(texts(figure))
    names = set()
    for axes in shown(figure):
        for text in axes.texts:
            names.add(text.get_text())
    assert 1 < len(names) < 12
    most_important = rows[0].heads[: len(names)]
    assert names == {f"H{head.head}" for head in most_important}


def test_of_more_layers_than_fit_the_first_and_the_last_are_among_those_shown():
    words = texts(drawn(views(40, 2)))
    names = [word for word in words if re.fullmatch(r"L\d+", word)]
    assert 12 < len(names) < 40
    assert (names[0], names[-1]) == ("L0", "L39")


def test_what_no_layer_has_gets_no_column():
    rows = []
    for row in views(6, 3):
        bare = tuple(replace(head, map=None, lost=None) for head in row.heads)
        rows.append(replace(row, heads=bare, lens=None, role=None))
    figure = drawn(rows)
    maps = shown(figure)
    curves = [axes for axes in figure.axes if axes.lines and axes not in maps]
    assert curves == figure.axes[-1:]
    assert cut_off(figure) == []


def test_the_axis_of_accuracy_stays_within_what_is_possible():
    rows = [replace(row, lens=Estimate(1.0, 0.9, 1.0, 64)) for row in views(6, 3)]
    (axes,) = [axes for axes in drawn(rows).axes if "n = 64" in axes.get_xlabel()]
    low, high = axes.get_xlim()
    assert 0 <= low < high <= 100
