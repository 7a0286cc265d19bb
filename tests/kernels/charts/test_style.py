import threading

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.kit.axes import cut_off, pixels
from vitlens.charts.style import WIDE, heading, round_ticks, sheet, styled, tick_words
from vitlens.display import protected


@styled
def drawn(*, title: str = "x") -> Figure:
    figure = sheet(3.0, 2.0)
    figure.add_subplot().plot([0, 1], [0, 1])
    heading(figure, title)
    return figure


@pytest.mark.parametrize(
    ("ends", "ticks", "words"),
    [
        ((0.0, 1.0), [0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((-0.5, 0.5), [-0.5, 0, 0.5], ["-0.5", "0", "0.5"]),  # the ends, rather than 0.4
        ((0.0012, 21.04), [5, 10, 15, 20], ["5", "10", "15", "20"]),
        ((0.35, 2.0), [0.5, 1.0, 1.5, 2.0], ["0.5", "1.0", "1.5", "2.0"]),
        ((0.0, 1370.0), [0, 500, 1000], ["0", "500", "1000"]),
        ((-2e-9, 3e-9), [-2e-9, -1e-9, 0, 1e-9, 2e-9, 3e-9], ["-2e-09", "-1e-09", "0", "1e-09", "2e-09", "3e-09"]),
        ((0.25, 0.25), [0.25], ["0.25"]),
    ],
)
def test_ticks_are_round_numbers(ends, ticks, words):
    assert round_ticks(*ends) == pytest.approx(ticks, abs=1e-15)
    assert tick_words(round_ticks(*ends)) == words


def test_user_settings_neither_change_nor_matter():
    plain = pixels(drawn())
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "xtick.labelsize": 40, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        other = drawn()
        assert dict(matplotlib.rcParams) == before
    np.testing.assert_array_equal(pixels(other), plain)


def test_threads_draw_the_same_and_no_style_is_left_behind_not_even_by_an_error():
    @styled
    def broken() -> Figure:
        raise KeyError

    before, figures = dict(matplotlib.rcParams), list[Figure]()
    with pytest.raises(KeyError):
        broken()
    threads = [threading.Thread(target=lambda: figures.append(drawn())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(matplotlib.rcParams) == before
    first, *others = map(pixels, figures)
    assert [np.array_equal(other, first) for other in others] == [True] * 3


def test_long_titles_are_broken_and_make_room():
    long = drawn(title="many words " * 12)
    assert not cut_off(long)
    assert long.get_figheight() > drawn().get_figheight()


@styled
def _with_names(names: list[str]) -> Figure:
    figure = sheet(WIDE, 3.0)
    bars, lines = figure.subplots(1, 2)
    bars.bar(range(len(names)), range(len(names)))
    bars.set_xticks(range(len(names)), names)
    bars.set_title(" ".join(names))
    for name in names:
        lines.plot([1, 1000], [1, 2], label=f"line {name}")
    lines.set_xscale("log")
    lines.legend()
    return figure


def test_names_are_written_as_they_are_and_numbers_as_formulas(tmp_path):
    names = ["$x^2$", "$\\nocommand$", "\x1b[31m\u202e", "\U000ffff0", protected("a*b`c")]
    figure = _with_names(names)
    figure.savefig(tmp_path / "a.png")  # an unknown command, or a lacking glyph, would be an error
    bars, lines = figure.axes
    shown = ["$x^2$", "$\\nocommand$", "\\x1b[31m\\u202e", "\\U000ffff0", "a*b`c"]
    assert bars.get_title() == " ".join(shown)
    assert not bars.title.get_parse_math()
    assert [label.get_text().replace("\\$", "$") for label in bars.get_xticklabels()] == shown
    assert [text.get_text() for text in lines.get_legend().get_texts()] == [f"line {name}" for name in shown]
    assert any("10^" in label.get_text() and label.get_parse_math() for label in lines.get_xticklabels())
