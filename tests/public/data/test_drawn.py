"""The drawn sets: images depend only on their number, have exact masks, can be redrawn."""

import math
import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from tests.kit.datasets import limited, pixels_of
from vitlens import Split, load_data
from vitlens.errors import DataError

NAMES = ("digits", "shapes", "shapes-conflict")
EYE = torch.eye(8, dtype=torch.long)


@pytest.fixture(scope="module")
def test_digits() -> Split:
    return load_data("digits")


def drawn(count: int, *, name: str = "digits", canvas: int | None = None) -> tuple[Tensor, Tensor]:
    """Return pixels and masks of the first images of the training part."""
    return load_data(name, part="train", canvas=canvas).source.draw(torch.arange(count))


def light(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 * torch.tensor([0.2126, 0.7152, 0.0722]).view(3, 1, 1)).sum(1)


def grown(masks: Tensor, by: int) -> Tensor:
    """Grow masks in every direction by so many px, or shrink them if negative."""
    if by < 0:
        return ~grown(~masks, -by)
    return F.max_pool2d(masks[:, None].float(), 2 * by + 1, 1, by)[:, 0] > 0


def change(first: Tensor, second: Tensor) -> Tensor:
    return (first.int() - second.int()).abs().amax(1)


def test_no_source_digit_is_in_both_parts_and_none_is_lost(test_digits):
    train = load_data("digits", part="train", scenes=2)
    targets = torch.from_numpy(load_digits().target)
    assert sorted({*train.groups.tolist(), *test_digits.groups.tolist()}) == list(range(1797))
    assert (len(train), len(load_data("digits", part="train"))) == (2 * 1347, 4 * 1347)
    assert test_digits.labels.bincount().tolist() == [4 * 45] * 10
    assert torch.bincount(test_digits.groups).unique().tolist() == [0, 4]
    for split in (train, test_digits):
        assert torch.equal(split.labels, targets[split.groups])


@pytest.mark.parametrize("name", NAMES)
def test_an_image_does_not_depend_on_its_batch_and_epochs_share_none(name):
    split = load_data(name, part="train")
    together = split.source.read(torch.arange(40))
    with limited(CHUNK=32 * 32 * 3):  # drawn in chunks
        assert torch.equal(split.source.read(torch.arange(40)), together)
    picked = split.pick(torch.tensor([39, 3]))
    assert torch.equal(pixels_of(picked), together[[39, 3]])
    assert torch.equal(picked.source.read(torch.tensor([1])), together[3:4])
    epochs = [picked.epoch(number) for number in range(4)]
    assert torch.equal(pixels_of(epochs[0]), pixels_of(picked))
    assert len(torch.cat([pixels_of(epoch) for epoch in epochs]).flatten(1).unique(dim=0)) == 8
    for epoch in epochs:
        assert torch.equal(epoch.labels, picked.labels)
        assert epoch.masks is None
    assert split.source.read(torch.arange(0)).shape == (0, 3, 32, 32)


def test_more_scenes_leave_the_first_ones_and_seeds_and_parts_change_them(test_digits):
    two = load_data("digits", scenes=2)
    first = pixels_of(test_digits)[:450]
    other = pixels_of(load_data("digits", seed=3, scenes=1))
    again = pixels_of(load_data("digits", seed=3, scenes=1))
    assert torch.equal(pixels_of(two), pixels_of(test_digits)[:900])
    assert torch.equal(two.groups, test_digits.groups[:450].repeat(2))
    assert not torch.equal(pixels_of(two)[450:], first)
    assert torch.equal(other, again)
    assert not torch.equal(other, first)
    assert test_digits.epoch(5) is test_digits
    parts = [
        load_data("shapes", part=part, seed=seed)
        for part, seed in (("train", 0), ("train", 1), ("test", 0))
    ]
    images = [part.source.read(torch.arange(16)) for part in parts]
    assert len(torch.cat(images).flatten(1).unique(dim=0)) == 48


@pytest.mark.parametrize("canvas", [32, 64])
def test_ink_is_lighter_than_ground_on_every_scene(canvas):
    pixels, masks = drawn(100, canvas=canvas)
    for values, mask in zip(light(pixels), masks):
        assert values[mask].median() - values[~mask].median() > 0.06


def test_masks_hold_the_whole_digit(test_digits):
    masks = test_digits.masks
    large = load_data("digits", canvas=64, limit=100)
    area = masks.flatten(1).float().mean(1)
    heights = large.masks.any(2).sum(1)
    assert 0.01 < area.min() < area.max() < 0.4
    assert (masks.any(1).sum(1) >= 2).all()
    assert large.size == (64, 64)
    assert 0.2 * 64 < heights.min() <= heights.max() <= 0.8 * 64 + 2
    assert len(masks.float().flatten(1).argmax(1).unique()) > 200  # not all in one place


def test_pixels_inside_the_mask_are_one_colour_and_colours_differ_between_scenes():
    """The mask is exact: away from the soft outline only the ink's grain is seen, never ground, bar
    or stroke.

    A few digits have faint ink, through which the ground shows.
    """
    pixels, masks = drawn(120, canvas=128)
    inks = []
    even = []
    for image, values, inner in zip(pixels.float() / 255, light(pixels), grown(masks, -4)):
        ink = image[:, inner]
        even.append(bool((ink.amax(1) - ink.amin(1) <= 0.06 + 2 / 255).all()))
        # no stroke is lighter than the ink, but for the grain
        assert values.max() <= values[inner].median() + 0.07
        inks.append(ink.mean(1))
    assert np.mean(even) > 0.97
    assert torch.stack(inks).std(0).min() > 0.05


def test_redrawn_without_distractors_and_on_another_ground(test_digits):
    split = test_digits.limit(60)
    scenes = split.scenes
    images = pixels_of(split)
    masks = split.masks
    plain = scenes.redrawn("without distractors")
    other = scenes.redrawn("other ground")
    removed = change(plain, images)
    changed = change(other, images).float()
    strokes = removed > 3
    assert not (strokes & masks).any()
    assert 0.005 < strokes.float().mean() < 0.1
    assert strokes.flatten(1).any(1).float().mean() > 0.9
    # the grain is drawn again, too; the ground shows through the digit's edge
    assert changed[masks].quantile(0.9) <= 0.06 * 255 + 1
    assert ((changed > 3) & ~masks).float().mean() > 0.3
    assert changed[strokes].mean() < removed[strokes].float().mean() / 3
    for values, around in zip(light(plain), grown(masks, 2)):
        spread = values[~around].max() - values[~around].min()
        assert 0.06 < spread < 0.14 + 0.06 + 0.02  # of the texture and the grain
    # of the same luminance
    assert abs(light(other)[~masks].mean() - light(images)[~masks].mean()) < 0.01
    assert torch.equal(
        split.pick(torch.tensor([5, 2])).scenes.redrawn("other ground"), other[[5, 2]]
    )
    assert load_data("digits", part="train").scenes is None
    large = load_data("digits", canvas=128, limit=12)
    strokes = change(large.scenes.redrawn("without distractors"), pixels_of(large)) > 3
    assert strokes.any()
    assert not (strokes & grown(large.masks, 1)).any()  # none touches the ink


@pytest.mark.parametrize(
    ("name", "pairs"), [("shapes", 70 * EYE), ("shapes-conflict", 10 * (1 - EYE))]
)
def test_shapes_are_balanced_in_shape_and_texture(name, pairs):
    """Shape and texture are in the names of the files, and those of conflicts are read as such."""
    split = load_data(name)
    word_pairs = [re.findall(r"([a-z]+)\d+", file.rpartition("/")[2]) for file in split.files]
    shapes, textures = torch.tensor(
        [[split.classes.index(word) for word in pair] for pair in word_pairs]
    ).T
    assert torch.equal(shapes, split.labels)
    assert torch.equal(torch.bincount(shapes * 8 + textures, minlength=64).view(8, 8), pairs)
    assert len(load_data(name, part="train")) == 8 * 560


def test_the_mask_is_where_the_texture_is_and_inside_the_image():
    """The same image in two textures differs on the mask and, but for its soft edge, nowhere
    else."""
    one = load_data("shapes")
    other = load_data("shapes-conflict")
    different = change(pixels_of(one), pixels_of(other)) > 8
    masks = one.masks
    areas = masks.flatten(1).sum(1)
    edge = masks.clone()
    edge[:, 1:-1, 1:-1] = False
    assert torch.equal(masks, other.masks)
    assert (different & ~grown(masks, 1)).float().mean() < 0.0003
    assert ((different & masks).flatten(1).sum(1) / areas).min() > 0.4
    assert edge.flatten(1).any(1).float().mean() < 0.2  # only a soft edge may reach the border
    assert 0.06 < areas.min() / 1024 < areas.max() / 1024 < 0.6


AREAS = {  # by elementary geometry, of shapes of size 1
    "circle": math.pi * 0.9**2,
    "cross": 4 * 0.95 * 0.6 - 0.6**2,
    "hourglass": 1.188,
    "moon": 1.478,
    "ring": math.pi * (0.97**2 - 0.43**2),
    "square": 1.4**2,
    "star": 10 * 0.42 * math.sin(math.pi / 5) / 2,
    "triangle": 3 * math.sqrt(3) / 4,
}


def test_shapes_have_their_areas_and_are_lighter_than_the_ground():
    pixels, masks = drawn(8 * 300, name="shapes")
    labels = torch.arange(8).repeat(300)
    values = light(pixels)
    # mean of the square, px: uniform from 0.31 to 0.47 of the canvas
    sizes = 32**2 * (0.39**2 + 0.16**2 / 12)
    for label, (name, area) in enumerate(AREAS.items()):
        in_class = labels == label
        assert masks[in_class].flatten(1).sum(1).float().mean() / sizes == pytest.approx(
            area, rel=0.05
        ), name
        assert 0.4 < values[in_class][masks[in_class]].mean() < 0.7
    outside = values[~grown(masks, 2)]
    assert abs(outside.mean() - 0.18) < 0.02
    assert outside.max() < 0.35


def test_what_cannot_be_drawn_is_refused():
    for canvas in (16, 1024):
        assert load_data("digits", part="train", canvas=canvas).size == (canvas, canvas)
    for canvas in (15, 1025):
        with pytest.raises(DataError, match="16 to 1024"):
            load_data("digits", canvas=canvas)
    with pytest.raises(DataError, match="at least 1 scene"):
        load_data("digits", scenes=0)
