"""Every operation is torchvision's, and each view is augmented independently of its batch."""

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from vitlens.training.augment import AREA, OPERATIONS, augment, erase, mix, rand_augment, strength, uniforms
from vitlens.training.recipe import Recipe

PIXELS = torch.randint(0, 256, (20, 3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
INDICES = torch.arange(100, 120)


def augmented(pixels: torch.Tensor = PIXELS, keys: torch.Tensor = INDICES, **changes: object) -> torch.Tensor:
    settings: dict[str, object] = {"crop_padding": 2, "flip": True, **changes}
    drawn = {name: settings.pop(name, default) for name, default in (("seed", 3), ("epoch", 1))}
    return augment(pixels, keys, Recipe(**settings), **drawn)  # type: ignore[arg-type]


def test_the_augmentation_of_an_image_does_not_depend_on_its_batch() -> None:
    whole = augmented()
    halves = torch.cat([augmented(PIXELS[0::2], INDICES[0::2]), augmented(PIXELS[1::2], INDICES[1::2])])
    assert torch.equal(halves, torch.cat([whole[0::2], whole[1::2]]))
    assert torch.equal(augmented(PIXELS.flip(0), INDICES.flip(0)), whole.flip(0))


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 2}, {"keys": INDICES + 1}, {"seed": 3 + (1 << 32)}])
def test_seed_epoch_and_index_each_change_it(change: dict[str, object]) -> None:
    assert not torch.equal(augmented(**change), augmented())


def test_each_result_is_one_of_the_shifts_and_flips_of_its_image() -> None:
    padded = torch.nn.functional.pad(PIXELS, (2, 2, 2, 2))
    for result, image in zip(augmented(), padded):
        crops = [image[:, y : y + 8, x : x + 12] for y in range(5) for x in range(5)]
        assert any(torch.equal(result, view.float() / 255) for crop in crops for view in (crop, crop.flip(2)))


def test_without_padding_and_flip_it_is_the_image() -> None:
    assert torch.equal(augmented(crop_padding=0, flip=False), PIXELS.float() / 255)


def test_without_flip_nothing_is_mirrored() -> None:
    assert torch.equal(augmented(crop_padding=0, flip=False), augmented(crop_padding=0, flip=True, epoch=1)) is False
    ramp = torch.arange(12, dtype=torch.uint8).expand(200, 3, 8, 12).contiguous()
    shifted = augmented(ramp, torch.arange(200), crop_padding=2, flip=False)
    assert (shifted[..., 2:-2].diff(dim=-1) >= 0).all()


def test_shifts_and_flips_are_equally_likely() -> None:
    ramp = torch.arange(1, 13, dtype=torch.uint8).expand(6000, 3, 8, 12).contiguous()
    views, counts = (augmented(ramp, torch.arange(6000), crop_padding=1) * 255).unique(dim=0, return_counts=True)
    assert len(views) == 2 * 9  # an image of equal rows shows vertical shifts by its black rows
    expected = 6000 / len(views)
    assert ((counts - expected) ** 2 / expected).sum() < 40  # chi-squared with 17 degrees: p > 0.001


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    draws = uniforms(torch.arange(20000), 3, seed=0, epoch=0)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert draws.mean(0).sub(0.5).abs().max() < 0.01
    assert draws.var(0).sub(1 / 12).abs().max() < 0.002
    other = uniforms(torch.arange(20000), 3, seed=0, epoch=0, stream=1)
    neighbours = torch.cat([draws[1:], draws[:-1], other[1:]], dim=1)
    assert torch.corrcoef(neighbours.T).fill_diagonal_(0).abs().max() < 0.03


def test_input_is_not_changed() -> None:
    before = PIXELS.clone()
    augmented()
    assert torch.equal(PIXELS, before)


NOISE = torch.randint(0, 256, (40, 3, 16, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
VIEWS = torch.arange(40)
THEIRS = {
    "identity": "Identity", "shear-x": "ShearX", "shear-y": "ShearY", "translate-x": "TranslateX",
    "translate-y": "TranslateY", "rotate": "Rotate", "brightness": "Brightness", "colour": "Color",
    "contrast": "Contrast", "sharpness": "Sharpness", "posterize": "Posterize", "solarize": "Solarize",
    "autocontrast": "AutoContrast", "equalize": "Equalize",
}  # fmt: skip


def rand_augmented(pixels: torch.Tensor = NOISE, keys: torch.Tensor = VIEWS, **changes: object) -> torch.Tensor:
    settings: dict[str, object] = {"seed": 1, "epoch": 0, "operations": 2, "magnitude": 9}
    return rand_augment(pixels, keys, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("magnitude", [5, 9, 30])
def test_each_operation_is_torchvisions(name: str, magnitude: int) -> None:
    top, signed, operation = OPERATIONS[name]
    theirs = v2.RandAugment(fill=0)
    values, theirs_signed = theirs._AUGMENTATION_SPACE[THEIRS[name]]
    magnitudes = values(31, 16, 24)
    assert signed == theirs_signed
    for sign in (1, -1) if signed else (1,):
        value = 0.0 if magnitudes is None else float(magnitudes[magnitude]) * sign
        expected = theirs._apply_image_or_video_transform(
            NOISE, THEIRS[name], value, InterpolationMode.NEAREST, theirs._fill
        )
        assert torch.equal(operation(NOISE, sign * strength(top, magnitude)), expected)


def test_the_operations_of_a_view_do_not_depend_on_its_batch() -> None:
    whole = rand_augmented()
    parts = torch.cat([rand_augmented(NOISE[start : start + 7], VIEWS[start : start + 7]) for start in range(0, 40, 7)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, rand_augmented(epoch=1))
    assert not torch.equal(whole, rand_augmented(seed=2))


def test_every_operation_is_drawn_equally_often_and_the_input_stays() -> None:
    before = NOISE[:1].clone()
    views = rand_augmented(before.expand(4000, -1, -1, -1), torch.arange(4000), operations=1)
    assert torch.equal(before, NOISE[:1])
    results, counts = views.unique(dim=0, return_counts=True)
    assert len(results) == len(OPERATIONS) + sum(signed for _, signed, _ in OPERATIONS.values())
    halves = torch.where(counts > 4000 / len(OPERATIONS) * 0.75, 1.0, 0.5)
    expected = 4000 / len(OPERATIONS) * halves
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-squared with 22 degrees: p > 0.002


BLACK = torch.zeros(2000, 3, 16, 24)
MANY = torch.arange(2000)


def test_rectangles_of_noise_of_the_right_sizes_in_a_share_of_the_images() -> None:
    erased = erase(BLACK, MANY, seed=0, epoch=0, chance=0.25)
    changed = (erased != 0).any(1)
    hit = changed.flatten(1).any(1)
    assert abs(hit.float().mean() - 0.25) < 0.04
    boxes = [mask.nonzero() for mask in changed[hit]]
    for box in boxes:
        tall, wide = (box.max(0).values - box.min(0).values + 1).tolist()
        assert len(box) == tall * wide  # a rectangle without holes
        assert len(box) <= AREA[1] * 16 * 24 + 16 + 24  # sides are rounded
    assert erased.min() >= 0
    assert erased.max() < 1
    assert abs(erased[erased != 0].mean() - 0.5) < 0.01


def test_the_erasing_of_a_view_does_not_depend_on_its_batch_and_keeps_the_input() -> None:
    whole = erase(BLACK, MANY, seed=0, epoch=0, chance=0.5)
    assert torch.equal(whole[7:9], erase(BLACK[7:9], MANY[7:9], seed=0, epoch=0, chance=0.5))
    assert not torch.equal(whole, erase(BLACK, MANY, seed=0, epoch=1, chance=0.5))
    assert not BLACK.any()
    assert torch.equal(erase(BLACK, MANY, seed=0, epoch=0, chance=0.0), BLACK)


LABELS = torch.arange(8)
IMAGES = torch.eye(8)[:, :3, None, None].expand(-1, -1, 16, 16) + LABELS[:, None, None, None] / 10


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_targets_are_the_shares_of_the_images_in_the_mixture(kind: str) -> None:
    """Constant images: the mean over pixels is as linear in the shares as the targets are."""
    torch.manual_seed(0)
    settings = {"mixup": 0.0, "cutmix": 0.0, kind: 1.0}
    for _ in range(10):
        mixed, targets = mix(IMAGES, LABELS, Recipe(**settings), classes=8)
        assert torch.allclose(targets.sum(1), torch.ones(8))
        expected = targets @ IMAGES.mean((2, 3))
        assert torch.allclose(mixed.mean((2, 3)), expected, atol=1e-5)
        if kind == "cutmix":  # each pixel is of one of the two images
            values = torch.cat([IMAGES[:, 0].unique()])
            assert torch.isin(mixed[:, 0], values).all()


def test_a_batch_is_mixed_with_the_given_probability_by_one_of_two() -> None:
    torch.manual_seed(0)
    drawn = [mix(IMAGES, LABELS, Recipe(mixup=0.8, cutmix=1.0, mix_chance=0.5), classes=8) for _ in range(400)]
    whole = [targets.ndim == 1 for _, targets in drawn]
    assert abs(sum(whole) / 400 - 0.5) < 0.08
    assert all(torch.equal(images, IMAGES) for (images, _), untouched in zip(drawn, whole) if untouched)


def test_one_image_or_no_parameter_leaves_the_batch_unchanged() -> None:
    for images, settings in ((IMAGES[:1], {"mixup": 1.0, "cutmix": 0.0}), (IMAGES, {"mixup": 0.0, "cutmix": 0.0})):
        labels = LABELS[: len(images)]
        mixed = mix(images, labels, Recipe(**settings), classes=8)
        assert mixed[0] is images
        assert mixed[1] is labels
