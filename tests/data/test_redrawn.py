"""Scenes drawn again: without distractors, or with them on another ground."""

import torch

from vitlens.data.digits import digits
from vitlens.data.scenes import STROKES, SceneStyle
from vitlens.data.split import Split


def differs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.int() - second.int()).abs().amax(1) > 3


def images_of(split: Split) -> torch.Tensor:
    return split.source.read(torch.arange(len(split)))


def test_only_the_distractors_are_gone():
    split = digits("test").limit(60)
    plain, drawn = split.scenes.redrawn("without distractors"), images_of(split)
    gone = differs(plain, drawn)
    assert not (gone & split.masks).any()
    assert 0.005 < gone.float().mean() < 0.1
    assert (gone.flatten(1).any(1)).float().mean() > 0.95


def test_another_ground_keeps_digit_and_distractors():
    split = digits("test").limit(60)
    drawn = images_of(split)
    other = split.scenes.redrawn("other ground")
    plain = split.scenes.redrawn("without distractors")
    strokes = differs(plain, drawn)
    noise = 0.06 * 255  # the grain is drawn again, too; the ground shows through the digit's edge
    assert (other.int() - drawn.int()).abs().amax(1)[split.masks].float().quantile(0.9) <= noise + 1
    assert (differs(other, drawn) & ~split.masks).float().mean() > 0.3
    kept = (other.int() - drawn.int()).abs().amax(1)[strokes].float().mean()
    removed = (plain.int() - drawn.int()).abs().amax(1)[strokes].float().mean()
    assert kept < removed / 3


def test_redrawing_follows_the_images_that_are_picked():
    whole = digits("test")
    picked = whole.pick(torch.tensor([5, 2]))
    for change in ("without distractors", "other ground"):
        assert torch.equal(picked.scenes.redrawn(change), whole.scenes.redrawn(change)[[5, 2]])


def test_what_is_drawn_anew_has_no_scenes_of_before():
    train = digits("train", scenes=1)
    assert train.scenes is None
    assert digits("test").pick(torch.arange(3)).limit(2).scenes is not None
    assert SceneStyle().strokes == STROKES
