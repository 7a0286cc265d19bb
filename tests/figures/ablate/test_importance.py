import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex

from tests.figures.reading import colour_at, cut_off, drawn, overlapping, panel, texts
from vitlens.errors import InputError
from vitlens.figures.ablate.importance import importance_map, importance_ranking, replacement_agreement
from vitlens.figures.style import BLUE, GREY, SIGNED, VERMILLION

NAN = float("nan")


def all_text(figure):
    return " ".join(texts(figure)).replace("\n", " ")


def shade(share):
    """The colour of a value that is that share of the scale's end."""
    return np.array(colormaps[SIGNED]((1 + share) / 2)[:3])


def mapped(heads, **options):
    heads = np.asarray(heads, dtype=float)
    given = {"marked": np.zeros(heads.shape, bool), "unit": "rise of loss (nats)", "title": "Importance of heads"}
    return importance_map(heads=heads, **{**given, **options})


@pytest.mark.parametrize(
    ("shape", "beside"),
    [
        ((1, 1), 0.0),
        ((1, 1), 100.0),
        pytest.param((24, 16), 1.0, marks=pytest.mark.slow),
        ((24, 16), 100.0),
        ((32, 2), 100.0),
    ],
)
def test_maps_fit_on_a_page(shape, beside, random):
    heads = random.normal(size=shape)
    heads[0, 0] = 30.0
    columns = {"mlps": beside * np.ones(shape[0]), "blocks": 10 * beside * np.ones(shape[0])} if beside else {}
    figure = mapped(heads, marked=heads > 1, title="Importance of every head of vit-tiny, mean ablation", **columns)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61
    assert {"head", "layer"} <= set(texts(figure))
    assert figure.axes[0].get_xticklabels()[0].get_text() == "0"


def test_map_is_centred_marked_and_hatched():
    heads = [[-2.0, 0.0, 1.0], [NAN, 0.0, 4.0]]
    figure = mapped(heads, marked=torch.tensor([[1, 0, 0], [0, 0, 1]], dtype=torch.bool))
    axes = figure.axes[0]
    for x, y, share in ((0.05, 0.1, -0.5), (0.5, 0.25, 0.0), (0.83, 0.25, 0.25), (0.95, 0.9, 1.0)):
        np.testing.assert_allclose(colour_at(figure, axes, x, y), shade(share), atol=0.02)
    hatched = panel(figure, axes)[-12:, :20]
    assert np.ptp(hatched, axis=-1).max() < 0.02
    assert len(np.unique(hatched[..., 0])) > 3
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[0, 0], [2, 1]])
    assert "dots: 2 of 5 heads have an effect" in all_text(figure)
    assert {"no value", "-4", "0", "4"} <= set(texts(figure))
    assert "rise of loss (nats)" in all_text(figure)


def test_columns_share_the_colours_unless_far_larger_or_smaller():
    heads = np.full((2, 2), 1.0)
    alike = mapped(heads, mlps=[2.0, -1.0])
    assert len(alike.axes) == 3
    np.testing.assert_allclose(colour_at(alike, alike.axes[0], 0.5, 0.25), shade(0.5), atol=0.02)
    np.testing.assert_allclose(colour_at(alike, alike.axes[1], 0.5, 0.25), shade(1.0), atol=0.02)
    np.testing.assert_allclose(colour_at(alike, alike.axes[1], 0.5, 0.75), shade(-0.5), atol=0.02)
    assert "own colours" not in all_text(alike)
    for size in (20.0, 0.05):
        apart = mapped(heads, mlps=[1.0, 0.5], blocks=[size, size / 2])
        assert len(apart.axes) == 5
        assert "block in its own colours" in all_text(apart)
        np.testing.assert_allclose(colour_at(apart, apart.axes[0], 0.25, 0.25), shade(1.0), atol=0.02)
        np.testing.assert_allclose(colour_at(apart, apart.axes[3], 0.5, 0.75), shade(0.5), atol=0.02)
    assert "MLP and block in their own colours" in all_text(mapped(heads, mlps=[9.0, 9.0], blocks=[9.0, 9.0]))


def test_one_great_value_of_many_does_not_set_a_column_apart():
    column = np.r_[1.5, np.full(11, 0.3)]
    figure = mapped(np.tile([2.0, 0.1], (12, 1)), mlps=column)
    assert len(figure.axes) == 3
    assert "own colours" not in all_text(figure)
    assert "Beyond" not in all_text(figure)


def test_columns_stand_beside_the_layers_and_are_named():
    figure = mapped(np.ones((3, 2)), mlps=[1, 1, 1], blocks=[NAN, 1, 1])
    assert {"MLP", "block"} <= set(texts(figure))
    heads, mlps, blocks, _ = (axes.get_position() for axes in figure.axes)
    assert heads.x1 < mlps.x0 < mlps.x1 < blocks.x0
    assert heads.y0 == pytest.approx(blocks.y0)
    assert "no value" in texts(figure)


def test_bars_do_not_reach_into_the_next_column():
    heads = np.full((4, 4), 0.001)
    heads[1, 2] = -0.1
    figure = mapped(heads, blocks=np.full(4, -123.45))
    _, bar, blocks, _ = figure.axes
    drawn(figure)
    assert bar.get_tightbbox().x1 < blocks.get_tightbbox().x0
    assert "≤ -0.0010" in texts(figure)


def test_values_far_beyond_the_others_are_named():
    heads = np.full((4, 4), 0.1)
    heads[1, 2] = -5.0
    figure = mapped(heads)
    assert "Beyond the colours: L1.H2 (-5)" in all_text(figure)
    assert {"≤ -0.10", "≥ 0.10"} <= set(texts(figure))
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.1, 0.1), shade(1.0), atol=0.02)
    assert "Beyond" not in all_text(mapped(np.linspace(-1, 1, 16).reshape(4, 4)))
    assert "Beyond" not in all_text(mapped(heads[:2, 1:3]))


def test_no_effect_at_all():
    figure = mapped(np.zeros((2, 2)), mlps=[0.0, 0.0])
    np.testing.assert_allclose(colour_at(figure, figure.axes[0], 0.2, 0.2), shade(0.0), atol=0.02)
    assert "0\nall\nequal" in texts(figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": np.ones(3)}, r"heads of shape \(layers, heads\)"),
        ({"heads": np.full((2, 2), NAN)}, "number in heads"),
        ({"heads": np.full((2, 2), np.inf)}, "finite numbers in heads"),
        ({"marked": np.ones((3, 2), bool)}, r"marked of shape \(2, 2\), found \(3, 2\)"),
        ({"heads": [[NAN, 1], [1, 1]], "marked": np.ones((2, 2), bool)}, "value wherever marked is true"),
        ({"mlps": [1.0]}, "2 layers of MLP"),
        ({"blocks": [1.0, np.inf]}, "finite numbers in block"),
    ],
)
def test_maps_refused(options, message):
    with pytest.raises(InputError, match=message):
        mapped(**{"heads": np.eye(2), "marked": np.zeros((2, 2), bool), **options})


def ranked(values, **options):
    values = np.asarray(values, dtype=float)
    given = {
        "names": [f"L{index // 12}.H{index % 12}" for index in range(len(values))],
        "low": values - 0.5,
        "high": values + 1.0,
        "matters": np.zeros(len(values), bool),
        "unit": "rise of loss (nats)",
        "title": "Importance of heads",
    }
    return importance_ranking(values=values, **{**given, **options})


@pytest.mark.parametrize(("count", "skew"), [(1, 0.5), (40, 0.5), (384, 4.0)])
def test_rankings_fit_on_a_page(count, skew, random):
    values = random.lognormal(-3, skew, count) * random.choice([1, 1, -1], count)
    figure = ranked(
        values, matters=np.abs(values) > 0.05, first_order=0.7 * values, names=["a long name of it"] * count
    )
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21
    assert figure.get_figheight() <= 9.61


def test_most_important_first_with_interval_and_colour():
    figure = ranked([1.0, 3.0, -2.0, 0.0], matters=[False, True, True, False], names=["a", "b", "c", "d"])
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "a", "d", "c"]
    assert axes.yaxis_inverted()
    lines, dots, _ = axes.collections
    np.testing.assert_array_equal(dots.get_offsets(), [[3, 0], [1, 1], [0, 2], [-2, 3]])
    np.testing.assert_array_equal(
        [line[:, 0] for line in lines.get_segments()], [[2.5, 4], [0.5, 2], [-0.5, 1], [-2.5, -1]]
    )
    found = [to_hex(colour).upper() for colour in dots.get_facecolors()]
    assert [to_hex(colour).upper() for colour in lines.get_colors()] == found
    assert found == [BLUE, GREY.upper(), GREY.upper(), VERMILLION]
    assert {"3.0  [2.5, 4.0]", "worse without it (Holm)", "better without it (Holm)", "no effect shown"} <= set(
        texts(figure)
    )
    assert "first-order estimate" not in texts(figure)


def test_estimates_are_hollow_and_stand_at_their_units():
    figure = ranked([1.0, 3.0, 2.0], first_order=[0.5, NAN, 4.0])
    marks = figure.axes[0].collections[2]
    np.testing.assert_array_equal(np.ma.filled(marks.get_offsets(), NAN)[[1, 2]], [[4.0, 1], [0.5, 2]])
    assert not len(marks.get_facecolors())
    assert "first-order estimate" in texts(figure)


def test_of_too_many_the_most_and_the_least_are_drawn():
    figure = ranked(np.arange(50.0), names=[str(index) for index in range(50)], most=5)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["49", "48", "47", "46", "45", *map(str, range(9, -1, -1))]
    assert "⋮ 35 others" in texts(figure)
    assert len(ranked(np.arange(40.0)).axes[0].get_yticklabels()) == 40


def test_skewed_values_are_drawn_logarithmically_and_it_is_said():
    assert ranked([1.0, 2.0, 3.0]).axes[0].get_xscale() == "linear"
    values = np.array([0.01, 0.02, 0.03, -0.01, 9.0])
    figure = ranked(values, low=values - 0.005, high=values + 0.005)
    assert figure.axes[0].get_xscale() == "symlog"
    assert "rise of loss (nats); logarithmic beyond ±0.01" in texts(figure)
    assert {"0", "1"} <= {label.get_text() for label in figure.axes[0].get_xticklabels()}


def test_without_intervals_it_is_said():
    figure = ranked([1.0, 2.0], low=[NAN, NAN], high=[NAN, NAN])
    assert "no intervals" in all_text(figure)
    assert "2.0" in texts(figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": [1.0, NAN]}, "finite numbers in values"),
        ({"names": ["a"]}, "2 names"),
        ({"low": [0.0]}, "2 low"),
        ({"high": [0.0, 3.0]}, r"contain their values, found 1 \[0, 0\]"),
        ({"low": [0.0, NAN]}, "contain their values"),
        ({"matters": [True]}, r"matters of shape \(2,\)"),
        ({"first_order": [0.0, np.inf]}, "finite numbers in first_order"),
        ({"most": 0}, "most of 1 to 30"),
        ({"most": 31}, "most of 1 to 30"),
    ],
)
def test_rankings_refused(options, message):
    with pytest.raises(InputError, match=message):
        ranked(**{"values": [1.0, 2.0], "low": [0.0, 0.0], "high": [3.0, 3.0], **options})


NAMES = ("zero", "mean", "resample", "first-order", "other")


def agreement(values, **options):
    names = list(values)
    rho = {(one, other): 0.91 for one in names for other in names if one < other}
    return replacement_agreement(**{"values": values, "rho": rho, "unit": "nats", **options})


@pytest.mark.parametrize(("count", "skew"), [(2, 4.0), (5, 0.5)])
def test_agreement_fits_on_a_page(count, skew, random):
    values = {name: random.lognormal(-3, skew, 36) for name in NAMES[:count]}
    figure = agreement(values)
    assert len(figure.axes) == count * (count - 1) / 2
    assert texts(figure).count("ρ = 0.91") == len(figure.axes)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figheight() <= 9.61
    assert ("logarithmic" in all_text(figure)) == (skew > 1)


def test_every_pair_has_its_dots_and_its_rho():
    values = {"zero": [1.0, 2.0, NAN], "mean": [1.5, 2.5, 3.5], "resample": [0.0, -1.0, 1.0]}
    rho = {("mean", "zero"): 0.5, ("zero", "resample"): NAN, ("mean", "resample"): -1.0}
    figure = agreement(values, rho=rho)
    found = {
        axes.get_title(): (axes.lines[0].get_xdata().tolist()[1], axes.lines[0].get_ydata().tolist()[1])
        for axes in figure.axes
    }
    assert found == {"ρ = 0.50": (2.0, 2.5), "ρ undefined": (2.0, -1.0), "ρ = -1.00": (2.5, -1.0)}
    for axes in figure.axes:
        np.testing.assert_array_equal(axes.lines[1].get_xdata(), axes.lines[1].get_ydata())
        assert axes.get_xlim() == axes.get_ylim()
    assert {"zero (nats)", "mean (nats)", "resample (nats)"} <= set(texts(figure))
    assert "3 units" in all_text(figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": {"zero": [1.0]}}, "2 to 5 replacements, found 1"),
        ({"values": {str(index): [1.0] for index in range(6)}}, "2 to 5 replacements, found 6"),
        ({"values": {"mean": [1.0], "zero": [1.0, 2.0]}}, "1 units of 'zero'"),
        ({"values": {"mean": [1.0], "zero": [NAN]}}, "number in 'zero'"),
        ({"rho": {}}, r"rho of \('mean', 'zero'\)"),
        ({"rho": {("zero", "mean"): 1.2}}, r"in \[-1, 1\], found 1.2"),
    ],
)
def test_agreement_refused(options, message):
    with pytest.raises(InputError, match=message):
        agreement(**{"values": {"mean": [1.0], "zero": [1.0]}, **options})


def test_rounding_stays_pale_and_what_was_not_tested_bears_no_dots(random):
    values = random.uniform(-1e-6, 1e-6, size=(4, 3))
    given = {"heads": values, "unit": "rise of loss (nats)", "title": "Title"}
    pale = importance_map(**given, marked=None, faintest=0.01)
    for x, y in ((0.17, 0.12), (0.5, 0.5), (0.83, 0.88)):
        assert colour_at(pale, pale.axes[0], x, y).min() > 0.9
    strong = importance_map(**given, marked=np.zeros((4, 3), bool))
    assert min(colour_at(strong, strong.axes[0], (i % 3 + 0.5) / 3, (i // 3 + 0.5) / 4).min() for i in range(12)) < 0.6
    assert not pale.axes[0].lines
    assert not any("Holm" in text for text in texts(pale))
    assert any("Holm" in text for text in texts(strong))
    assert float(pale.axes[1].get_ylim()[1]) == pytest.approx(0.01)
