"""Shares of the training images: balanced, seeded, nested, still, and as long as the whole."""

import pytest
import torch

from vitlens.data.digits import digits
from vitlens.data.split import InMemory, Split, images_in, share_of
from vitlens.errors import DataError, InputError


@pytest.fixture
def split() -> Split:
    """200 images of four classes; each one's pixels are its number."""
    pixels = torch.arange(200, dtype=torch.uint8).view(200, 1, 1, 1).expand(200, 3, 1, 2).contiguous()
    labels = torch.arange(200) % 4
    return Split("toy", "train", InMemory(pixels), (1, 2), tuple("abcd"), labels=labels)


def seen(split: Split) -> list[int]:
    """Numbers of the images of a split, in its order."""
    return split.source.read(torch.arange(len(split)))[:, 0, 0, 0].tolist()


@pytest.mark.parametrize("seed", [0, 3])
def test_shares_are_balanced_and_nested(split, seed):
    inner: set[int] = set()
    for share in (0.05, 0.1, 0.25, 0.5, 1.0):
        images = set(seen(share_of(split, share, seed=seed)))
        assert len(images) == images_in(split, share) == round(200 * share)
        counts = torch.bincount(torch.tensor(sorted(images)) % 4, minlength=4)
        assert counts.max() - counts.min() <= 1
        assert inner < images
        inner = images


def test_a_share_is_as_long_as_the_whole_and_its_images_come_equally_often(split):
    found = share_of(split, 0.15, seed=1)
    assert len(found) == len(found.labels) == 200
    counts = torch.bincount(torch.tensor(seen(found)), minlength=200)
    assert set(counts.tolist()) == {0, 6, 7}
    assert torch.equal(found.labels, torch.tensor(seen(found)) % 4)


def test_the_seed_decides_which(split):
    first, same, other = (seen(share_of(split, 0.1, seed=seed)) for seed in (0, 0, 1))
    assert first == same
    assert set(first) != set(other)


def test_all_of_it_is_the_split_itself(split):
    assert share_of(split, 1.0, seed=0) is split


def test_scenes_are_held_still():
    split = digits("train").limit(40)
    found = share_of(split, 0.5, seed=0)
    assert found.epoch(3) is found
    everything = split.source.read(torch.arange(40))
    kept = found.source.read(torch.arange(20))
    assert all((image == everything).flatten(1).all(1).any() for image in kept)
    assert share_of(split, 1.0, seed=0).epoch(1).source.read(torch.arange(40)).equal(everything)


def test_refused(split):
    for share in (0.0, -0.5, 1.5):
        with pytest.raises(InputError, match="above 0 and at most 1"):
            share_of(split, share, seed=0)
    with pytest.raises(DataError, match="an image of each of 4 classes in 1% of 200"):
        share_of(split, 0.01, seed=0)
