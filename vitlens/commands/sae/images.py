"""The images of `vitlens sae`: to train a dictionary on, and to measure it on."""

from contextlib import suppress
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

TEST_SHARE: Final = 0.25  # of the images that are held out if the data have no training part
_SMALLEST: Final = 0.5  # smallest side of a crop, as a share of the image's


@dataclass(frozen=True)
class Images:
    """The images of a run.

    train: the images on which the dictionary is trained.
    test: held-out images, on which it is measured.
    note: how the images were divided, "" if the data have these parts.
    shown: the images of the gallery, None for the held-out ones.
    """

    train: Split
    test: Split
    note: str = ""
    shown: Split | None = None


@dataclass(frozen=True)
class Crops:
    """The images of another source, then `count` random crops of each, of the same size.

    With n images, index i is image i % n: the image itself below n, a crop of it from n on.
    """

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
        # a generator for each crop, so that it does not depend on which others are read
        generator = torch.Generator().manual_seed(derive_seed(self.seed, index))
        draws = torch.rand(4, generator=generator).tolist()
        for_size, for_top, for_left, for_mirror = draws
        full_height, full_width = pixels.shape[-2:]
        share = _SMALLEST + (1 - _SMALLEST) * for_size
        height = max(1, round(full_height * share))
        width = max(1, round(full_width * share))
        top = round(for_top * (full_height - height))
        left = round(for_left * (full_width - width))
        crop = pixels[:, top : top + height, left : left + width]
        if for_mirror < 0.5:
            crop = crop.flip(-1)
        resized = F.interpolate(
            crop[None].float(),
            size=(full_height, full_width),
            mode="bilinear",
            antialias=True,
            align_corners=False,
        )[0]
        if pixels.is_floating_point():
            return resized.clamp(0, 1)
        return resized.round().clamp(0, 255).to(pixels.dtype)


def images_of(run: Run[SaeOptions]) -> Images:
    """Return the images on which a dictionary is trained, and those on which it is measured.

    These are the training and the test part of the data. If there is no training part, the images
    are divided at random.
    """
    options = run.options
    train = None
    if not options.images:
        with suppress(DataError, InputError):  # the data have no training part
            train = _training_part(run)
    if train is not None and len(train):
        images = Images(train.limit(options.bank, seed=run.run_options.seed), run.split)
    else:
        images = divided(run.split, run.run_options.seed)
    if options.crops:
        images = replace(
            images, train=with_crops(images.train, options.crops, run.run_options.seed)
        )
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
        data_dir=run.run_options.data_dir,
        seed=run.run_options.seed,
        labels=run.run_options.labels,
    )


def divided(split: Split, seed: int) -> Images:
    """Return images divided at random, so that images of one source stay together."""
    count = len(split)
    source_of_image = torch.arange(count) if split.groups is None else split.groups.cpu()
    sources = source_of_image.unique()
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(seed))
    test_count = max(1, round(TEST_SHARE * len(sources)))
    test_sources = sources[order[:test_count]]
    is_test = torch.isin(source_of_image, test_sources)
    train = split.pick((~is_test).nonzero()[:, 0])
    test = split.pick(is_test.nonzero()[:, 0])
    note = (
        f"the data have no training part: {len(test)} of {count} images, drawn at random, are held "
        "out"
    )
    return Images(train, test, note)


def with_crops(split: Split, count: int, seed: int) -> Split:
    """Return the images and crops of them, without labels, masks and names."""
    return Split(
        split.name,
        split.part,
        Crops(split.source, count, seed),
        split.size,
        split.classes,
        title=split.title,
    )
