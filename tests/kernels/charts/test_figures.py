"""All figures: the user's own settings and other threads change nothing; any name is written as it is."""

import threading
from dataclasses import dataclass

import matplotlib
import numpy as np
import pytest

from tests.kit.axes import cut_off, pixels
from tests.kit.pages import said
from vitlens.charts import bars, lines
from vitlens.record import col


@dataclass(frozen=True)
class Row:
    name: str = col("name")
    x: float = col("x")
    y: float = col("y")


ROWS = [Row("a", 0.0, 0.0), Row("a", 1.0, 1.0)]


def drawn(title: str = "x"):
    return lines("x", "y")(ROWS, title)


def test_neither_user_settings_nor_threads_nor_errors_change_a_figure_or_stay():
    plain, figures = pixels(drawn()), []
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "xtick.labelsize": 40, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        with pytest.raises(AttributeError):
            lines("x", "no column")(ROWS, "x")
        threads = [threading.Thread(target=lambda: figures.append(drawn())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert dict(matplotlib.rcParams) == before
    for other in figures:
        np.testing.assert_array_equal(pixels(other), plain)


def test_long_titles_are_broken_and_make_room():
    long = drawn("many words " * 12)
    assert not cut_off(long)
    assert long.get_figheight() > drawn().get_figheight()


def test_names_are_written_as_they_are_and_numbers_as_formulas(tmp_path):
    names = ["$x^2$", "$\\nocommand$", "\x1b[31m", "\U000ffff0", said(name="a*b`c")]
    shown = ["$x^2$", "$\\nocommand$", "\\x1b[31m", "\\U000ffff0", "a*b`c"]
    rows = [Row(name, at + 1.0, 1000.0**at) for at, name in enumerate(names)]
    listed, named = (draw(rows, " ".join(names)) for draw in (lines("x", "y", of="name", log=True), bars("name", "x")))
    for figure in (listed, named):
        figure.savefig(tmp_path / "a.png")  # an unknown command, or a lacking glyph, would be an error
        assert figure.get_suptitle() == " ".join(shown)
    assert [text.get_text() for text in listed.legends[0].get_texts()] == shown
    assert [label.get_text().replace("\\$", "$") for label in named.axes[0].get_yticklabels()] == shown
    labels = listed.axes[0].get_yticklabels()
    assert any("10^" in label.get_text() and label.get_parse_math() for label in labels)
