import math
from functools import partial

import pytest
import torch
from torch import nn

from tests.training.tiny import CLASSES, tiny_model
from vitlens.errors import InputError
from vitlens.models.loading import untrained
from vitlens.names import OPTIMISERS
from vitlens.training.optimiser import Average, Optimiser, decay_groups, learning_rate, rate_shares
from vitlens.training.recipe import Recipe

BLOCKS = ("blocks.0", "blocks.1")


@pytest.mark.parametrize("preset", ["vit-mini", "resnet20"])
def test_matrices_decay_and_nothing_else(preset: str) -> None:
    overrides = {"registers": 2, "distillation": True} if preset == "vit-mini" else {}
    model = untrained(preset, classes=CLASSES, overrides=overrides).module.requires_grad_(True)
    decayed, undecayed = decay_groups(model)
    parameters = dict(model.named_parameters())
    assert sorted(decayed + undecayed) == sorted(parameters)
    assert all(name.endswith("weight") and parameters[name].ndim > 1 for name in decayed)
    kinds = {name.rpartition(".")[2] for name in undecayed}
    tokens = {"cls_token", "dist_token", "reg_token", "pos_embed"} if preset == "vit-mini" else set()
    assert kinds == {"bias", "weight"} | tokens
    assert all(parameters[name].ndim == 1 for name in undecayed if name.endswith("weight"))


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_without_gradients_only_the_decayed_shrink(kind: str) -> None:
    model = tiny_model().module.requires_grad_(True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimiser = Optimiser(model, Recipe(optimiser=kind, weight_decay=0.5), blocks=BLOCKS)
    optimiser.set_rate(0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    decayed, undecayed = decay_groups(model)
    after = dict(model.named_parameters())
    assert all(torch.allclose(after[name], before[name] * 0.95) for name in decayed)
    assert all(torch.equal(after[name], before[name]) for name in undecayed)


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert decay_groups(model) == (["weight"], [])
    with pytest.raises(InputError, match="found none"):
        Optimiser(model.requires_grad_(False), Recipe())


def test_adamw_is_torchs() -> None:
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    groups = [{"params": [theirs.weight], "weight_decay": 0.3}, {"params": [theirs.bias], "weight_decay": 0.0}]
    optimiser, expected = (
        Optimiser(ours, Recipe(weight_decay=0.3, betas=(0.9, 0.99))),
        torch.optim.AdamW(groups, 0.05, (0.9, 0.99)),
    )
    for step in range(3):
        for model in (ours, theirs):
            (model(torch.full((4, 3), float(step + 1))) ** 2).sum().backward()
        optimiser.set_rate(0.05)
        optimiser.step()
        expected.step()
        expected.zero_grad()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    assert ours.weight.grad is None


def test_muon_updates_the_blocks_matrices_and_adamw_the_rest() -> None:
    model = tiny_model().module.requires_grad_(True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimiser = Optimiser(model, Recipe(optimiser="muon", weight_decay=0.0), blocks=BLOCKS)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimiser.set_rate(0.1)
    optimiser.step()
    for name, value in model.named_parameters():
        change = (value.detach() - before[name]) / 0.1
        if name.startswith("blocks.") and value.ndim == 2:
            singular = torch.linalg.svdvals(change)
            scale = 0.2 * max(value.shape) ** 0.5  # match_rms_adamw
            assert singular.min() / scale > 0.6
            assert singular.max() / scale < 1.4, name
        else:
            assert torch.allclose(change.abs(), torch.ones_like(change), atol=1e-2), name  # Adam's first step is a sign


def test_rates_fall_by_layers_from_the_head_down_and_reach_the_steps() -> None:
    """BEiT's convention: rate x decay^(depth + 1 - layer), embeddings layer 0, block i layer i + 1, head depth + 1."""
    model = tiny_model().module.requires_grad_(True)
    shares = rate_shares(model, BLOCKS, decay=0.5)
    expected = {"cls_token": 1 / 8, "pos_embed": 1 / 8, "patch_embed.proj.weight": 1 / 8, "blocks.0.norm1.bias": 1 / 4}
    expected |= {"blocks.1.mlp.fc2.weight": 1 / 2, "norm.weight": 1.0, "head.bias": 1.0}
    assert {name: shares[name] for name in expected} == expected
    assert set(rate_shares(model, BLOCKS, decay=1.0).values()) == {1.0}
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimiser = Optimiser(model, Recipe(weight_decay=0.0, layer_decay=0.5), blocks=BLOCKS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.set_rate(0.1)
    optimiser.step()
    for name, value in model.named_parameters():
        assert torch.allclose(before[name] - value.detach(), torch.tensor(0.1 * shares[name]), rtol=1e-3), name


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_a_restored_optimiser_continues_identically(kind: str) -> None:
    models = [tiny_model().module.requires_grad_(True) for _ in range(2)]
    make = partial(Optimiser, recipe=Recipe(optimiser=kind, weight_decay=0.1, betas=(0.9, 0.99)), blocks=BLOCKS)
    first, second = make(models[0]), make(models[1])

    def step(optimiser: Optimiser, model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimiser.set_rate(0.01)
        optimiser.step()

    step(first, models[0], 0)
    models[1].load_state_dict(models[0].state_dict())
    second.restore({name: value.clone() for name, value in first.tensors().items()})
    step(first, models[0], 1)
    step(second, models[1], 1)
    assert all(torch.equal(one, other) for one, other in zip(models[0].parameters(), models[1].parameters()))


TOTAL, WARMUP, PEAK, MINIMUM = 101, 20, 2.0, 0.5


def rates(total: int = TOTAL, warmup: int = WARMUP) -> list[float]:
    recipe = Recipe(learning_rate=PEAK, warmup=warmup / total, minimum=MINIMUM / PEAK)
    return [learning_rate(step, recipe, total=total) for step in range(total)]


def test_warms_up_to_the_peak_and_falls_by_a_cosine_to_the_minimum() -> None:
    schedule = rates()
    assert schedule[:WARMUP] == pytest.approx([PEAK * (step + 1) / WARMUP for step in range(WARMUP)])
    assert schedule[WARMUP - 1] == schedule[WARMUP] == PEAK == max(schedule)
    falling = schedule[WARMUP:]
    assert falling == sorted(falling, reverse=True)
    assert falling[40] == pytest.approx((PEAK + MINIMUM) / 2)
    assert falling[20] == pytest.approx(MINIMUM + (PEAK - MINIMUM) * (1 + math.sqrt(0.5)) / 2)
    assert falling[-1] == pytest.approx(MINIMUM)


@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (2, 1)])
def test_short_trainings_have_finite_positive_rates(total: int, warmup: int) -> None:
    assert all(0 < rate <= PEAK for rate in rates(total, warmup))


def changed(module: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(value)
    return module


def test_average_is_the_weighted_sum_of_the_weights() -> None:
    module = changed(nn.Linear(1, 1, bias=False), 0.0)
    average = Average(module, decay=0.5)
    expected = 0.0
    for count, value in enumerate((1.0, 2.0, 5.0, -1.0, 4.0, 8.0, 16.0, 3.0)):
        average.update(changed(module, value))
        keep = min(0.5, (1 + count) / (10 + count))
        expected = keep * expected + (1 - keep) * value
    assert average.tensors["weight"].item() == pytest.approx(expected)


def test_counters_are_copied() -> None:
    module = nn.BatchNorm1d(2)
    average = Average(module, decay=0.9)
    module(torch.randn(4, 2))
    average.update(module)
    assert average.tensors["num_batches_tracked"] == 1


def test_applied_gives_the_own_weights_back_also_after_an_error() -> None:
    module = changed(nn.Linear(2, 2), 1.0)
    average = Average(module, decay=0.9)
    changed(module, 2.0)
    with pytest.raises(AssertionError), average.applied(module):
        assert (module.weight == 2.0).all()  # 1.0, the average's
    assert (module.weight == 2.0).all()
    assert (average.tensors["weight"] == 1.0).all()
