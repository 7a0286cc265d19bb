"""A share of the training images, in an epoch as long as all of them make."""

from dataclasses import replace

import torch

from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError, InputError


def share_of(split: Split, share: float, *, seed: int) -> Split:
    """A seeded, class-balanced share (fraction) of a training split, repeated to the split's length.

    Repeated, a share makes as many steps an epoch as the whole, so that shares differ in their images and not in the
    length of the training. The shares of one seed are nested: 5 % lies within 10 %. A source that draws new images
    every epoch keeps those of its first, or a share would limit nothing. Raises InputError for a share outside (0, 1],
    DataError where it leaves a class without an image.
    """
    count = images_in(split, share)
    kept = _held(split.limit(count, seed=seed))
    if len(kept) == len(split):
        return kept
    return kept.pick(torch.arange(len(split)) % len(kept))


def images_in(split: Split, share: float) -> int:
    """How many images a share (fraction) of a split is. Raises what share_of raises."""
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


def _held(split: Split) -> Split:
    """The split with the images of its first epoch for good."""
    if split.epoch(1) is split:
        return split
    pixels = split.source.read(torch.arange(len(split)))
    return replace(split, source=InMemory(pixels), masks=None)
