import pytest
import torch
from torch import nn

from tests.training.tiny import CLASSES, tiny_specimen
from vitlens.errors import InputError
from vitlens.models.zoo import untrained
from vitlens.training.optimiser import adamw, decay_groups


@pytest.mark.parametrize("preset", ["vit-mini", "resnet20"])
def test_matrices_decay_and_nothing_else(preset: str) -> None:
    overrides = {"registers": 2, "distillation": True} if preset == "vit-mini" else {}
    model = untrained(preset, classes=CLASSES, overrides=overrides).model.requires_grad_(True)
    decayed, undecayed = decay_groups(model)
    parameters = dict(model.named_parameters())
    assert sorted(decayed + undecayed) == sorted(parameters)
    assert all(name.endswith("weight") and parameters[name].ndim > 1 for name in decayed)
    kinds = {name.rpartition(".")[2] for name in undecayed}
    tokens = {"cls_token", "dist_token", "reg_token", "pos_embed"} if preset == "vit-mini" else set()
    assert kinds == {"bias", "weight"} | tokens
    assert all(parameters[name].ndim == 1 for name in undecayed if name.endswith("weight"))


def test_without_gradients_only_the_decayed_shrink() -> None:
    model = tiny_specimen().model.requires_grad_(True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = adamw(model, learning_rate=0.1, weight_decay=0.5, betas=(0.9, 0.999))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed, undecayed = decay_groups(model)
    after = dict(model.named_parameters())
    assert all(torch.allclose(after[name], before[name] * 0.95) for name in decayed)
    assert all(torch.equal(after[name], before[name]) for name in undecayed)


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert decay_groups(model) == (["weight"], [])
    with pytest.raises(InputError, match="found none"):
        adamw(model.requires_grad_(False), learning_rate=0.1, weight_decay=0.0, betas=(0.9, 0.999))
