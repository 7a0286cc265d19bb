"""Splits: what belongs to an image stays together; limits, and images named by the user."""

from dataclasses import replace

import pytest
import torch

from tests.kit.datasets import divided, numbered, pixels_of, seen_in_share
from vitlens import Split, load_data
from vitlens.errors import DataError


def seen(split: Split) -> list[int]:
    """Return the numbers of the images of a split, in its order."""
    return pixels_of(split)[:, 0, 0, 0].tolist()


@pytest.fixture
def split() -> Split:
    labels = torch.tensor([0] * 8 + [1] * 3 + [2])
    files = tuple(f"{index}.png" for index in range(12))
    return numbered(labels, groups=torch.arange(12) // 2, files=files)


def test_picking_keeps_everything_of_an_image_together(split):
    chosen = split.pick(torch.tensor([11, 0])).pick(torch.tensor([1, 0]))
    assert seen(chosen) == [0, 11]
    assert chosen.labels.tolist() == [0, 2]
    assert chosen.names == ("0.png", "11.png")
    assert chosen.groups.tolist() == [0, 5]
    assert chosen.masks[:, 0, 0].tolist() == [False, True]


def test_a_picked_split_has_names_and_a_size_without_files_too(split):
    chosen = split.pick(torch.tensor([0, 11]))
    assert replace(chosen, files=None).names == ("toy 0", "toy 1")
    assert "2 x 5" in repr(chosen)  # px


def test_picking_adds_nothing_that_the_split_lacks(split):
    bare = replace(split, labels=None, masks=None, groups=None, files=None)
    chosen = bare.pick(torch.tensor([2]))
    assert chosen.labels is chosen.masks is chosen.groups is chosen.files is None


def test_batches_have_every_image_once_in_order(split):
    first, second = split.batches(7)
    assert torch.equal(torch.cat([first.indices, second.indices]), torch.arange(12))
    assert torch.equal(second.labels, split.labels[7:])
    pixel_values = (second.images[:, 0, 0, 0] * 255).round()
    assert torch.equal(pixel_values, torch.arange(7.0, 12.0))


@pytest.mark.parametrize(
    ("count", "expected"), [(3, [1, 1, 1]), (5, [2, 2, 1]), (9, [5, 3, 1]), (1, [1])]
)
def test_a_limit_is_seeded_and_as_balanced_as_the_data_allow(split, count, expected):
    limited = split.limit(count)
    counts = limited.labels.bincount()
    assert sorted(counts[counts > 0].tolist(), reverse=True) == expected
    assert seen(limited) == sorted(seen(limited))
    assert split.limit(count, seed=1).files == split.limit(count, seed=1).files
    samples = {split.limit(count, seed=seed).files for seed in range(8)}
    assert len(samples) > 1
    without_labels = replace(split, labels=None)
    assert len(without_labels.limit(count)) == count


def test_a_limit_that_all_images_meet_changes_nothing(split):
    assert split.limit(None) is split.limit(12) is split


def test_a_limit_counts_labels_of_8_bits_beyond_255():
    labels = torch.tensor([0] * 900 + [1] * 100, dtype=torch.uint8)
    assert numbered(labels).limit(600).labels.bincount().tolist() == [500, 100]


@pytest.mark.parametrize("count", [None, 1, 2, 4])
def test_images_named_are_there_whatever_the_sample(split, count):
    sample = split.limit(count, seed=1).files
    candidates = split.files
    if count is not None:
        candidates = [file for file in split.files if file not in sample]
    last, before_last = candidates[-1], candidates[-2]
    named = split.starting_with(
        [last.removesuffix(".png"), last, before_last], count, seed=1
    )  # one of them twice
    rest = [file for file in sample if file not in (last, before_last)]
    places_left = max(0, (count or 12) - 2)
    assert named.files == (last, before_last, *rest[:places_left])
    assert [f"{number}.png" for number in seen(named)] == list(named.files)


@pytest.mark.parametrize("count", [None, 1, 2, 4])
def test_an_image_named_that_is_in_the_sample_comes_first(split, count):
    sample = split.limit(count, seed=1).files
    named = split.starting_with(sample[-1:], count, seed=1)
    assert named.files == (sample[-1], *sample[:-1])
    assert split.starting_with([]) is split


@pytest.mark.parametrize("seed", [0, 3])
def test_shares_of_a_study_are_balanced_seeded_nested_and_as_long_as_the_whole(seed):
    full = numbered(torch.arange(200) % 4)
    smaller_share = set[int]()
    for share in (0.05, 0.15, 0.25, 0.5, 1.0):
        images = seen_in_share(full, share, seed=seed)[:, 0, 0, 0].long()
        distinct = set(images.tolist())
        assert smaller_share < distinct
        assert len(distinct) == round(200 * share)
        class_counts = torch.bincount(images.unique() % 4, minlength=4)
        assert class_counts.max() - class_counts.min() <= 1
        # as long as the whole: each image about equally often
        assert len(images) == 200
        repetitions = images.unique(return_counts=True)[1]
        is_uneven = 200 % len(distinct) > 0
        assert repetitions.max() - repetitions.min() == is_uneven
        assert torch.equal(images, seen_in_share(full, share, seed=seed)[:, 0, 0, 0])
        smaller_share = distinct
    few = seen_in_share(full, 0.1, seed=seed).unique()
    few_of_another_seed = seen_in_share(full, 0.1, seed=seed + 1).unique()
    assert not torch.equal(few, few_of_another_seed)


def test_a_share_of_scenes_is_held_still():
    scenes = load_data("digits", part="train", limit=40)
    for share in (0.5, 1.0):
        assert torch.equal(seen_in_share(scenes, share), seen_in_share(scenes, share, epoch=3))
    some = {image.numpy().tobytes() for image in seen_in_share(scenes, 0.5)}
    every = {image.numpy().tobytes() for image in seen_in_share(scenes, 1.0)}
    assert some < every


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda split: split.limit(0), "at least 1"),
        (lambda split: seen_in_share(split, 0.1), "of 3 classes"),
        (lambda split: split.starting_with(["0"], 0), "at least 1"),
        (lambda split: split.starting_with(["e"]), "such as 0.png"),
        (lambda split: replace(split, files=None).starting_with(["0"]), "leave out their names"),
    ],
)
def test_refused(split, act, message):
    with pytest.raises(DataError, match=message):
        act(split)


def test_scenes_of_one_digit_are_held_out_together():
    train = load_data("digits", part="train", scenes=2)
    rest, held_out = divided(train, 0.1)
    assert len(rest) + len(held_out) == len(train)
    assert not {*rest.groups.tolist()} & {*held_out.groups.tolist()}
    sizes = held_out.labels.bincount(minlength=10) / train.labels.bincount(minlength=10)
    assert 0.08 < float(sizes.min()) <= float(sizes.max()) <= 0.1
    # the same in every epoch, while the rest is drawn anew
    assert torch.equal(pixels_of(held_out.epoch(1)), pixels_of(held_out))
    assert not torch.equal(pixels_of(rest.epoch(1)), pixels_of(rest))


def test_nothing_is_held_out_of_a_class_with_too_few_images(split):
    assert divided(split, 0.5) == (split, None)
    unlabelled = replace(split, labels=None)
    assert divided(unlabelled, 0.1) == (unlabelled, None)
