import pytest
import torch

from vitlens.analysis.answers.evaluate import evaluate
from vitlens.analysis.failures.disturbances import square_offset, square_side
from vitlens.analysis.failures.disturbed import KINDS, covered, passes, robustness
from vitlens.data.digits import digits
from vitlens.errors import UnknownNameError
from vitlens.models.loading import load


def test_the_untouched_level_is_the_clean_accuracy_and_the_hardest_is_lower():
    model, split = load("cnn-digits"), digits("test").limit(40)
    clean = evaluate(model, split).correct
    done = []
    found = robustness(model, split, kinds=("low-pass", "occlusion"), advance=done.append)
    assert [way.kind for way in found] == ["low-pass", "occlusion"]
    for way in found:
        assert way.correct.shape == (len(way.levels), 40)
        assert torch.equal(way.correct[0], clean)
        estimates = way.accuracies()
        assert estimates[0].value > estimates[-1].value + 0.3
        assert all(one.low <= one.value <= one.high for one in estimates)
    assert sum(done) == passes(split, kinds=("low-pass", "occlusion"))


def test_results_do_not_depend_on_the_batch_size():
    model, split = load("cnn-digits"), digits("test").limit(10)
    [one], [other] = (robustness(model, split, kinds=("shuffle",), batch_size=size) for size in (3, 10))
    assert torch.equal(one.correct, other.correct)


def test_an_unknown_kind_names_the_known():
    with pytest.raises(UnknownNameError, match="no disturbance 'lowpass'; did you mean 'low-pass'"):
        robustness(load("cnn-digits"), digits("test").limit(2), kinds=("lowpass",))
    assert set(KINDS) == {"low-pass", "high-pass", "shuffle", "occlusion"}


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
