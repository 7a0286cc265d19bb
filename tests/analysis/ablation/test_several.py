"""Curves, orders and pairs against full forwards and against trying everything; similarity against CKA's matrices."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kit.sign_flips import sign_flip_test
from tests.kit.simulated_processes import run_in_processes
from tests.lens.tiny import images, ours, timm_model
from vitlens.analysis.ablation.bench import Bench, Outcomes, Unit, units_of
from vitlens.analysis.ablation.several import (
    greedy_order,
    head_similarity,
    pairwise,
    removal_curves,
    share_removable,
)
from vitlens.lens.capture import capture
from vitlens.lens.intervene import another_image, intervene
from vitlens.models.model import Model
from vitlens.names import REPLACEMENTS, Replacement
from vitlens.uncertainty import bootstrap_mean, holm

LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
CLOSE = {"atol": 1e-5, "rtol": 0.0}


def seen() -> Tensor:
    return images((32, 48), batch=8)  # the mean takes at least 8


def loss_without(model: Model, units: tuple[Unit, ...], by: Replacement, pictures: Tensor) -> Tensor:
    """By a full forward, all replacements written out."""
    own = capture(model, pictures, [unit.place for unit in units])
    others = another_image(len(pictures), 0)
    put = {
        name: {"zero": torch.zeros_like(each), "mean": each.mean(0), "resample": each[others]}[by]
        for name, each in own.items()
    }
    with intervene(model, put) as changed, torch.no_grad():
        return F.cross_entropy(changed(pictures), LABELS[: len(pictures)], reduction="none").double()


def made(*accuracies: float, n: int = 100) -> Outcomes:
    """A curve over as many units as there are numbers but one; images fail from the last one on."""
    correct = torch.arange(n) < (torch.tensor(accuracies)[:, None] * n).round()
    units = tuple(Unit("head", 0, head) for head in range(len(accuracies) - 1))
    sets = tuple(units[:count] for count in range(len(accuracies)))
    none = torch.zeros(len(sets), n).double()
    return Outcomes(sets, "mean", torch.zeros(n).long(), none[0], correct[0], none, correct, 1.0)


@pytest.mark.parametrize(
    ("accuracies", "share"),
    [
        ((0.8, 0.8, 0.79, 0.5, 0.2), 0.5),
        ((0.8, 0.7, 0.8, 0.8, 0.2), 0.0),  # what comes after a fall does not count
        ((0.8, 0.9, 0.85, 0.81, 0.2), 0.75),
        ((0.8, 0.8, 0.79, 0.5, 0.75), None),  # all may be removed, as far as is known
        ((0.8, 0.9, 0.85, 0.81, 0.8), None),
    ],
)
def test_share_that_can_go(accuracies: tuple[float, ...], share: float | None) -> None:
    found = share_removable(made(*accuracies))
    assert (found and found.value) == share
    assert found is None or (found.n == 100 and found.low <= share <= found.high)


def test_the_share_is_uncertain_where_accuracy_is_near_the_bound() -> None:
    found = share_removable(made(0.8, 0.8, 0.795, 0.788, 0.2, n=1000))
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.75)
    assert share_removable(made(0.9, 0.1), groups=torch.zeros(100)) is None  # one group says nothing of others


@pytest.mark.parametrize("by", REPLACEMENTS)
def test_a_curve_is_full_forwards_without_the_first_heads(by: Replacement) -> None:
    model, pictures = ours(), seen()
    heads = units_of(model, kinds=("head",))
    order = (heads[2], heads[0], heads[3], heads[1])
    curve = removal_curves(Bench(model, pictures, LABELS, by), {"": order}, points=9, what="")[""]
    assert curve.sets == tuple(order[:count] for count in range(5))
    for removed, loss in zip(curve.sets, curve.loss):
        torch.testing.assert_close(loss, loss_without(model, removed, by, pictures), **CLOSE)
    assert torch.equal(curve.correct[0], curve.clean_correct)


def test_several_orders_share_their_ends_and_batches_change_nothing() -> None:
    model, pictures, told = ours(depth=4), seen(), list[int]()
    heads = units_of(model, kinds=("head",))

    @contextmanager
    def progress(_what: str, total: int, _unit: str) -> Iterator[Any]:
        assert total == 4 * 8  # nothing, everything, and two of four heads
        yield told.append

    orders = {"forth": heads, "back": heads[::-1]}
    curves = removal_curves(Bench(model, pictures, LABELS, "zero", progress=progress), orders, points=3, what="")
    assert sum(told) == 4 * 8
    for name, order in orders.items():
        parts = Bench(model, pictures, LABELS, "zero", batch_size=5)
        alone = removal_curves(parts, {"": order}, points=3, what="")[""]
        torch.testing.assert_close(curves[name].loss, alone.loss, **CLOSE)
        assert [len(each) for each in curves[name].sets] == [0, 4, 8]


def tried(model: Model, units: tuple[Unit, ...], by: Replacement, pictures: Tensor) -> tuple[Unit, ...]:
    """The greedy order by full forwards."""
    gone: tuple[Unit, ...] = ()
    while len(gone) < len(units):
        left = [unit for unit in units if unit not in gone]
        gone += (min(left, key=lambda unit: float(loss_without(model, (*gone, unit), by, pictures).mean())),)
    return gone


@pytest.mark.parametrize(("by", "budget"), [("mean", 1 << 30), ("zero", 100_000), ("resample", 0)])
def test_greedy_order_is_that_of_full_forwards(by: Replacement, budget: int) -> None:
    model, pictures, told = ours(depth=3), seen(), list[int]()
    units = units_of(model, kinds=("head",))
    order, passes = greedy_order(Bench(model, pictures, LABELS, by, budget=budget), units)
    assert order == tried(model, units, by, pictures)
    parts = Bench(model, pictures, LABELS, by, batch_size=2)
    assert greedy_order(parts, units)[0] == order
    assert greedy_order(parts, units, every=2, advance=told.append)[1] < passes
    assert told == [2, 2, 2]


def test_greedy_order_of_a_last_block_that_is_computed_for_cls_alone() -> None:
    model, pictures = timm_model("vit_tiny_patch16_224", depth=3, num_heads=4), images(batch=8)
    units = units_of(model, kinds=("head",))
    order, passes = greedy_order(Bench(model, pictures, LABELS, "zero"), units)
    assert order == tried(model, units, "zero", pictures)
    assert passes < 0.75 * len(units) * (len(units) + 1) / 2


@pytest.mark.parametrize("groups", [None, torch.arange(8) // 2])
def test_pairs_are_full_forwards_with_paired_intervals(groups: Tensor | None) -> None:
    model, pictures = ours(depth=3), seen()
    heads = units_of(model, kinds=("head",))[:3]
    bench, pairs = Bench(model, pictures, LABELS, "zero", groups, seed=3), list(combinations(range(3), 2))
    change, both, alone, note = pairwise(bench, heads, pairs, what="")

    def rise(*units: Unit) -> Tensor:
        return loss_without(model, units, "zero", pictures) - loss_without(model, (), "zero", pictures)

    beyond = [rise(heads[one], heads[two]) - rise(heads[one]) - rise(heads[two]) for one, two in pairs]
    own, close = None if groups is None else groups.numpy(), {"rel": 1e-3, "abs": 1e-5}
    for index, each in enumerate(beyond):
        expected = bootstrap_mean(each.numpy(), groups=own, seed=3)
        interval = (change.mean[index], change.low[index], change.high[index])
        assert [*map(float, interval)] == pytest.approx([expected.value, expected.low, expected.high], **close)
    p = [sign_flip_test(each.numpy(), groups=own, seed=3) for each in beyond]
    assert change.p_holm.tolist() == pytest.approx(holm(p), abs=0.01)
    assert change.mean.abs().max() > 1e-4
    torch.testing.assert_close(alone[1], rise(heads[1]).mean(), **CLOSE)
    torch.testing.assert_close(both[2], rise(heads[1], heads[2]).mean(), **CLOSE)
    assert note == ""
    some = pairwise(bench, heads, [(1, 2)], torch.tensor([6, 1, 5, 0]), what="")[0]
    assert float(some.mean[0]) == pytest.approx(float(beyond[2][[6, 1, 5, 0]].mean()), **close)
    one, *_, note = pairwise(bench, heads, pairs, torch.tensor([2]), what="")
    assert one.low.isnan().all()
    assert "at least 2 images" in note


def test_heads_of_a_block_whose_output_is_not_read_are_independent() -> None:
    model = ours()
    with torch.no_grad():
        model.module.blocks[1].attn.proj.weight.zero_()
    heads = (Unit("head", 0, 0), Unit("head", 1, 0), Unit("head", 1, 1))
    change, *_ = pairwise(Bench(model, seen(), LABELS, "mean"), heads, [(0, 1), (0, 2), (1, 2)], what="")
    assert change.mean.abs().max() < 1e-6


def full_cka(one: Tensor, two: Tensor) -> float:
    """Unbiased linear CKA from kernel matrices (samples, samples), by Song 2012's formula."""

    def hsic(k: Tensor, m: Tensor) -> Tensor:
        n = len(k)
        k, m = (each - each.diagonal().diag() for each in (k, m))
        ends = k.sum() * m.sum() / ((n - 1) * (n - 2))
        return ((k @ m).trace() + ends - 2 * (k.sum(0) @ m.sum(0)) / (n - 2)) / (n * (n - 3))

    k, m = (each.double() @ each.double().T for each in (one, two))
    return float(hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt())


def test_similarity_is_that_of_the_heads_outputs_also_of_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pictures = ours(), seen()
    with torch.no_grad():
        qkv = model.module.blocks[0].attn.qkv
        for start in (0, 16, 32):  # query, key and value of head 1 are those of head 0
            qkv.weight[start + 8 : start + 16] = qkv.weight[start : start + 8]
            qkv.bias[start + 8 : start + 16] = qkv.bias[start : start + 8]
    heads, some = units_of(model, kinds=("head",)), torch.arange(6)
    captured = capture(model, pictures[:6], "blocks.*.head.*")
    outputs = [captured[head.place].flatten(0, -2) for head in heads]
    expected = torch.tensor([[full_cka(one, two) for two in outputs] for one in outputs]).double()
    found = head_similarity(Bench(model, pictures, LABELS, batch_size=4), heads, some)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert float(found[0, 1]) == pytest.approx(1)

    models = ours(), ours()

    def work(processes: Any) -> Tensor:
        return head_similarity(Bench(models[processes.index], pictures, LABELS, processes=processes), heads, some)

    whole = head_similarity(Bench(ours(), pictures, LABELS), heads, some)
    for each in run_in_processes(2, work, monkeypatch):
        torch.testing.assert_close(each, whole)


def test_windows_are_compared_within_a_layer() -> None:
    model = timm_model("swin_tiny_patch4_window7_224")
    heads = units_of(model, kinds=("head",))
    found = head_similarity(Bench(model, images(), LABELS[:2]), heads)
    layer = torch.tensor([head.layer for head in heads])
    same = layer[:, None] == layer
    assert found[same].isfinite().all()
    windowed = layer < 2  # stage 1 has 16 windows
    assert found[windowed][:, windowed].isnan().equal(~same[windowed][:, windowed])
