"""Rankings by two checks: tau is scipy's, and only a pair that differs significantly in both ways has swapped."""

import pytest
import torch
from scipy import stats

from vitlens.analysis.faithfulness.league import rank_agreement
from vitlens.errors import InputError


def results(means: dict[str, float], *, spread: float = 0.1, seed: int = 0, n: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: mean + spread * torch.randn(n, generator=generator) for name, mean in means.items()}


def test_the_same_order_the_reverse_and_scipys_tau():
    first = results({"a": 0.1, "b": 0.5, "c": 0.9, "d": 0.3})
    assert rank_agreement(first, first)[0].value == pytest.approx(1.0)
    assert rank_agreement(first, {name: -values for name, values in first.items()})[0].value == pytest.approx(-1.0)
    second = results({"a": 0.2, "b": 0.1, "c": 0.9, "d": 0.3}, seed=1)
    means = [[float(values.mean()) for values in own.values()] for own in (first, second)]
    assert rank_agreement(first, second)[0].value == pytest.approx(stats.kendalltau(*means).statistic)


def test_a_pair_that_swaps_is_named_with_both_differences():
    first, second = results({"a": 0.1, "b": 0.5, "c": 0.9}), results({"a": 0.6, "b": 0.2, "c": 0.9}, seed=1)
    tau, (pair,) = rank_agreement(first, second)
    assert (pair.better, pair.worse, tau.n) == ("b", "a", 40)
    assert pair.first.value == pytest.approx(0.4, abs=0.06)
    assert pair.second.value == pytest.approx(-0.4, abs=0.06)
    assert pair.first.low > 0 > pair.second.high
    back = rank_agreement(second, first)[1][0]
    assert (back.better, back.worse) == ("a", "b")
    assert back.first.value == pytest.approx(-pair.second.value)


def test_methods_that_do_not_differ_do_not_swap():
    means = dict.fromkeys("abcdefgh", 0.5)
    assert rank_agreement(results(means), results(means, seed=1))[1] == ()


def test_copies_of_an_image_add_no_evidence():
    first, second = results({"a": 0.45, "b": 0.55}, n=6), results({"a": 0.55, "b": 0.45}, seed=1, n=6)
    copied = [{name: values[:3].repeat(30) for name, values in own.items()} for own in (first, second)]
    groups = torch.arange(3).repeat(30)
    assert len(rank_agreement(*copied)[1]) == 1
    assert rank_agreement(*copied, groups=groups)[0] == rank_agreement(*copied)[0]


def test_other_methods_are_refused():
    first = results({"a": 0.1, "b": 0.5})
    with pytest.raises(InputError, match="same two methods"):
        rank_agreement(first, {"a": first["a"], "c": first["b"]})
    with pytest.raises(InputError, match="same two methods"):
        rank_agreement({"a": first["a"]}, {"a": first["a"]})
