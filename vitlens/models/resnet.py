"""ResNet baselines (He 2016) on torchvision's blocks.

Their stem does not downsample small images.
"""

from typing import Final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.references import import_without_compiler
from vitlens.shapes import Images, Logits

import_without_compiler("torchvision")
import torchvision  # noqa: E402
from torchvision.models.resnet import BasicBlock  # noqa: E402

# px; the stem of stride 4 would reduce a 32 px image to a single pixel in the last stage
SMALL_IMAGE: Final = 64


class PaddedShortcut(nn.Module):
    """The shortcut without parameters (He 2016, option A).

    It takes every second pixel, and fills the new channels with zeros.
    """

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(
        self, maps: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch more half_height half_width"]:
        """Return maps of half the size, the new channels after the old ones."""
        # before and after: columns, rows, channels
        padding = (0, 0, 0, 0, 0, self.new_channels)
        return F.pad(maps[:, :, ::2, ::2], padding)


class CifarResNet(nn.Module):
    """CIFAR's ResNet: a 3x3 stem and three stages of 16, 32 and 64 channels.

    It maps images (batch, 3, height, width), already normalised, to logits (batch, classes). Each
    block has two convolutions. Layers have torchvision's names.

    blocks: the number of blocks in each stage; 3 make ResNet-20 (He 2016, section 4.2).
    """

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(blocks, channels=16, to_channels=16)
        self.layer2 = _stage(blocks, channels=16, to_channels=32)
        self.layer3 = _stage(blocks, channels=32, to_channels=64)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, classes)
        for module in self.modules():
            # normal_ of a meta tensor imports the compiler
            if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Images) -> Logits:
        """Return logits (batch, classes)."""
        maps = self.relu(self.bn1(self.conv1(images)))  # (batch, 16, height, width)
        maps = self.layer3(self.layer2(self.layer1(maps)))  # (batch, 64, height/4, width/4)
        logits: Tensor = self.fc(self.avgpool(maps).flatten(1))
        return logits


def build_resnet(name: str, *, classes: int, image_size: tuple[int, int]) -> nn.Module:
    """Return an untrained ResNet preset for images of (height, width) pixels.

    resnet20 is CIFAR's: 0.27 million parameters at 10 classes. Below 64 px, ResNet-18 and 50 get a
    3x3 stem of stride 1 and no max-pool.
    """
    if name == "resnet20":
        return CifarResNet(blocks=3, classes=classes)
    model: nn.Module = getattr(torchvision.models, name)(weights=None, num_classes=classes)
    if min(image_size) < SMALL_IMAGE:
        # also a meta tensor: torchvision's constructor has initialised some without a guard
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


def _stage(blocks: int, *, channels: int, to_channels: int) -> nn.Sequential:
    """Return the blocks of a stage; if the channels grow, the first block halves the maps."""
    if to_channels > channels:
        shortcut = PaddedShortcut(to_channels - channels)
        first_block = BasicBlock(channels, to_channels, stride=2, downsample=shortcut)
    else:
        first_block = BasicBlock(channels, to_channels)
    later_blocks = [BasicBlock(to_channels, to_channels) for _ in range(blocks - 1)]
    return nn.Sequential(first_block, *later_blocks)
