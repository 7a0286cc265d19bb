"""The ResNets: parameter counts from arithmetic, shortcuts, stems, torchvision's weights."""

import pytest
import torch
import torchvision
from torch import Tensor, nn

from vitlens.models.resnet import CifarResNet, PaddedShortcut, build_resnet


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def pictures(height: int = 32, width: int = 32, *, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_resnet20_has_its_parameters() -> None:
    def convolution(channels: int, wider: int) -> int:
        return 9 * channels * wider + 2 * wider  # with the two numbers a channel of its batch norm

    stages = sum(
        convolution(before, width) + 5 * convolution(width, width) for before, width in ((16, 16), (16, 32), (32, 64))
    )
    assert parameters(CifarResNet(3, 10)) == convolution(3, 16) + stages + 64 * 10 + 10 == 269_722


def test_resnet20_is_twenty_layers_deep() -> None:
    model = CifarResNet(3, 10)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20
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


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50"])
@pytest.mark.parametrize("batch", [1, 2])
def test_small_images_give_logits(name: str, batch: int) -> None:
    torch.manual_seed(0)
    model = build_resnet(name, classes=7, image_size=(32, 24)).eval()
    logits = model(pictures(32, 24, batch=batch))
    assert logits.shape == (batch, 7)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_small_images_keep_their_pixels(name: str) -> None:
    shapes = {}
    for size in (32, 63, 64):
        model = build_resnet(name, classes=10, image_size=(size, size)).eval()
        model.layer1.register_forward_pre_hook(lambda _m, inputs, size=size: shapes.update({size: inputs[0].shape[-1]}))
        with torch.no_grad():
            model(pictures(size, size, batch=1))
    assert shapes == {32: 32, 63: 63, 64: 16}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_large_images_get_torchvisions_model(name: str) -> None:
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, name)(weights=None, num_classes=10).eval()
    ours = build_resnet(name, classes=10, image_size=(64, 64)).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(ours(pictures(64, 64, batch=1)), theirs(pictures(64, 64, batch=1)))


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50"])
def test_same_seed_same_weights(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(4)
        states.append(build_resnet(name, classes=3, image_size=(32, 32)).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_resnet20_learns() -> None:
    torch.manual_seed(0)
    model, images, labels = CifarResNet(3, 4), pictures(16, 16, batch=8), torch.arange(8) % 4
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
