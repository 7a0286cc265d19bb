"""What a model is made of: the layout read from its modules is that of the attention it computes."""

import pytest
import timm
import torch
import torchvision
from torch import nn

import vitlens
from tests.kit.models.tiny import images, model_of, shaken, timm_model, torchvision_swin
from vitlens.errors import UnsupportedError


def seen_by(model: vitlens.Model) -> list[object]:
    """Where each attention call of an image is, in order."""
    sites = []
    vitlens.observe(model, images(model.input_size, batch=1), lambda call: sites.append(call.site))
    return sites


def hybrid() -> vitlens.Model:
    shape = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}
    return model_of(shaken(lambda: timm.create_model("vit_tiny_r_s16_p8_224", **shape), scale=0.01), size=(64, 64))


def around_encoder(name: str, **sizes: int) -> vitlens.Model:
    shape = {"img_size": (32, 48), "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5, "patch_size": 8}
    return timm_model(name, **shape, **sizes)


GEMMA = {"head_dim": 16, "intermediate_size": 64, "position_embedding_size": 16}
PLACED = {  # grid, patch, prefix and readout
    "patches cut from the map of a CNN": (hybrid, (2, 2), (32, 32), ("cls",), "cls"),
    "a classifier around an encoder": (lambda: around_encoder("deepseek_vit_412m"), (4, 6), (8, 8), (), "mean"),
    "another": (lambda: around_encoder("gemma4_vit_167m", **GEMMA), (4, 6), (8, 8), (), "mean"),
}


@pytest.mark.parametrize("case", PLACED)
def test_patches_of_an_inner_module_are_placed(case):
    build, grid, patch, prefix, readout = PLACED[case]
    model = build()
    assert (model.layout.grid, model.layout.patch_size, model.layout.prefix) == (grid, patch, prefix)
    assert model.anatomy.readout == readout
    assert {site.keys for site in seen_by(model)} == {grid[0] * grid[1] + len(prefix)}


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (lambda: vitlens.load("resnet20@random"), 9),
        (lambda: model_of(torchvision.models.resnet18(num_classes=5)), 8),
        (lambda: model_of(timm.create_model("resnet18", num_classes=5)), 8),
    ],
    ids=["resnet20", "torchvision", "timm"],
)
def test_a_cnn_has_its_residual_blocks(build, blocks):
    model = build()
    assert (model.anatomy.family, model.anatomy.layout, model.anatomy.readout) == ("cnn", None, None)
    assert len(model.anatomy.blocks) == blocks
    assert len({type(model.module.get_submodule(name)) for name in model.anatomy.blocks}) == 1


def test_blocks_are_in_forward_order():
    model, order = timm_model("swin_tiny_patch4_window7_224"), []
    for name in model.anatomy.blocks:
        model.module.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name))
    model(images())
    assert tuple(order) == model.anatomy.blocks
    assert len(order) == 4


@pytest.mark.parametrize(
    ("build", "family"),
    [
        (torchvision_swin, "windowed"),
        (lambda: model_of(nn.Sequential(nn.Conv2d(3, 5, 32), nn.Flatten())), "cnn"),
        (lambda: model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))), "other"),
    ],
)
def test_a_model_without_a_sequence_of_tokens_says_so(build, family):
    model = build()
    assert model.anatomy.family == family
    assert bool(model.anatomy.blocks) == (family == "windowed")
    with pytest.raises(UnsupportedError, match=family):
        _ = model.layout


# ---- Model: pixels in, normalisation inside, its own size


def linear(size: tuple[int, int] = (8, 8)) -> vitlens.Model:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * size[0] * size[1], 2))
    return vitlens.wrap(module, image_size=size, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))


def test_normalisation_is_the_first_step():
    model, batch = linear(), images((8, 8))
    expected = torch.stack([(batch[:, c] - (0.1, 0.2, 0.3)[c]) / (0.5, 0.25, 2.0)[c] for c in range(3)], 1)
    torch.testing.assert_close(model.prepare(batch), expected)
    torch.testing.assert_close(model(batch), model.module(expected))


@pytest.mark.parametrize("size", [(20, 30), (4, 4)])
def test_other_sizes_are_resized_with_a_gradient(size):
    model, batch = linear(), images(size).requires_grad_()
    small = nn.functional.interpolate(batch, size=(8, 8), mode="bilinear", antialias=True)
    torch.testing.assert_close(model.prepare(batch), model.prepare(small))
    assert torch.autograd.grad(model(batch).sum(), batch)[0].abs().sum() > 0


def test_a_distilled_model_in_training_mode_answers_with_one():
    model = timm_model("deit_tiny_distilled_patch16_224").train()
    model.module.set_distilled_training(True)
    first, second = model.module(model.prepare(images()))
    torch.testing.assert_close(model(images()), (first + second) / 2)
