"""Splits: what belongs to an image stays together; limits, shares, and images named by the user."""

from dataclasses import replace

import pytest
import torch

from vitlens.data.digits import digits
from vitlens.data.identity import sources
from vitlens.data.split import InMemory, Split, hold_out, images_in, share_of
from vitlens.errors import DataError, InputError


def toy(labels: torch.Tensor, **fields) -> Split:
    """Images whose pixels are their numbers."""
    pixels = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 5).contiguous()
    return Split("toy", "train", InMemory(pixels), (2, 5), tuple("abcd"), labels, pixels[:, 0] > 5, **fields)


def seen(split: Split) -> list[int]:
    """Numbers of the images of a split, in its order."""
    return split.source.read(torch.arange(len(split)))[:, 0, 0, 0].tolist()


@pytest.fixture
def split() -> Split:
    labels = torch.tensor([0] * 8 + [1] * 3 + [2])
    return toy(labels, groups=torch.arange(12) // 2, files=tuple(f"{index}.png" for index in range(12)))


def test_batches_give_every_image_once_in_order(split):
    batches = list(split.batches(5))
    assert [len(batch.images) for batch in batches] == [5, 5, 2]
    assert torch.cat([batch.indices for batch in batches]).tolist() == list(range(12))
    assert torch.equal(torch.cat([batch.labels for batch in batches]), split.labels)
    values = torch.cat([batch.images for batch in batches])[:, 0, 0, 0]
    assert torch.equal((values * 255).round().long(), torch.arange(12))


def test_picking_keeps_everything_of_an_image_together(split):
    chosen = split.pick(torch.tensor([11, 0])).pick(torch.tensor([1, 0]))
    assert seen(chosen) == [0, 11]
    assert chosen.labels.tolist() == [0, 2]
    assert chosen.names == ("0.png", "11.png")
    assert chosen.groups.tolist() == [0, 5]
    assert chosen.masks[:, 0, 0].tolist() == [False, True]
    twice = replace(split.pick(torch.tensor([3, 4, 3, 5, 4])), groups=None, files=None)
    assert sources(twice).tolist() == [0, 1, 0, 2, 1]  # images of equal pixels are one photograph
    assert torch.equal(sources(split), split.groups)
    assert twice.names[:2] == ("toy 0", "toy 1")


@pytest.mark.parametrize(("count", "expected"), [(3, [1, 1, 1]), (5, [2, 2, 1]), (9, [5, 3, 1]), (1, [1])])
def test_a_limit_is_seeded_and_as_balanced_as_the_data_allow(split, count, expected):
    found = split.limit(count).labels.bincount()
    assert sorted(found[found > 0].tolist(), reverse=True) == expected
    assert len({split.limit(count, seed=seed).files for seed in range(8)}) > 1
    assert split.limit(count, seed=1).files == split.limit(count, seed=1).files
    assert split.limit(None) is split.limit(99) is split


def test_a_limit_is_as_balanced_for_labels_of_8_bits():
    labels = torch.tensor([0] * 900 + [1] * 100, dtype=torch.uint8)
    whole = Split("toy", "test", InMemory(torch.zeros(1000, 3, 1, 1, dtype=torch.uint8)), (1, 1), ("a", "b"), labels)
    assert whole.limit(600).labels.bincount().tolist() == [500, 100]


def test_a_fifth_of_each_class_is_held_out():
    labels = torch.tensor([0] * 10 + [1] * 2 + [2])
    (train, note), (test, _) = (hold_out(labels, part, seed=1) for part in ("train", "test"))
    assert sorted(train.tolist() + test.tolist()) == list(range(13))
    assert labels[test].bincount(minlength=3).tolist() == [2, 1, 0]
    assert "drawn with seed 1, is held out" in note[0]
    assert any(not torch.equal(hold_out(labels, "test", seed=seed)[0], test) for seed in range(2, 5))
    for found in (hold_out(labels, "train", seed=1, whole=True), hold_out(torch.arange(13), "test", seed=1)):
        assert (found[0].tolist(), found[1]) == (list(range(13)), ())


@pytest.mark.parametrize("count", [None, 1, 2, 4])
def test_images_named_are_there_whatever_the_sample(split, count):
    drawn = split.limit(count, seed=1).files
    names = [file for file in split.files if count is None or file not in drawn][-2:][::-1]
    led = split.starting_with([names[0].removesuffix(".png"), *names], count, seed=1)
    rest = [file for file in drawn if file not in names]
    assert led.files == (*names, *rest[: max(0, (count or 12) - 2)])
    assert [f"{number}.png" for number in seen(led)] == list(led.files)
    inside = split.starting_with(drawn[-1:], count, seed=1)
    assert inside.files == (drawn[-1], *drawn[:-1])
    assert split.starting_with([]) is split


@pytest.mark.parametrize("seed", [0, 3])
def test_shares_are_balanced_seeded_nested_and_as_long_as_the_whole(seed):
    split, inner = toy(torch.arange(200) % 4), set[int]()
    for share in (0.05, 0.15, 0.25, 0.5, 1.0):
        found = share_of(split, share, seed=seed)
        images = seen(found)
        assert len(set(images)) == images_in(split, share) == round(200 * share)
        counts = torch.bincount(torch.tensor(sorted(set(images))) % 4, minlength=4)
        assert counts.max() - counts.min() <= 1
        assert inner < set(images)
        inner = set(images)
        times = torch.bincount(torch.tensor(images), minlength=200)
        assert len(found) == times.sum() == 200
        assert times.max() - times[times > 0].min() == (200 % len(inner) > 0)
        assert torch.equal(found.labels, torch.tensor(images) % 4)
        assert images == seen(share_of(split, share, seed=seed))
    assert found is split
    assert set(seen(share_of(split, 0.1, seed=seed))) != set(seen(share_of(split, 0.1, seed=seed + 1)))


def test_a_share_of_scenes_is_held_still():
    split = digits("train").limit(40)
    found = share_of(split, 0.5, seed=0)
    assert found.epoch(3) is found
    everything = split.source.read(torch.arange(40))
    assert all((image == everything).flatten(1).all(1).any() for image in found.source.read(torch.arange(20)))
    assert share_of(split, 1.0, seed=0).epoch(1).source.read(torch.arange(40)).equal(everything)


REFUSED = {
    "no limit": (lambda split: split.limit(0), DataError, "at least 1, found 0"),
    "another name": (lambda split: split.starting_with(["e"]), DataError, r"such as 0.png, found 'e'"),
    "no files": (lambda split: replace(split, files=None).starting_with(["0"]), DataError, "leave out --show"),
    "no share": (lambda split: share_of(split, 0.0, seed=0), InputError, "above 0 and at most 1"),
    "too large a share": (lambda split: share_of(split, 1.5, seed=0), InputError, "above 0 and at most 1"),
    "an empty class": (
        lambda split: share_of(split, 0.1, seed=0),
        DataError,
        "an image of each of 3 classes in 10%",
    ),
    "one of each": (lambda _: hold_out(torch.arange(3), "train", seed=0), DataError, "at least two images of a class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(split, name):
    act, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        act(split)
