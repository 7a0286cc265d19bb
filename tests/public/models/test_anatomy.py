"""The parts of a model, read from its modules; and Model: pixels, normalisation, input size."""

import re

import pytest
import timm
import torch
import torchvision
from torch import nn

import vitlens
from tests.kit.tiny import SWIN, images, model_of, shaken, timm_model, torchvision_swin
from tests.kit.windows import WINDOWED
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.errors import UnsupportedError

SHAPE = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def hybrid() -> vitlens.Model:
    build = lambda: timm.create_model("vit_tiny_r_s16_p8_224", img_size=64, **SHAPE)  # noqa: E731
    return model_of(shaken(build, scale=0.01), size=(64, 64))


def around_encoder() -> vitlens.Model:
    if not timm.is_model("deepseek_vit_412m"):
        pytest.skip("this timm has no model with a classifier around an encoder")
    return timm_model("deepseek_vit_412m", img_size=(32, 48), patch_size=8, **SHAPE)


PLACED = {  # grid, patch, prefix and readout
    "patches cut from the map of a CNN": (hybrid, (2, 2), (32, 32), ("cls",), "cls"),
    "a classifier around an encoder": (around_encoder, (4, 6), (8, 8), (), "mean"),
}


@pytest.mark.parametrize("case", PLACED)
def test_patches_of_an_inner_module_are_placed(case):
    build, grid, patch, prefix, readout = PLACED[case]
    model = build()
    assert (model.layout.grid, model.layout.patch_size, model.layout.prefix) == (
        grid,
        patch,
        prefix,
    )
    assert model.anatomy.readout == readout
    assert {layer.shape[-1] for layer in vitlens.attention(model, images(model.input_size))} == {
        grid[0] * grid[1] + len(prefix)
    }


CNNS = {
    9: lambda: vitlens.load("resnet20@random"),
    8: lambda: model_of(torchvision.models.resnet18(num_classes=5)),
}


@pytest.mark.parametrize("blocks", CNNS)
def test_a_cnn_has_its_residual_blocks(blocks):
    model = CNNS[blocks]()
    assert (model.anatomy.family, model.anatomy.layout, model.anatomy.readout) == (
        "cnn",
        None,
        None,
    )
    assert len(model.anatomy.blocks) == blocks
    assert len({type(model.module.get_submodule(name)) for name in model.anatomy.blocks}) == 1
    with pytest.raises(UnsupportedError, match="cnn"):
        _ = model.layout


def test_blocks_of_windows_and_grids_are_the_modules_that_hold_their_attention():
    layers = [
        f"blocks.{stage}.layers.0.layers.{kind}_attention"
        for stage in (0, 1)
        for kind in ("window", "grid")
    ]
    assert WINDOWED["torchvision's maxvit"]().anatomy.blocks == tuple(layers)


WITHOUT = {
    "windowed": torchvision_swin,
    "other": lambda: model_of(nn.Sequential(nn.Flatten(), nn.Linear(3072, 5))),
}


@pytest.mark.parametrize("family", WITHOUT)
def test_a_model_without_a_sequence_of_tokens_says_so(family):
    model = WITHOUT[family]()
    assert (model.anatomy.family, bool(model.anatomy.blocks)) == (family, family == "windowed")
    with pytest.raises(UnsupportedError, match=family):
        _ = model.layout


@pytest.mark.parametrize("size", [(20, 30), (4, 4)])
def test_pixels_are_resized_then_normalised_with_a_gradient(size):
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    mean = (0.1, 0.2, 0.3)
    std = (0.5, 0.25, 2.0)
    model = vitlens.wrap(module, image_size=(8, 8), mean=mean, std=std)
    batch = images(size).requires_grad_()
    small = nn.functional.interpolate(batch, size=(8, 8), mode="bilinear", antialias=True)
    expected = torch.stack([(small[:, c] - mean[c]) / std[c] for c in range(3)], 1)
    torch.testing.assert_close(model.prepare(batch), expected)
    torch.testing.assert_close(model(batch), module(expected))
    assert torch.autograd.grad(model(batch).sum(), batch)[0].abs().sum() > 0


def test_a_distilled_model_in_training_mode_answers_with_one():
    model = timm_model("deit_tiny_distilled_patch16_224").train()
    model.module.set_distilled_training(True)
    first, second = model.module(model.prepare(images()))
    torch.testing.assert_close(model(images()), (first + second) / 2)


# ---- our ResNets: parameter counts from arithmetic, shortcuts, stems, initial weights,
# torchvision's weights


def test_resnet20_has_its_parameters_and_layers():
    def convolution(channels: int, wider: int) -> int:
        return 9 * channels * wider + 2 * wider  # with the two numbers a channel of its batch norm

    stages = sum(
        convolution(before, width) + 5 * convolution(width, width)
        for before, width in ((16, 16), (16, 32), (32, 64))
    )
    model = vitlens.load("resnet20@random")
    maps = torch.randn(2, 16, 5, 6)
    assert model.parameter_count() == convolution(3, 16) + stages + 64 * 10 + 10 == 269_722
    seen = vitlens.capture(model, images(), "stages.*")
    assert [tuple(value.shape[1:]) for value in seen.values()] == [
        (16, 32, 32),
        (32, 16, 16),
        (64, 8, 8),
    ]
    shortcut = model.module.layer2[0].downsample(maps)  # every second pixel, and channels of zeros
    assert torch.equal(shortcut[:, :16], maps[:, :, ::2, ::2])
    assert (shortcut.shape, bool(shortcut[:, 16:].any())) == ((2, 32, 3, 3), False)


def test_convolutions_begin_as_he_says():
    for name, count in (("resnet20", 19), ("resnet18", 20)):
        convolutions = [
            part for part in vitlens.load(f"{name}@random").modules() if isinstance(part, nn.Conv2d)
        ]
        assert len(convolutions) == count
        for part in convolutions[:3]:
            fan_out = part.out_channels * part.kernel_size[0] ** 2
            assert part.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_small_images_keep_their_pixels_and_large_ones_get_torchvisions_model(tmp_path):
    theirs = torchvision.models.resnet18(num_classes=7).eval()
    rows = {}
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    for size in (63, 64):
        model = vitlens.load("resnet18@random", image_size=(size, size + 8))
        model.module.layer1.register_forward_pre_hook(
            lambda _m, seen, size=size: rows.update({size: seen[0].shape[2]})
        )
        assert model(images((size, size + 8))).shape == (2, 10)
    assert rows == {63: 63, 64: 16}
    model = vitlens.load("resnet18", weights=tmp_path / "w.pth", image_size=64)
    with torch.no_grad():
        assert torch.equal(model(images((64, 64))), theirs(model.prepare(images((64, 64)))))


def shown(model: vitlens.Model, name: str) -> str:
    """Return one line of a model's repr."""
    lines = [line.split(maxsplit=1) for line in repr(model).splitlines()[1:]]
    return dict(lines)[name]


def test_a_model_s_repr_counts_the_heads_of_all_its_blocks():
    swin = timm_model("swin_tiny_patch4_window7_224", **SWIN | {"num_heads": (4, 8)})
    assert [int(number) for number in re.findall(r"\d+", shown(swin, "blocks"))] == [4, 4, 8]
    vit = timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, **SHAPE)
    assert [int(number) for number in re.findall(r"\d+", shown(vit, "blocks"))] == [2, 2]


def test_a_model_without_classes_lists_the_methods_with_which_it_can_be_explained():
    shape = SHAPE | {"num_classes": 0, "img_size": 32, "patch_size": 8}
    build = lambda: timm.create_model("vit_tiny_patch16_224", **shape)  # noqa: E731
    model = model_of(shaken(build), classes=())
    listed = re.search(r"explain \((.*?)\)", shown(model, "supports"))[1].split(", ")
    refused = []
    for name, method in ATTRIBUTIONS.items():
        if method.slow:
            continue
        try:
            vitlens.explain(model, images(batch=1), method=name)
        except UnsupportedError:
            refused.append(name)
        else:
            assert name in listed
    assert not set(listed) & set(refused)
    assert len(refused) > len(listed) > 0
    assert "(" not in shown(vitlens.load("cnn-digits"), "supports")
