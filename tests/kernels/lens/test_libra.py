"""LibraGrad's backward rules: logits unchanged, and FullGrad-completeness."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.kit.tiny import timm_model, torchvision_vit
from vitlens.lens.libra import LibraMode


def full_gradient(module: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a logit, and input · gradient plus parameter · gradient of every added parameter."""
    pixels = pixels.clone().requires_grad_()
    ends = ("bias", "_token", "pos_embed", "pos_embedding")
    added = [parameter for name, parameter in module.named_parameters() if name.endswith(ends)]
    logit = module(pixels)[:, 0].sum()
    gradients = torch.autograd.grad(logit, [pixels, *added], allow_unused=True)
    parts = [
        (value * gradient).sum()
        for value, gradient in zip((pixels, *added), gradients)
        if gradient is not None
    ]
    return logit.detach(), torch.stack(parts).sum().detach()


@pytest.mark.parametrize(
    "build", [lambda: timm_model("vit_tiny_patch16_224", depth=3), torchvision_vit]
)
def test_the_gradients_of_a_vit_sum_to_its_logit(build):
    """Also where attention is nn.MultiheadAttention."""
    module = build().module.double().requires_grad_()
    pixels = torch.rand(
        2, 3, 32, 32, dtype=torch.double, generator=torch.Generator().manual_seed(1)
    )
    plain = full_gradient(module, pixels)
    with LibraMode():
        logit, total = full_gradient(module, pixels)
    assert abs(logit - plain[0]) < 1e-8
    assert abs(total - logit) < 1e-8 * max(1.0, abs(float(logit)))
    assert abs(plain[1] - plain[0]) > 1e-3 * abs(float(logit)), (
        "plain gradients would be complete, too"
    )


SWIGLU, QUICK = (lambda x: F.silu(2 * x) * (0.5 * x)), (lambda x: x * torch.sigmoid(1.702 * x))
UNIT, DIVIDED = (lambda x: F.normalize(x, dim=0)), (lambda x: x / x.norm())


@pytest.mark.parametrize(
    "function", [F.gelu, F.silu, F.hardswish, F.mish, F.relu, SWIGLU, QUICK, UNIT, DIVIDED]
)
def test_an_activation_is_its_gate_times_its_input_and_a_product_counts_once(function):
    """Also where it is divided by its length."""
    tokens = torch.tensor([-2.0, -0.5, 0.0, 0.7, 3.0], requires_grad=True)
    with LibraMode():
        value = function(tokens)
    (gradient,) = torch.autograd.grad(value.sum(), tokens)
    torch.testing.assert_close(tokens * gradient, value)
    assert torch.equal(value, function(tokens))


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.LayerNorm((4, 6)), nn.RMSNorm(6)])
def test_a_norm_divides_by_a_constant_and_its_weights_keep_their_gradient(norm):
    tokens = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = norm(tokens)
    with LibraMode():
        value = norm(tokens)
    assert torch.equal(value, plain)
    gradients = torch.autograd.grad((value * torch.arange(6.0)).sum(), [tokens, norm.weight])
    expected = torch.autograd.grad((plain * torch.arange(6.0)).sum(), [tokens, norm.weight])
    torch.testing.assert_close(
        (tokens * gradients[0]).sum(), (value * torch.arange(6.0)).sum(), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(gradients[1], expected[1], rtol=1e-4, atol=1e-5)
