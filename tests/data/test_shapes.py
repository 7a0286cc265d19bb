import pytest
import torch

from vitlens.data.cue_conflict import cues_of
from vitlens.data.shapes import CLASSES, PER_CLASS, SHAPES, TEXTURES, render, shapes
from vitlens.errors import DataError


def test_every_class_has_a_shape_and_a_texture():
    assert tuple(SHAPES) == tuple(TEXTURES) == CLASSES
    assert len(set(TEXTURES.values())) == len(CLASSES)


@pytest.mark.parametrize("cue", ["agree", "conflict"])
def test_the_test_part_is_balanced_in_shape_and_texture(cue):
    split = shapes("test", cue=cue)
    cues = cues_of(split)
    assert len(split) == 8 * PER_CLASS["test"]
    assert torch.equal(cues.shape, split.labels)
    assert torch.bincount(cues.shape).tolist() == torch.bincount(cues.texture).tolist() == [70] * 8
    if cue == "agree":
        assert not cues.conflict.any()
        return
    assert cues.conflict.all()
    pairs = torch.bincount(cues.shape * 8 + cues.texture, minlength=64).view(8, 8)
    assert torch.equal(pairs, 10 * (1 - torch.eye(8, dtype=torch.long)))


def test_an_image_does_not_depend_on_the_others_nor_on_their_number():
    few, many = shapes("train", per_class=2), shapes("train", per_class=5)
    for index in (0, 9, 15):
        one = many.source.read(torch.tensor([index]))
        assert torch.equal(one[0], few.source.read(torch.arange(16))[index])


def test_parts_seeds_and_epochs_share_no_image():
    first = shapes("train", per_class=2)
    seen = [
        first.source.read(torch.arange(16)),
        first.epoch(1).source.read(torch.arange(16)),
        shapes("train", per_class=2, seed=1).source.read(torch.arange(16)),
        shapes("test", per_class=2).source.read(torch.arange(16)),
    ]
    images = torch.cat(seen).flatten(1)
    assert len(images.unique(dim=0)) == 64
    assert first.epoch(1).masks is None


def test_the_mask_is_where_the_texture_is():
    """The same image in two textures differs on the mask and, but for its soft edge, nowhere else."""
    one, other = (shapes("test", cue=cue, per_class=1) for cue in ("agree", "conflict"))
    pixels = [split.source.read(torch.arange(8)).int() for split in (one, other)]
    different = (pixels[0] - pixels[1]).abs().amax(1) > 8
    assert torch.equal(one.masks, other.masks)
    reach = torch.nn.functional.max_pool2d(one.masks.float()[:, None], 3, 1, 1)[:, 0] > 0
    assert not (different & ~reach).any()
    for changed, mask in zip(different, one.masks):
        assert (changed & mask).sum() > 0.4 * mask.sum()


def test_shapes_lie_inside_the_image():
    masks = shapes("test").masks
    edge = torch.ones(32, 32, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    touching = (masks & edge).flatten(1).any(1).float().mean()
    assert touching < 0.2  # a soft edge may reach the border, the shape does not go over it
    areas = masks.float().mean((1, 2))
    assert areas.min() > 0.06
    assert areas.max() < 0.6


def test_a_larger_canvas_shows_the_same():
    keys = torch.arange(8)
    small, large = (render(torch.arange(8), torch.arange(8), keys, canvas) for canvas in (32, 64))
    shrunk = torch.nn.functional.avg_pool2d(large.masks.float()[:, None], 2)[:, 0]
    assert ((shrunk > 0.5) == small.masks).float().mean() > 0.97


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(DataError, match="canvas of 16 to 1024 px, found 8"):
        shapes("test", canvas=8)
