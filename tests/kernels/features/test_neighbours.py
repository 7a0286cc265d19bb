"""Nearest neighbours: exactly those of float64, in any chunks."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlens.analysis.features import neighbours
from vitlens.analysis.features.neighbours import (
    correspond,
    near,
    nearest,
    object_overlap,
    patch_neighbours,
    vote,
)
from vitlens.errors import DataError, InputError, UnknownNameError


def vectors(count: int, width: int = 24, *, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def assert_same(one: neighbours.Neighbours, other: neighbours.Neighbours) -> None:
    assert torch.equal(one.indices, other.indices)
    assert torch.equal(one.similarity, other.similarity)


@pytest.mark.parametrize(
    ("bank", "k", "close"), [(400, 1, 1), (2700, 5, 1), (30, 30, 1), (300, 5, 1e-4)]
)
def test_they_are_those_of_float64(bank, k, close):
    """Also of vectors that differ by less than fp32's rounding of a cosine."""
    base = 0 if close == 1 else vectors(1, seed=2) + 10
    queries = base + close * vectors(50, seed=1)
    candidates = base + close * vectors(bank)
    one = queries.double()
    two = candidates.double()
    cosines = (one @ two.T) / one.norm(dim=1)[:, None] / two.norm(dim=1)
    order = torch.from_numpy(np.argsort(-cosines.numpy().round(12), axis=1, kind="stable")[:, :k])
    result = nearest(queries, candidates, k=k)
    assert torch.equal(result.indices, order)
    torch.testing.assert_close(result.similarity, cosines.gather(1, order), atol=1e-11, rtol=0)


def test_everything_is_computed_on_the_device_of_the_features():
    """As on a GPU, the default device is not theirs: what is made on it by mistake does not mix
    with them.
    """
    queries = vectors(30, seed=1)
    features = vectors(400)
    itself = torch.arange(30)
    for out in (None, itself):
        expected = nearest(queries, features, k=3, leave_out=out)
        with torch.device("meta"):
            assert_same(nearest(queries, features, k=3, leave_out=out), expected)


@pytest.mark.parametrize(("numbers", "block"), [(1 << 9, 37), (1 << 14, 150), (1 << 9, 1 << 16)])
def test_chunks_change_nothing(monkeypatch, numbers, block):
    # 50 of them twice
    queries = vectors(40, seed=1)
    bank = torch.cat((vectors(300), vectors(50)))
    expected = nearest(queries, bank, k=7)
    monkeypatch.setattr(neighbours, "_NUMBERS", numbers)
    monkeypatch.setattr(neighbours, "_BANK", block)
    assert_same(nearest(queries, bank, k=7), expected)


def test_copies_come_by_index_and_an_image_is_no_neighbour_of_its_own():
    copies = vectors(10).repeat(30, 1)
    assert torch.equal(
        nearest(copies[:10], copies, k=25).indices,
        torch.arange(10)[:, None] + 10 * torch.arange(25),
    )
    bank = torch.cat((vectors(60), vectors(20)))  # the first 20 twice
    result = nearest(bank, bank, k=4, leave_out=torch.arange(80))
    assert not (result.indices == torch.arange(80)[:, None]).any()
    assert torch.equal(result.indices[60:, 0], torch.arange(20))
    assert torch.equal(result.indices[:20, 0], torch.arange(60, 80))
    zeros = nearest(torch.zeros(1, 24), vectors(9), k=3)  # like nothing
    assert (zeros.indices.tolist(), zeros.similarity.tolist()) == ([[0, 1, 2]], [[0.0, 0.0, 0.0]])


def test_of_equal_votes_the_lowest_class_wins():
    bank = torch.eye(4, 24)
    truth = torch.tensor([3, 1, 2, 0])
    near_to_two = nearest(torch.tensor([[1.0, 1.0] + [0.0] * 22]), bank, k=2)
    assert vote(near_to_two, truth, k=2, classes=4, weighting="majority").tolist() == [1]
    assert vote(near_to_two, truth, k=1, classes=4).tolist() == [3]


def test_places_of_matches_in_grids_that_differ_and_a_distance_in_shares_of_the_image():
    first = torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]])
    second = torch.tensor([[[1.0, 0.02]], [[0.1, 1.0]]])
    matches = correspond(first, second)
    back = correspond(second, first)
    assert matches.sources.tolist() == back.targets.tolist() == [[0, 0], [0, 2]]
    assert matches.targets.tolist() == back.sources.tolist() == [[0, 0], [1, 0]]
    grid = (torch.arange(16).double()[:, None] + 0.5) / 16
    alike = near(torch.cat((grid, grid * 0 + 0.5), 1))
    assert alike[5].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]  # two sixteenths are an eighth


def test_what_cannot_be_counted():
    bank = vectors(20)
    truth = torch.arange(20) % 5
    result = nearest(bank, bank, k=5)
    with pytest.raises(InputError, match="from 1 to 5"):
        vote(result, truth, k=6, classes=5)
    with pytest.raises(UnknownNameError):
        getattr(vote, "__wrapped__", vote)(result, truth, k=5, classes=5, weighting="cosine")
    with pytest.raises(DataError):
        patch_neighbours(vectors(6, 2), torch.tensor([0, 0, 0, 0, 1, 1]))
    assert object_overlap(result, torch.zeros(20).long(), torch.arange(20)) is None
