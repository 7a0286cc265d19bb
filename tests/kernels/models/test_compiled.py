"""Presets compiled by torch.compile; a warning of it is an error here."""

import re

import pytest
import torch

import vitlens
from vitlens.models.model import trainable
from vitlens.names import PRESETS

# the first preset of each family is its smallest
FAMILIES = {re.split(r"[-\d]", name)[0]: name for name in reversed(PRESETS)}


@pytest.fixture(autouse=True)
def _no_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FAMILIES.values())
def test_a_compiled_model_is_one_graph_and_computes_the_same(name):
    model = vitlens.load(f"{name}@random", device="cpu")
    images = torch.rand(2, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    expected = model(images)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), expected)


def test_a_training_step_is_one_graph_inside_the_turn_of_its_thread():
    model = vitlens.load("vit-micro@random", device="cpu")
    images = torch.rand(2, 3, *model.input_size, generator=torch.Generator().manual_seed(0))
    with trainable(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(images).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
