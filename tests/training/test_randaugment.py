"""Every operation is torchvision's own, on each view as on a batch of it alone."""

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

from vitlens.errors import InputError
from vitlens.training.randaugment import OPERATIONS, rand_augment, strength

PIXELS = torch.randint(0, 256, (40, 3, 16, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
KEYS = torch.arange(40)
THEIRS = {
    "identity": "Identity", "shear-x": "ShearX", "shear-y": "ShearY", "translate-x": "TranslateX",
    "translate-y": "TranslateY", "rotate": "Rotate", "brightness": "Brightness", "colour": "Color",
    "contrast": "Contrast", "sharpness": "Sharpness", "posterize": "Posterize", "solarize": "Solarize",
    "autocontrast": "AutoContrast", "equalize": "Equalize",
}  # fmt: skip


def augmented(pixels: torch.Tensor = PIXELS, keys: torch.Tensor = KEYS, **changes: object) -> torch.Tensor:
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
            PIXELS, THEIRS[name], value, InterpolationMode.NEAREST, theirs._fill
        )
        assert torch.equal(operation(PIXELS, sign * strength(top, magnitude)), expected)


def test_a_view_is_changed_alike_however_batches_are_cut() -> None:
    whole = augmented()
    parts = torch.cat([augmented(PIXELS[start : start + 7], KEYS[start : start + 7]) for start in range(0, 40, 7)])
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, augmented(epoch=1))
    assert not torch.equal(whole, augmented(seed=2))


def test_every_operation_is_drawn_equally_often_and_the_input_stays() -> None:
    before = PIXELS[:1].clone()
    views = augmented(before.expand(4000, -1, -1, -1), torch.arange(4000), operations=1)
    assert torch.equal(before, PIXELS[:1])
    results, counts = views.unique(dim=0, return_counts=True)
    assert len(results) == len(OPERATIONS) + sum(signed for _, signed, _ in OPERATIONS.values())
    halves = torch.where(counts > 4000 / len(OPERATIONS) * 0.75, 1.0, 0.5)
    expected = 4000 / len(OPERATIONS) * halves
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-squared with 22 degrees: p > 0.002


def test_a_magnitude_beyond_the_scale_is_refused() -> None:
    with pytest.raises(InputError, match="from 0 to 30, found 31"):
        augmented(magnitude=31)
