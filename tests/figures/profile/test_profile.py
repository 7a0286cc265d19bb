import numpy as np
import pytest

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.analysis.cost.parts import PARTS
from vitlens.errors import InputError
from vitlens.figures.profile.counts import in_thousands
from vitlens.figures.profile.growth import Growth, growth_by_tokens
from vitlens.figures.profile.parts import COLOURS, cost_by_part
from vitlens.figures.profile.speed import SpeedCurve, speed_by_batch

VIT = {"patch embedding": 10, "attention projections": 30, "attention products": 0, "MLP": 50, "head": 10}
WORK = {"patch embedding": 5, "attention projections": 25, "attention products": 20, "MLP": 50, "head": 0}
CNN = {"stem": 5, "stage 0": 20, "stage 1": 70, "head": 5}


def speed(name, sizes=(1, 2, 4, 8), each=0.01):
    median = each * np.asarray(sizes, dtype=float) ** 0.7
    return SpeedCurve(name, sizes, 0.9 * median, median, 1.2 * median)


def growth(name, *, attention=True, base=1e-3):
    tokens = np.asarray([17.0, 37.0, 65.0, 145.0, 257.0])
    products = tokens**2 if attention else 0 * tokens
    powers = {"latency": 1.2, "flops": 1.1} | ({"products": 2.0} if attention else {})
    return Growth(name, tokens, base * tokens, 1.1 * base * tokens, 1.3 * base * tokens, 1e3 * tokens, products, powers)


def test_every_part_has_a_colour_of_its_own():
    assert set(COLOURS) == set(PARTS)
    assert len(set(COLOURS.values())) == len(COLOURS) - 1  # a CNN has stages or convolutions


def test_bars_are_shares_and_say_their_totals():
    figure = cost_by_part(parameters={"vit": VIT, "cnn": CNN}, flops={"vit": WORK, "cnn": CNN})
    left, right = figure.axes
    widths = [bar.get_width() for bar in left.patches]
    assert widths == [10, 30, 50, 10, 5, 20, 70, 5]
    assert [bar.get_width() for bar in right.patches][:4] == [5, 25, 20, 50]
    assert {"100", "100 FLOPs", "50", "70"} <= set(texts(figure))
    assert not cut_off(figure)
    assert not overlapping(figure)
    blue = np.asarray([0x00, 0x72, 0xB2]) / 255
    np.testing.assert_allclose(colour_at(figure, left, 0.15, 0.25), blue, atol=0.02)


@pytest.mark.parametrize("models", [1, 8])
def test_bars_of_many_models_are_not_cut_off(models):
    named = {f"model with a long name, number {index}": {**VIT, **CNN, "norms": 3} for index in range(models)}
    figure = cost_by_part(parameters=named, flops=named)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert figure.get_figwidth() <= 7.21


def test_what_no_bar_can_be_made_of_is_refused():
    with pytest.raises(InputError, match="expected the same models twice"):
        cost_by_part(parameters={"a": VIT}, flops={"b": VIT})
    with pytest.raises(InputError, match="expected FLOPs of a, found none"):
        cost_by_part(parameters={"a": VIT}, flops={"a": {"MLP": 0}})
    with pytest.raises(InputError, match="found 'heart'"):
        cost_by_part(parameters={"a": {"heart": 3}}, flops={"a": VIT})


@pytest.mark.parametrize(
    ("count", "said"), [(5, "5"), (1_205_898, "1.21 M"), (1.6e9, "1.6 G"), (269_722, "270 k"), (4e12, "4 T")]
)
def test_counts_have_a_prefix(count, said):
    assert in_thousands(count).strip() == said


def test_throughput_is_the_batch_over_its_time():
    figure = speed_by_batch(speeds=[speed("vit"), speed("cnn", sizes=(1, 8, 64), each=0.002)])
    left, right = figure.axes
    np.testing.assert_allclose(left.lines[0].get_ydata(), 10 * np.asarray([1, 2, 4, 8]) ** 0.7)
    np.testing.assert_allclose(right.lines[0].get_ydata(), np.asarray([1, 2, 4, 8]) ** 0.3 / 0.01)
    band = right.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(100 / 1.2)
    assert band[:, 1].max() == pytest.approx(8**0.3 / 0.009)
    assert not cut_off(figure)


@pytest.mark.parametrize(("models", "sizes"), [(1, (1,)), (2, (3, 5, 7)), (6, (1, 2, 4, 8, 16, 32, 64))])
def test_speeds_are_not_cut_off(models, sizes):
    figure = speed_by_batch(speeds=[speed(f"a model {index}", sizes, 0.01 * 4**index) for index in range(models)])
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_growth_draws_the_fitted_lines():
    figure = growth_by_tokens(growths=[growth("vit"), growth("cnn", attention=False, base=2e-2)])
    left, right = figure.axes
    line = left.lines[0]
    x, y = line.get_xdata(), line.get_ydata()
    assert np.log(y[1] / y[0]) / np.log(x[1] / x[0]) == pytest.approx(1.2)
    assert len(right.lines) == 2 * 2 + 2  # a line and its marks: two costs of the ViT, one of the CNN
    said = [text for text in texts(figure) if "tokens^" in text]
    assert said == [
        "vit: latency ~ tokens^1.20, FLOPs ~ tokens^1.10, attention products ~ tokens^2.00",
        "cnn: latency ~ tokens^1.20, FLOPs ~ tokens^1.10",
    ]
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_six_growths_are_not_cut_off():
    figure = growth_by_tokens(growths=[growth(f"timm:a_model_with_a_long_name_{i}", base=10.0**-i) for i in range(6)])
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_times_that_are_none_are_refused():
    with pytest.raises(InputError, match="at least one model"):
        speed_by_batch(speeds=[])
    with pytest.raises(InputError, match="at least one model"):
        growth_by_tokens(growths=[])
    with pytest.raises(InputError, match="expected low of vit above 0"):
        speed_by_batch(speeds=[SpeedCurve("vit", [1], [0.0], [1.0], [1.0])])
    with pytest.raises(InputError, match="expected 2 median of vit"):
        speed_by_batch(speeds=[SpeedCurve("vit", [1, 2], [1.0, 1.0], [1.0], [1.0, 1.0])])
    with pytest.raises(InputError, match="finite numbers in flops of vit"):
        growth_by_tokens(growths=[Growth("vit", [1, 2], [1, 1], [1, 1], [1, 1], [1, np.nan], [0, 0], {"latency": 1.0})])
