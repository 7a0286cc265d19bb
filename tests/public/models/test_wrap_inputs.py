"""wrap judges a module by its input: three channels, or a line about what to put before it."""

import re

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import vitlens
from tests.kit.models.files import one_line
from tests.kit.models.handwritten import (
    DIM,
    PATCH,
    SIZE,
    SmallCNN,
    ViT,
    half,
    noise,
    seeded,
    wrapped,
)
from vitlens.errors import ModelError, UnsupportedError


def cnn(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


class Grey(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)


class LinearPatches(ViT):
    """Patches of any number of channels by a linear layer; a later convolution has others."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__(prefix=0)
        self.neck = nn.Conv2d(DIM, DIM, 3, padding=1, groups=DIM)
        self.stem = nn.Linear(channels * PATCH**2, DIM)

    def patches(self, x: Tensor) -> Tensor:
        parts = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 1, 4, 5)
        return self.stem(parts.flatten(3).flatten(1, 2))


class NeckFirst(ViT):
    """A convolution of its features is registered before the patch embedding."""

    def __init__(self) -> None:
        super().__init__(prefix=0)
        stem = self.stem
        del self.stem
        self.neck = nn.Conv2d(DIM, DIM, 1)
        self.stem = stem

    def patches(self, x: Tensor) -> Tensor:
        return self.neck(self.stem(x)).flatten(2).mT


class SpaceToDepth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pixel_unshuffle(x, 4)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(Grey(), cnn(1)),
        lambda: nn.Sequential(torchvision.transforms.Grayscale(1), cnn(1)),
        lambda: nn.Sequential(nn.Conv2d(3, 13, 1), cnn(13)),
        lambda: nn.Sequential(SpaceToDepth(), cnn(48)),
        LinearPatches,
        NeckFirst,
    ],
    ids=[
        "grey by code",
        "grey by torchvision",
        "13 by a convolution",
        "space to depth",
        "linear",
        "neck first",
    ],
)
def test_a_module_that_runs_on_colour_images_is_taken_whatever_its_first_convolution(build):
    model = wrapped(build)
    assert vitlens.explain(model, noise(), method="saliency").shape == (3, *SIZE)


@pytest.mark.parametrize("channels", [1, 2, 4, 13, 20])
def test_the_advice_for_another_number_of_channels_runs(channels: int):
    module = seeded(lambda: cnn(channels))
    with pytest.raises(ModelError, match=f"images of {channels} channel") as refusal:
        half(module)
    code = re.search(r"wrap (torch\.nn\.Sequential\(.*module\))", str(refusal.value))[1]
    model = half(eval(code, {"torch": torch, "torchvision": torchvision, "module": module}))
    assert model(noise()).shape == (3, 3)


@pytest.mark.parametrize("channels", [1, 4])
def test_the_channels_of_linear_patches_are_found(channels: int):
    with one_line(ModelError, f"images of {channels} channel"):
        wrapped(lambda: LinearPatches(channels))


class Masked(SmallCNN):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x * mask)


class OfDict(SmallCNN):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch["pixels"])


class OfVideo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = SmallCNN()

    def forward(self, video: Tensor) -> Tensor:
        batch, frames, channels, height, width = video.shape
        return (
            self.inside(video.reshape(batch * frames, channels, height, width))
            .unflatten(0, (batch, -1))
            .mean(1)
        )


INPUTS = {
    "a further argument": (Masked, "needs mask, too"),
    "a dict": (OfDict, r"\{'pixels': images\}"),
    "frames": (OfVideo, "it takes video"),
    "a convolution over time": (
        lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.Flatten()),
        "it takes video",
    ),
    "another size": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 30 * 30, 3)),
        "check image_size=",
    ),
}


@pytest.mark.parametrize("case", INPUTS)
def test_what_a_module_takes_in_place_of_images_is_said_in_one_line(case: str):
    build, words = INPUTS[case]
    with one_line(ModelError, words):
        wrapped(build)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers_are_refused_by_name():
    module = torch.ao.quantization.quantize_dynamic(seeded(ViT), {nn.Linear}, dtype=torch.qint8)
    with one_line(ModelError, r"layer of integers, layers\.0\.att\.q"):
        half(module)


def test_features_are_no_classes_and_a_thousand_logits_are_not_imagenets():
    headless = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, depth=1)
    assert half(headless, 32).classes == ()
    with one_line(UnsupportedError, "no classifier"):
        vitlens.evaluate(half(headless, 32), noise(), torch.zeros(3, dtype=torch.long))
    assert wrapped(lambda: ViT(classes=1000)).classes[:2] == ("0", "1")


def test_weights_of_another_patch_size_are_not_resampled(tmp_path):
    module = timm.create_model("vit_tiny_patch16_224", patch_size=8, img_size=32, num_classes=5)
    torch.save(module.state_dict(), tmp_path / "patch8.pth")
    with one_line(ModelError, "expected patches of 16x16 px .* found 8x8 px"):
        vitlens.load(f"timm:vit_tiny_patch16_224@{tmp_path / 'patch8.pth'}", image_size=32)
