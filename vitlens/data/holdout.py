"""A test part for data without one: a seeded fifth of each class."""

import torch
from torch import Tensor

from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.shapes import Labels

TEST_SHARE = 0.2


def hold_out(labels: Labels, part: Part, *, seed: int) -> Tensor:
    """The sorted indices of a part's images: a fifth of every class, at least one, is for test.

    A class with a single image is in the training part. Where no class has two images, all are for test, and requesting
    the training part raises DataError.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    shuffled = labels[order]
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = order[shuffled == label]
        count = max(1, round(TEST_SHARE * len(members))) if len(members) > 1 else 0
        test[members[:count]] = True
    if not test.any():
        if part == "train":
            raise DataError(
                "expected at least two images of a class to train on some and test on others, found one of each"
            )
        test[:] = True
    return (test if part == "test" else ~test).nonzero().squeeze(1)


def describe_hold_out(seed: int) -> str:
    """The note about the division in a report."""
    return (
        f"no test part was given: a fifth of each class, drawn with seed {seed}, is held out for test, as a model is "
        "better on images that it was trained on"
    )
