"""A vision transformer of one layer: its heads write known classes, on known colours."""

import torch
from torch import Tensor

from tests.kit.tiny import model_of
from vitlens.models.configs import ViTConfig
from vitlens.models.model import Model
from vitlens.models.vit import VisionTransformer

# px, px, channels of a head
SIDE = 16
PATCH = 4
WIDTH = 4
CLASSES = ("red", "green", "blue", "other", "never")


def model(gains: list[tuple[int, float]]) -> Model:
    """Build a head for each (channel, gain), which adds a colour to the class of the channel.

    It adds gain times the colour's mean, from -1 to 1; channel 3 is that of red to all classes. All
    attend to all patches alike.
    """
    config = ViTConfig(
        image_size=(SIDE, SIDE),
        patch_size=(PATCH, PATCH),
        dim=len(gains) * WIDTH,
        depth=1,
        heads=len(gains),
        classes=len(CLASSES),
        mlp=False,
        norm=False,
        qkv_bias=False,
    )
    module = VisionTransformer(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        for channel in range(3):
            module.patch_embed.proj.weight[channel, channel] = 1 / PATCH**2
        attention = module.blocks[0].attn
        values = attention.qkv.weight.view(3, len(gains), WIDTH, -1)[2]
        attention.proj.weight.copy_(torch.eye(len(gains) * WIDTH))
        module.head.bias[4] = -100.0
        for head, (channel, gain) in enumerate(gains):
            values[head, 0, channel % 3] = float(gain != 0)
            module.head.weight[channel if channel < 3 else slice(None), head * WIDTH] = gain
    return model_of(module, alias="writers", size=(SIDE, SIDE), classes=CLASSES)


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images of one of three colours each, more or less, among noise, and their classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    pixels = 0.4 + 0.2 * torch.rand(count, 3, SIDE, SIDE, generator=draw)
    strength = 0.1 + 0.2 * torch.rand(count, generator=draw)
    pixels[torch.arange(count), labels] += strength[:, None, None]
    return pixels, labels
