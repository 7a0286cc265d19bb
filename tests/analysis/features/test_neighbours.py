"""Nearest neighbours: exactly those of float64, whatever the chunks; votes as scikit-learn counts them; what patches
share with their neighbours, and patches that match."""

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from tests.lens.tiny import images, ours
from vitlens.analysis.features import neighbours
from vitlens.analysis.features.features import patch_tokens
from vitlens.analysis.features.neighbours import (
    correspond,
    near,
    nearest,
    object_overlap,
    patch_neighbours,
    same_class,
    shared,
    vote,
)
from vitlens.errors import DataError, InputError, UnknownNameError


def vectors(*shape: int, seed: int = 0) -> Tensor:
    shape = shape if len(shape) > 1 else (*shape, 24)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int = 5, *, seed: int = 0) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def by_hand(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines of all pairs in float64; of equal ones the lowest index."""
    one, two = queries.double(), bank.double()
    cosines = (one @ two.T) / one.norm(dim=1)[:, None] / two.norm(dim=1)
    order = np.argsort(-cosines.numpy().round(12), axis=1, kind="stable")[:, :k]
    return torch.from_numpy(order), cosines.gather(1, torch.from_numpy(order))


@pytest.mark.parametrize(("bank", "k", "close"), [(400, 1, 1), (2700, 5, 1), (30, 30, 1), (300, 5, 1e-4)])
def test_they_are_those_of_float64(bank, k, close):
    """Also of vectors that differ by less than fp32's rounding of a cosine."""
    base = 0 if close == 1 else vectors(1, seed=2) + 10
    queries, others = base + close * vectors(50, seed=1), base + close * vectors(bank)
    found = nearest(queries, others, k=k)
    indices, similarity = by_hand(queries, others, k)
    assert torch.equal(found.indices, indices)
    torch.testing.assert_close(found.similarity, similarity, atol=1e-11, rtol=0)


def test_everything_is_computed_on_the_device_of_the_features():
    """As on a GPU, the default device is not theirs: what is made on it by mistake does not mix with them."""
    queries, others, own = vectors(30, seed=1), vectors(400), torch.arange(30)
    expected = [nearest(queries, others, k=3, leave_out=out) for out in (None, own)]
    with torch.device("meta"):
        found = [nearest(queries, others, k=3, leave_out=out) for out in (None, own)]
    for one, other in zip(expected, found):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.similarity, other.similarity)


@pytest.mark.parametrize("numbers", [1 << 9, 1 << 14])
@pytest.mark.parametrize("block", [37, 150, 1 << 16])
def test_chunks_change_nothing(monkeypatch, numbers, block):
    queries, others = vectors(40, seed=1), torch.cat((vectors(300), vectors(50)))  # 50 of them twice
    expected = nearest(queries, others, k=7)
    monkeypatch.setattr(neighbours, "_NUMBERS", numbers)
    monkeypatch.setattr(neighbours, "_BANK", block)
    found = nearest(queries, others, k=7)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.similarity, expected.similarity)


def test_copies_come_by_index_and_an_image_is_no_neighbour_of_its_own():
    copies = vectors(10).repeat(30, 1)
    assert torch.equal(nearest(copies[:10], copies, k=25).indices, torch.arange(10)[:, None] + 10 * torch.arange(25))
    others = torch.cat((vectors(60), vectors(20)))  # the first 20 twice
    found = nearest(others, others, k=4, leave_out=torch.arange(80))
    assert not (found.indices == torch.arange(80)[:, None]).any()
    assert torch.equal(found.indices[60:, 0], torch.arange(20))
    assert torch.equal(found.indices[:20, 0], torch.arange(60, 80))
    equal = nearest(torch.ones(30, 4), torch.ones(30, 4), k=3, leave_out=torch.arange(30))
    assert (equal.indices[20].tolist(), equal.indices[0].tolist()) == ([0, 1, 2], [1, 2, 3])
    zeros = nearest(torch.zeros(1, 24), vectors(9), k=3)  # like nothing
    assert (zeros.indices.tolist(), zeros.similarity.tolist()) == ([[0, 1, 2]], [[0.0, 0.0, 0.0]])


@pytest.mark.parametrize("k", [1, 2, 20])
@pytest.mark.parametrize("classes", [2, 40])
def test_the_majority_is_scikit_learns(k, classes):
    bank, queries, truth = vectors(300), vectors(200, seed=1), labels(300, classes)
    model = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(bank.double().numpy(), truth.numpy())
    found = vote(nearest(queries, bank, k=k), truth, k=k, classes=classes, weighting="majority")
    assert np.array_equal(found.numpy(), model.predict(queries.double().numpy()))


@pytest.mark.parametrize("k", [1, 5, 20])
def test_dinos_weights(k):
    """Written after facebookresearch/dino's eval_knn: normalised features, exp(similarity / 0.07), summed by class."""
    bank, queries, truth = vectors(300), vectors(200, seed=1), labels(300)
    one, two = torch.nn.functional.normalize(queries), torch.nn.functional.normalize(bank)
    similarity, indices = (one @ two.T).topk(k)
    one_hot = torch.nn.functional.one_hot(truth[indices], 5)
    expected = (one_hot * (similarity / 0.07).exp()[..., None]).sum(1).argmax(1)
    assert torch.equal(vote(nearest(queries, bank, k=k), truth, k=k, classes=5), expected)


def test_precision_of_a_retrieval():
    bank, truth = vectors(60), labels(60)
    found = nearest(vectors(9, seed=1), bank, k=10)
    share = same_class(found, truth, labels(9, seed=1), k=10)
    by_query = [(truth[row] == label).double().mean().item() for row, label in zip(found.indices, labels(9, seed=1))]
    assert share.tolist() == by_query


def test_a_model_without_positions_finds_patches_where_they_were_moved():
    """Without positions a ViT does not know where a patch is: shuffled patches have the same tokens."""
    model = ours(positions=False)  # 4 x 3 patches of 8 x 16 px
    (image,) = images(model.input_size, batch=1)
    patches = image.unfold(1, 8, 8).unfold(2, 16, 16)  # (3, 4, 3, 8, 16)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = patches.flatten(1, 2)[:, order].unflatten(1, (4, 3))
    other = moved.permute(0, 1, 3, 2, 4).reshape(3, *model.input_size)
    ((first, second),) = patch_tokens(model, torch.stack((image, other)))
    found = correspond(first, second)
    assert len(found.sources) == 12
    sources, targets = (places[:, 0] * 3 + places[:, 1] for places in (found.sources, found.targets))
    assert torch.equal(order[targets], sources)


def test_only_mutual_pairs_the_best_first_also_of_grids_that_differ():
    first = torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]])
    second = torch.tensor([[[1.0, 0.02]], [[0.1, 1.0]]])
    found, back = correspond(first, second), correspond(second, first)
    assert found.sources.tolist() == back.targets.tolist() == [[0, 0], [0, 2]]
    assert found.targets.tolist() == back.sources.tolist() == [[0, 0], [1, 0]]
    assert found.similarity[0] > found.similarity[1]


IMAGES, SIDE, CELLS = 12, 4, 16
OF_PATCH = torch.arange(IMAGES).repeat_interleave(CELLS)


def test_neighbours_of_patches_are_the_most_similar_of_other_images():
    tokens = vectors(IMAGES * CELLS)
    found = patch_neighbours(tokens, OF_PATCH, k=3)
    units = torch.nn.functional.normalize(tokens.double())
    for patch in (0, 17, IMAGES * CELLS - 1):
        cosines = units @ units[patch]
        cosines[OF_PATCH[patch] == OF_PATCH] = -2
        assert found.indices[patch].tolist() == cosines.topk(3).indices.tolist()


@pytest.mark.parametrize("by", ["position", "class"])
def test_planted_positions_and_classes_are_found(by):
    classes, cells = (torch.arange(IMAGES) % 3)[OF_PATCH], torch.arange(CELLS).repeat(IMAGES)
    tokens = 5 * vectors(CELLS, seed=1)[cells if by == "position" else classes] + 0.1 * vectors(IMAGES * CELLS)
    found = patch_neighbours(tokens, OF_PATCH, k=3)
    centres = (torch.stack((cells // SIDE, cells % SIDE), 1).double() + 0.5) / SIDE
    at_place, place_chance = shared(found, near(centres), OF_PATCH)
    same, class_chance = shared(found, classes[:, None] == classes, OF_PATCH)
    assert place_chance == pytest.approx(1 / CELLS)  # a quarter of the side apart: only the place itself is near
    assert class_chance == pytest.approx(3 / 11)  # of the 11 other images 3 are of the class
    planted, other, chance = (at_place, same, class_chance) if by == "position" else (same, at_place, place_chance)
    assert planted.value == 1
    assert other.value == pytest.approx(chance, abs=0.12)
    assert other.low < chance + 0.1


def test_near_is_a_distance_in_shares_of_the_image():
    grid = (torch.arange(16).double()[:, None] + 0.5) / 16
    alike = near(torch.cat((grid, grid * 0 + 0.5), 1))
    assert alike[5].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]  # two sixteenths are an eighth


def test_the_overlap_is_that_of_scikit_learn():
    on_object = (vectors(IMAGES * CELLS, 1, seed=2)[:, 0] > 0.7).long()
    found = patch_neighbours(vectors(IMAGES * CELLS) + 1.2 * on_object[:, None], OF_PATCH, k=5)
    weights = (found.similarity / 0.07).exp()
    votes = torch.stack([(weights * (on_object[found.indices] == side)).sum(1) for side in (0, 1)], 1).argmax(1)
    estimate, chance = object_overlap(found, on_object, OF_PATCH)
    assert estimate.value == pytest.approx(jaccard_score(on_object, votes))
    assert chance == pytest.approx(jaccard_score(on_object, torch.ones_like(on_object)))
    assert estimate.low < estimate.value < estimate.high
    assert object_overlap(found, torch.zeros_like(on_object), OF_PATCH) is None


def test_bad_input():
    bank, truth = vectors(20), labels(20)
    with pytest.raises(InputError, match="expected k from 1 to 5, the number of neighbours, found 6"):
        vote(nearest(bank, bank, k=5), truth, k=6, classes=5)
    with pytest.raises(UnknownNameError, match="no weighting of neighbours 'cosine'"):
        getattr(vote, "__wrapped__", vote)(nearest(bank, bank, k=5), truth, k=5, classes=5, weighting="cosine")
    with pytest.raises(DataError, match="expected at least 10 patches in other images, found 2"):
        patch_neighbours(vectors(6, 2), torch.tensor([0, 0, 0, 0, 1, 1]))
