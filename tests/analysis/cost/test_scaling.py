"""The exponent of a power law is found where there is one, with an interval that says how far it is from one."""

import numpy as np
import pytest
from scipy import stats

from tests.lens.tiny import ours
from vitlens.analysis.cost.flops import vit_flops
from vitlens.analysis.cost.parts import PRODUCTS
from vitlens.analysis.cost.scaling import exponent
from vitlens.errors import InputError

TOKENS = [17, 37, 65, 145, 257]


@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0, 1.5, 2.0])
def test_a_power_law_gives_its_exponent_without_width(power):
    found = exponent(TOKENS, [3 * tokens**power for tokens in TOKENS])
    assert (found.value, found.low, found.high) == pytest.approx((power, power, power), abs=1e-9)
    assert found.n == 5


def test_a_mixture_lies_between_its_powers_and_is_no_power_law():
    found = exponent(TOKENS, [100 * tokens + tokens**2 for tokens in TOKENS])
    assert 1 < found.low < found.value < found.high < 2
    assert found.high - found.low > 0.1


def test_the_interval_is_that_of_least_squares():
    noise = np.random.default_rng(0).normal(size=5)
    x, y = np.log(TOKENS), 1.3 * np.log(TOKENS) + 0.1 * noise
    found = exponent(TOKENS, np.exp(y).tolist())
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - slope * x - intercept
    half = stats.t.ppf(0.975, 3) * np.sqrt((residual**2).sum() / 3 / ((x - x.mean()) ** 2).sum())
    assert (found.value, found.low, found.high) == pytest.approx((slope, slope - half, slope + half))


def test_the_products_of_attention_grow_with_the_square_of_the_tokens():
    configs = [ours(size=(side, side)).module.config for side in (16, 32, 64)]
    products = [vit_flops(config)[PRODUCTS] for config in configs]
    assert exponent([config.layout.tokens for config in configs], products).value == pytest.approx(2)


def test_two_points_have_no_interval():
    found = exponent([10, 100], [1, 10])
    assert (found.value, found.low, found.high, found.n) == (pytest.approx(1.0), None, None, 2)


@pytest.mark.parametrize(
    ("tokens", "costs", "said"),
    [
        ([5], [1.0], "two or more"),
        ([5, 5], [1.0, 2.0], "two or more"),
        ([5, 6], [1.0], "two or more"),
        ([5, 6], [0.0, 1.0], "above 0"),
        ([5, 6], [float("nan"), 1.0], "above 0"),
    ],
)
def test_refused(tokens, costs, said):
    with pytest.raises(InputError, match=said):
        exponent(tokens, costs)
