"""The ResNets: parameter counts from arithmetic, shortcuts, stems, torchvision's weights."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

from vitlens.models.resnet import PaddedShortcut, build_resnet


def pictures(height: int = 32, width: int = 32) -> Tensor:
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_resnet20_has_its_parameters_and_layers() -> None:
    def convolution(channels: int, wider: int) -> int:
        return 9 * channels * wider + 2 * wider  # with the two numbers a channel of its batch norm

    stages = sum(
        convolution(before, width) + 5 * convolution(width, width) for before, width in ((16, 16), (16, 32), (32, 64))
    )
    model = build_resnet("resnet20", classes=10, image_size=(32, 32))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == convolution(3, 16) + stages + 64 * 10 + 10 == 269_722
    assert len([module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]) == 20
    shapes = {}
    for name in ("layer1", "layer2", "layer3"):
        getattr(model, name).register_forward_hook(lambda _m, _i, out, name=name: shapes.update({name: out.shape[1:]}))
    model(pictures())
    assert shapes == {"layer1": (16, 32, 32), "layer2": (32, 16, 16), "layer3": (64, 8, 8)}


def test_padded_shortcut_keeps_every_second_pixel() -> None:
    maps = torch.randn(2, 3, 5, 6)
    shortcut = PaddedShortcut(4)(maps)
    assert shortcut.shape == (2, 7, 3, 3)
    assert torch.equal(shortcut[:, :3], maps[:, :, ::2, ::2])
    assert (shortcut[:, 3:] == 0).all()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_small_images_keep_their_pixels_and_large_ones_get_torchvisions_model(name: str) -> None:
    shapes = {}
    for size in (32, 63, 64):
        model = build_resnet(name, classes=7, image_size=(size, size + 8)).eval()
        model.layer1.register_forward_pre_hook(lambda _m, inputs, size=size: shapes.update({size: inputs[0].shape[-2]}))
        with torch.no_grad():
            assert model(pictures(size, size + 8)).shape == (1, 7)
    assert shapes == {32: 32, 63: 63, 64: 16}
    theirs = getattr(torchvision.models, name)(weights=None, num_classes=7).eval()
    model.load_state_dict(theirs.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(model(pictures(64, 64)), theirs(pictures(64, 64)))
