"""Splits of numbered images, pictures on disk, and the limits of loading made small."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from vitlens import Split
from vitlens.data.split import InMemory, hold_out_groups, share_of
from vitlens.preprocessing import Preprocessing


def numbered(labels: Tensor, **fields: Any) -> Split:
    """Return images of 2 x 5 px whose pixels are their numbers; those above 5 have a mask."""
    pixels = (
        torch.arange(len(labels)).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 5).contiguous()
    )
    return Split(
        "toy", "train", InMemory(pixels), (2, 5), tuple("abcd"), labels, pixels[:, 0] > 5, **fields
    )


def pixels_of(split: Split) -> Tensor:
    """Return all pixels, as they are stored."""
    return split.source.read(torch.arange(len(split)))


def seen_in_share(split: Split, share: float, *, seed: int = 0, epoch: int = 0) -> Tensor:
    """Return the pixels of one epoch of a study's training on a share of the images."""
    return pixels_of(share_of(split, share, seed=seed).epoch(epoch))


def divided(split: Split, share: float) -> tuple[Split, Split | None]:
    """Return the training images of a study and its validation images, or None."""
    return hold_out_groups(split, share)


def fitted(size: tuple[int, int], resize: int | None = None, **more: Any) -> Preprocessing:
    """Return a preprocessing for models of this input size."""
    return Preprocessing(size, resize, **more)


def put(folder: Path, *names: str, value: int = 100, size: tuple[int, int] = (5, 4)) -> None:
    """Write grey pictures of size (width, height)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", size, (value, value, value)).save(folder / name)


@contextmanager
def limited(**limits: float) -> Iterator[None]:
    """Set MEMORY_LIMIT, TIMEOUT and CHUNK inside the context.

    MEMORY_LIMIT: bytes of pixels in memory; TIMEOUT: seconds to wait for a server; CHUNK: pixels
    drawn at a time.
    """
    places = {
        "MEMORY_LIMIT": (
            "vitlens.data.decode.MEMORY_LIMIT",
            "vitlens.data.torchvision_sets.MEMORY_LIMIT",
        ),
        "TIMEOUT": ("vitlens.data.torchvision_sets.TIMEOUT",),
        "CHUNK": ("vitlens.data.drawing._CHUNK",),
        "MANY": ("vitlens.data.walk.MANY",),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            for place in places[name]:
                patch.setattr(place, value)
        yield
