"""Means, intervals and tests of effects: row by row the same as alone, and as plain counting gives."""

import itertools
import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.kit.sign_flips import sign_flip_test
from vitlens.analysis.ablation.bench import Outcomes, Unit
from vitlens.analysis.ablation.importance import summarise
from vitlens.analysis.evaluation.intervals import intervals, resampled_means, sign_flips, spearman
from vitlens.errors import InputError
from vitlens.uncertainty import bootstrap_difference, bootstrap_mean, holm

HEADS = tuple(Unit("head", layer, head) for layer in range(2) for head in range(3))
UNITS = (*HEADS, Unit("mlp", 0), Unit("mlp", 1))
TRUE = torch.tensor([0.0, 0.2, 0.4, 0.05, 1.0, -0.3, 0.1, 2.0])  # change of loss of each unit


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(n: int = 40, *, right: float = 0.7) -> Outcomes:
    """Effects whose true change of loss is TRUE, one a unit."""
    clean, generator = noise(n).abs(), torch.Generator().manual_seed(0)
    return Outcomes(
        tuple((unit,) for unit in UNITS), "mean", torch.arange(n) % 4, clean,
        torch.rand(n, generator=generator) < right, clean + TRUE[:, None] + noise(len(UNITS), n, seed=1),
        torch.rand(len(UNITS), n, generator=generator) < 0.5, 9.5,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [None, torch.arange(30) // 4])
def test_each_rows_interval_and_p_value_are_those_it_has_alone(groups: Tensor | None) -> None:
    values = noise(3, 30) + torch.tensor([0.0, 0.2, 2.0])[:, None]
    low, high = intervals(values, groups=groups, seed=5)
    p, own = sign_flips(values, groups=groups, seed=5), None if groups is None else groups.numpy()
    for row in range(3):
        alone = bootstrap_mean(values[row].numpy(), groups=own, seed=5)
        assert (float(low[row]), float(high[row])) == pytest.approx((alone.low, alone.high), abs=1e-12)
        assert float(p[row]) == pytest.approx(sign_flip_test(values[row].numpy(), groups=own, seed=5), abs=1e-12)


def test_sign_flips_agree_with_counting_them_all() -> None:
    differences = torch.tensor([0.3, -0.1, 0.8, 0.4, 0.2, 0.9, -0.2, 0.5], dtype=torch.float64)
    flips = torch.tensor([*itertools.product([1.0, -1.0], repeat=8)], dtype=torch.float64)
    exact = float(((flips @ differences).abs() >= differences.sum().abs() - 1e-12).double().mean())
    assert float(sign_flips(differences[None])[0]) == pytest.approx(exact, abs=0.02)
    copied = differences.repeat_interleave(4)[None]  # flip together
    assert float(sign_flips(copied, groups=torch.arange(8).repeat_interleave(4))[0]) == pytest.approx(exact, abs=0.02)
    assert float(sign_flips(torch.zeros(1, 5))[0]) == 1.0
    assert float(sign_flips(torch.full((1, 40), 0.1))[0]) == 1 / 10_001


def test_draws_in_several_steps_are_the_same_draws() -> None:
    values = noise(1, 1000)  # 4,000 draws at once
    low, high = intervals(values, seed=1)
    alone = bootstrap_mean(values[0].numpy(), seed=1)
    assert (float(low[0]), float(high[0])) == pytest.approx((alone.low, alone.high), abs=1e-12)
    assert float(sign_flips(values, seed=1)[0]) == pytest.approx(sign_flip_test(values[0].numpy(), seed=1), abs=1e-12)
    assert resampled_means(values, draws=7).shape == (7, 1)


def test_values_that_are_not_finite_and_groups_of_others_are_refused() -> None:
    with pytest.raises(InputError, match="finite"):
        intervals(torch.tensor([[0.0, torch.nan]], dtype=torch.float64))
    with pytest.raises(InputError, match=r"one group an image \(2\)"):
        sign_flips(noise(1, 2), groups=torch.zeros(3))


@pytest.mark.parametrize("groups", [None, torch.arange(40) // 10])
def test_summary_is_mean_interval_and_test_of_the_paired_changes(groups: Tensor | None) -> None:
    effects, own = made(), None if groups is None else groups.numpy()
    found = summarise(effects, groups=groups, seed=2)
    assert (found.n, found.replace, found.forward_equivalents, found.note) == (40, "mean", 9.5, "")
    right = effects.clean_correct.double()
    torch.testing.assert_close(found.loss.mean, (effects.loss - effects.clean_loss).mean(1))
    torch.testing.assert_close(found.accuracy.mean, 100 * (right.mean() - effects.correct.double().mean(1)))
    for row in (1, 7):
        loss = effects.loss[row].numpy(), effects.clean_loss.numpy()
        accuracy = 100 * right.numpy(), 100 * effects.correct[row].double().numpy()
        for metric, pair in ((found.loss, loss), (found.accuracy, accuracy)):
            alone = bootstrap_difference(*pair, groups=own, seed=2)
            assert (float(metric.low[row]), float(metric.high[row])) == pytest.approx((alone.low, alone.high))
        assert float(found.loss.p[row]) == sign_flip_test(effects.delta_loss[row].numpy(), groups=own, seed=2)
    assert (found.clean_loss, found.clean_accuracy) == (float(effects.clean_loss.mean()), float(right.mean()))


def test_holm_counts_units_of_one_kind() -> None:
    found = summarise(made())
    for metric in (found.loss, found.accuracy):
        assert metric.p_holm.tolist() == [*holm(metric.p[:6].tolist()), *holm(metric.p[6:].tolist())]
    assert found.matters.tolist() == [value <= 0.05 for value in found.loss.p_holm.tolist()]
    assert (bool(found.matters[4]), bool(found.matters[0])) == (True, False)
    assert (found.is_ranked("head"), found.is_ranked("block")) == (True, False)


def test_enough_flips_for_many_units() -> None:
    units = tuple((Unit("head", layer, head),) for layer in range(30) for head in range(20))
    labels, right = torch.zeros(20).long(), torch.ones(20).bool()
    effects = Outcomes(
        units, "zero", labels, torch.zeros(20).double(), right, torch.ones(600, 20).double(), ~right.expand(600, 20), 1
    )
    assert bool(summarise(effects).matters.all())  # 600 times the smallest p-value of 10,000 draws would be 0.06


def test_tables_put_units_where_they_are() -> None:
    found = summarise(made())
    for table, values in (
        (found.delta_loss, found.loss.mean), (found.delta_accuracy, found.accuracy.mean),
        (found.low, found.loss.low), (found.high, found.loss.high),
    ):  # fmt: skip
        assert torch.equal(table, values[:6].view(2, 3))
    assert torch.equal(found.table(found.loss.mean, "mlp")[:, 0], found.loss.mean[6:])
    assert found.table(found.loss.mean, "block").isnan().all()
    assert (found.ranking()[0], found.ranking("mlp")) == (HEADS[4], (Unit("mlp", 1), Unit("mlp", 0)))
    some = summarise(made().rows([0, 5]))  # heads that are not there
    assert some.delta_loss.isnan().tolist() == [[False, True, True], [True, True, False]]


def test_first_order_is_ranked_against_the_exact_over_heads() -> None:
    effects, first = made(), noise(len(UNITS), 40, seed=9)
    first[6:] = torch.nan  # MLPs have none
    found = summarise(effects, first=first)
    expected = stats.spearmanr(first[:6].mean(1).numpy(), found.loss.mean[:6].numpy()).statistic
    assert found.rank_correlation == pytest.approx(expected)
    assert torch.equal(found.first_order[:6], first[:6].mean(1))
    assert math.isnan(summarise(effects).rank_correlation)
    assert summarise(effects, first=effects.delta_loss).rank_correlation == pytest.approx(1)


def test_a_rank_correlation_has_ties_at_their_mean_rank_and_is_undefined_of_equal_values() -> None:
    assert math.isnan(spearman(torch.ones(1, 4), torch.arange(4)[None]).item())
    assert math.isnan(spearman(torch.ones(1, 1), torch.ones(1, 1)).item())
    ties = torch.tensor([[1.0, 2.0, 2.0, 5.0]]), torch.tensor([[3.0, 1.0, 4.0, 4.0]])
    assert spearman(*ties).item() == pytest.approx(stats.spearmanr(*(each[0].numpy() for each in ties)).statistic)


@pytest.mark.parametrize(
    ("n", "groups", "right", "note"),
    [
        (1, None, 1.0, "at least 2 images"),
        (3, torch.zeros(3), 1.0, "at least 2 groups"),
        (40, None, 0.0, "none of the 40"),
    ],
)
def test_what_cannot_be_said_is_noted(n: int, groups: Tensor | None, right: float, note: str) -> None:
    found = summarise(made(n, right=right), groups=groups)
    assert note in found.note
    assert found.loss.mean.isfinite().all()
    if n < 40:
        assert all(getattr(found.loss, name).isnan().all() for name in ("low", "high", "p", "p_holm"))
        assert not found.matters.any()
