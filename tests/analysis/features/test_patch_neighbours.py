"""What neighbours share: planted positions, classes and objects are found; the patch's own image is left out."""

import pytest
import torch
from sklearn.metrics import jaccard_score
from torch import Tensor

from vitlens.analysis.features.neighbours import near, object_overlap, patch_neighbours, shared
from vitlens.errors import DataError

IMAGES, SIDE, DIM = 12, 4, 24
CELLS = SIDE * SIDE


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images() -> Tensor:
    return torch.arange(IMAGES).repeat_interleave(CELLS)


def centres() -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return (torch.stack((rows.flatten(), columns.flatten()), 1).repeat(IMAGES, 1).double() + 0.5) / SIDE


def test_neighbours_are_the_most_similar_of_other_images():
    tokens = noise(IMAGES * CELLS, DIM)
    found = patch_neighbours(tokens, images(), k=3)
    units = torch.nn.functional.normalize(tokens.double())
    for patch in (0, 17, IMAGES * CELLS - 1):
        cosines = units @ units[patch]
        cosines[images() == images()[patch]] = -2
        expected = cosines.topk(3)
        assert found.indices[patch].tolist() == expected.indices.tolist()
        torch.testing.assert_close(found.similarity[patch], expected.values, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("by", "position", "of_class"), [("position", 1.0, None), ("class", None, 1.0)])
def test_planted_positions_and_classes_are_found(by, position, of_class):
    classes = (torch.arange(IMAGES) % 3)[images()]
    cells = torch.arange(CELLS).repeat(IMAGES)
    planted = cells if by == "position" else classes
    tokens = 5 * noise(CELLS, DIM, seed=1)[planted] + 0.1 * noise(IMAGES * CELLS, DIM)
    found = patch_neighbours(tokens, images(), k=3)
    at_place, place_chance = shared(found, near(centres()), images())
    same, class_chance = shared(found, classes[:, None] == classes, images())
    assert place_chance == pytest.approx(1 / CELLS)  # a quarter of the side apart: only the place itself is near
    assert class_chance == pytest.approx(3 / 11)  # of the 11 other images 3 are of the class
    assert position is None or at_place.value == position
    assert of_class is None or same.value == of_class
    other, chance = (same, class_chance) if by == "position" else (at_place, place_chance)
    assert other.value == pytest.approx(chance, abs=0.12)
    assert other.low < chance + 0.1


def test_near_is_a_distance_in_shares_of_the_image():
    grid = (torch.arange(16).double()[:, None] + 0.5) / 16
    alike = near(torch.cat((grid, grid * 0 + 0.5), 1))
    assert alike[5].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]  # two sixteenths are an eighth


def test_the_overlap_is_that_of_scikit_learn():
    on_object = (noise(IMAGES * CELLS, seed=2) > 0.7).long()
    tokens = noise(IMAGES * CELLS, DIM) + 1.2 * on_object[:, None]
    found = patch_neighbours(tokens, images(), k=5)
    weights = (found.similarity / 0.07).exp()
    votes = torch.stack([(weights * (on_object[found.indices] == side)).sum(1) for side in (0, 1)], 1).argmax(1)
    overlap = object_overlap(found, on_object, images())
    assert overlap is not None
    estimate, chance = overlap
    assert estimate.value == pytest.approx(jaccard_score(on_object, votes))
    assert chance == pytest.approx(jaccard_score(on_object, torch.ones_like(on_object)))
    assert estimate.low < estimate.value < estimate.high
    assert object_overlap(found, torch.zeros_like(on_object), images()) is None


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="expected at least 10 patches in other images, found 2"):
        patch_neighbours(noise(6, 2), torch.tensor([0, 0, 0, 0, 1, 1]))
