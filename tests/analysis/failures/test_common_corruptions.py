import pytest
import torch

from vitlens.analysis.failures.disturbances import CORRUPTIONS, SEVERITIES
from vitlens.analysis.failures.operations import OPERATIONS, Corrupted, correct_after
from vitlens.data.digits import digits
from vitlens.models.loading import load

IMAGES = torch.rand(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
KEYS = torch.arange(4)


def corrupted(images: torch.Tensor, kind: str, severity: int, keys: torch.Tensor) -> torch.Tensor:
    """Images under one corruption, as a model sees them."""
    known = CORRUPTIONS[kind]
    return OPERATIONS[known.operation](images, known.levels[severity - 1], keys).clamp(0, 1)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_damage_grows_with_severity_and_stays_in_range(kind):
    smooth = torch.nn.functional.interpolate(IMAGES, size=(32, 48), mode="bilinear")
    before = smooth.clone()
    found = [corrupted(smooth, kind, severity, KEYS) for severity in SEVERITIES]
    distances = [float((one - smooth).square().mean()) for one in found]
    assert distances == sorted(distances)
    assert distances[0] > 0
    for one in found:
        assert one.shape == smooth.shape
        assert 0 <= one.min() <= one.max() <= 1
    assert torch.equal(smooth, before)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_does_not_depend_on_its_batch_mates(kind):
    whole = corrupted(IMAGES, kind, 3, KEYS)
    torch.testing.assert_close(corrupted(IMAGES[2:3], kind, 3, KEYS[2:3]), whole[2:3], atol=1e-6, rtol=0)


def test_noise_is_as_strong_as_it_says():
    grey = torch.full((4, 3, 64, 64), 0.5)
    change = corrupted(grey, "noise", 1, KEYS) - grey
    assert float(change.std()) == pytest.approx(CORRUPTIONS["noise"].levels[0], rel=0.03)
    assert abs(float(change.mean())) < 2e-3
    assert not torch.equal(change[0], change[1])


def test_a_square_of_the_share_is_covered():
    images = torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    changed = (corrupted(images, "occlusion", 5, KEYS[:3]) != images).any(1)
    side = round(CORRUPTIONS["occlusion"].levels[4] * 40)
    assert changed.sum((1, 2)).tolist() == [side * side] * 3


def made(alias: str, shares: list[float]) -> Corrupted:
    """Right on the first share of 40 images, one share a kind, the same at all severities."""
    rows = torch.stack([torch.arange(40) < 40 * share for share in shares])
    return Corrupted(alias, rows[:, None].expand(len(CORRUPTIONS), len(SEVERITIES), 40).contiguous())


def test_mean_corruption_error_is_the_mean_of_ratios():
    vit, cnn = made("vit", [0.9, 0.8] + [0.5] * 5), made("cnn", [0.8, 0.2] + [0.5] * 5)
    found = vit.relative_error(cnn)
    assert found.value == pytest.approx((0.1 / 0.2 + 0.2 / 0.8 + 5) / 7)
    assert found.low <= found.value <= found.high
    assert cnn.relative_error(cnn).value == pytest.approx(1)
    assert made("cnn", [1.0] * 7).relative_error(vit).value == 0
    assert vit.relative_error(made("cnn", [1.0] * 7)) is None
    assert vit.mean_error().value == pytest.approx((0.1 + 0.2 + 2.5) / 7)
    assert vit.accuracy("blur", 2).value == pytest.approx(0.5 if list(CORRUPTIONS)[2] == "blur" else 0.8)


def test_the_accuracy_lost_is_paired_by_image():
    """A tenth of the images is wrong when clean, a fifth under every corruption: the same tenth and as many others."""
    clean, right = torch.arange(400) % 10 > 0, torch.arange(400) % 10 > 1
    found = Corrupted("m", right.expand(len(CORRUPTIONS), len(SEVERITIES), 400))
    lost = found.lost(clean)
    assert (lost.value, lost.unit, lost.n) == (pytest.approx(10), "points", 400)
    assert 6 < lost.low < 10 < lost.high < 14
    assert found.lost(right).value == found.lost(right).high == 0


def test_a_model_loses_to_damage_and_shards_agree():
    model, split = load("cnn-digits"), digits("test").limit(12)
    changes = [(known.operation, level) for known in CORRUPTIONS.values() for level in known.levels]
    keys, mine = torch.arange(12), torch.arange(1, 12, 2)
    whole = correct_after(model, split, changes, keys=keys, batch_size=12)
    severities = whole.view(len(CORRUPTIONS), len(SEVERITIES), 12)
    assert severities[:, 0].float().mean() > severities[:, 4].float().mean()
    part = correct_after(model, split.pick(mine), changes, keys=keys[mine], batch_size=5)
    assert (part == whole[:, mine]).float().mean() > 0.99  # rounding may decide one
