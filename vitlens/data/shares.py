"""A fraction of the training images, repeated to the length of a full epoch."""

from dataclasses import replace

import torch

from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError, InputError


def share_of(split: Split, share: float, *, seed: int) -> Split:
    """A seeded, class-balanced share (fraction) of a training split, repeated to the split's length.

    Repeated, an epoch has as many steps as with all images, so that shares differ in their images and not in the length
    of training. Shares with the same seed are nested: 5 % is a subset of 10 %. A source that draws new images every
    epoch is fixed to those of its first. Raises InputError for a share outside (0, 1], DataError where a class is left
    without an image.
    """
    count = images_in(split, share)
    subset = _first_epoch(split.limit(count, seed=seed))
    if len(subset) == len(split):
        return subset
    return subset.pick(torch.arange(len(split)) % len(subset))


def images_in(split: Split, share: float) -> int:
    """The number of images in a share (fraction) of a split. Raises what share_of raises."""
    if not 0 < share <= 1:
        raise InputError(f"expected a share of the images above 0 and at most 1, found {share}")
    count = round(share * len(split))
    classes = 1 if split.labels is None else len(split.labels.unique())
    if count < classes:
        raise DataError(
            f"expected an image of each of {classes} classes in {share:.0%} of {len(split)} training images, found "
            f"{count}; give more data or a greater --limit"
        )
    return count


def _first_epoch(split: Split) -> Split:
    """The split fixed to the images of its first epoch."""
    if split.epoch(1) is split:
        return split
    pixels = split.source.read(torch.arange(len(split)))
    return replace(split, source=InMemory(pixels), masks=None, scenes=None)
