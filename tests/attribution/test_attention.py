"""Attention as attribution is what the functions of its name compute."""

import pytest
import torch

from tests.analysis.attention.ways import gradient_rollout
from tests.lens.tiny import images, shared_model
from vitlens.analysis.attention.methods import relevance, rollout
from vitlens.analysis.attention.weights import attention_maps
from vitlens.attribution.explain import explain

TARGETS = torch.tensor([1, 4])


@pytest.mark.parametrize("name", ["ours", "dinov2-registers", "swin"])
def test_each_is_the_function_of_its_name(name):
    model = shared_model(name)
    batch = images(model.input_size)
    expected = {
        "rollout": rollout(model, batch),
        "relevance": relevance(model, batch, targets=TARGETS),
        "gradient-rollout": gradient_rollout(model, batch, targets=TARGETS),
        "attention": attention_maps(model, batch)[-1].maps.mean(1),
    }
    for method, maps in expected.items():
        explained = explain(model, batch, targets=TARGETS, method=method)
        torch.testing.assert_close(explained, maps, atol=1e-7, rtol=1e-5)
