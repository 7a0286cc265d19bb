"""Promises of observation for every family: logits, all layers, rows, gradients, a rollout."""

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.tiny import CHAINED, FAMILIES, images, shared_model
from vitlens import Model

WHOLE = (  # models of full size, at their own
    "timm:deit_tiny_patch16_224",
    "timm:deit_tiny_distilled_patch16_224",
    "timm:deit3_small_patch16_224",
    "timm:beit_base_patch16_224",
    "timm:eva02_tiny_patch14_224",
    "timm:vit_small_patch14_reg4_dinov2",
    "timm:vit_small_patch16_dinov3",
    "timm:vit_base_patch16_siglip_224",
    "timm:cait_xxs24_224",
    "timm:swin_tiny_patch4_window7_224",
    "timm:swinv2_tiny_window8_256",
    "torchvision:vit_b_16",
    "torchvision:swin_t",
)
# other tokens before the patches, and what the classifier reads: from the papers, not from the code
READ = {
    "vit-mean": (("register",), "mean"),
    "deit-distilled": (("cls", "distillation"), "cls+distillation"),
    "beit": (("cls",), "mean"),
    "eva02": (("cls",), "mean"),
    "dinov2-registers": (("cls", *["register"] * 4), "cls"),
    "dinov3": (("cls", *["register"] * 4), "mean"),
    "siglip": ((), "pool"),
    "perception-encoder": (("cls",), "pool"),
    "cait": ((), "pool"),
}


def observed(model: Model, batch: Tensor, **how: bool) -> tuple[Tensor, list[str], list[Tensor]]:
    """Return the logits, and the module and the weights of every layer."""
    modules = []
    layers = []

    def keep(call: vitlens.AttentionCall) -> None:
        modules.append(call.site.module)
        layers.append(call.weights())

    return vitlens.observe(model, batch, keep, **how), modules, layers


def check(model: Model, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    with torch.no_grad():
        plain = model(batch)
    logits, modules, layers = observed(model, batch)
    # unobserved inference of nn.MultiheadAttention takes another kernel
    tolerance = (
        1e-5
        if any(isinstance(module, torch.nn.MultiheadAttention) for module in model.modules())
        else 0
    )
    torch.testing.assert_close(logits, plain, atol=tolerance, rtol=tolerance)
    assert modules == list(model.anatomy.attention_modules)
    for weights in layers:
        torch.testing.assert_close(
            weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0
        )
        assert (weights >= 0).all()
    return logits, layers


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_unchanged_every_layer_is_seen_with_its_gradient_and_no_image_depends_on_another(
    name,
):
    model = shared_model(name)
    batch = images(model.input_size, batch=3)
    together, layers = check(model, batch)
    alone, _, in_batch = observed(model, batch[1:2])
    torch.testing.assert_close(alone[0], together[1], atol=1e-5, rtol=1e-5)
    # cosine scores times up to 100: more float noise
    tolerance = 1e-5 if name == "swinv2" else 1e-6
    for one, layer in zip(in_batch, layers, strict=True):  # windows of an image stand together
        torch.testing.assert_close(one, layer.unflatten(0, (3, -1))[1], atol=tolerance, rtol=0)
    explicit, _, graph = observed(model, batch, explicit=True)
    torch.testing.assert_close(explicit.detach(), together, atol=1e-5, rtol=1e-5)
    for weights, gradient, same in zip(
        graph, torch.autograd.grad(explicit[:, 1].sum(), graph), layers, strict=True
    ):
        torch.testing.assert_close(weights.detach(), same, atol=1e-5, rtol=1e-5)
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_rollout_of_each_image_alone(name):
    """Of windows over the patches of the first stage, where nothing is left to a prefix."""
    model = shared_model(name)
    batch = images(model.input_size)
    maps = vitlens.rollout(model, batch)
    torch.testing.assert_close(vitlens.rollout(model, batch[1:])[0], maps[1], atol=1e-6, rtol=0)
    assert (maps >= 0).all()
    assert maps.shape == (2, *(model.layout.grid if name in CHAINED else (16, 16)))
    left = torch.ones(2) - maps.sum((1, 2))
    assert (left >= -1e-5).all()
    prefix, readout = READ.get(name, (("cls",), "cls")) if name in CHAINED else (None, "mean")
    assert name in CHAINED or (left <= 1e-5).all()
    assert (len(model.anatomy.blocks), model.anatomy.readout) == (
        2 if prefix or name == "siglip" else 4,
        readout,
    )
    assert prefix is None or model.layout.prefix == prefix


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_model_under_observation(name):
    model = vitlens.load(name, random_weights=True)
    check(model, images(model.input_size, batch=1))
