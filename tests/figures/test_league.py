"""The league's figures, read as pixels and texts."""

from itertools import pairwise

import numpy as np
import pytest
from matplotlib.text import Text

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.counterfactual import counterfactual_panels
from vitlens.figures.league import Column, fidelity_curves, league_figure
from vitlens.figures.style import BLUE, GREY, VERMILLION

NAMES = ("relevance", "integrated-gradients", "gradient-weighted-rollout", "random", "centre")


def column(title: str = "insertion − deletion", *, gaps: bool = False) -> Column:
    value = np.linspace(0.4, 0.0, len(NAMES))
    if gaps:
        value[3:] = np.nan
    return Column(title, value, value - 0.05, value + 0.05, chance=0.0)


@pytest.mark.parametrize("count", [1, 8])
def test_the_league_fits(count):
    columns = [column(f"check number {index}", gaps=index % 2 == 1) for index in range(count)]
    figure = league_figure(
        methods=NAMES, columns=columns, baselines=("random", "centre"), flagged=("relevance",), title="All checks"
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"relevance", "hardly changes with randomised weights"} <= set(texts(figure))
    assert figure.get_figwidth() <= 7.21


def test_twenty_methods_are_legible_at_half_a_page():
    names = [f"integrated-gradients-{index}" for index in range(20)]
    value = np.linspace(0.9, 0.0, 20)
    checks = [Column("Spearman, upper half random", value, value - 0.02, value + 0.02, "less", 0.5) for _ in range(8)]
    figure = league_figure(methods=names, columns=checks, title="vit: explanation methods in every check")
    scale = 17 / 2.54 / figure.get_figwidth()
    assert figure.get_figheight() * scale < 29.7 / 2.54 / 2
    assert min(text.get_fontsize() for text in figure.findobj(Text)) * scale >= 6
    assert not cut_off(figure)
    for axes in figure.axes:
        labels = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(one.x1 < other.x0 for one, other in pairwise(labels))


def test_colours_tell_flagged_methods_and_baselines():
    figure = league_figure(methods=NAMES, columns=[column()], baselines=("random", "centre"), flagged=("relevance",),
                           title="All checks")  # fmt: skip
    dots = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert [dot.get_color() for dot in dots] == [VERMILLION, BLUE, BLUE, GREY, GREY]
    assert [float(dot.get_xdata()[0]) for dot in dots] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert [int(dot.get_ydata()[0]) for dot in dots] == [4, 3, 2, 1, 0]


def test_a_method_without_a_number_has_no_dot():
    figure = league_figure(methods=NAMES, columns=[column(gaps=True)], title="All checks")
    assert len([line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]) == 3


def test_curves_fit_and_are_the_numbers():
    shares = np.linspace(0, 1, 6)
    curves = {name: (1 - shares) ** (index + 1) for index, name in enumerate(NAMES)}
    figure = fidelity_curves(
        shares=shares,
        deletion=curves,
        insertion={name: curve[::-1] for name, curve in curves.items()},
        baselines=("random", "centre"),
        substrate="blur",
        title="What is left",
    )
    assert not cut_off(figure)
    assert not overlapping(figure)
    first = figure.axes[0].lines[0]
    assert first.get_ydata().tolist() == pytest.approx(100 * (1 - shares))
    assert first.get_xdata().tolist() == pytest.approx(100 * shares)
    assert any("blur" in text for text in texts(figure))


def test_a_curve_that_rises_above_where_it_began_is_not_cut():
    """What an image says may be surer without some of its patches."""
    figure = fidelity_curves(
        shares=[0, 0.5, 1],
        deletion={"relevance": [0.2, 0.1, 0.0]},
        insertion={"relevance": [0.0, 0.6, 0.2]},
        substrate="blur",
        title="What is left",
    )
    for axes in figure.axes:
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > 60


def test_panels_of_counterfactuals():
    generator = np.random.default_rng(0)
    removed = np.zeros((2, 3, 4, 4), bool)
    removed[:, 0, :2] = True
    removed[0, 1, 0, 0] = True
    images = generator.random((2, 3, 16, 16))
    figure = counterfactual_panels(
        images=images,
        removed=removed,
        titles=["relevance", "random", "search"],
        names=["three", "a class with a long name"],
        turned=[["eight"] * 3, ["nine"] * 3],
        title="Patches to go",
    )
    assert not cut_off(figure)
    seen = texts(figure)
    assert "8 of 16\n→ eight" in seen
    assert "none found" in seen
    veiled = np.asarray(figure.axes[1].images[0].get_array())
    whole = np.asarray(figure.axes[0].images[0].get_array())
    assert np.abs(veiled[0, 0] - (0.2 * whole[0, 0] + 0.4)).max() < 1e-6
    assert np.array_equal(veiled[-1, -1], whole[-1, -1])


def test_wrong_calls():
    with pytest.raises(InputError, match="for 5 methods"):
        league_figure(methods=NAMES, columns=[Column("x", [1.0], [1.0], [1.0])], title="x")
    with pytest.raises(InputError, match="at least one"):
        league_figure(methods=(), columns=[], title="x")
    with pytest.raises(InputError, match="same methods twice"):
        fidelity_curves(shares=[0, 1], deletion={"a": [1, 0]}, insertion={}, substrate="blur", title="x")
    with pytest.raises(InputError, match="3 words"):
        counterfactual_panels(
            images=np.zeros((1, 3, 8, 8)), removed=np.zeros((1, 3, 2, 2)), titles=["a", "b", "c"], names=["d"],
            turned=[["e"]], title="x",
        )  # fmt: skip
