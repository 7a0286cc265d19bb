"""LibraGrad's backward rules: logits unchanged, and FullGrad-completeness, which plain gradients lack."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.lens.tiny import images, shaken, torchvision_vit
from vitlens.lens.libra import LibraMode, libra_gradients
from vitlens.models.model import Model


def full_gradient(module: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """A logit, and input · gradient plus, of every parameter that is added (not multiplied), parameter · gradient."""
    images = images.clone().requires_grad_()
    added = [
        parameter
        for name, parameter in module.named_parameters()
        if name.rsplit(".", 1)[-1] in ("bias", "cls_token", "pos_embed", "positions", "position")
    ]
    logit = module(images)[:, 0].sum()
    gradients = torch.autograd.grad(logit, [images, *added], allow_unused=True)
    parts = [(value * gradient).sum() for value, gradient in zip((images, *added), gradients) if gradient is not None]
    return logit.detach(), torch.stack(parts).sum().detach()


def test_the_gradients_of_a_vit_sum_to_its_logit() -> None:
    shape = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    module = shaken(lambda: timm.create_model("vit_tiny_patch16_224", **shape)).double()
    images = torch.rand(2, 3, 32, 32, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    plain = full_gradient(module, images)
    with LibraMode():
        logit, total = full_gradient(module, images)
    assert abs(total - logit) < 1e-8 * max(1.0, abs(float(logit)))
    assert abs(plain[1] - plain[0]) > 1e-3 * abs(float(logit)), "plain gradients would be complete, too"


@pytest.mark.parametrize("activation", [F.gelu, F.silu, F.hardswish, F.mish, F.relu])
def test_an_activation_is_its_gate_times_its_input(activation: object) -> None:
    tokens = torch.tensor([-2.0, -0.5, 0.0, 0.7, 3.0], requires_grad=True)
    with LibraMode():
        value = activation(tokens)  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(value.sum(), tokens)
    torch.testing.assert_close(tokens * gradient, value)
    assert torch.equal(value, activation(tokens))  # type: ignore[operator]


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.LayerNorm((4, 6)), nn.RMSNorm(6)])
def test_a_norm_divides_by_a_constant(norm: nn.Module) -> None:
    tokens = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with LibraMode():
        value = norm(tokens)
    (gradient,) = torch.autograd.grad((value * torch.arange(6.0)).sum(), tokens)
    torch.testing.assert_close((tokens * gradient).sum(), (value * torch.arange(6.0)).sum(), rtol=1e-4, atol=1e-4)
    assert torch.equal(value, norm(tokens))


def test_a_product_of_two_computed_tensors_counts_once() -> None:
    """SwiGLU: silu(a x) · (b x), whose plain gradient explains the product twice."""
    tokens = torch.tensor([0.3, -1.2, 2.0], requires_grad=True)
    with LibraMode():
        value = F.silu(2 * tokens) * (0.5 * tokens)
    (gradient,) = torch.autograd.grad(value.sum(), tokens)
    torch.testing.assert_close(tokens * gradient, value)
    with LibraMode():
        quick_gelu = tokens * torch.sigmoid(1.702 * tokens)
    (gradient,) = torch.autograd.grad(quick_gelu.sum(), tokens)
    torch.testing.assert_close(tokens * gradient, quick_gelu)


def test_the_logits_are_those_of_the_plain_model_and_parameters_are_restored() -> None:
    model: Model = vitlens.load("vit-digits")
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model.module.requires_grad_(True)
    plain = model(images)
    with libra_gradients(model):
        assert not any(parameter.requires_grad for parameter in model.module.parameters())
        assert torch.equal(model(images.clone().requires_grad_()), plain)
    assert all(parameter.requires_grad for parameter in model.module.parameters())
    with pytest.raises(ZeroDivisionError), libra_gradients(model):
        raise ZeroDivisionError
    assert all(parameter.requires_grad for parameter in model.module.parameters())


def test_gradients_inside_multihead_attention_are_those_of_its_formula() -> None:
    """torchvision's ViT, and the same weights with attention as a plain call of the kernel."""
    model = torchvision_vit()
    module = model.module

    def by_formula(attention: nn.MultiheadAttention) -> Any:
        def forward(tokens: Tensor, *_args: object, **_options: object) -> tuple[Tensor, None]:
            projected = F.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
            heads = projected.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
            joined = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            return F.linear(joined, attention.out_proj.weight, attention.out_proj.bias), None

        return forward

    def gradient() -> Tensor:
        pixels = images().requires_grad_()
        return torch.autograd.grad(model(pixels)[:, 1].sum(), pixels)[0]

    def both() -> tuple[Tensor, Tensor]:
        plain = gradient()
        with libra_gradients(model):
            return plain, gradient()

    plain, libra = both()
    for attention in module.modules():
        if isinstance(attention, nn.MultiheadAttention):
            attention.forward = by_formula(attention)  # type: ignore[method-assign]
    for found, expected in zip((plain, libra), both()):
        assert (found - expected).norm() < 1e-5 * expected.norm()
    assert (libra - plain).norm() > 0.1 * plain.norm()
