"""Curves and orders of removal, against full forwards and against trying everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.lens.tiny import images, ours, timm_model
from vitlens.analysis.ablation.bench import Bench, Outcomes, other_images
from vitlens.analysis.ablation.orders import (
    Curve,
    greedy_order,
    random_order,
    removal_curves,
    share_removable,
    steps,
)
from vitlens.analysis.ablation.units import Unit, units_of
from vitlens.errors import InputError
from vitlens.lens.intervene import intervene
from vitlens.lens.replay import replaying
from vitlens.models.model import Model
from vitlens.names import REPLACEMENTS, Replacement
from vitlens.uncertainty import bootstrap_mean, wilson

LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


def seen() -> Tensor:
    return images((32, 48), batch=8)  # the mean takes at least 8


def loss_without(model: Model, units: tuple[Unit, ...], by: Replacement, pictures: Tensor) -> Tensor:
    """By a full forward, all replacements written out."""
    tensors = {}
    for unit in units:
        with replaying(model, pictures) as replay:
            own = replay.tensor(f"blocks.{unit.layer}.heads")[:, unit.head]
        others = other_images(len(pictures), seed=0)
        tensors[unit.place] = {
            "zero": torch.zeros_like(own), "mean": own.mean(0), "resample": own[others],
        }[by]  # fmt: skip
    with intervene(model, tensors) as changed, torch.no_grad():
        return F.cross_entropy(changed(pictures), LABELS[: len(pictures)], reduction="none").double()


def made(*accuracies: float, n: int = 100) -> Curve:
    """A curve over as many units as there are numbers but one; images fail from the last one on."""
    correct = torch.arange(n) < (torch.tensor(accuracies)[:, None] * n).round()
    units = tuple(Unit("head", 0, head) for head in range(len(accuracies) - 1))
    outcomes = Outcomes(
        tuple(units[:count] for count in range(len(accuracies))), "mean", torch.zeros(n).long(),
        torch.zeros(n).double(), correct[0], torch.zeros(len(accuracies), n).double(), correct, 1.0,
    )  # fmt: skip
    return Curve(units, outcomes)


def test_accuracy_comes_with_wilsons_interval() -> None:
    found = made(0.9, 0.5).accuracy()
    assert found == [wilson(90, 100), wilson(50, 100)]
    groups = torch.arange(100) // 5
    assert made(0.9, 0.5).accuracy(groups=groups)[1] == bootstrap_mean(
        (torch.arange(100) < 50).numpy(), groups=groups.numpy()
    )


@pytest.mark.parametrize(
    ("accuracies", "points", "share"),
    [
        ((0.8, 0.8, 0.79, 0.5, 0.2), 1.0, 0.5),
        ((0.8, 0.8, 0.79, 0.5, 0.2), 0.5, 0.25),
        ((0.8, 0.7, 0.8, 0.8, 0.8), 1.0, 0.0),  # what comes after a fall does not count
        ((0.8, 0.9, 0.85, 0.81, 0.8), 1.0, 1.0),
    ],
)
def test_share_that_can_go(accuracies: tuple[float, ...], points: float, share: float) -> None:
    found = share_removable(made(*accuracies), points=points)
    assert found.value == share
    assert found.low is not None
    assert found.high is not None
    assert found.low <= share <= found.high
    assert found.n == 100


def test_the_share_is_uncertain_where_accuracy_is_near_the_bound() -> None:
    curve = made(0.8, 0.8, 0.795, 0.788, 0.2, n=1000)
    found = share_removable(curve)
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.75)
    assert share_removable(made(1.0, 1.0, n=1)).low is None


def test_steps_are_even_and_hold_both_ends() -> None:
    assert steps(36) == tuple(range(0, 37, 3))
    assert steps(4) == (0, 1, 2, 3, 4)
    assert steps(144, points=3) == (0, 72, 144)
    with pytest.raises(InputError, match="at least 1 unit"):
        steps(0)


def test_random_orders_hold_every_unit_once() -> None:
    units = units_of(ours(), kinds=("head",))
    orders = {random_order(units, seed=seed) for seed in range(10)}
    assert len(orders) > 3
    assert all(set(order) == set(units) for order in orders)
    assert random_order(units, seed=1) == random_order(units, seed=1)


def tried(model: Model, units: tuple[Unit, ...], by: Replacement, pictures: Tensor) -> tuple[Unit, ...]:
    """The greedy order by full forwards."""
    gone: tuple[Unit, ...] = ()
    while len(gone) < len(units):
        left = [unit for unit in units if unit not in gone]
        gone += (min(left, key=lambda unit: float(loss_without(model, (*gone, unit), by, pictures).mean())),)
    return gone


EVERY_PAIR = [(by, budget) for by in REPLACEMENTS for budget in (1 << 30, 100_000, 0)]
SOME = EVERY_PAIR[::4]  # each replacement once and each budget once; the others by hand


@pytest.mark.parametrize(
    ("by", "budget"), [pytest.param(*pair, marks=() if pair in SOME else pytest.mark.slow) for pair in EVERY_PAIR]
)
def test_greedy_order_is_that_of_full_forwards(by: Replacement, budget: int) -> None:
    model, pictures = ours(depth=3), seen()
    units = units_of(model, kinds=("head",))
    found = greedy_order(Bench(model, pictures, LABELS, by, budget=budget), units)
    assert found.order == tried(model, units, by, pictures)


def test_greedy_order_of_a_last_block_that_is_computed_for_cls_alone() -> None:
    model, pictures = timm_model("vit_tiny_patch16_224", depth=3, num_heads=4), images(batch=8)
    units = units_of(model, kinds=("head",))
    found = greedy_order(Bench(model, pictures, LABELS, "zero"), units)
    assert found.order == tried(model, units, "zero", pictures)
    whole = len(units) * (len(units) + 1) / 2
    assert found.forward_equivalents < 0.75 * whole


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_a_curve_is_full_forwards_without_the_first_heads(by: Replacement) -> None:
    model, pictures = ours(), seen()
    heads = units_of(model, kinds=("head",))
    order = (heads[2], heads[0], heads[3], heads[1])
    curve = removal_curves(Bench(model, pictures, LABELS, by), {"": order})[""]
    assert curve.removed == (0, 1, 2, 3, 4)
    for count, loss in zip(curve.removed, curve.outcomes.loss):
        expected = loss_without(model, order[:count], by, pictures)
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    assert torch.equal(curve.outcomes.correct[0], curve.outcomes.clean_correct)
    torch.testing.assert_close(curve.loss, curve.outcomes.loss.mean(1))


def test_several_orders_share_their_ends_and_batches_change_nothing() -> None:
    model, pictures = ours(), seen()
    heads = units_of(model, kinds=("head",))
    told: list[int] = []

    @contextmanager
    def progress(_what: str, total: int, _unit: str) -> Iterator[Any]:
        assert total == 4 * 8  # nothing, everything, and two of two
        yield told.append

    orders = {"forth": heads, "back": heads[::-1]}
    curves = removal_curves(Bench(model, pictures, LABELS, "zero", progress=progress), orders, points=3)
    assert sum(told) == 4 * 8
    for name, order in orders.items():
        alone = removal_curves(Bench(model, pictures, LABELS, "zero", batch_size=5), {"": order}, points=3)[""]
        torch.testing.assert_close(curves[name].outcomes.loss, alone.outcomes.loss, atol=1e-5, rtol=0)
        assert curves[name].removed == (0, 2, 4)


def test_greedy_order_in_batches_and_steps() -> None:
    model, pictures = ours(depth=3), seen()
    units = units_of(model, kinds=("head",))
    bench = Bench(model, pictures, LABELS, "mean")
    whole = greedy_order(bench, units)
    assert greedy_order(Bench(model, pictures, LABELS, "mean", batch_size=2), units).order == whole.order
    assert greedy_order(bench.on(torch.arange(8)), units).order == whole.order
    told: list[int] = []
    twos = greedy_order(bench, units, every=2, advance=told.append)
    assert told == [2, 2, 2]
    assert twos.forward_equivalents < whole.forward_equivalents
    with pytest.raises(InputError, match="at least 1 removed in a round"):
        greedy_order(bench, units, every=0)
