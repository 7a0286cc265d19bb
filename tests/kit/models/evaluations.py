"""The preprocessing of a source's models without their weights, and photographs to compare it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image

from tests.kit.datasets import pixels_of
from vitlens.data.catalogue import load_images
from vitlens.models.rebuild import Architecture, build
from vitlens.preprocessing import Preprocessing

# height, width: smaller, taller and wider than crops
SIZES = (
    (37, 91),
    (301, 123),
    (64, 65),
    (250, 333),
    (7, 120),
)


def preprocessing_of_timm(name: str, image_size: tuple[int, int] | None = None) -> Preprocessing:
    """Return the preprocessing that vitlens reads from timm's configuration, without the model."""
    config = timm.models.get_pretrained_cfg(name).to_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", lambda *_, **__: SimpleNamespace(pretrained_cfg=config))
        return build(Architecture("timm", name, image_size=image_size))[1]


def preprocessing_of_torchvision(name: str) -> Preprocessing:
    """Return the preprocessing that vitlens reads from torchvision's weights, without the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.models, "get_model", lambda *_, **__: torch.nn.Identity())
        return build(Architecture("torchvision", name))[1]


def write_photographs(folder: Path) -> list[Path]:
    """Write smoothed noise as files of odd sizes."""
    files = []
    for seed, (height, width) in enumerate(SIZES):
        coarse = np.random.default_rng(seed).integers(
            0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8
        )
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        files.append(folder / f"{seed}.png")
        picture.save(files[-1])
    return files


def prepared(files: list[Path], preprocessing: Preprocessing) -> torch.Tensor:
    """Return the 8-bit pixels (files, 3, height, width) of files by this preprocessing."""
    return pixels_of(load_images(files, preprocessing=preprocessing))
