"""The ResNets: parameter counts from arithmetic, shortcuts, stems, torchvision's weights."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

import vitlens


def pictures(height: int = 32, width: int = 32) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_resnet20_has_its_parameters_and_layers():
    def convolution(channels: int, wider: int) -> int:
        return 9 * channels * wider + 2 * wider  # with the two numbers a channel of its batch norm

    stages = sum(
        convolution(before, width) + 5 * convolution(width, width) for before, width in ((16, 16), (16, 32), (32, 64))
    )
    model = vitlens.load("resnet20@random")
    assert model.parameter_count() == convolution(3, 16) + stages + 64 * 10 + 10 == 269_722
    assert len([module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]) == 20
    seen = vitlens.capture(model, pictures(), "stages.*")
    assert [tuple(value.shape[1:]) for value in seen.values()] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_a_shortcut_keeps_every_second_pixel_and_adds_channels_of_zeros():
    module, maps = vitlens.load("resnet20@random").module, torch.randn(2, 16, 5, 6)
    shortcut = module.layer2[0].downsample(maps)
    assert shortcut.shape == (2, 32, 3, 3)
    assert torch.equal(shortcut[:, :16], maps[:, :, ::2, ::2])
    assert (shortcut[:, 16:] == 0).all()


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_small_images_keep_their_pixels_and_large_ones_get_torchvisions_model(name: str, tmp_path):
    theirs = getattr(torchvision.models, name)(num_classes=7).eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    rows = {}
    for size in (63, 64):
        model = vitlens.load(f"{name}@random", image_size=(size, size + 8))
        model.module.layer1.register_forward_pre_hook(lambda _m, seen, size=size: rows.update({size: seen[0].shape[2]}))
        assert model(pictures(size, size + 8)).shape == (1, 10)
    assert rows == {63: 63, 64: 16}
    model = vitlens.load(name, weights=tmp_path / "w.pth", image_size=64)
    with torch.no_grad():
        assert torch.equal(model(pictures(64, 64)), theirs(model.prepare(pictures(64, 64))))
