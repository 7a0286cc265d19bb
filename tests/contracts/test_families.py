"""What the lens promises for every family: unchanged logits, all layers, rows that sum to 1, images on their own."""

import pytest
import torch

from tests.lens.tiny import CHAINED, FAMILIES, images
from vitlens.analysis.attention.methods import rollout
from vitlens.analysis.attention.weights import attention_maps
from vitlens.lens.capture import capture_attention
from vitlens.models import loading
from vitlens.models.model import Model

EXPECTED = {  # prefix, readout: from the papers, not from the code
    "ours": (("cls",), "cls"),
    "ours-unfused": (("cls",), "cls"),
    "vit": (("cls",), "cls"),
    "vit-mean": (("register",), "mean"),
    "deit-distilled": (("cls", "distillation"), "cls+distillation"),
    "deit3": (("cls",), "cls"),
    "beit": (("cls",), "mean"),
    "eva02": (("cls",), "mean"),
    "dinov2-registers": (("cls",) + ("register",) * 4, "cls"),
    "dinov3": (("cls",) + ("register",) * 4, "mean"),
    "siglip": ((), "pool"),
    "perception-encoder": (("cls",), "pool"),
    "cait": ((), "pool"),
    "torchvision-vit": (("cls",), "cls"),
}
WHOLE = {  # the full-size names of issue 2, their own sizes
    "deit": "timm:deit_tiny_patch16_224",
    "deit-distilled": "timm:deit_tiny_distilled_patch16_224",
    "deit3": "timm:deit3_small_patch16_224",
    "beit": "timm:beit_base_patch16_224",
    "eva02": "timm:eva02_tiny_patch14_224",
    "dinov2-registers": "timm:vit_small_patch14_reg4_dinov2",
    "dinov3": "timm:vit_small_patch16_dinov3",
    "siglip": "timm:vit_base_patch16_siglip_224",
    "cait": "timm:cait_xxs24_224",
    "swin": "timm:swin_tiny_patch4_window7_224",
    "swinv2": "timm:swinv2_tiny_window8_256",
    "torchvision-vit": "torchvision:vit_b_16",
    "torchvision-swin": "torchvision:swin_t",
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, Model]:
    return request.param, FAMILIES[request.param]()


def check_logits(name: str, model: Model, batch: torch.Tensor) -> None:
    with torch.no_grad():
        plain = model(batch)
    observed = capture_attention(model, batch)
    if name == "torchvision-vit":  # unobserved inference takes nn.MultiheadAttention's other kernel
        torch.testing.assert_close(observed.logits, plain, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(observed.logits, plain)
    modules = list(model.anatomy.attention_modules)
    assert [site.module for site in observed.sites] == modules
    assert [site.layer for site in observed.sites] == list(range(len(modules)))
    for weights in observed.layers:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0)
        assert (weights >= 0).all()


def test_logits_are_unchanged_and_every_layer_is_seen(family):
    name, model = family
    check_logits(name, model, images(model.input_size))


def test_anatomy(family):
    name, model = family
    anatomy = model.anatomy
    assert all(model.module.get_submodule(block) for block in anatomy.blocks)
    assert len(anatomy.blocks) == (4 if name in ("cait", "swin", "swinv2", "torchvision-swin", "our-swin") else 2)
    if name not in EXPECTED:
        assert (anatomy.family, anatomy.layout, anatomy.readout) == ("windowed", None, "mean")
        return
    assert anatomy.family == "vit"
    assert (anatomy.layout.prefix, anatomy.readout) == EXPECTED[name]
    assert anatomy.layout.grid == ((4, 3) if name.startswith("ours") else (4, 4))


def test_an_image_does_not_depend_on_its_batch_mates(family):
    name, model = family
    batch = images(model.input_size, batch=3)
    tolerance = 1e-5 if name == "swinv2" else 1e-6  # cosine scores times up to 100: more float noise
    together, alone = capture_attention(model, batch), capture_attention(model, batch[1:2])
    torch.testing.assert_close(alone.logits[0], together.logits[1], atol=1e-5, rtol=1e-5)
    for one, layer in zip(alone.layers, together.layers):
        own = layer.unflatten(0, (3, -1))[1]  # windows of an image stand together
        torch.testing.assert_close(one, own, atol=tolerance, rtol=0)
    for one_map, maps in zip(attention_maps(model, batch[1:2]), attention_maps(model, batch)):
        torch.testing.assert_close(one_map.maps[0], maps.maps[1], atol=tolerance, rtol=0)
    if model.anatomy.family == "vit":
        torch.testing.assert_close(rollout(model, batch[1:2])[0], rollout(model, batch)[1], atol=1e-6, rtol=0)


def test_explicit_attention_gives_the_same_logits_and_gradients_of_every_layer(family):
    name, model = family
    batch = images(model.input_size)
    plain, explicit = capture_attention(model, batch), capture_attention(model, batch, explicit=True)
    torch.testing.assert_close(explicit.logits.detach(), plain.logits, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(explicit.logits[:, 1].sum(), explicit.layers)
    assert len(gradients) == len(plain.layers)
    for weights, gradient, same in zip(explicit.layers, gradients, plain.layers):
        torch.testing.assert_close(weights.detach(), same, atol=1e-5, rtol=1e-5)
        assert gradient.shape == weights.shape
        assert gradient.abs().sum() > 0, name


def test_every_family_has_a_rollout(family):
    """Of windows over the patches of the first stage, where nothing is left to a prefix."""
    name, model = family
    batch = images(model.input_size)
    maps = rollout(model, batch)
    assert (maps >= 0).all()
    if name in CHAINED:
        assert maps.shape == (2, *model.layout.grid)
        assert (maps.sum((1, 2)) <= 1 + 1e-5).all()
    else:
        assert maps.shape == (2, 16, 16)
        torch.testing.assert_close(maps.sum((1, 2)), torch.ones(2), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_model_under_observation(name):
    model = loading.load(WHOLE[name], random_weights=True)
    check_logits(name, model, images(model.input_size, batch=1))
