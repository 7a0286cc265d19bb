"""Optimisers against torch's and by hand, the schedule, and the moving average of the weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.trainings import CLASSES, tiny_model
from tests.kit.uses import BrokenError
from vitlens.errors import InputError
from vitlens.models.loading import untrained
from vitlens.names import OPTIMISERS
from vitlens.training.optimiser import Average, Optimiser, decay_groups, learning_rate, rate_shares
from vitlens.training.recipe import Recipe

BLOCKS = ("blocks.0", "blocks.1")


def step(optimiser: Optimiser, model: nn.Module, rate: float, seed: int | None = None, value: float = 0.0) -> None:
    """One step with random gradients, or those of a value."""
    generator = torch.Generator().manual_seed(seed or 0)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.full_like(parameter, value) if seed is None else drawn
    optimiser.set_rate(rate)
    optimiser.step()


def begun(**recipe: Any) -> tuple[nn.Module, Optimiser, dict[str, Tensor]]:
    """A model, its optimiser, and its weights before the first step."""
    model = tiny_model().module.requires_grad_(True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    return model, Optimiser(model, Recipe(**{"weight_decay": 0.0, **recipe}), blocks=BLOCKS), before


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
    model, optimiser, before = begun(optimiser=kind, weight_decay=0.5)
    step(optimiser, model, 0.1)
    decayed, undecayed = decay_groups(model)
    after = dict(model.named_parameters())
    assert all(torch.allclose(after[name], before[name] * 0.95) for name in decayed)
    assert all(torch.equal(after[name], before[name]) for name in undecayed)
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    assert decay_groups(layer) == (["weight"], [])
    with pytest.raises(InputError, match="found none"):
        Optimiser(layer.requires_grad_(False), Recipe())


def test_adamw_is_torchs() -> None:
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    groups = [{"params": [theirs.weight], "weight_decay": 0.3}, {"params": [theirs.bias], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, 0.05, (0.9, 0.99))
    optimiser = Optimiser(ours, Recipe(weight_decay=0.3, betas=(0.9, 0.99)))
    for number in range(3):
        expected.zero_grad()
        for model in (ours, theirs):
            (model(torch.full((4, 3), float(number + 1))) ** 2).sum().backward()
        optimiser.set_rate(0.05)
        optimiser.step()
        expected.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    assert ours.weight.grad is None


def test_muon_updates_the_blocks_matrices_and_adamw_the_rest() -> None:
    model, optimiser, before = begun(optimiser="muon")
    step(optimiser, model, 0.1, seed=0)
    for name, value in model.named_parameters():
        change = (value.detach() - before[name]) / 0.1
        if name.startswith("blocks.") and value.ndim == 2:
            singular = torch.linalg.svdvals(change) / (0.2 * max(value.shape) ** 0.5)  # match_rms_adamw
            assert 0.6 < singular.min() <= singular.max() < 1.4, name
        else:
            assert torch.allclose(change.abs(), torch.ones_like(change), atol=1e-2), name  # Adam's first step is a sign


def test_rates_fall_by_layers_from_the_head_down_and_reach_the_steps() -> None:
    """BEiT's convention: rate x decay^(depth + 1 - layer), embeddings layer 0, block i layer i + 1, head depth + 1."""
    model, optimiser, before = begun(layer_decay=0.5)
    shares = rate_shares(model, BLOCKS, decay=0.5)
    expected = {"cls_token": 1 / 8, "pos_embed": 1 / 8, "patch_embed.proj.weight": 1 / 8, "blocks.0.norm1.bias": 1 / 4}
    expected |= {"blocks.1.mlp.fc2.weight": 1 / 2, "norm.weight": 1.0, "head.bias": 1.0}
    assert {name: shares[name] for name in expected} == expected
    assert set(rate_shares(model, BLOCKS, decay=1.0).values()) == {1.0}
    step(optimiser, model, 0.1, value=1.0)
    for name, value in model.named_parameters():
        assert torch.allclose(before[name] - value.detach(), torch.tensor(0.1 * shares[name]), rtol=1e-3), name


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_a_restored_optimiser_continues_identically(kind: str) -> None:
    (one, first, _), (other, second, _) = (begun(optimiser=kind, weight_decay=0.1, betas=(0.9, 0.99)) for _ in range(2))
    step(first, one, 0.01, seed=1)
    other.load_state_dict(one.state_dict())
    state = {name: value.clone() for name, value in first.tensors().items()}
    assert {name: value.shape for name, value in state.items()} == {
        name: value.shape for name, value in second.expected().items()
    }
    second.restore(state)
    step(first, one, 0.01, seed=2)
    step(second, other, 0.01, seed=2)
    assert all(torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters()))


TOTAL, WARMUP, PEAK, MINIMUM = 101, 20, 2.0, 0.5


def rates(total: int = TOTAL, warmup: int = WARMUP) -> list[float]:
    recipe = Recipe(learning_rate=PEAK, warmup=warmup / total, minimum=MINIMUM / PEAK)
    return [learning_rate(number, recipe, total=total) for number in range(total)]


def test_warms_up_to_the_peak_and_falls_by_a_cosine_to_the_minimum() -> None:
    schedule = rates()
    assert schedule[:WARMUP] == pytest.approx([PEAK * (number + 1) / WARMUP for number in range(WARMUP)])
    assert schedule[WARMUP - 1] == schedule[WARMUP] == PEAK == max(schedule)
    falling = schedule[WARMUP:]
    assert falling == sorted(falling, reverse=True)
    assert falling[40] == pytest.approx((PEAK + MINIMUM) / 2)
    assert falling[20] == pytest.approx(MINIMUM + (PEAK - MINIMUM) * (1 + math.sqrt(0.5)) / 2)
    assert falling[-1] == pytest.approx(MINIMUM)
    for total, warmup in ((1, 0), (1, 1), (5, 5), (2, 1)):
        assert all(0 < rate <= PEAK for rate in rates(total, warmup))


def fill(module: nn.Module, value: float) -> nn.Module:
    for tensor in module.state_dict().values():
        tensor.fill_(value)
    return module


def test_average_is_the_weighted_sum_of_the_weights() -> None:
    module = fill(nn.Linear(1, 1, bias=False), 0.0)
    average, expected = Average(module, decay=0.5), 0.0
    for count, value in enumerate((1.0, 2.0, 5.0, -1.0, 4.0, 8.0, 16.0, 3.0)):
        average.update(fill(module, value))
        keep = min(0.5, (1 + count) / (10 + count))
        expected = keep * expected + (1 - keep) * value
    assert average.tensors["weight"].item() == pytest.approx(expected)
    counting = nn.BatchNorm1d(2)
    average = Average(counting, decay=0.9)
    counting(torch.randn(4, 2))
    average.update(counting)
    assert average.tensors["num_batches_tracked"] == 1  # counters are copied


def test_applied_gives_the_own_weights_back_also_after_an_error() -> None:
    module = fill(nn.Linear(2, 2), 1.0)
    average = Average(module, decay=0.9)
    fill(module, 2.0)
    with average.applied(module):
        assert (module.weight == 1.0).all()
    with pytest.raises(BrokenError), average.applied(module):
        raise BrokenError
    assert (module.weight == 2.0).all()
    assert (average.tensors["weight"] == 1.0).all()
