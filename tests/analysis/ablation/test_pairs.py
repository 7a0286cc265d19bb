"""Redundancy against CKA of the full matrices; synergy against full forwards."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.kit.sign_flips import sign_flip_test
from tests.lens.tiny import images, model_of, ours, timm_model
from vitlens.analysis.ablation.bench import Bench, Outcomes
from vitlens.analysis.ablation.pairs import (
    Redundancy,
    RedundancyStream,
    Synergy,
    pairwise,
    synergy,
)
from vitlens.analysis.ablation.units import Unit, units_of
from vitlens.analysis.features.cka import CKAStream
from vitlens.errors import InputError, UnsupportedError
from vitlens.lens.capture import capture
from vitlens.lens.intervene import intervene
from vitlens.models.model import Model
from vitlens.models.resnet import CifarResNet
from vitlens.uncertainty import bootstrap_mean, holm

LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
HEADS = tuple(Unit("head", 0, head) for head in range(3))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redundancy(model: Model, batches: Sequence[Tensor]) -> Redundancy:
    stream = RedundancyStream(model)
    for batch in batches:
        stream.add(batch)
    return stream.result()


def full_cka(one: Tensor, two: Tensor) -> float:
    """Unbiased linear CKA from kernel matrices (samples, samples), by Song 2012's formula."""

    def hsic(k: Tensor, m: Tensor) -> Tensor:
        n = len(k)
        k, m = (each - each.diagonal().diag() for each in (k, m))
        return (
            (k @ m).trace() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * (k.sum(0) @ m.sum(0)) / (n - 2)
        ) / (n * (n - 3))  # fmt: skip

    k, m = (each.double() @ each.double().T for each in (one, two))
    return float(hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt())


def streamed(*layers: Tensor, parts: int = 1) -> Tensor:
    """CKA of layers (samples, heads, head_dim), taken in by parts."""
    stream = CKAStream(centred=False)
    for some in zip(*(layer.chunk(parts) for layer in layers)):
        stream.add([head for layer in some for head in layer.unbind(1)])
    return stream.cka()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("centre", [0.0, 50.0])
def test_streamed_cka_is_that_of_the_full_matrices(parts: int, centre: float) -> None:
    base = noise(30, 2, 4)
    first, second = (
        base + centre,
        torch.cat([base[..., :3] + 0.5 * noise(30, 2, 3, seed=1), noise(30, 1, 3, seed=2)], 1),
    )
    found = streamed(first, second, parts=parts)
    heads = [first[:, 0], first[:, 1], second[:, 0], second[:, 1], second[:, 2]]
    expected = torch.tensor([[full_cka(one, two) for two in heads] for one in heads]).double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert 0.3 < float(found[0, 2]) < 0.99


def test_cka_of_the_same_is_one_and_knows_no_rotation_shift_or_scale() -> None:
    own = noise(40, 1, 5)
    rotation = torch.linalg.qr(noise(5, 5, seed=3))[0]
    found = streamed(own, 7 * own @ rotation - 3)
    torch.testing.assert_close(found, torch.ones(2, 2).double(), atol=1e-9, rtol=0)
    assert abs(float(streamed(noise(4000, 1, 3), noise(4000, 1, 3, seed=1))[0, 1])) < 0.01  # unlike heads: about 0


def test_cka_of_too_little_is_nan() -> None:
    assert streamed(noise(3, 1, 2)).isnan().all()
    assert streamed(noise(9, 1, 2), torch.ones(9, 1, 2).double()).isnan().tolist() == [[False, True], [True, True]]


def test_redundancy_of_a_model_is_that_of_its_heads_outputs() -> None:
    model, pictures = ours(), images((32, 48), batch=6)
    found = redundancy(model, [pictures[:4], pictures[4:]])
    assert found.images == 6
    assert found.units == units_of(model, kinds=("head",))
    outputs = capture(model, pictures, "blocks.*.head.*")
    heads = [outputs[unit.place].flatten(0, -2) for unit in found.units]
    expected = torch.tensor([[full_cka(one, two) for two in heads] for one in heads]).double()
    torch.testing.assert_close(found.matrix, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.matrix.diagonal(), torch.ones(4).double(), atol=1e-9, rtol=0)


def test_a_copy_of_a_head_is_found() -> None:
    model = ours()
    with torch.no_grad():
        qkv = model.module.blocks[0].attn.qkv
        for start in (0, 16, 32):  # query, key and value of head 1 are those of head 0
            qkv.weight[start + 8 : start + 16] = qkv.weight[start : start + 8]
            qkv.bias[start + 8 : start + 16] = qkv.bias[start : start + 8]
    assert float(redundancy(model, [images((32, 48))]).matrix[0, 1]) == pytest.approx(1)


def test_windows_are_compared_within_a_layer() -> None:
    found = redundancy(timm_model("swin_tiny_patch4_window7_224"), [images()])
    layer = torch.tensor([unit.layer for unit in found.units])
    same = layer[:, None] == layer
    assert found.matrix[same].isfinite().all()
    windowed = layer < 2  # stage 1 has 16 windows
    assert found.matrix[windowed][:, windowed].isnan().equal(~same[windowed][:, windowed])


def test_two_processes_join_to_one() -> None:
    model, pictures = ours(), images((32, 48), batch=6)
    mine, theirs = RedundancyStream(model), RedundancyStream(model)
    mine.add(pictures[:2])
    theirs.add(pictures[2:])
    sent: list[Tensor] = []
    theirs.join(lambda value: sent.append(value) or value)
    mine.join(lambda value: value + sent.pop(0))
    found, whole = mine.result(), redundancy(model, [pictures])
    torch.testing.assert_close(found.matrix, whole.matrix)
    assert found.images == 6


def test_a_cnn_has_no_heads_to_compare() -> None:
    with pytest.raises(UnsupportedError, match="attention"):
        redundancy(model_of(CifarResNet(3, classes=5)), [images()])


def made(beyond: Tensor, **options: object) -> Synergy:
    """Three units whose pairs do so much more than the sum (pairs, n)."""
    n = beyond.shape[1]
    alone = noise(3, n, seed=4)
    pairs = ((0, 1), (0, 2), (1, 2))
    both = torch.stack([alone[one] + alone[two] for one, two in pairs]) + beyond
    clean = noise(n, seed=5).abs()
    outcomes = Outcomes(
        (*((head,) for head in HEADS), *((HEADS[one], HEADS[two]) for one, two in pairs)), "mean",
        torch.zeros(n).long(), clean, torch.ones(n).bool(), clean + torch.cat([alone, both]),
        torch.ones(6, n).bool(), 1.0,
    )  # fmt: skip
    found = synergy(HEADS, pairs, outcomes, **options)
    torch.testing.assert_close(found.both, both.mean(1))
    return found


def test_independent_heads_have_no_synergy() -> None:
    found = made(torch.zeros(3, 20).double())
    assert found.change.mean.abs().max() < 1e-12
    assert found.change.high.abs().max() < 1e-12


def test_synergy_is_both_less_the_sum_with_its_paired_interval() -> None:
    beyond = torch.tensor([0.0, 0.5, -0.5]).double()[:, None] + 0.3 * noise(3, 30)
    found = made(beyond, seed=3)
    torch.testing.assert_close(found.change.mean, beyond.mean(1))
    alone = bootstrap_mean(beyond[1].numpy(), seed=3)
    assert (float(found.change.low[1]), float(found.change.high[1])) == pytest.approx((alone.low, alone.high))
    p = [sign_flip_test(row.numpy(), seed=3) for row in beyond]
    assert found.change.p_holm.tolist() == pytest.approx(holm(p))
    matrix = found.matrix()
    assert matrix.diagonal().isnan().all()
    assert float(matrix[2, 0]) == float(matrix[0, 2]) == float(found.change.mean[1])
    assert (found.n, found.note) == (30, "")
    groups = torch.arange(30) // 3
    grouped = bootstrap_mean(beyond[1].numpy(), groups=groups.numpy())
    assert float(made(beyond, groups=groups).change.low[1]) == pytest.approx(grouped.low)


def test_one_image_gives_no_interval_and_says_so() -> None:
    found = made(torch.ones(3, 1).double())
    assert found.change.low.isnan().all()
    assert "at least 2 images" in found.note


def test_pairs_of_a_model_are_full_forwards() -> None:
    model, pictures = ours(), images((32, 48), batch=6)
    heads = units_of(model, kinds=("head",))[:3]
    bench = Bench(model, pictures, LABELS, "zero")

    def loss(*units: Unit) -> Tensor:
        with intervene(model, {unit.place: "zero" for unit in units}) as changed, torch.no_grad():
            return nn.functional.cross_entropy(changed(pictures), LABELS, reduction="none").double()

    found = pairwise(bench, heads)
    assert found.pairs == ((0, 1), (0, 2), (1, 2))
    for (one, two), value in zip(found.pairs, found.change.mean):
        expected = loss(heads[one], heads[two]) - loss(heads[one]) - loss(heads[two]) + loss()
        assert float(value) == pytest.approx(float(expected.mean()), abs=1e-5)
    assert found.change.mean.abs().max() > 1e-4
    assert float(found.alone[1]) == pytest.approx(float((loss(heads[1]) - loss()).mean()), abs=1e-5)
    chosen = pairwise(bench, heads, pairs=[(1, 2)])
    torch.testing.assert_close(chosen.change.mean, found.change.mean[2:], atol=1e-6, rtol=0)
    parts = pairwise(Bench(model, pictures, LABELS, "zero", batch_size=4), heads)
    torch.testing.assert_close(parts.change.mean, found.change.mean, atol=1e-5, rtol=0)


def test_heads_of_a_block_whose_output_is_not_read_are_independent() -> None:
    model = ours()
    with torch.no_grad():
        model.module.blocks[1].attn.proj.weight.zero_()
    heads = (Unit("head", 0, 0), Unit("head", 1, 0), Unit("head", 1, 1))
    found = pairwise(Bench(model, images((32, 48), batch=9), torch.arange(9) % 5, "mean"), heads)
    assert found.change.mean.abs().max() < 1e-6


def test_a_pair_needs_two_different_units() -> None:
    bench, head = Bench(ours(), images((32, 48), batch=6), LABELS), Unit("head", 0, 0)
    for units in ((head,), (head, head)):
        with pytest.raises(InputError, match="at least 2 different units"):
            pairwise(bench, units)
