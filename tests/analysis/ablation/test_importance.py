"""Means, intervals and tests of effects: row by row the same as alone, and as plain counting gives."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.kit.sign_flips import sign_flip_test
from tests.lens.tiny import images, ours
from vitlens.analysis.ablation.bench import Outcomes
from vitlens.analysis.ablation.importance import ablate, summarise
from vitlens.analysis.ablation.units import Unit
from vitlens.analysis.evaluation.intervals import intervals, resampled_means, sign_flips, spearman
from vitlens.errors import InputError
from vitlens.uncertainty import bootstrap_difference, bootstrap_mean, holm

HEADS = tuple(Unit("head", layer, head) for layer in range(2) for head in range(3))
UNITS = (*HEADS, Unit("mlp", 0), Unit("mlp", 1))
DECIMALS = torch.tensor([0.0, 0.2, 0.4, 0.05, 1.0, -0.3, 0.1, 2.0])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(n: int = 40, *, seed: int = 0, right: float = 0.7) -> Outcomes:
    """Effects whose true change of loss is DECIMALS, one a unit."""
    clean = noise(n, seed=seed).abs()
    generator = torch.Generator().manual_seed(seed)
    return Outcomes(
        tuple((unit,) for unit in UNITS),
        "mean",
        torch.arange(n) % 4,
        clean,
        torch.rand(n, generator=generator) < right,
        clean + DECIMALS[:, None] + noise(len(UNITS), n, seed=seed + 1),
        torch.rand(len(UNITS), n, generator=generator) < 0.5,
        9.5,
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_each_rows_interval_is_the_one_it_has_alone(grouped: bool) -> None:
    first, second = noise(3, 30), noise(3, 30, seed=1)
    groups = torch.arange(30) // 4 if grouped else None
    low, high = intervals(first - second, groups=groups, seed=5)
    for row in range(3):
        alone = bootstrap_difference(
            first[row].numpy(), second[row].numpy(), groups=None if groups is None else groups.numpy(), seed=5
        )
        assert alone.low == pytest.approx(float(low[row]), abs=1e-12)
        assert alone.high == pytest.approx(float(high[row]), abs=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
def test_each_rows_p_value_is_the_one_it_has_alone(grouped: bool) -> None:
    values = noise(4, 25) + torch.tensor([0.0, 0.2, 0.5, 2.0])[:, None]
    groups = torch.arange(25) // 3 if grouped else None
    p = sign_flips(values, groups=groups, seed=3)
    for row in range(4):
        alone = sign_flip_test(values[row].numpy(), groups=None if groups is None else groups.numpy(), seed=3)
        assert float(p[row]) == pytest.approx(alone, abs=1e-12)


def test_sign_flips_agree_with_counting_them_all() -> None:
    differences = torch.tensor([0.3, -0.1, 0.8, 0.4, 0.2, 0.9, -0.2, 0.5], dtype=torch.float64)
    flips = torch.tensor([*itertools.product([1.0, -1.0], repeat=8)], dtype=torch.float64)
    exact = ((flips @ differences).abs() >= differences.sum().abs() - 1e-12).double().mean()
    assert float(sign_flips(differences[None])[0]) == pytest.approx(float(exact), abs=0.02)
    assert float(sign_flips(torch.zeros(1, 5))[0]) == 1.0
    assert float(sign_flips(torch.full((1, 40), 0.1))[0]) == 1 / 10_001


def test_copies_of_a_difference_flip_together() -> None:
    differences = torch.tensor([[0.3, -0.1, 0.8, 0.4, -0.2, 0.9]])
    copied = sign_flips(differences.repeat_interleave(4, 1), groups=torch.arange(6).repeat_interleave(4))
    assert float(copied[0]) == pytest.approx(float(sign_flips(differences)[0]), abs=0.02)


def test_draws_in_several_steps_are_the_same_draws() -> None:
    values = noise(1, 1000)  # 4,000 draws at once
    low, high = intervals(values, seed=1)
    alone = bootstrap_mean(values[0].numpy(), seed=1)
    assert (float(low[0]), float(high[0])) == pytest.approx((alone.low, alone.high), abs=1e-12)
    assert float(sign_flips(values, seed=1)[0]) == pytest.approx(sign_flip_test(values[0].numpy(), seed=1), abs=1e-12)
    assert resampled_means(values, draws=7).shape == (7, 1)


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="finite"):
        intervals(torch.tensor([[0.0, torch.nan]], dtype=torch.float64))
    with pytest.raises(InputError, match=r"one group an image \(2\)"):
        sign_flips(noise(1, 2), groups=torch.zeros(3))


def test_summary_is_mean_interval_and_test_of_the_paired_changes() -> None:
    effects = made()
    found = summarise(effects, seed=2)
    assert (found.n, found.replace, found.forward_equivalents, found.note) == (40, "mean", 9.5, "")
    torch.testing.assert_close(found.loss.mean, (effects.loss - effects.clean_loss).mean(1))
    right = effects.clean_correct.double()
    torch.testing.assert_close(found.accuracy.mean, 100 * (right.mean() - effects.correct.double().mean(1)))
    for row in (1, 7):
        alone = bootstrap_difference(effects.loss[row].numpy(), effects.clean_loss.numpy(), seed=2)
        assert (float(found.loss.low[row]), float(found.loss.high[row])) == pytest.approx((alone.low, alone.high))
        alone = bootstrap_difference(100 * right.numpy(), 100 * effects.correct[row].double().numpy(), seed=2)
        assert (float(found.accuracy.low[row]), float(found.accuracy.high[row])) == pytest.approx(
            (alone.low, alone.high)
        )
        assert float(found.loss.p[row]) == sign_flip_test(effects.delta_loss[row].numpy(), seed=2)
    assert found.clean_loss == pytest.approx(float(effects.clean_loss.mean()))
    assert found.clean_accuracy == pytest.approx(float(right.mean()))


def test_holm_counts_units_of_one_kind() -> None:
    found = summarise(made())
    assert found.loss.p_holm[:6].tolist() == holm(found.loss.p[:6].tolist())
    assert found.loss.p_holm[6:].tolist() == holm(found.loss.p[6:].tolist())
    assert found.accuracy.p_holm[6:].tolist() == holm(found.accuracy.p[6:].tolist())
    assert found.matters.tolist() == [value <= 0.05 for value in found.loss.p_holm.tolist()]
    assert bool(found.matters[4])
    assert not bool(found.matters[0])


def test_enough_flips_for_many_units() -> None:
    units = tuple(Unit("head", layer, head) for layer in range(30) for head in range(20))
    effects = Outcomes(
        tuple((unit,) for unit in units), "zero",
        torch.zeros(20).long(), torch.zeros(20).double(), torch.ones(20).bool(),
        torch.ones(600, 20).double(), torch.zeros(600, 20).bool(), 1.0,
    )  # fmt: skip
    assert bool(summarise(effects).matters.all())  # 600 times the smallest p-value of 10,000 draws would be 0.06


def test_tables_put_units_where_they_are() -> None:
    found = summarise(made())
    assert found.delta_loss.shape == (2, 3)
    assert torch.equal(found.delta_loss.flatten(), found.loss.mean[:6])
    assert torch.equal(found.delta_accuracy.flatten(), found.accuracy.mean[:6])
    assert torch.equal(found.low.flatten(), found.loss.low[:6])
    assert torch.equal(found.high.flatten(), found.loss.high[:6])
    assert torch.equal(found.table(found.loss.mean, "mlp")[:, 0], found.loss.mean[6:])
    assert found.table(found.loss.mean, "block").isnan().all()
    assert found.ranking()[0] == Unit("head", 1, 1)  # true change 1
    assert found.ranking("mlp") == (Unit("mlp", 1), Unit("mlp", 0))
    assert found.of_kind("mlp") == [6, 7]


def test_heads_that_are_not_there_are_nan() -> None:
    effects = made()
    some = Outcomes(
        ((HEADS[0],), (HEADS[5],)), "mean", effects.labels, effects.clean_loss, effects.clean_correct,
        effects.loss[:2], effects.correct[:2], 1.0,
    )  # fmt: skip
    assert summarise(some).delta_loss.isnan().tolist() == [[False, True, True], [True, True, False]]


def test_first_order_is_ranked_against_the_exact_over_heads() -> None:
    effects = made()
    first = noise(len(UNITS), 40, seed=9)
    first[6:] = torch.nan  # MLPs have none
    found = summarise(effects, first=first)
    expected = stats.spearmanr(first[:6].mean(1).numpy(), found.loss.mean[:6].numpy()).statistic
    assert found.rank_correlation == pytest.approx(expected)
    assert found.first_order is not None
    assert torch.equal(found.first_order[:6], first[:6].mean(1))
    assert math.isnan(summarise(effects).rank_correlation)
    same = summarise(effects, first=effects.delta_loss)
    assert same.rank_correlation == pytest.approx(1)


def test_groups_are_drawn_and_flipped_as_wholes() -> None:
    effects, groups = made(), torch.arange(40) // 10
    found = summarise(effects, groups=groups)
    alone = bootstrap_mean(effects.delta_loss[3].numpy(), groups=groups.numpy())
    assert float(found.loss.low[3]) == pytest.approx(alone.low)
    assert float(found.loss.p[3]) == sign_flip_test(effects.delta_loss[3].numpy(), groups=groups.numpy())


@pytest.mark.parametrize("groups", [None, torch.zeros(3)])
def test_one_image_has_no_interval_and_says_so(groups: Tensor | None) -> None:
    found = summarise(made(1 if groups is None else 3), groups=groups)
    assert all(getattr(found.loss, name).isnan().all() for name in ("low", "high", "p", "p_holm"))
    assert found.loss.mean.isfinite().all()
    assert not found.matters.any()
    assert "at least 2 images" in found.note or "at least 2 groups" in found.note


def test_a_model_that_is_never_right_is_told_of() -> None:
    assert "classifies none of the 40 images correctly" in summarise(made(right=0.0)).note


def test_a_rank_correlation_of_equal_values_is_undefined() -> None:
    assert math.isnan(spearman(torch.ones(1, 4), torch.arange(4)[None]).item())
    assert math.isnan(spearman(torch.ones(1, 1), torch.ones(1, 1)).item())
    ties = torch.tensor([1.0, 2.0, 2.0, 5.0]), torch.tensor([3.0, 1.0, 4.0, 4.0])
    expected = stats.spearmanr(*(np.asarray(each) for each in ties)).statistic
    assert spearman(*(each[None] for each in ties)).item() == pytest.approx(expected)


def test_ablate_gives_a_summary_of_a_model() -> None:
    found = ablate(ours(), images((32, 48), batch=6), torch.arange(6) % 5, kinds=("head", "mlp", "block"))
    assert [len(found.of_kind(kind)) for kind in ("head", "mlp", "block")] == [4, 2, 2]
    assert (found.loss.low <= found.loss.mean).all()
    assert (found.loss.mean <= found.loss.high).all()
