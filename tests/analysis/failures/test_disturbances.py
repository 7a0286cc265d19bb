import pytest
import torch

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.operations import OPERATIONS, covered, shuffled


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", DISTURBANCES)
def test_the_first_level_changes_nothing_and_none_mutates(kind, images):
    way, before = DISTURBANCES[kind], images.clone()
    levels = way.at((16, 24))
    assert len(levels) > 2
    torch.testing.assert_close(OPERATIONS[way.operation](images, levels[0], torch.arange(4)), images, atol=1e-6, rtol=0)
    for level in levels[1:]:
        changed = OPERATIONS[way.operation](images, level, torch.arange(4))
        assert changed.shape == images.shape
        assert changed.min() >= 0
        assert changed.max() <= 1
        assert not torch.equal(changed, images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("kind", DISTURBANCES)
def test_an_image_does_not_depend_on_its_batch_mates(kind, images):
    way = DISTURBANCES[kind]
    level = way.at((16, 24))[2]
    whole = OPERATIONS[way.operation](images, level, torch.arange(4))
    alone = OPERATIONS[way.operation](images[2:3], level, torch.tensor([2]))
    torch.testing.assert_close(alone[0], whole[2])


def test_shuffling_keeps_every_tile(images):
    laid = shuffled(images, 4, torch.arange(4))
    for before, after in zip(images, laid):
        tiles = [part.unfold(1, 4, 4).unfold(2, 6, 6).permute(1, 2, 0, 3, 4).flatten(0, 1) for part in (before, after)]
        found = {tuple(tile.flatten().tolist()) for tile in tiles[1]}
        assert found == {tuple(tile.flatten().tolist()) for tile in tiles[0]}
    assert not torch.equal(laid[0], images[0])


def test_keys_decide_the_order():
    image = torch.rand(1, 3, 16, 16).expand(8, -1, -1, -1)
    orders = {tuple(one.flatten().tolist()) for one in shuffled(image, 4, torch.arange(8))}
    assert len(orders) == 8
    again = shuffled(image, 4, torch.zeros(8, dtype=torch.long))
    assert (again == again[0]).all()


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_on_average_that_share_of_the_pixels_has_the_mean_colour(share):
    images = torch.rand(1, 3, 16, 24, generator=torch.Generator().manual_seed(0)).expand(400, -1, -1, -1)
    gone = (covered(images, share, torch.arange(400)) == images.mean((2, 3))[:, :, None, None]).all(1).float()
    assert gone.mean().item() == pytest.approx(share, abs=0.02 if 0 < share < 1 else 0)


def test_what_is_covered_stays_covered(images):
    some, more = (covered(images, share, torch.arange(4)) for share in (0.25, 0.75))
    hidden = (some != images).any(1)
    assert (more != images).any(1)[hidden].all()
