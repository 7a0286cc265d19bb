from dataclasses import replace

import pytest
import torch

from vitlens.data.identity import sources
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError


@pytest.fixture
def split() -> Split:
    pixels = torch.arange(12, dtype=torch.uint8).view(12, 1, 1, 1).expand(12, 3, 2, 5).contiguous()
    labels = torch.tensor([0] * 8 + [1] * 3 + [2])
    return Split(
        name="toy",
        part="test",
        source=InMemory(pixels),
        size=(2, 5),
        classes=("a", "b", "c"),
        labels=labels,
        masks=pixels[:, 0] > 5,
        groups=torch.arange(12) // 2,
        files=tuple(f"{index}.png" for index in range(12)),
    )


def test_batches_give_every_image_once_in_order(split):
    batches = list(split.batches(5))
    assert [len(batch.images) for batch in batches] == [5, 5, 2]
    assert torch.cat([batch.indices for batch in batches]).tolist() == list(range(12))
    values = torch.cat([batch.images for batch in batches])[:, 0, 0, 0]
    assert torch.equal((values * 255).round().long(), torch.arange(12))


def test_picking_keeps_everything_of_an_image_together(split):
    chosen = split.pick(torch.tensor([11, 0])).pick(torch.tensor([1, 0]))
    assert chosen.source.read(torch.arange(2))[:, 0, 0, 0].tolist() == [0, 11]
    assert chosen.labels.tolist() == [0, 2]
    assert chosen.files == ("0.png", "11.png")
    assert chosen.groups.tolist() == [0, 5]
    assert chosen.masks[:, 0, 0].tolist() == [False, True]


@pytest.mark.parametrize(("count", "expected"), [(3, [1, 1, 1]), (5, [2, 2, 1]), (9, [5, 3, 1]), (1, [1])])
def test_a_limit_is_as_balanced_as_the_data_allow(split, count, expected):
    found = split.limit(count).labels.bincount()
    assert found.sum() == count
    assert sorted(found[found > 0].tolist(), reverse=True) == expected


def test_a_limit_is_as_balanced_for_labels_of_8_bits():
    labels = torch.tensor([0] * 900 + [1] * 100)
    whole = Split("toy", "test", InMemory(torch.zeros(1000, 3, 1, 1, dtype=torch.uint8)), (1, 1), ("a", "b"), labels)
    small = replace(whole, labels=labels.to(torch.uint8)).limit(600)
    assert small.labels.bincount().tolist() == whole.limit(600).labels.bincount().tolist() == [500, 100]


def test_a_limit_is_seeded(split):
    picks = {split.limit(4, seed=seed).files for seed in range(8)}
    assert len(picks) > 1
    assert split.limit(4, seed=1).files == split.limit(4, seed=1).files


def test_no_limit_is_the_split_itself(split):
    assert split.limit(None) is split
    assert split.limit(99) is split


def test_a_limit_below_one_is_refused(split):
    with pytest.raises(DataError, match="at least 1, found 0"):
        split.limit(0)


def test_images_named_stand_in_front_and_the_rest_keeps_its_order(split):
    led = split.starting_with(["10", "1.png", "10.png"])
    assert led.files[:4] == ("10.png", "1.png", "0.png", "2.png")
    assert led.labels.tolist() == [1, *[0] * 8, *[1] * 2, 2]
    assert led.source.read(torch.arange(3))[:, 0, 0, 0].tolist() == [10, 1, 0]
    assert split.starting_with([]) is split


@pytest.mark.parametrize("count", [1, 2, 4])
def test_images_named_are_there_whatever_the_sample(split, count):
    drawn = split.limit(count, seed=1).files
    names = [file for file in split.files if file not in drawn][:2]
    led = split.starting_with(names, count, seed=1)
    assert led.files == (*names, *drawn[: max(0, count - 2)])
    inside = split.starting_with(drawn[-1:], count, seed=1)
    assert inside.files == (drawn[-1], *drawn[:-1])


def test_a_name_that_is_not_there_is_said(split):
    with pytest.raises(DataError, match=r"such as 0.png, found 'e'"):
        split.starting_with(["e"])
    with pytest.raises(DataError, match="leave out --show"):
        replace(split, files=None).starting_with(["0"])


def test_images_of_equal_pixels_are_one_photograph(split):
    twice = replace(split.pick(torch.tensor([3, 4, 3, 5, 4])), groups=None)
    assert sources(twice).tolist() == [0, 1, 0, 2, 1]
    assert torch.equal(sources(split), split.groups)
