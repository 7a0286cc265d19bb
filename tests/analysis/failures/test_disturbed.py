import pytest
import torch

from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.operations import correct_after, covered
from vitlens.data.digits import digits
from vitlens.models.loading import load


@pytest.mark.parametrize("kind", ["low-pass", "occlusion"])
def test_the_untouched_level_is_the_clean_accuracy_and_the_hardest_is_lower(kind):
    model, split = load("cnn-digits"), digits("test").limit(40)
    way, done = DISTURBANCES[kind], []
    changes = [(way.operation, level) for level in way.at(split.size)]
    correct = correct_after(model, split, changes, keys=torch.arange(40), advance=done.append)
    assert correct.shape == (len(changes), 40)
    assert torch.equal(correct[0], evaluate(model, split).correct)
    assert correct[0].float().mean() > correct[-1].float().mean() + 0.3
    assert sum(done) == 40 * len(changes)


def test_results_do_not_depend_on_the_batch_size():
    model, split, way = load("cnn-digits"), digits("test").limit(10), DISTURBANCES["shuffle"]
    changes = [(way.operation, level) for level in way.at(split.size)]
    one, other = (correct_after(model, split, changes, keys=torch.arange(10), batch_size=size) for size in (3, 10))
    assert torch.equal(one, other)


@pytest.mark.parametrize(("side", "patch"), [(32, 4), (28, 4), (28, 7), (64, 8), (224, 14), (224, 16), (224, 32)])
def test_covered_squares_are_off_the_grid_of_patches(side, patch):
    """A square of the grid itself would remove a token and leave its neighbours as they are; these never do."""
    images = torch.rand(64, 3, side, side, generator=torch.Generator().manual_seed(0))
    keys = torch.arange(64)
    changed = (covered(images, 0.5, keys) != images).any(1)
    assert changed.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert not (changed & ~(covered(images, 0.75, keys) != images).any(1)).any()
    whole = changed.unflatten(1, (-1, patch)).unflatten(3, (-1, patch)).float().mean((2, 4))
    assert ((whole > 0) & (whole < 1)).any((1, 2)).all()  # every image has patches covered in part
