"""Features on a plane: seeded, trustworthiness by its formula, and limits that are said."""

import pytest
import torch
from sklearn import manifold
from sklearn.decomposition import PCA
from torch import Tensor

from vitlens.analysis.features import embedding as module
from vitlens.analysis.features.embedding import embed, principal, require_perplexity
from vitlens.errors import DataError, InputError, UnknownNameError


def clusters(count: int = 60, dim: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = 6 * torch.randn(3, dim, generator=generator)
    return centres[torch.arange(count) % 3] + torch.randn(count, dim, generator=generator)


@pytest.mark.parametrize("k", [1, 10, 29])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_trustworthiness_is_scikit_learns(k, offset):
    values = clusters().double() + offset
    points = values[:, :2] + torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    expected = manifold.trustworthiness(values.numpy(), points.numpy(), n_neighbors=k)
    assert module.trustworthiness(values, points, neighbours=k) == pytest.approx(expected, abs=1e-12)
    assert module.trustworthiness(values, 3 * values, neighbours=k) == 1


def test_points_at_random_are_at_one_half():
    points = torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    assert abs(module.trustworthiness(clusters(400), points, neighbours=10) - 0.5) < 0.05


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_how_far_an_embedding_can_be_trusted(method):
    values = clusters()
    found = embed(values, method=method, perplexity=8.0)
    units = torch.nn.functional.normalize(values.double())
    assert found.points.shape == (60, 2)
    assert found.neighbours == 10
    expected = manifold.trustworthiness(units.numpy(), found.points.numpy(), n_neighbors=10)
    assert found.trustworthiness == pytest.approx(expected, abs=1e-9)
    assert 0.7 < found.trustworthiness <= 1


def test_tsne_keeps_groups_apart_and_says_its_perplexity():
    found = embed(clusters(), perplexity=8.0)
    distances = torch.cdist(found.points, found.points).fill_diagonal_(torch.inf)
    assert torch.equal(distances.argmin(1) % 3, torch.arange(60) % 3)
    assert (found.method, found.perplexity, found.explained) == ("tsne", 8.0, None)


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_a_seed_gives_the_same_points(method):
    one, other = (embed(clusters(30), method=method, perplexity=5.0, seed=3) for _ in range(2))
    assert torch.equal(one.points, other.points)


def test_the_length_of_a_vector_says_nothing():
    values = clusters(30)
    scales = torch.linspace(0.5, 20, 30)[:, None]
    torch.testing.assert_close(embed(values, method="pca").points, embed(values * scales, method="pca").points)


@pytest.mark.parametrize("shape", [(40, 12), (8, 30)])
def test_principal_components_are_scikit_learns(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double() + 5
    scores, explained = principal(values, count=3)
    model = PCA(3, svd_solver="full").fit(values.numpy())
    expected = torch.from_numpy(model.transform(values.numpy()))
    torch.testing.assert_close(scores.abs(), expected.abs(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(explained, torch.from_numpy(model.explained_variance_ratio_), atol=1e-9, rtol=1e-9)


def test_signs_are_fixed():
    values = clusters(20)
    scores, _ = principal(values, count=2)
    again, _ = principal(values.flip(0), count=2)
    torch.testing.assert_close(again.flip(0), scores)


def test_pca_says_what_it_explains():
    found = embed(clusters(), method="pca")
    assert found.perplexity is None
    assert found.explained.sum() > 0.8  # three centres span a plane
    line = embed(torch.tensor([[1.0], [2.0], [-3.0], [4.0]]), method="pca")
    assert line.points[:, 1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("count", [4, 5, 7])
def test_few_images(count):
    found = embed(clusters(count), perplexity=1.0)
    assert found.points.isfinite().all()
    assert found.neighbours == (count - 1) // 2


def test_what_cannot_be_laid_out():
    with pytest.raises(
        InputError, match=r"expected a perplexity from 1 to 9\.667 for 30 images, found 30; give another"
    ):
        require_perplexity(30.0, 30)
    with pytest.raises(InputError, match=r"found 0\.5"):
        require_perplexity(0.5, 100)
    with pytest.raises(InputError, match="expected a perplexity with more images for 3 images"):
        require_perplexity(1.0, 3)
    with pytest.raises(DataError, match="expected features that differ, found all the same"):
        embed(torch.full((9, 4), 0.1), method="pca")
    with pytest.raises(UnknownNameError, match="no projection 'umap'"):
        getattr(embed, "__wrapped__", embed)(clusters(), method="umap")
