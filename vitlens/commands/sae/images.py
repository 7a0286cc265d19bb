"""The images of `vitlens sae`: to train a dictionary on, and to measure it on."""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.commands.run.run import Run
from vitlens.commands.sae.options import SaeOptions
from vitlens.data.catalogue import load_data, load_images
from vitlens.data.split import Source, Split
from vitlens.errors import DataError, InputError
from vitlens.training.feed import derive_seed

TEST_SHARE: Final = 0.25  # of the images, where the data have no training part
_SMALLEST: Final = 0.5  # side of a crop, as a share of the image's


@dataclass(frozen=True)
class Images:
    """The images of a run.

    train: of the dictionary.
    test: others, on which it is measured.
    note: how they were divided, "" for parts of the data.
    shown: of the gallery, None for held-out ones.
    """

    train: Split
    test: Split
    note: str = ""
    shown: Split | None = None


@dataclass(frozen=True)
class Crops:
    """The images of another source, then `count` random crops of each, of the same size."""

    source: Source
    count: int
    seed: int

    def __len__(self) -> int:
        return len(self.source) * (1 + self.count)

    def read(self, indices: Tensor) -> Tensor:
        """Return the pixels of these images and crops."""
        originals = len(self.source)
        pixels = self.source.read(indices % originals).clone()
        for position, index in enumerate(indices.tolist()):
            if index >= originals:
                pixels[position] = self._crop(pixels[position], index)
        return pixels

    def _crop(self, pixels: Tensor, index: int) -> Tensor:
        """Return a random part of an image, mirrored half of the time, at the image's size."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, index))
        draws = torch.rand(4, generator=generator).tolist()
        size = pixels.shape[-2:]
        share = _SMALLEST + (1 - _SMALLEST) * draws[0]
        height, width = (max(1, round(side * share)) for side in size)
        top = round(draws[1] * (size[0] - height))
        left = round(draws[2] * (size[1] - width))
        part = pixels[:, top : top + height, left : left + width]
        if draws[3] < 0.5:
            part = part.flip(-1)
        resized = F.interpolate(
            part[None].float(), size=size, mode="bilinear", antialias=True, align_corners=False
        )[0]
        if pixels.is_floating_point():
            return resized.clamp(0, 1)
        return resized.round().clamp(0, 255).to(pixels.dtype)


def images_of(run: Run[SaeOptions]) -> Images:
    """Return the images on which a dictionary is trained, and those on which it is measured.

    The training and test part of the data; where there is no training part, all sources of the
    images are divided at random.
    """
    options = run.options
    images = divided(run.split, run.run.seed)
    if not options.images:
        try:
            train = _training_part(run)
        except (DataError, InputError):
            train = None
        if train is not None and len(train):
            images = Images(train.limit(options.bank, seed=run.run.seed), run.split)
    if options.crops:
        images = replace(images, train=with_crops(images.train, options.crops, run.run.seed))
    if options.show:
        shown = load_images(list(options.show), preprocessing=run.model.preprocessing)
        images = replace(images, shown=shown)
    return images


def _training_part(run: Run[Any]) -> Split:
    data = run.options.data or "digits"
    return load_data(
        data,
        part="train",
        preprocessing=run.model.preprocessing,
        data_dir=run.run.data_dir,
        seed=run.run.seed,
        labels=run.run.labels,
    )


def divided(split: Split, seed: int) -> Images:
    """Return images divided at random by their sources."""
    count = len(split)
    groups = torch.arange(count) if split.groups is None else split.groups.cpu()
    sources = groups.unique()
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(seed))
    held_out = sources[order[: max(1, round(TEST_SHARE * len(sources)))]]
    is_test = torch.isin(groups, held_out)
    train = split.pick((~is_test).nonzero()[:, 0])
    test = split.pick(is_test.nonzero()[:, 0])
    note = (
        f"the data have no training part: {len(test)} of {count} images, drawn at random, are held "
        "out"
    )
    return Images(train, test, note)


def with_crops(split: Split, count: int, seed: int) -> Split:
    """Return the images and crops of them, without what is known of single images."""
    return Split(
        split.name,
        split.part,
        Crops(split.source, count, seed),
        split.size,
        split.classes,
        title=split.title,
    )
