"""Features on a plane and patches as colours: seeded, trustworthiness and components as scikit-learn's, limits said."""

import pytest
import torch
from sklearn import manifold
from sklearn.decomposition import PCA
from torch import Tensor

from vitlens.analysis.features.embedding import embed, patch_colours, principal, require_perplexity
from vitlens.errors import DataError, InputError, UnknownNameError


def clusters(count: int = 60, dim: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = 6 * torch.randn(3, dim, generator=generator)
    return centres[torch.arange(count) % 3] + torch.randn(count, dim, generator=generator)


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_an_embedding_is_seeded_and_its_trustworthiness_is_that_of_unit_vectors(method):
    values = clusters()
    found, again = (embed(values, method=method, perplexity=8.0, seed=3) for _ in range(2))
    assert torch.equal(found.points, again.points)
    assert (found.points.shape, found.neighbours) == ((60, 2), 10)
    units = torch.nn.functional.normalize(values.double())
    expected = manifold.trustworthiness(units.numpy(), found.points.numpy(), n_neighbors=10)
    assert found.trustworthiness == pytest.approx(expected, abs=1e-9)
    assert 0.7 < found.trustworthiness <= 1
    if method == "tsne":
        distances = torch.cdist(found.points, found.points).fill_diagonal_(torch.inf)
        assert torch.equal(distances.argmin(1) % 3, torch.arange(60) % 3)  # groups stay apart
        assert (found.perplexity, found.explained) == (8.0, None)
    else:
        assert found.perplexity is None
        assert found.explained.sum() > 0.8  # three centres span a plane


def test_the_length_of_a_vector_says_nothing():
    values, scales = clusters(30), torch.linspace(0.5, 20, 30)[:, None]
    torch.testing.assert_close(embed(values, method="pca").points, embed(values * scales, method="pca").points)
    line = embed(torch.tensor([[1.0], [2.0], [-3.0], [4.0]]), method="pca")
    assert line.points[:, 1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(40, 12), (8, 30)])
def test_principal_components_are_scikit_learns_with_fixed_signs(shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double() + 5
    scores, explained = principal(values, count=3)
    model = PCA(3, svd_solver="full").fit(values.numpy())
    expected = torch.from_numpy(model.transform(values.numpy()))
    torch.testing.assert_close(scores.abs(), expected.abs(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(explained, torch.from_numpy(model.explained_variance_ratio_), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(principal(values.flip(0), count=3)[0].flip(0), scores)


@pytest.mark.parametrize("count", [4, 5, 7])
def test_few_images(count):
    found = embed(clusters(count), perplexity=1.0)
    assert found.points.isfinite().all()
    assert found.neighbours == (count - 1) // 2


def test_like_patches_of_two_images_have_like_colours():
    generator = torch.Generator().manual_seed(0)
    background, left, right = torch.randn(3, 12, generator=generator) * 4
    tokens = background + 0.1 * torch.randn(2, 8, 10, 12, generator=generator)
    shift = torch.zeros(12)
    shift[0] = 50  # what parts object from background is the greatest variance
    tokens[:, 2:6, 2:5] += left + shift
    tokens[:, 2:6, 5:8] += right + shift
    colours, explained = patch_colours(tokens)
    scores, shares = principal(tokens.flatten(0, 2), count=3)  # one for all images
    assert torch.equal(explained, shares)
    low, high = scores.amin(0), scores.amax(0)
    torch.testing.assert_close(colours, ((scores - low) / (high - low)).view(2, 8, 10, 3))
    same, apart = colours[0, 3, 3] - colours[1, 4, 4], colours[0, 3, 3] - colours[0, 0, 0]
    assert same[:2].abs().max() < 0.1  # three kinds of patches span a plane; the third component is noise
    assert apart[:2].abs().max() > 0.8


def test_a_component_that_does_not_vary_is_at_one_half():
    colours, _ = patch_colours(torch.linspace(0, 1, 12).view(1, 3, 4, 1).repeat(1, 1, 1, 2))
    assert colours[..., 0].min() == 0
    assert (colours[..., 2] == 0.5).all()


REFUSED = {
    "wide": (
        InputError,
        lambda: require_perplexity(30.0, 30),
        r"a perplexity from 1 to 9\.667 for 30 images, found 30",
    ),
    "narrow": (InputError, lambda: require_perplexity(0.5, 100), r"found 0\.5"),
    "few": (InputError, lambda: require_perplexity(1.0, 3), "with more images for 3 images"),
    "same": (
        DataError,
        lambda: embed(torch.full((9, 4), 0.1), method="pca"),
        "features that differ, found all the same",
    ),
    "patches": (DataError, lambda: patch_colours(torch.ones(1, 3, 3, 4)), "features that differ"),
    "name": (
        UnknownNameError,
        lambda: getattr(embed, "__wrapped__", embed)(clusters(), method="umap"),
        "no projection 'umap'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_laid_out(case):
    kind, call, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call()
