"""All figures: the user's own settings and other threads change nothing; any name is written as it is."""

import threading
from dataclasses import dataclass

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.kit.axes import cut_off, pixels
from vitlens.charts import lines, scatter
from vitlens.record import col
from vitlens.report.claims import found


@dataclass(frozen=True)
class Row:
    name: str = col("name")
    x: float = col("x")
    y: float = col("y")


ROWS = [Row("a", 0.0, 0.0), Row("a", 1.0, 1.0)]


def drawn(title: str = "x") -> Figure:
    return lines("x", "y")(ROWS, title)


def test_user_settings_neither_change_nor_matter():
    plain = pixels(drawn())
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "xtick.labelsize": 40, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        other = drawn()
        assert dict(matplotlib.rcParams) == before
    np.testing.assert_array_equal(pixels(other), plain)


def test_threads_draw_the_same_and_no_style_is_left_behind_not_even_by_an_error():
    before, figures = dict(matplotlib.rcParams), list[Figure]()
    with pytest.raises(AttributeError):
        lines("x", "no column")(ROWS, "x")
    threads = [threading.Thread(target=lambda: figures.append(drawn())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(matplotlib.rcParams) == before
    first, *others = map(pixels, figures)
    assert [np.array_equal(other, first) for other in others] == [True] * 3


def test_long_titles_are_broken_and_make_room():
    long = drawn("many words " * 12)
    assert not cut_off(long)
    assert long.get_figheight() > drawn().get_figheight()


def test_names_are_written_as_they_are_and_numbers_as_formulas(tmp_path):
    own = found("q", "s", "{{ n }}", given={"n": "a*b`c"}).says
    names = ["$x^2$", "$\\nocommand$", "\x1b[31m", "\U000ffff0", own]
    figure = scatter("x", "y", of="name")([Row(name, at, at) for at, name in enumerate(names)], " ".join(names))
    (axes,) = figure.axes
    axes.set_xscale("log")
    figure.savefig(tmp_path / "a.png")  # an unknown command, or a lacking glyph, would be an error
    shown = ["$x^2$", "$\\nocommand$", "\\x1b[31m", "\\U000ffff0", "a*b`c"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == shown
    assert figure.get_suptitle() == " ".join(shown)
    assert not figure._suptitle.get_parse_math()
