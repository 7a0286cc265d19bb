"""The gradient of a logit with respect to the weights, beside autograd's own of attention spelled out."""

import pytest
import torch
from torch import Tensor

from tests.kit.uses import state_of
from tests.lens.tiny import EACH_FAMILY, images, ours, shared_model
from vitlens.analysis.attention.chain import chained, check_targets
from vitlens.errors import InputError, LensError
from vitlens.lens.capture import capture_attention
from vitlens.models.model import Model


def explicit_gradients(model: Model, batch: Tensor, targets: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Weights of every layer and ∂logit/∂weights, the model's attention made of matrix products that autograd sees."""
    captured = capture_attention(model, batch, explicit=True)
    logits = captured.logits
    chosen = logits.argmax(-1) if targets is None else targets
    target_logits = [logits[image, int(chosen[image])] for image in range(len(logits))]
    gradients = torch.autograd.grad(torch.stack(target_logits).sum(), captured.layers)
    return [weights.detach() for weights in captured.layers], list(gradients)


def close(found: Tensor, expected: Tensor, *, rtol: float = 1e-4) -> None:
    """Equal to rtol, numbers near zero to the same part of the largest one; and not empty."""
    largest = expected.abs().max().item()
    assert largest > 0
    torch.testing.assert_close(found, expected, atol=rtol * largest, rtol=rtol)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_fused_gradients_are_autograds_of_explicit_attention(name):
    model = shared_model(name)
    batch, targets = images(model.input_size, batch=3), torch.tensor([4, 0, 2])
    chain = chained(model, batch, targets=targets, gradient=True)
    logits, calls = chain.logits, chain.calls
    weights, gradients = explicit_gradients(model, batch, targets)
    assert [call.site.layer for call in calls] == list(range(len(weights)))
    for call, own, expected in zip(calls, weights, gradients):
        found = call.weight_gradient()
        assert found is not None
        assert not found.requires_grad
        torch.testing.assert_close(call.weights(), own, atol=1e-5, rtol=1e-4)
        close(found, expected)
    assert not logits.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(logits, model(batch), atol=1e-5, rtol=1e-5)


def test_targets():
    logits = torch.tensor([[0.1, 0.9, 0.0], [2.0, 1.0, -1.0]])
    assert check_targets(None, logits).tolist() == [1, 0]
    assert check_targets(torch.tensor([2, 2]), logits).tolist() == [2, 2]
    for wrong in (-1, 3):
        with pytest.raises(InputError, match=f"classes from 0 to 2, found {wrong}"):
            check_targets(torch.tensor([0, wrong]), logits)


def test_a_layer_that_has_no_part_in_the_logit_is_named():
    model = ours()
    model.module.blocks[0].register_forward_hook(lambda _module, _inputs, output: output.detach())
    model.requires_grad_(True)
    before = state_of(model)
    with pytest.raises(LensError, match=r"found none in 'blocks.0.attn'"):
        chained(model, images((32, 48)), gradient=True)
    assert state_of(model) == before
