"""Each change moves its property, and its control is as large and leaves it as it is."""

from dataclasses import replace

import pytest
import torch
from torchvision.transforms.v2 import functional as transforms

from tests.analysis.failures.planted import SIDE, squares
from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.covariates import CHANGES, Edited, Pictures, Subject, centroids, luminance
from vitlens.analysis.failures.properties import PROPERTIES
from vitlens.data.digits import digits
from vitlens.data.split import InMemory, Split


def pictures_of(split: Split, maps: torch.Tensor | None = None) -> Pictures:
    evaluation = Evaluation("m", split.classes, torch.zeros(len(split), 2), split.labels)
    return Pictures(Subject(None, split, evaluation, maps), torch.arange(len(split)))


def edited(split: Split, name: str, sign: int, maps: torch.Tensor | None = None) -> Edited:
    return CHANGES[name](pictures_of(split, maps), sign)


def measured(split: Split, images: torch.Tensor, **more: object) -> dict[str, torch.Tensor]:
    """Properties of pixels."""
    source = InMemory((255 * images).round().byte())
    bare = Split("x", "test", source, split.size, split.classes, labels=split.labels, **more)
    logits = torch.randn(len(split), 2, generator=torch.Generator().manual_seed(0))
    return Subject(None, bare, Evaluation("m", split.classes, logits, split.labels)).values


def border(planes: torch.Tensor) -> torch.Tensor:
    """Whether any pixel at the border is true."""
    return torch.cat([planes[:, 0], planes[:, -1], planes[:, :, 0], planes[:, :, -1]], 1).any(1)


def object_at(images: torch.Tensor, split: Split) -> torch.Tensor:
    """The centre of what is brighter than the ground, once the bright pixels are gone."""
    planes = luminance(images)
    return centroids((planes > 0.38) & (planes < 0.9))


@pytest.fixture(scope="module")
def scenes() -> Split:
    return squares(40, seed=4, dots=0)


def test_every_change_that_is_described_exists():
    assert CHANGES.keys() == {name for name, known in PROPERTIES.items() if known.lowered or known.raised}
    assert all(known.control and known.cause for name, known in PROPERTIES.items() if name in CHANGES)


@pytest.mark.parametrize("sign", [-1, 1])
def test_moved_to_and_from_the_centre_with_a_control_around_it(scenes, sign):
    before = object_at(next(iter(scenes.batches(40))).images, scenes) - SIDE / 2
    changed, control = (object_at(images, scenes) - SIDE / 2 for images in edited(scenes, "off_centre", sign))
    radius, far = before.norm(dim=1), before.norm(dim=1) > 2
    if sign < 0:
        assert changed.norm(dim=1).max() < 1.2, "whole pixels"
    else:
        assert (changed.norm(dim=1) > radius - 0.6).all()
    distance = [(after - before).norm(dim=1)[far] for after in (changed, control)]
    assert (control.norm(dim=1) - radius).abs().mean() < 1.0
    assert float((distance[0] - distance[1]).abs().mean()) < 2.0


def test_moved_off_the_border_with_a_control_along_it(scenes):
    pictures = pictures_of(scenes)
    changed, control = CHANGES["border"](pictures, -1)
    touching = border(scenes.masks)
    assert 5 < int(touching.sum()) < 35
    edges = [border((luminance(images) - 0.3).abs() > 0.07) for images in (changed, control)]
    assert not edges[0].any()
    assert edges[1].sum() > 0.8 * touching.sum(), "but where the stripe at the border is a dark one"
    assert torch.allclose(changed[~touching], pictures.images[~touching], atol=1e-5)
    assert ((control - pictures.images)[touching].flatten(1).abs().amax(1) > 0.05).all()


@pytest.mark.parametrize(("sign", "least", "most"), [(1, 1.15, 1.35), (-1, 0.72, 0.88)])
def test_scaled_with_a_turn_as_control(sign, least, most):
    split = digits("test").limit(40)
    pictures = pictures_of(split)
    changed, control = CHANGES["size"](pictures, sign)
    ground = pictures.ground
    before, after, turned = (
        ((images - ground).abs().amax(1) > 0.15).flatten(1).sum(1).sqrt()
        for images in (pictures.images, changed, control)
    )
    free = before < 18  # room to grow
    assert least < float((after / before)[free].mean()) < most
    assert float((turned / before).mean()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(("name", "sign"), [(n, s) for n in ("contrast", "brightness", "sharpness") for s in (-1, 1)])
def test_pixels_change_as_much_as_their_control_which_keeps_luminance(masks, name, sign):
    split = squares(30, seed=1, masks=masks, dots=0)
    if (name, sign) == ("sharpness", 1):  # nothing is sharper than its edges
        source = InMemory(transforms.gaussian_blur(split.source.pixels, [9, 9], [1.5, 1.5]))
        split = replace(split, source=source)
    images = next(iter(split.batches(30))).images
    changed, control = edited(split, name, sign)
    sizes = [(each - images).square().mean((1, 2, 3)).sqrt() for each in (changed, control)]
    assert torch.allclose(*sizes, rtol=0.1, atol=2e-3)
    before, after, same = (measured(split, each) for each in (images, changed.clamp(0, 1), control))
    moved = (after[name] - before[name]).mean() * sign
    kept = (same[name] - before[name]).abs().mean()
    assert moved > 4 * kept
    assert float(control.min()) >= 0
    assert float(control.max()) <= 1


def test_scenes_are_drawn_again_without_clutter_or_blurred_and_the_control_is_as_cluttered():
    drawn = digits("test").limit(12)
    for images, how in zip(edited(drawn, "clutter", -1), ("without distractors", "other ground")):
        assert torch.equal(images, drawn.scenes.redrawn(how).float() / 255)
    split = squares(30, seed=1)
    pictures = pictures_of(split)
    changed, control = CHANGES["clutter"](pictures, -1)
    before, after, same = (
        measured(split, images, masks=split.masks)["clutter"] for images in (pictures.images, changed, control)
    )
    assert after.mean() < 0.3 * before.mean()
    assert float(same.mean()) == pytest.approx(float(before.mean()), rel=0.15)
    kept = split.masks[:, None].expand_as(changed)
    assert torch.equal(changed[kept], pictures.images[kept])


def test_a_photograph_is_shifted_so_that_its_map_is_centred():
    images = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8)
    images[0, :, 4, 20], images[1, :, 16, 16] = 255, 255
    split = Split("p", "test", InMemory(images), (SIDE, SIDE), ("a", "b"), labels=torch.tensor([0, 1]))
    maps = torch.zeros(2, SIDE, SIDE)
    maps[0, 2, 20] = 1.0  # the other is uniform
    changed, control = edited(split, "map_off_centre", -1, maps)
    assert changed[0, 0, 4 + SIDE // 4, 15:17].max() == 1, "by a quarter of a side at most"
    assert torch.equal(changed[1], images[1].float() / 255), "a map that is not known moves nothing"
    assert not torch.equal(control[0], changed[0])
    zoomed, shifted = edited(split, "map_size", 1)
    assert zoomed.sum() > images.float().sum() / 255
    assert not torch.equal(shifted, images.float() / 255)


def test_objects_that_fill_the_image_and_empty_masks():
    split = squares(3, dots=0)
    split.masks[0], split.masks[1] = True, False
    for name in ("off_centre", "size", "object_contrast", "border", "clutter"):
        for images in edited(split, name, -1):
            assert images.isfinite().all(), name
