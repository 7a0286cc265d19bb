"""Each change moves its property, and a control of the same size leaves it as it is."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

import vitlens
from tests.kit.planted_failures import SIDE, pictures_of, properties, squares
from tests.kit.splits import split_of
from vitlens import Split
from vitlens.analysis.failures.changes import CHANGES, Edited
from vitlens.analysis.failures.operations import luminance


def edited(split: Split, name: str, sign: int, maps: Tensor | None = None) -> Edited:
    return CHANGES[name](pictures_of(split, maps), sign)


def images_of(split: Split) -> Tensor:
    return split.source.read(torch.arange(len(split))).float() / 255


def of_pixels(images: Tensor, masks: Tensor | None = None) -> dict[str, Tensor]:
    """Measure the properties of changed images."""
    return properties(
        split_of(images.clamp(0, 1), torch.arange(len(images)) % 2, ("across", "down"), masks=masks)
    )


def border(planes: Tensor) -> Tensor:
    """Return True where any pixel at the border is true."""
    return torch.cat([planes[:, 0], planes[:, -1], planes[:, :, 0], planes[:, :, -1]], 1).any(1)


def from_centre(images: Tensor) -> Tensor:
    """Return how far the centre of the bright part lies from that of the image, down and right, px.

    Pixels brighter than the ground count; very bright pixels do not.
    """
    planes = luminance(images)
    inside = ((planes > 0.38) & (planes < 0.9)).float()
    places = torch.arange(SIDE) + 0.5
    return (
        torch.stack([inside.sum(2) @ places, inside.sum(1) @ places], 1)
        / inside.sum((1, 2))[:, None]
        - SIDE / 2
    )


@pytest.fixture(scope="module")
def scenes() -> Split:
    return squares(40, seed=4, dots=0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_moved_to_and_from_the_centre_with_a_control_around_it(scenes, sign):
    before = from_centre(images_of(scenes))
    changed, control = (from_centre(images) for images in edited(scenes, "off_centre", sign))
    radius = before.norm(dim=1)
    far = before.norm(dim=1) > 2
    if sign < 0:
        assert changed.norm(dim=1).max() < 1.2, "whole pixels"
    else:
        assert (changed.norm(dim=1) > radius - 0.6).all()
        assert (changed.norm(dim=1) - radius).mean() > 1
    distance = [(after - before).norm(dim=1)[far] for after in (changed, control)]
    assert (control.norm(dim=1) - radius).abs().mean() < 1.0
    assert float((distance[0] - distance[1]).abs().mean()) < 2.0


def test_moved_off_the_border_with_a_control_along_it(scenes):
    images, (changed, control) = images_of(scenes), edited(scenes, "border", -1)
    touching = border(scenes.masks)
    edges = [border((luminance(pictures) - 0.3).abs() > 0.07) for pictures in (changed, control)]
    assert not edges[0].any()
    assert edges[1].sum() > 0.8 * touching.sum(), "but where the stripe at the border is a dark one"
    torch.testing.assert_close(changed[~touching], images[~touching], atol=1e-5, rtol=0)
    assert ((control - images)[touching].flatten(1).abs().amax(1) > 0.05).all()


@pytest.mark.parametrize(("sign", "least", "most"), [(1, 1.15, 1.35), (-1, 0.72, 0.88)])
def test_scaled_with_a_move_as_control(sign, least, most):
    pictures = pictures_of(vitlens.load_data("digits", limit=40))
    changed, control = CHANGES["size"](pictures, sign)
    before = ((pictures.images - pictures.ground).abs().amax(1) > 0.15).flatten(1).sum(1).sqrt()
    after = ((changed - pictures.ground).abs().amax(1) > 0.15).flatten(1).sum(1).sqrt()
    moved = ((control - pictures.ground).abs().amax(1) > 0.15).flatten(1).sum(1).sqrt()
    free = before < 18  # room to grow
    assert least < float((after / before)[free].mean()) < most
    assert float((moved / before).mean()) == pytest.approx(1, abs=0.05)
    assert (control - pictures.images).abs().flatten(1).amax(1).min() > 0.05


@pytest.mark.parametrize(
    ("name", "sign", "masks"),
    [
        *((n, s, False) for n in ("contrast", "brightness", "sharpness") for s in (-1, 1)),
        ("contrast", 1, True),
    ],
)
def test_pixels_change_nearly_as_much_as_those_of_a_control_that_keeps_the_property(
    name, sign, masks
):
    split = squares(30, seed=1, masks=masks, dots=0)
    if (name, sign) == ("sharpness", 1):  # nothing is sharper than its edges
        smooth = transforms.gaussian_blur(split.source.pixels, [9, 9], [1.5, 1.5])
        split = split_of(smooth, split.labels, split.classes)
    images, (changed, control) = images_of(split), edited(split, name, sign)
    size = (changed - images).abs().mean((1, 2, 3))
    control_size = (control - images).abs().mean((1, 2, 3))
    assert ((control_size > 0.6 * size) & (control_size < 1.1 * size)).all()
    before = of_pixels(images)[name]
    after = of_pixels(changed)[name]
    same = of_pixels(control)[name]
    assert (after - before).mean() * sign > 4 * (same - before).abs().mean()
    assert 0 <= float(control.min()) <= float(control.max()) <= 1


@pytest.mark.parametrize(("sign", "factor"), [(-1, 1 / 1.5), (1, 1.5)])
def test_the_contrast_of_an_object_to_its_ground_changes_by_a_half(scenes, sign, factor):
    changed, control = edited(scenes, "object_contrast", sign)
    before = of_pixels(images_of(scenes), scenes.masks)["object_contrast"]
    after = of_pixels(changed, scenes.masks)["object_contrast"]
    same = of_pixels(control, scenes.masks)["object_contrast"]
    dark = before < 0.2  # brighter ones reach white
    torch.testing.assert_close(after[dark], factor * before[dark], rtol=0.1, atol=5e-3)
    torch.testing.assert_close(same, before, rtol=0, atol=0.02)
    ground = ~scenes.masks[:, None].expand_as(changed)
    assert torch.equal(changed[ground], images_of(scenes)[ground])


def test_scenes_are_drawn_again_without_clutter_or_blurred_and_the_control_is_as_cluttered():
    drawn = vitlens.load_data("digits", limit=12)
    changed, control = edited(drawn, "clutter", -1)
    assert torch.equal(changed, drawn.scenes.redrawn("without distractors").float() / 255)
    other = drawn.scenes.redrawn("other ground").float() / 255
    ground = ~drawn.masks
    unchanged = [(control == background).all(1).all(1) for background in (other, images_of(drawn))]
    assert (unchanged[0] | unchanged[1]).all(), "columns of another ground"
    assert 0 < unchanged[0].float().mean() < 0.5
    edges = [
        (pictures.diff(dim=3).abs().mean(1) * ground[:, :, 1:]).mean((1, 2))
        for pictures in (control, images_of(drawn))
    ]
    torch.testing.assert_close(*edges, rtol=0.15, atol=0)
    split = squares(30, seed=1)
    changed, control = edited(split, "clutter", -1)
    before = of_pixels(images_of(split), split.masks)["clutter"]
    after = of_pixels(changed, split.masks)["clutter"]
    same = of_pixels(control, split.masks)["clutter"]
    assert after.mean() < 0.3 * before.mean()
    assert float(same.mean()) == pytest.approx(float(before.mean()), rel=0.15)
    unchanged = split.masks[:, None].expand_as(changed)
    for images in (changed, control):
        assert torch.equal(images[unchanged], images_of(split)[unchanged])


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "mark"])
@pytest.mark.parametrize("masks", [True, False])
def test_a_control_changes_pixels_by_half_to_twice_as_much(name, masks):
    objects = name in ("off_centre", "size", "object_contrast", "border", "clutter")
    if masks == name.startswith("map_") or (objects and not masks):
        # a map's place and size are changed of images without masks, what is an object's of the
        # others
        return
    drawn = vitlens.load_data("digits", limit=60)
    split = drawn if masks else replace(drawn, masks=None, scenes=None)
    maps = torch.rand(60, 8, 8, generator=torch.Generator().manual_seed(0)) ** 3
    for sign in (-1, 1):
        size, control_size = (
            float((pictures - images_of(split)).abs().mean())
            for pictures in edited(split, name, sign, maps)
        )
        assert 0.5 < control_size / size < 2


def test_a_light_from_one_side_keeps_the_mean_of_dark_images():
    """Where it would be clipped, too: the control of another brightness must not change the
    brightness.
    """
    drawn = vitlens.load_data("digits", limit=60)
    changed, control = (
        luminance(pictures).mean((1, 2)) for pictures in edited(drawn, "brightness", 1)
    )
    before = luminance(images_of(drawn)).mean((1, 2))
    assert (changed - before).min() > 0.1
    torch.testing.assert_close(control, before, atol=0.005, rtol=0)


def test_a_photograph_is_shifted_so_that_its_map_is_centred():
    images = torch.zeros(2, 3, SIDE, SIDE)
    images[0, :, 4, 20], images[1, :, 16, 16] = 1, 1
    split = split_of(images, torch.tensor([0, 1]), ("a", "b"))
    maps = torch.zeros(2, SIDE, SIDE)
    maps[0, 2, 20] = 1.0  # the other is uniform
    changed, control = edited(split, "map_off_centre", -1, maps)
    assert changed[0, 0, 4 + SIDE // 4, 15:17].max() == 1, "by a quarter of a side at most"
    assert torch.equal(changed[1], images[1]), "a map that is not known moves nothing"
    assert not torch.equal(control[0], changed[0])
    zoomed, shifted = edited(split, "map_size", 1)
    assert zoomed.sum() > images.sum()
    assert (
        1
        <= torch.tensor(divmod(int(shifted[1, 0].argmax()), SIDE)).float().sub(16).norm()
        < SIDE / 4
    )


def test_objects_that_fill_the_image_and_empty_masks():
    split = squares(3, dots=0)
    split.masks[0], split.masks[1] = True, False
    for name in ("off_centre", "size", "object_contrast", "border", "clutter", "occlusion"):
        for images in edited(split, name, -1):
            assert images.isfinite().all(), name
