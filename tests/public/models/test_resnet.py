"""The ResNets: parameter counts from arithmetic, shortcuts, stems, initial weights, torchvision's weights."""

import pytest
import torch
import torchvision
from torch import nn

import vitlens
from tests.kit.tiny import images


def test_resnet20_has_its_parameters_and_layers():
    def convolution(channels: int, wider: int) -> int:
        return 9 * channels * wider + 2 * wider  # with the two numbers a channel of its batch norm

    stages = sum(
        convolution(before, width) + 5 * convolution(width, width) for before, width in ((16, 16), (16, 32), (32, 64))
    )
    model, maps = vitlens.load("resnet20@random"), torch.randn(2, 16, 5, 6)
    assert model.parameter_count() == convolution(3, 16) + stages + 64 * 10 + 10 == 269_722
    seen = vitlens.capture(model, images(), "stages.*")
    assert [tuple(value.shape[1:]) for value in seen.values()] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    shortcut = model.module.layer2[0].downsample(maps)  # every second pixel, and channels of zeros
    assert torch.equal(shortcut[:, :16], maps[:, :, ::2, ::2])
    assert (shortcut.shape, bool(shortcut[:, 16:].any())) == ((2, 32, 3, 3), False)


@pytest.mark.parametrize("name", ["resnet20", "resnet18"])
def test_convolutions_begin_as_he_says(name):
    model = vitlens.load(f"{name}@random")
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == (19 if name == "resnet20" else 20)
    for part in convolutions[:3]:
        fan_out = part.out_channels * part.kernel_size[0] ** 2
        assert part.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_small_images_keep_their_pixels_and_large_ones_get_torchvisions_model(tmp_path):
    theirs, rows = torchvision.models.resnet18(num_classes=7).eval(), {}
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    for size in (63, 64):
        model = vitlens.load("resnet18@random", image_size=(size, size + 8))
        model.module.layer1.register_forward_pre_hook(lambda _m, seen, size=size: rows.update({size: seen[0].shape[2]}))
        assert model(images((size, size + 8))).shape == (2, 10)
    assert rows == {63: 63, 64: 16}
    model = vitlens.load("resnet18", weights=tmp_path / "w.pth", image_size=64)
    with torch.no_grad():
        assert torch.equal(model(images((64, 64))), theirs(model.prepare(images((64, 64)))))
