"""How well the similarity of position embeddings follows distance: against scipy on pairs, and degenerate forms."""

import pytest
import torch
from scipy import stats
from torch.nn import functional as F

import vitlens
from tests.kit.tiny import model_of, ours, torchvision_swin, torchvision_vit
from vitlens.analysis.attention.positions import distance_correlation, position_similarity, rank_correlation


def layout(grid: tuple[int, int], patch: tuple[int, int]):
    """Of a model without a prefix."""
    size = (grid[0] * patch[0], grid[1] * patch[1])
    return ours(size=size, patch_size=patch, pooling="mean", depth=1).layout


def by_hand(similarity, grid, patch, keep):
    pairs = []
    for i in range(grid[0] * grid[1]):
        for j in range(i):
            (y, x), (v, u) = divmod(i, grid[1]), divmod(j, grid[1])
            if keep(y - v, x - u):
                distance = (((y - v) * patch[0]) ** 2 + ((x - u) * patch[1]) ** 2) ** 0.5
                pairs.append((float(similarity[i, j]), -distance))
    return list(zip(*pairs))


@pytest.mark.parametrize("patch", [(4, 4), (4, 8)])
def test_they_are_spearmans_and_pearsons_over_pairs(patch):
    own = layout((3, 4), patch)
    vectors = F.normalize(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    similarity = vectors @ vectors.T
    kept = (lambda *_: True, lambda down, _: down == 0, lambda _, right: right == 0)
    pairs = [by_hand(similarity, (3, 4), patch, keep) for keep in kept]
    expected = [stats.spearmanr(*each).statistic for each in pairs]
    assert rank_correlation(similarity, own) == pytest.approx(expected)
    assert distance_correlation(similarity, own) == pytest.approx(-stats.pearsonr(*pairs[0]).statistic, abs=1e-6)
    assert distance_correlation(torch.ones(12, 12), own) is None


def test_the_ends_and_the_forms_without_a_number():
    own = layout((3, 4), (4, 4))
    y, x = torch.arange(12) // 4, torch.arange(12) % 4
    near = torch.exp(-((y[:, None] - y) ** 2 + (x[:, None] - x) ** 2).float())
    assert rank_correlation(near, own) == pytest.approx((1.0, 1.0, 1.0))
    assert rank_correlation(1 - near, own) == pytest.approx((-1.0, -1.0, -1.0))
    only_columns = torch.exp(-((x[:, None] - x) ** 2).float())  # all patches of one column alike
    assert rank_correlation(only_columns, own)[1:] == (pytest.approx(1.0), None)
    assert rank_correlation(torch.ones(12, 12), own) == (None, None, None)
    two = layout((1, 2), (4, 4))
    assert rank_correlation(torch.eye(2), two) == (None, None, None)
    assert distance_correlation(torch.eye(2), two) is None


def cosine(embeddings: torch.Tensor) -> torch.Tensor:
    return F.cosine_similarity(embeddings[:, None], embeddings, dim=-1)


def test_similarity_is_the_cosine_of_the_patches_embeddings_with_and_without_a_prefix():
    for model in (ours(), ours(registers=2), ours(pooling="mean"), torchvision_vit()):
        learned = getattr(model.module, "pos_embed", None)
        learned = model.module.encoder.pos_embedding if learned is None else learned
        expected = cosine(learned[0, -model.layout.patches :])
        torch.testing.assert_close(position_similarity(model), expected, atol=1e-5, rtol=1e-5)


def test_without_positions_of_this_grid_there_is_no_similarity():
    assert position_similarity(ours(positions=False)) is None
    assert position_similarity(torchvision_swin()) is None
    for size in ((16, 48), (64, 48)):  # learned on another grid: not sliced
        assert position_similarity(model_of(ours().module, size=size)) is None


@pytest.mark.parametrize(("kind", "ranks"), [("sine", (0.608, 0.991, 0.762)), ("sine-2d", (0.839, 0.940, 0.937))])
def test_fixed_positions_are_read_at_every_size(kind, ranks):
    """Sines of one dimension follow rows, those of two both."""
    model = ours(positions=kind, size=(32, 32), patch_size=(4, 4), dim=64, pooling="mean")
    assert rank_correlation(position_similarity(model), model.layout) == pytest.approx(ranks, abs=5e-3)
    large = model_of(model.module, size=(64, 48))
    similar = position_similarity(large)
    assert similar.shape == (16 * 12,) * 2
    with torch.no_grad():
        grey = vitlens.capture(large, torch.zeros(1, 3, 64, 48), "patches")["patches"][0]
        plain = large.module.patch_embed.proj(large.prepare(torch.zeros(1, 3, 64, 48)))[0].flatten(1).T
    torch.testing.assert_close(similar, cosine(grey - plain), atol=1e-4, rtol=0)
