import pytest
import torch

from vitlens.errors import InputError
from vitlens.training.augment import augment
from vitlens.training.draws import uniforms

PIXELS = torch.randint(0, 256, (20, 3, 8, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
INDICES = torch.arange(100, 120)


def augmented(pixels: torch.Tensor = PIXELS, keys: torch.Tensor = INDICES, **changes: object) -> torch.Tensor:
    settings: dict[str, object] = {"seed": 3, "epoch": 1, "crop_padding": 2, "flip": True}
    return augment(pixels, keys, **{**settings, **changes})  # type: ignore[arg-type]


def test_an_image_is_augmented_alike_however_batches_are_cut_and_ordered() -> None:
    whole = augmented()
    halves = torch.cat([augmented(PIXELS[0::2], INDICES[0::2]), augmented(PIXELS[1::2], INDICES[1::2])])
    assert torch.equal(halves, torch.cat([whole[0::2], whole[1::2]]))
    assert torch.equal(augmented(PIXELS.flip(0), INDICES.flip(0)), whole.flip(0))


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 2}, {"keys": INDICES + 1}, {"seed": 3 + (1 << 32)}])
def test_seed_epoch_and_index_each_change_it(change: dict[str, object]) -> None:
    assert not torch.equal(augmented(**change), augmented())


def test_each_result_is_one_of_the_shifts_and_flips_of_its_image() -> None:
    padded = torch.nn.functional.pad(PIXELS, (2, 2, 2, 2))
    for found, image in zip(augmented(), padded):
        crops = [image[:, y : y + 8, x : x + 12] for y in range(5) for x in range(5)]
        assert any(torch.equal(found, view.float() / 255) for crop in crops for view in (crop, crop.flip(2)))


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


def test_uniforms_look_uniform_and_unrelated() -> None:
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


@pytest.mark.parametrize(("padding", "indices"), [(-1, INDICES), (1, INDICES[:3])])
def test_refuses_what_cannot_be(padding: int, indices: torch.Tensor) -> None:
    with pytest.raises(InputError, match="expected crop padding"):
        augmented(crop_padding=padding, keys=indices)
