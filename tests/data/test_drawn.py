"""The drawn sets: each image depends on its own number alone, with an exact mask; redrawn without distractors."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.cue_conflict import cues_of
from vitlens.data.digits import TEST_PER_CLASS, _load, digits, source_digits
from vitlens.data.draws import keys, mix, uniform
from vitlens.data.scenes import LUMINANCE, render
from vitlens.data.shapes import CLASSES, PER_CLASS, SHAPES, TEXTURES, shapes
from vitlens.data.split import Drawings, Drawn, InMemory, Split
from vitlens.errors import DataError


def drawn(count: int, *, canvas: int = 32, seed: int = 0) -> Drawn:
    """The first scenes of the training part."""
    source = digits("train", canvas=canvas, seed=seed).source
    assert isinstance(source, Drawings)
    return source.draw(torch.arange(count))


def images_of(split: Split) -> Tensor:
    return split.source.read(torch.arange(len(split)))


def test_no_source_digit_is_in_both_parts_and_none_is_lost() -> None:
    train, test = digits("train", scenes=2), digits("test")
    assert sorted(source_digits("train").tolist() + source_digits("test").tolist()) == list(range(1797))
    assert test.labels.bincount().tolist() == [TEST_PER_CLASS] * 10
    assert torch.equal(test.groups, source_digits("test"))
    for split in (train, test):
        assert torch.equal(split.labels, _load()[1][split.groups])


@pytest.mark.parametrize(
    "split",
    [digits("train", scenes=2), shapes("train", per_class=5), shapes("train", cue="conflict", per_class=5)],
    ids=["digits", "shapes", "conflict"],
)
def test_an_image_does_not_depend_on_its_batch_and_epochs_share_none(split: Split, monkeypatch) -> None:
    together = split.source.read(torch.arange(40))
    monkeypatch.setattr("vitlens.data.scenes._CHUNK", 32 * 32 * 3)  # drawn in chunks
    assert torch.equal(split.source.read(torch.arange(40)), together)
    for index in (0, 9, 39):
        assert torch.equal(split.source.read(torch.tensor([index]))[0], together[index])
    limited = split.pick(torch.tensor([7, 3]))
    assert torch.equal(images_of(limited), together[[7, 3]])
    epochs = [limited.epoch(number) for number in range(4)]
    assert torch.equal(images_of(epochs[0]), images_of(limited))
    assert len(torch.cat([images_of(each) for each in epochs]).flatten(1).unique(dim=0)) == 8
    assert all(torch.equal(each.labels, limited.labels) and each.masks is None for each in epochs)


def test_more_scenes_leave_the_first_ones_and_seeds_change_them() -> None:
    one, three, other = digits("test"), digits("test", scenes=3), digits("test", seed=3)
    assert len(three) == 3 * len(one)
    assert torch.equal(three.source.read(torch.arange(len(one))), images_of(one))
    assert torch.equal(three.groups[len(one) : 2 * len(one)], one.groups)
    assert not torch.equal(images_of(other), images_of(one))
    assert torch.equal(images_of(digits("test", seed=3)), images_of(other))
    assert isinstance(one.source, InMemory)
    assert one.epoch(5) is one
    few, many = shapes("train", per_class=2), shapes("train", per_class=5)
    assert torch.equal(few.source.read(torch.arange(16)), many.source.read(torch.arange(16)))
    parts = [few, shapes("train", per_class=2, seed=1), shapes("test", per_class=2)]
    assert len(torch.cat([images_of(each) for each in parts]).flatten(1).unique(dim=0)) == 48


@pytest.mark.parametrize("canvas", [32, 64])
def test_ink_and_ground_differ_in_luminance_on_every_scene(canvas: int) -> None:
    scenes = drawn(400, canvas=canvas)
    light = (scenes.pixels.float() / 255 * torch.tensor(LUMINANCE).view(3, 1, 1)).sum(1)
    for values, mask in zip(light, scenes.masks):
        assert abs(values[mask].median() - values[~mask].median()) > 0.25


def test_masks_hold_the_whole_digit() -> None:
    masks = digits("test").masks
    area = masks.flatten(1).float().mean(1)
    assert 0.04 < area.min() < area.max() < 0.45
    rows, columns = masks.any(2).sum(1), masks.any(1).sum(1)
    assert rows.float().mean() > 14  # px of 32: large enough to read
    assert (columns >= 3).all()
    large = digits("test", canvas=64)
    heights = large.masks.any(2).sum(1)
    assert large.size == (64, 64)
    assert 0.4 * 64 < heights.min() <= heights.max() <= 64


def test_pixels_inside_the_mask_are_one_colour() -> None:
    """The mask is exact: away from the soft outline only the ink's grain is seen, never ground or stroke."""
    scenes = drawn(50, canvas=128)
    for pixels, mask in zip(scenes.pixels.float() / 255, scenes.masks):
        inner = -F.max_pool2d(-mask[None, None].float(), 9, 1, 4)[0, 0] > 0
        ink = pixels[:, inner]
        assert (ink.amax(1) - ink.amin(1) <= 0.06 + 2 / 255).all()


def test_no_stroke_touches_the_ink(monkeypatch) -> None:
    """Strokes that covered the whole canvas would still leave the digit, and a margin around it, as it is."""
    pictures = []
    for cover in (torch.zeros, torch.ones):
        monkeypatch.setattr(
            "vitlens.data.scenes._stroke", lambda draws, canvas, make=cover: make(len(draws), canvas, canvas)
        )
        pictures.append(drawn(20, canvas=128))
    near = F.max_pool2d(pictures[0].masks[:, None].float(), 3, 1, 1) > 0
    changed = (pictures[0].pixels != pictures[1].pixels).any(1, keepdim=True)
    assert not (changed & near).any()
    assert changed.any()


def test_the_digit_is_the_source_digit() -> None:
    """A nearest-mean classifier on the masks, cropped to the ink, tells most digits: labels and drawings agree."""
    crops = []
    for masks in (drawn(1347).masks, digits("test").masks):
        boxes = [mask[mask.any(1)][:, mask.any(0)][None, None].float() for mask in masks]
        crops.append(torch.cat([F.interpolate(box, (8, 8), mode="bilinear") for box in boxes]).flatten(1))
    train_labels, test_labels = digits("train", scenes=1).labels, digits("test").labels
    means = torch.stack([crops[0][train_labels == label].mean(0) for label in range(10)])
    assert (torch.cdist(crops[1], means).argmin(1) == test_labels).float().mean() > 0.7


def differs(first: Tensor, second: Tensor) -> Tensor:
    return (first.int() - second.int()).abs().amax(1) > 3


def test_redrawn_without_distractors_and_on_another_ground() -> None:
    split = digits("test").limit(60)
    scenes, images = split.scenes, images_of(split)
    assert scenes is not None
    plain, other = scenes.redrawn("without distractors"), scenes.redrawn("other ground")
    strokes = differs(plain, images)
    assert not (strokes & split.masks).any()
    assert 0.005 < strokes.float().mean() < 0.1
    assert (strokes.flatten(1).any(1)).float().mean() > 0.95
    noise = 0.06 * 255  # the grain is drawn again, too; the ground shows through the digit's edge
    assert (other.int() - images.int()).abs().amax(1)[split.masks].float().quantile(0.9) <= noise + 1
    assert (differs(other, images) & ~split.masks).float().mean() > 0.3
    kept, removed = ((each.int() - images.int()).abs().amax(1)[strokes].float().mean() for each in (other, plain))
    assert kept < removed / 3
    picked = split.pick(torch.tensor([5, 2])).scenes
    assert picked is not None
    assert torch.equal(picked.redrawn("other ground"), other[[5, 2]])
    assert digits("train").scenes is None


@pytest.mark.parametrize("cue", ["agree", "conflict"])
def test_shapes_are_balanced_in_shape_and_texture(cue) -> None:
    split = shapes("test", cue=cue)
    cues = cues_of(split)
    assert tuple(SHAPES) == tuple(TEXTURES) == CLASSES
    assert len(split) == 8 * PER_CLASS["test"]
    assert torch.equal(cues.shape, split.labels)
    assert torch.bincount(cues.shape).tolist() == torch.bincount(cues.texture).tolist() == [70] * 8
    pairs = torch.bincount(cues.shape * 8 + cues.texture, minlength=64).view(8, 8)
    same = torch.eye(8, dtype=torch.long)
    assert torch.equal(pairs, 70 * same if cue == "agree" else 10 * (1 - same))


def test_the_mask_is_where_the_texture_is_and_inside_the_image() -> None:
    """The same image in two textures differs on the mask and, but for its soft edge, nowhere else."""
    one, other = (shapes("test", cue=cue, per_class=1) for cue in ("agree", "conflict"))
    different = (images_of(one).int() - images_of(other).int()).abs().amax(1) > 8
    assert torch.equal(one.masks, other.masks)
    reach = F.max_pool2d(one.masks.float()[:, None], 3, 1, 1)[:, 0] > 0
    assert not (different & ~reach).any()
    for changed, mask in zip(different, one.masks):
        assert (changed & mask).sum() > 0.4 * mask.sum()
    masks, edge = shapes("test").masks, torch.ones(32, 32, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    assert (masks & edge).flatten(1).any(1).float().mean() < 0.2  # only a soft edge may reach the border
    areas = masks.float().mean((1, 2))
    assert 0.06 < areas.min() < areas.max() < 0.6


def test_a_larger_canvas_shows_the_same() -> None:
    small, large = (shapes("test", canvas=canvas, per_class=1).masks for canvas in (32, 64))
    shrunk = F.avg_pool2d(large.float()[:, None], 2)[:, 0]
    assert ((shrunk > 0.5) == small).float().mean() > 0.97


@pytest.mark.parametrize("options", [{"canvas": 8}, {"canvas": 4096}, {"scenes": 0}])
def test_what_cannot_be_drawn_is_refused(options) -> None:
    for make in (digits, shapes)[: 1 + ("canvas" in options)]:
        with pytest.raises(DataError, match="expected"):
            make("test", **options)


def test_draws_are_uniform_and_an_empty_batch_is_one() -> None:
    words = torch.arange(1 << 16)
    assert len(mix(words).unique()) == len(words)
    draws = uniform(keys(7, words[:4000]), 50)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.005
    assert abs(draws.var() - 1 / 12) < 0.002
    correlation = torch.corrcoef(draws.T) - torch.eye(50)
    assert correlation.abs().max() < 0.09  # 5.7 standard errors of 4,000 independent pairs
    empty = render(torch.zeros(0, 8, 8), torch.zeros(0, dtype=torch.long))
    assert (empty.pixels.shape, empty.masks.shape) == ((0, 3, 32, 32), (0, 32, 32))
