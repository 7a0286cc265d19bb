"""Every operation is torchvision's, and each view is augmented independently of its batch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from vitlens.training.augment import AREA, OPERATIONS, augment, erase, mix, rand_augment, strength, uniforms
from vitlens.training.recipe import Recipe

PIXELS, NOISE = (
    torch.randint(0, 256, (40, 3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for size in ((8, 12), (16, 24))
)
KEYS = torch.arange(100, 140)
KINDS: dict[str, dict[str, Any]] = {
    "shift and flip": {"crop_padding": 2, "flip": True}, "RandAugment": {"randaugment": 2}, "erasing": {"erasing": 0.5},
}  # fmt: skip


def augmented(pixels: Tensor = PIXELS, keys: Tensor = KEYS, *, seed: int = 3, epoch: int = 1, **recipe: Any) -> Tensor:
    return augment(pixels, keys, Recipe(**recipe), seed=seed, epoch=epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_depends_on_seed_epoch_and_key_and_not_on_its_batch(kind: str) -> None:
    recipe, before = KINDS[kind], PIXELS.clone()
    whole = augmented(**recipe)
    halves = torch.cat([augmented(PIXELS[part::2], KEYS[part::2], **recipe) for part in (0, 1)])
    assert torch.equal(halves, torch.cat([whole[0::2], whole[1::2]]))
    assert torch.equal(augmented(PIXELS.flip(0), KEYS.flip(0), **recipe), whole.flip(0))
    for change in ({"seed": 4}, {"epoch": 2}, {"keys": KEYS + 1}, {"seed": 3 + (1 << 32)}):
        assert not torch.equal(augmented(**change, **recipe), whole)
    assert torch.equal(PIXELS, before)


@pytest.mark.parametrize("flip", [True, False])
def test_each_result_is_one_of_the_shifts_and_flips_of_its_image(flip: bool) -> None:
    padded = torch.nn.functional.pad(PIXELS, (2, 2, 2, 2))
    for result, image in zip(augmented(crop_padding=2, flip=flip), padded):
        crops = [image[:, y : y + 8, x : x + 12] for y in range(5) for x in range(5)]
        views = [view for crop in crops for view in ((crop, crop.flip(2)) if flip else (crop,))]
        assert any(torch.equal(result, view.float() / 255) for view in views)
    assert torch.equal(augmented(), PIXELS.float() / 255)


def test_shifts_and_flips_are_equally_likely() -> None:
    ramp = torch.arange(1, 13, dtype=torch.uint8).expand(6000, 3, 8, 12).contiguous()
    drawn = augmented(ramp, torch.arange(6000), crop_padding=1, flip=True)
    views, counts = (drawn * 255).unique(dim=0, return_counts=True)
    assert len(views) == 2 * 9  # an image of equal rows shows vertical shifts by its black rows
    expected = 6000 / len(views)
    assert ((counts - expected) ** 2 / expected).sum() < 40  # chi-squared with 17 degrees: p > 0.001


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draws, other = (uniforms(torch.arange(20000), 3, stream, seed=0, epoch=0) for stream in (0, 1))
    assert draws.min() >= 0
    assert draws.max() < 1
    assert draws.mean(0).sub(0.5).abs().max() < 0.01
    assert draws.var(0).sub(1 / 12).abs().max() < 0.002
    neighbours = torch.cat([draws[1:], draws[:-1], other[1:]], dim=1)
    assert torch.corrcoef(neighbours.T).fill_diagonal_(0).abs().max() < 0.03


THEIRS = {
    "identity": "Identity", "shear-x": "ShearX", "shear-y": "ShearY", "translate-x": "TranslateX",
    "translate-y": "TranslateY", "rotate": "Rotate", "brightness": "Brightness", "colour": "Color",
    "contrast": "Contrast", "sharpness": "Sharpness", "posterize": "Posterize", "solarize": "Solarize",
    "autocontrast": "AutoContrast", "equalize": "Equalize",
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("magnitude", [5, 9, 30])
def test_each_operation_is_torchvisions(name: str, magnitude: int) -> None:
    top, signed, operation = OPERATIONS[name]
    theirs: Any = v2.RandAugment(fill=0)
    values, theirs_signed = theirs._AUGMENTATION_SPACE[THEIRS[name]]
    magnitudes = values(31, 16, 24)
    assert signed == theirs_signed
    for sign in (1, -1) if signed else (1,):
        value = 0.0 if magnitudes is None else float(magnitudes[magnitude]) * sign
        expected = theirs._apply_image_or_video_transform(
            NOISE, THEIRS[name], value, InterpolationMode.NEAREST, theirs._fill
        )
        assert torch.equal(operation(NOISE, sign * strength(top, magnitude)), expected)


def test_every_operation_is_drawn_equally_often() -> None:
    draw = partial(uniforms, torch.arange(4000), seed=1, epoch=0)
    views = rand_augment(NOISE[:1].expand(4000, -1, -1, -1), draw, operations=1, magnitude=9)
    results, counts = views.unique(dim=0, return_counts=True)
    assert len(results) == len(OPERATIONS) + sum(signed for _, signed, _ in OPERATIONS.values())
    halves = torch.where(counts > 4000 / len(OPERATIONS) * 0.75, 1.0, 0.5)
    expected = 4000 / len(OPERATIONS) * halves
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-squared with 22 degrees: p > 0.002


def test_rectangles_of_noise_of_the_right_sizes_in_a_share_of_the_images() -> None:
    black, draw = torch.zeros(2000, 3, 16, 24), partial(uniforms, torch.arange(2000), seed=0, epoch=0)
    erased = erase(black, draw, chance=0.25)
    changed = (erased != 0).any(1)
    hit = changed.flatten(1).any(1)
    assert abs(hit.float().mean() - 0.25) < 0.04
    for box in (mask.nonzero() for mask in changed[hit]):
        tall, wide = (box.max(0).values - box.min(0).values + 1).tolist()
        assert len(box) == tall * wide  # a rectangle without holes
        assert len(box) <= AREA[1] * 16 * 24 + 16 + 24  # sides are rounded
    assert erased.min() >= 0
    assert erased.max() < 1
    assert abs(erased[erased != 0].mean() - 0.5) < 0.01
    assert not black.any()


LABELS = torch.arange(8)
IMAGES = torch.eye(8)[:, :3, None, None].expand(-1, -1, 16, 16) + LABELS[:, None, None, None] / 10


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_targets_are_the_shares_of_the_images_in_the_mixture(kind: str) -> None:
    """Constant images: the mean over pixels is as linear in the shares as the targets are."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"mixup": 0.0, "cutmix": 0.0, kind: 1.0}
    for _ in range(10):
        mixed, targets = mix(IMAGES, LABELS, Recipe(**settings), classes=8)
        assert torch.allclose(targets.sum(1), torch.ones(8))
        assert torch.allclose(mixed.mean((2, 3)), targets @ IMAGES.mean((2, 3)), atol=1e-5)
        if kind == "cutmix":  # each pixel is of one of the two images
            assert torch.isin(mixed[:, 0], IMAGES[:, 0].unique()).all()


def test_a_batch_is_mixed_with_the_given_probability_by_one_of_two() -> None:
    torch.manual_seed(0)
    drawn = [mix(IMAGES, LABELS, Recipe(mixup=0.8, cutmix=1.0, mix_chance=0.5), classes=8) for _ in range(400)]
    whole = [targets.ndim == 1 for _, targets in drawn]
    assert abs(sum(whole) / 400 - 0.5) < 0.08
    assert all(torch.equal(images, IMAGES) for (images, _), untouched in zip(drawn, whole) if untouched)
    for images, recipe in ((IMAGES[:1], Recipe(mixup=1.0)), (IMAGES, Recipe())):  # one image, or no parameter
        assert mix(images, LABELS[: len(images)], recipe, classes=8)[0] is images
