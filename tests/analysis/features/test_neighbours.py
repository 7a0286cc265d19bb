"""Nearest neighbours: exactly those of float64, whatever the chunks; votes as scikit-learn counts them."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from vitlens.analysis.features import neighbours
from vitlens.analysis.features.neighbours import nearest, same_class, vote
from vitlens.errors import InputError, UnknownNameError


def vectors(count: int, dim: int = 24, *, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def labels(count: int, classes: int = 5, *, seed: int = 0) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


def by_hand(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines of all pairs in float64; of equal ones the lowest index."""
    one, two = queries.double(), bank.double()
    cosines = (one @ two.T) / one.norm(dim=1)[:, None] / two.norm(dim=1)
    order = np.argsort(-cosines.numpy().round(12), axis=1, kind="stable")[:, :k]
    return torch.from_numpy(order), cosines.gather(1, torch.from_numpy(order))


@pytest.mark.parametrize(("bank", "k"), [(400, 1), (400, 20), (2700, 5), (30, 30), (5, 3)])
def test_they_are_those_of_float64(bank, k):
    queries, others = vectors(50, seed=1), vectors(bank)
    found = nearest(queries, others, k=k)
    indices, similarity = by_hand(queries, others, k)
    assert torch.equal(found.indices, indices)
    torch.testing.assert_close(found.similarity, similarity, atol=1e-11, rtol=0)


@pytest.mark.parametrize(("bank", "k"), [(400, 20), (5000, 3), (5, 3)])
def test_everything_is_computed_on_the_device_of_the_features(bank, k):
    """As on a GPU, the default device is not theirs: what is made on it by mistake does not mix with them."""
    queries, others, own = vectors(30, seed=1), vectors(bank), torch.arange(30) % bank
    twins = torch.cat([others[:1].repeat(40, 1), others])  # too many alike for the candidates: measured again
    expected = [nearest(queries, each, k=k, leave_out=out) for each in (others, twins) for out in (None, own)]
    with torch.device("meta"):
        found = [nearest(queries, each, k=k, leave_out=out) for each in (others, twins) for out in (None, own)]
    for one, other in zip(expected, found):
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.similarity, other.similarity)


def test_neighbours_too_close_for_fp32_are_told_apart():
    """Vectors that differ by less than fp32's rounding of a cosine, and more of them than there are candidates."""
    base = torch.randn(1, 24, generator=torch.Generator().manual_seed(0)) + 10
    others = base + 1e-4 * vectors(300)
    queries = base + 1e-4 * vectors(20, seed=1)
    assert torch.equal(nearest(queries, others, k=5).indices, by_hand(queries, others, 5)[0])


def test_copies_come_by_index():
    others = vectors(10).repeat(30, 1)
    found = nearest(others[:10], others, k=25)
    assert torch.equal(found.indices, torch.arange(10)[:, None] + 10 * torch.arange(25))


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


def test_an_image_is_no_neighbour_of_its_own():
    others = torch.cat((vectors(60), vectors(20)))  # the first 20 twice
    found = nearest(others, others, k=4, leave_out=torch.arange(80))
    assert not (found.indices == torch.arange(80)[:, None]).any()
    assert torch.equal(found.indices[60:, 0], torch.arange(20))
    assert torch.equal(found.indices[:20, 0], torch.arange(60, 80))
    one = nearest(others[5:6], others, k=79, leave_out=torch.tensor([5]))
    assert sorted(one.indices[0].tolist()) == [index for index in range(80) if index != 5]


def test_itself_behind_many_copies_is_left_out_too():
    others = torch.ones(30, 4)
    found = nearest(others, others, k=3, leave_out=torch.arange(30))
    assert found.indices[20].tolist() == [0, 1, 2]
    assert found.indices[0].tolist() == [1, 2, 3]


def test_a_vector_of_zeros_is_like_nothing():
    found = nearest(torch.zeros(1, 24), vectors(9), k=3)
    assert found.indices.tolist() == [[0, 1, 2]]
    assert found.similarity.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("k", [1, 2, 5, 20])
@pytest.mark.parametrize("classes", [2, 5, 40])
def test_the_majority_is_scikit_learns(k, classes):
    bank, queries, truth = vectors(300), vectors(200, seed=1), labels(300, classes)
    model = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(bank.double().numpy(), truth.numpy())
    found = vote(nearest(queries, bank, k=k), truth, k=k, classes=classes, weighting="majority")
    assert np.array_equal(found.numpy(), model.predict(queries.double().numpy()))


def dino(queries: Tensor, bank: Tensor, truth: Tensor, k: int, classes: int) -> Tensor:
    """Written after facebookresearch/dino's eval_knn: normalised features, exp(similarity / 0.07), summed by class."""
    one, two = torch.nn.functional.normalize(queries), torch.nn.functional.normalize(bank)
    similarity, indices = (one @ two.T).topk(k)
    one_hot = torch.nn.functional.one_hot(truth[indices], classes)
    return (one_hot * (similarity / 0.07).exp()[..., None]).sum(1).argmax(1)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_dinos_weights(k):
    bank, queries, truth = vectors(300), vectors(200, seed=1), labels(300)
    found = vote(nearest(queries, bank, k=k), truth, k=k, classes=5)
    assert torch.equal(found, dino(queries, bank, truth, k, 5))


def test_one_neighbour_is_its_class_whatever_the_weighting():
    bank, queries, truth = vectors(50), vectors(30, seed=1), labels(50)
    near = nearest(queries, bank, k=1)
    for weighting in ("dino", "majority"):
        assert torch.equal(vote(near, truth, k=1, classes=5, weighting=weighting), truth[near.indices[:, 0]])


def test_an_image_alone_in_its_class_is_never_right_among_others():
    bank, truth = vectors(40), torch.zeros(40, dtype=torch.long)
    truth[7] = 1
    near = nearest(bank, bank, k=5, leave_out=torch.arange(40))
    assert [int(vote(near, truth, k=k, classes=2)[7]) for k in (1, 5)] == [0, 0]


def test_precision_of_a_retrieval():
    bank, truth = vectors(60), labels(60)
    found = nearest(vectors(9, seed=1), bank, k=10)
    share = same_class(found, truth, labels(9, seed=1), k=10)
    by_query = [(truth[row] == label).double().mean().item() for row, label in zip(found.indices, labels(9, seed=1))]
    assert share.tolist() == by_query


def test_bad_input():
    bank, truth = vectors(20), labels(20)
    with pytest.raises(InputError, match="expected k from 1 to 5, the number of neighbours, found 6"):
        vote(nearest(bank, bank, k=5), truth, k=6, classes=5)
    with pytest.raises(UnknownNameError, match="no weighting of neighbours 'cosine'"):
        getattr(vote, "__wrapped__", vote)(nearest(bank, bank, k=5), truth, k=5, classes=5, weighting="cosine")
