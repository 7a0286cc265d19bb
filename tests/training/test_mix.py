import pytest
import torch

from vitlens.training.mix import mix

LABELS = torch.arange(8)
IMAGES = torch.eye(8)[:, :3, None, None].expand(-1, -1, 16, 16) + LABELS[:, None, None, None] / 10


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_targets_are_the_shares_of_the_images_in_the_mixture(kind: str) -> None:
    """Constant images: the mean over pixels is as linear in the shares as the targets are."""
    torch.manual_seed(0)
    settings = {"mixup": 0.0, "cutmix": 0.0, kind: 1.0}
    for _ in range(10):
        mixed, targets = mix(IMAGES, LABELS, classes=8, chance=1.0, **settings)
        assert torch.allclose(targets.sum(1), torch.ones(8))
        expected = targets @ IMAGES.mean((2, 3))
        assert torch.allclose(mixed.mean((2, 3)), expected, atol=1e-5)
        if kind == "cutmix":  # pixels are whole ones of either image
            values = torch.cat([IMAGES[:, 0].unique()])
            assert torch.isin(mixed[:, 0], values).all()


def test_a_batch_is_mixed_as_often_as_asked_and_by_one_of_two() -> None:
    torch.manual_seed(0)
    drawn = [mix(IMAGES, LABELS, classes=8, mixup=0.8, cutmix=1.0, chance=0.5) for _ in range(400)]
    whole = [targets.ndim == 1 for _, targets in drawn]
    assert abs(sum(whole) / 400 - 0.5) < 0.08
    assert all(torch.equal(images, IMAGES) for (images, _), untouched in zip(drawn, whole) if untouched)


def test_one_image_and_no_parameter_leave_the_batch_as_it_is() -> None:
    for images, settings in ((IMAGES[:1], {"mixup": 1.0, "cutmix": 0.0}), (IMAGES, {"mixup": 0.0, "cutmix": 0.0})):
        labels = LABELS[: len(images)]
        found = mix(images, labels, classes=8, chance=1.0, **settings)
        assert found[0] is images
        assert found[1] is labels
