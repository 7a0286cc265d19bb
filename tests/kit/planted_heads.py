"""A vision transformer of one layer: each head carries a known part of the evidence."""

from pathlib import Path

import numpy as np
import torch

from tests.kit.tiny import model_of
from vitlens.models.configs import ViTConfig
from vitlens.models.model import Model
from vitlens.models.vit import VisionTransformer

# px, px, channels of a head
SIDE = 8
PATCH = 4
WIDTH = 4
CHANNELS = {"red": 0, "green": 1}


def model(heads: list[tuple[str, float]]) -> Model:
    """Build a head for each (channel, gain), which adds evidence for the channel's bit.

    It adds gain times the channel's mean over the patches, from -1 to 1, to the margin of the bit;
    gain 0: a head without values. Class = 2 (red > 0) + (green > 0), the fifth is never predicted;
    the cross-entropy is softplus(-red margin) + softplus(-green margin).
    """
    patches = (SIDE // PATCH) ** 2
    config = ViTConfig(
        image_size=(SIDE, SIDE),
        patch_size=(PATCH, PATCH),
        dim=len(heads) * WIDTH,
        depth=1,
        heads=len(heads),
        classes=5,
        mlp=False,
        norm=False,
        qkv_bias=False,
    )
    module = VisionTransformer(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        kernel = module.patch_embed.proj.weight
        for channel in CHANNELS.values():
            kernel[channel, channel] = 1 / PATCH**2
        attention = module.blocks[0].attn
        values = attention.qkv.weight.view(3, len(heads), WIDTH, -1)[2]
        attention.proj.weight.copy_(torch.eye(len(heads) * WIDTH))
        module.head.bias[4] = -100.0
        for head, (channel, gain) in enumerate(heads):
            values[head, 0, CHANNELS[channel]] = float(gain != 0)
            for label in range(4):
                bit = label // 2 if channel == "red" else label % 2
                # attention is uniform over the patches and CLS, whose value is 0
                module.head.weight[label, head * WIDTH] = (
                    (bit - 0.5) * gain * (patches + 1) / patches
                )
    return model_of(module, alias="planted", size=(SIDE, SIDE))


def write(
    folder: Path, heads: list[tuple[str, float]], *, images: int = 48, seed: int = 0
) -> list[str]:
    """Write a file with the model's function and images of its four classes.

    Return what to type after `vitlens ablate`.
    """
    draw = np.random.default_rng(seed)
    labels = np.arange(images) % 4
    strength = draw.uniform(0.7, 0.9, (images, 2))
    signs = np.stack([labels // 2, labels % 2], 1) * 2 - 1
    pixels = np.full((images, SIDE, SIDE, 3), 128, np.uint8)
    pixels[..., :2] = (127.5 * (1 + signs * strength)).round()[:, None, None]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "data.npz", images=pixels, labels=labels)
    source = (
        f"from tests.kit.planted_heads import model\n\n\ndef made():\n    return model({heads!r})\n"
    )
    (folder / "hand.py").write_text(source)
    (folder / "classes.txt").write_text("0\n1\n2\n3\n4\n")
    place = f"planted={folder / 'hand.py'}:made"
    arguments = ["--model-file", place, "--classes", str(folder / "classes.txt")]
    return [place, *arguments, "--data", str(folder / "data.npz"), "--device", "cpu", "--quiet"]
