"""How well the similarity of position embeddings follows distance: against scipy on pairs, and degenerate forms."""

import pytest
import torch
from scipy import stats

from tests.lens.tiny import model_of, ours
from vitlens.analysis.attention.positions import distance_correlation, position_similarity, rank_correlation
from vitlens.models.positions import FIXED, fixed_positions
from vitlens.shapes import TokenLayout


def by_hand(similarity, layout, keep):
    pairs = []
    for i in range(layout.patches):
        for j in range(i):
            (y, x), (v, u) = divmod(i, layout.grid[1]), divmod(j, layout.grid[1])
            if keep(y - v, x - u):
                height, width = layout.patch_size
                pairs.append((float(similarity[i, j]), -((((y - v) * height) ** 2 + ((x - u) * width) ** 2) ** 0.5)))
    return list(zip(*pairs))


@pytest.mark.parametrize("patch", [(4, 4), (4, 8)])
def test_they_are_spearmans_and_pearsons_over_pairs(patch):
    layout = TokenLayout((3, 4), patch)
    vectors = torch.nn.functional.normalize(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), dim=1)
    similarity = vectors @ vectors.T
    found = rank_correlation(similarity, layout)
    kept = (lambda *_: True, lambda down, _: down == 0, lambda _, right: right == 0)
    pairs = [by_hand(similarity, layout, keep) for keep in kept]
    assert found == pytest.approx([stats.spearmanr(*each).statistic for each in pairs])
    assert distance_correlation(similarity, layout) == pytest.approx(-stats.pearsonr(*pairs[0]).statistic, abs=1e-6)
    assert distance_correlation(torch.ones(12, 12), layout) is None


def test_the_ends_and_the_forms_without_a_number():
    layout = TokenLayout((3, 4), (4, 4))
    y, x = torch.arange(12) // 4, torch.arange(12) % 4
    squared = (y[:, None] - y) ** 2 + (x[:, None] - x) ** 2
    near = torch.exp(-squared.float())
    assert rank_correlation(near, layout) == pytest.approx((1.0, 1.0, 1.0))
    assert rank_correlation(1 - near, layout) == pytest.approx((-1.0, -1.0, -1.0))
    only_columns = torch.exp(-((x[:, None] - x) ** 2).float())  # all patches of one column alike
    assert rank_correlation(only_columns, layout)[1:] == (pytest.approx(1.0), None)
    assert rank_correlation(torch.ones(12, 12), layout) == (None, None, None)
    assert rank_correlation(torch.eye(2), TokenLayout((1, 2), (4, 4))) == (None, None, None)


def test_sines_of_one_dimension_follow_rows_and_those_of_two_both():
    layout = TokenLayout((8, 8), (4, 4))
    found = {}
    for kind in FIXED:
        unit = torch.nn.functional.normalize(fixed_positions(kind, grid=(8, 8), prefix=0, dim=64)[0], dim=1)
        found[kind] = rank_correlation(unit @ unit.T, layout)
    assert found["sine"] == pytest.approx((0.608, 0.991, 0.762), abs=2e-3)
    assert found["sine-2d"] == pytest.approx((0.839, 0.940, 0.937), abs=5e-3)


@pytest.mark.parametrize("kind", FIXED)
def test_fixed_positions_are_read_at_every_size(kind):
    model = ours(positions=kind)
    own = position_similarity(model)
    assert own.shape == (model.layout.patches, model.layout.patches)
    large = model_of(model.module, size=(64, 48))
    assert large.layout.patches != model.layout.patches
    embeddings = fixed_positions(kind, grid=large.layout.grid, prefix=0, dim=model.module.config.dim)[0]
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    torch.testing.assert_close(position_similarity(large), unit @ unit.T, atol=1e-5, rtol=0)
