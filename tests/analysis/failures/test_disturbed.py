import pytest
import torch

from vitlens.analysis.answers.evaluate import evaluate
from vitlens.analysis.failures.disturbed import (
    DISTURBANCES,
    covered,
    levels_of,
    robustness,
    square_offset,
    square_side,
)
from vitlens.data.digits import digits
from vitlens.models.loading import load


def test_the_untouched_level_is_the_clean_accuracy_and_the_hardest_is_lower():
    model, split = load("cnn-digits"), digits("test").limit(40)
    clean, done = evaluate(model, split).correct, []
    found, levels = robustness(model, split, advance=done.append), levels_of(split.size)
    assert found.shape == (len(levels), 40)
    assert sum(done) == found.numel()
    assert {kind for kind, _ in levels} == {"low-pass", "high-pass", "shuffle", "occlusion"}
    for name in DISTURBANCES:
        own = found[[kind == name for kind, _ in levels]]
        assert torch.equal(own[0], clean)
        assert own[0].float().mean() > own[-1].float().mean() + 0.3, name


def test_results_do_not_depend_on_the_batch_size():
    model, split = load("cnn-digits"), digits("test").limit(10)
    one, other = (robustness(model, split, batch_size=size) for size in (3, 10))
    assert torch.equal(one, other)


@pytest.mark.parametrize(("side", "patch"), [(32, 4), (28, 4), (28, 7), (64, 8), (224, 14), (224, 16), (224, 32)])
def test_covered_squares_are_off_the_grid_of_patches(side, patch):
    """A square of the grid itself would remove a token and leave its neighbours as they are; these never do."""
    square, offset = square_side((side, side)), square_offset((side, side))
    assert square % patch
    assert offset % patch
    images = torch.rand(64, 3, side, side, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(64)
    changed = (covered(images, 0.5, keys) != images).any(1)
    assert changed.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert not (changed & ~(covered(images, 0.75, keys) != images).any(1)).any()
    whole = changed.unflatten(1, (-1, patch)).unflatten(3, (-1, patch)).float().mean((2, 4))
    assert ((whole > 0) & (whole < 1)).any((1, 2)).all()  # every image has patches covered in part
