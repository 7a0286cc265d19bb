"""Operations on images, the two tables of them, and a model's accuracy after them."""

import math

import pytest
import torch

import vitlens
from vitlens.analysis.failures.disturbances import CORRUPTIONS, DISTURBANCES, SEVERITIES
from vitlens.analysis.failures.operations import (
    OPERATIONS,
    Corrupted,
    correct_after,
    cover_squares,
    frequency_bands,
    shuffle_tiles,
)

IMAGES = torch.rand(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
KEYS = torch.arange(4)
TABLES = [*CORRUPTIONS.items(), *DISTURBANCES.items()]


@pytest.mark.parametrize(("kind", "entry"), TABLES, ids=[kind for kind, _ in TABLES])
def test_damage_grows_with_the_level_whatever_the_batch(kind, entry):
    """Of disturbances the first level changes nothing."""
    smooth = torch.nn.functional.interpolate(IMAGES, size=(32, 48), mode="bilinear")
    before = smooth.clone()
    levels = entry.at((32, 48))
    operation = OPERATIONS[entry.operation]
    damaged = [operation(smooth, level, KEYS).clamp(0, 1) for level in levels]
    assert torch.equal(smooth, before)
    distances = [float((one - smooth).square().mean()) for one in damaged]
    if entry is CORRUPTIONS.get(kind):
        assert distances == sorted(distances)
        assert distances[0] > 0
        assert len(levels) == len(SEVERITIES)
    else:
        assert len(levels) > 2
        torch.testing.assert_close(damaged[0], smooth, atol=1e-6, rtol=0)
        for distance in distances[1:]:
            assert distance > 0
    alone = operation(smooth[2:3], levels[2], KEYS[2:3]).clamp(0, 1)
    torch.testing.assert_close(alone[0], damaged[2][2], atol=1e-6, rtol=0)


def test_noise_and_the_covered_square_are_as_large_as_they_say():
    grey, (noise, square) = (
        torch.full((4, 3, 64, 64), 0.5),
        (CORRUPTIONS[kind] for kind in ("noise", "occlusion")),
    )
    change = OPERATIONS["noise"](grey, noise.levels[0], KEYS) - grey
    assert float(change.std()) == pytest.approx(noise.levels[0], rel=0.03)
    assert abs(float(change.mean())) < 2e-3
    assert not torch.equal(change[0], change[1])
    images = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    changed = (OPERATIONS["occlusion"](images, square.levels[4], KEYS[:3]) != images).any(1)
    assert changed.sum((1, 2)).tolist() == [round(square.levels[4] * 40) ** 2] * 3


def test_shuffling_keeps_every_tile_in_an_order_of_its_own():
    for before, after in zip(IMAGES, shuffle_tiles(IMAGES, 4, KEYS)):
        tiles = [
            part.unfold(1, 4, 4).unfold(2, 6, 6).permute(1, 2, 0, 3, 4).flatten(0, 1)
            for part in (before, after)
        ]
        tile_sets = [
            {tuple(tile.flatten().tolist()) for tile in image_tiles} for image_tiles in tiles
        ]
        assert tile_sets[0] == tile_sets[1]
        assert not torch.equal(before, after)
    image = IMAGES[:1].expand(8, -1, -1, -1)
    assert (
        len({tuple(one.flatten().tolist()) for one in shuffle_tiles(image, 4, torch.arange(8))})
        == 8
    )


@pytest.mark.parametrize(("side", "patch"), [(32, 4), (28, 7)])
def test_covered_squares_have_the_mean_colour_stay_covered_and_are_off_the_grid_of_patches(
    side, patch
):
    """A square of the grid itself would remove a token and leave its neighbours as they are; these
    never do.
    """
    images = torch.rand(64, 3, side, side, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(64)
    mean = images.mean((2, 3))[:, :, None, None]
    gone = {
        share: (cover_squares(images, share, keys) == mean).all(1)
        for share in (0.0, 0.5, 0.75, 1.0)
    }
    for share, is_covered in gone.items():
        assert is_covered.float().mean().item() == pytest.approx(
            share, abs=0.03 if 0 < share < 1 else 0
        )
    assert not (gone[0.5] & ~gone[0.75]).any()
    shares = gone[0.5].unflatten(1, (-1, patch)).unflatten(3, (-1, patch)).float().mean((2, 4))
    # every image has patches covered in part
    assert ((shares > 0) & (shares < 1)).any((1, 2)).all()


@pytest.mark.parametrize("side", range(20, 65))
def test_the_grid_of_covered_squares_begins_outside_the_image(side):
    """The first row and column of pixels are covered as often as others."""
    images = torch.rand(8, 3, side, side, generator=torch.Generator().manual_seed(0))
    covered = cover_squares(images, 0.5, torch.arange(8)) != images
    is_covered = covered.any(1)
    changes = (is_covered[..., 1:] != is_covered[..., :-1]).any((0, 1)).nonzero()[:, 0]
    first_width = 1 + int(changes[0])
    inner_width = int(changes.diff().max())
    assert first_width < inner_width


@pytest.mark.parametrize("cutoff", [0.0, 0.5])
def test_low_and_high_frequencies_make_the_image(cutoff):
    images = torch.rand(3, 3, 24, 37, generator=torch.Generator().manual_seed(0))
    low, high = frequency_bands(images, cutoff=cutoff)
    torch.testing.assert_close(low + high, images)
    torch.testing.assert_close(high.mean((2, 3)), torch.zeros(3, 3), atol=1e-6, rtol=0)
    assert (low.flatten(2).std(2).max() < 1e-6) == (cutoff == 0)  # only the mean


@pytest.mark.parametrize("across", [True, False])
def test_the_cut_off_is_where_it_says(across):
    """8 cycles over 32 px are half of Nyquist's 16, kept at 0.5 and gone below; and not cycles an
    image: over 64 px they are a quarter.
    """

    def grating(*size: int) -> torch.Tensor:
        """Draw eight periods of a sine along one axis, around 0.5."""
        wave = 0.5 + 0.4 * (16 * math.pi * torch.arange(size[across]) / size[across]).sin()
        return (wave[None] if across else wave[:, None]).expand(1, 3, *size).contiguous()

    image = grating(32, 32)
    for name, cutoff, is_kept in (
        ("low-pass", 0.5, 1),
        ("low-pass", 0.49, 0),
        ("high-pass", 0.49, 1),
    ):
        expected = image if is_kept else torch.full_like(image, 0.5)
        torch.testing.assert_close(
            OPERATIONS[name](image, cutoff, KEYS), expected, atol=1e-5, rtol=0
        )
    wide = grating(32, 64) if across else grating(64, 32)
    torch.testing.assert_close(OPERATIONS["low-pass"](wide, 0.3, KEYS), wide, atol=1e-5, rtol=0)


def made(alias: str, shares: list[float]) -> Corrupted:
    """Return results that are right on the first share of 40 images, at all severities."""
    rows = torch.stack([torch.arange(40) < 40 * share for share in shares])
    return Corrupted(
        alias, rows[:, None].expand(len(CORRUPTIONS), len(SEVERITIES), 40).contiguous()
    )


def test_mean_corruption_error_is_the_mean_of_ratios():
    vit = made("vit", [0.9, 0.8] + [0.5] * 5)
    cnn = made("cnn", [0.8, 0.2] + [0.5] * 5)
    error = vit.relative_error(cnn)
    assert error.value == pytest.approx((0.1 / 0.2 + 0.2 / 0.8 + 5) / 7)
    assert error.low <= error.value <= error.high
    assert cnn.relative_error(cnn).value == pytest.approx(1)
    assert made("cnn", [1.0] * 7).relative_error(vit).value == 0
    assert vit.relative_error(made("cnn", [1.0] * 7)) is None
    assert vit.mean_error().value == pytest.approx((0.1 + 0.2 + 2.5) / 7)
    assert [vit.accuracy(kind, 2).value for kind in list(CORRUPTIONS)[:3]] == pytest.approx(
        [0.9, 0.8, 0.5]
    )


def test_the_accuracy_lost_is_paired_by_image():
    """A tenth of the images is wrong when clean, a fifth under every corruption: the same tenth and
    as many others.
    """
    clean = torch.arange(400) % 10 > 0
    right = torch.arange(400) % 10 > 1
    corrupted = Corrupted("m", right.expand(len(CORRUPTIONS), len(SEVERITIES), 400))
    lost = corrupted.lost(clean)
    assert (lost.value, lost.unit, lost.n) == (pytest.approx(10), "points", 400)
    assert 6 < lost.low < 10 < lost.high < 14
    assert corrupted.lost(right).value == corrupted.lost(right).high == 0


def test_the_accuracy_of_a_model_falls_and_shares_of_the_images_agree():
    model = vitlens.load("cnn-digits")
    split = vitlens.load_data("digits", limit=40)
    done = []
    entries = [DISTURBANCES[kind] for kind in ("low-pass", "occlusion", "shuffle")]
    changes = [(way.operation, level) for way in entries for level in way.at(split.size)]
    keys = torch.arange(40)
    indices = torch.arange(1, 40, 3)
    complete = correct_after(model, split, changes, keys=keys, advance=done.append)
    assert complete.shape == (len(changes), 40)
    assert sum(done) == complete.numel()
    clean = vitlens.evaluate(model, split).correct
    for way in entries:
        first, *_, last = (row for row, (name, _) in enumerate(changes) if name == way.operation)
        assert torch.equal(complete[first], clean)
        assert complete[last].float().mean() < clean.float().mean() - 0.3
    part = correct_after(model, split.pick(indices), changes, keys=keys[indices], batch_size=5)
    assert (part == complete[:, indices]).float().mean() > 0.99  # rounding may decide one
