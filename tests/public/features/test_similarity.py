"""`vitlens.similarity`: CKA of full Gram matrices in float64, its interval; rank correlation."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import vitlens
from tests.kit.commands import ran
from tests.kit.select import select_one
from tests.kit.vectors import gram_cka, layers, of
from vitlens import similarity
from vitlens.errors import InputError


@pytest.mark.parametrize(
    ("count", "biased", "offset"),
    # in batches of 1,024
    [
        (40, True, 0),
        (40, False, 0),
        (1030, False, 0),
        (50, True, 3000),
        (50, False, 3000),
    ],
)
def test_cka_is_that_of_whole_gram_matrices_and_large_means_cancel_no_digits(
    count, biased, offset
) -> None:
    """Features far from 0, as an unnormalised stream has them."""
    first = layers(count, 5, 60, offset=offset)
    second = layers(count, 8, 3, 30, seed=1, offset=-offset / 4)
    result = similarity(of(first), of(second), biased=biased, groups=1)
    near = [[part.double() - part.double().mean(0) for part in parts] for parts in (first, second)]
    expected = [[gram_cka(x, y, biased=biased) for y in near[1]] for x in near[0]]
    np.testing.assert_allclose(result.values, expected, atol=1e-9, rtol=0)
    assert (result.n, result.low) == (count, None)


@pytest.mark.parametrize("biased", [True, False])
def test_one_model_with_itself_is_two_models_that_are_the_same(biased: bool) -> None:
    one = of(layers(30, 4, 50, 7))
    alone = similarity(one, biased=biased)
    pair = similarity(one, one, biased=biased)
    torch.testing.assert_close(alone.values.diagonal(), torch.ones(3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(alone.values, alone.values.T, atol=0, rtol=0)
    torch.testing.assert_close(alone.values, pair.values, atol=1e-12, rtol=0)
    torch.testing.assert_close(alone.low, pair.low, atol=1e-10, rtol=0)


def test_a_layer_that_does_not_vary_has_none() -> None:
    values = similarity(of([*layers(20, 5), torch.full((20, 3), 0.1)])).values
    assert values[0, 0] == pytest.approx(1)
    assert values[1].isnan().all()
    assert values[:, 1].isnan().all()


def test_the_interval_is_the_jackknife_of_groups() -> None:
    x = layers(60, 8)[0]
    y = layers(60, 10, seed=1)[0]
    result = similarity(of([x]), of([y]), groups=6, seed=3)
    left = []
    for group in torch.randperm(60, generator=torch.Generator().manual_seed(3)).chunk(6):
        is_kept = torch.ones(60, dtype=torch.bool)
        is_kept[group] = False
        left.append(gram_cka(x[is_kept], y[is_kept]))
    half = stats.t.ppf(0.975, 5) * np.sqrt(5 / 6 * np.sum((np.array(left) - np.mean(left)) ** 2))
    value = gram_cka(x, y)
    assert result.n == 60
    ends = (result.values.item(), result.low.item(), result.high.item())
    assert ends == pytest.approx((value, value - half, min(1, value + half)), abs=1e-6)
    sources = torch.arange(60) // 3
    copies = [
        similarity(of([x[sources]]), of([y[sources]]), groups=20, sources=members)
        for members in (None, sources)
    ]
    widths = [float(copy.high - copy.low) for copy in copies]
    assert widths[1] > 1.2 * widths[0]  # copies of an image tell nothing new
    assert similarity(of([x]), of([y]), sources=torch.zeros(60)).low is None
    assert similarity(of(layers(7, 8))).low is None  # too few for two groups
    assert similarity(of(layers(8, 8))).low is not None


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation of the distances between images, 1 - cosine."""
    rows, columns = np.triu_indices(len(x), 1)
    units = [torch.nn.functional.normalize(part.double()) for part in (x, y)]
    one, other = (1 - (unit @ unit.T).numpy()[rows, columns] for unit in units)
    return float(stats.spearmanr(one, other).statistic)


def test_the_rank_correlation_of_distances_within_a_model_and_between_two(
    golden, tiny_vit, tiny_cnn
) -> None:
    record = golden("features").record
    split = vitlens.load_data("digits", limit=record.sets[0].test)
    models = {"a": vitlens.load(str(tiny_vit)), "b": vitlens.load(str(tiny_cnn))}
    read = {
        alias: vitlens.features(model, split, embedding=True) for alias, model in models.items()
    }

    def at(alias: str, layer: str) -> Tensor:
        return read[alias].at(layer if layer == "embedding" else int(layer))

    rows: Sequence = (*record.within, *record.between)
    assert len(rows) == 3 * 3 + 4 * 4 + 3 * 4
    for row in rows:
        x = at(row.first, row.layer)
        y = at(row.second, row.other)
        assert row.rank == pytest.approx(rank_correlation(x, y), abs=1e-6)
        assert row.cka.value == pytest.approx(gram_cka(x - x.mean(0), y - y.mean(0)), abs=1e-4)


def test_of_many_images_the_distances_of_a_seeded_thousand_are_ranked(tiny_vit, tmp_path) -> None:
    model = vitlens.load(str(tiny_vit))
    data = tmp_path / "noise.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (1030, 32, 32, 3), dtype=np.uint8)
    np.savez(data, test_images=pixels, test_labels=np.arange(1030) % 10)
    record = ran(
        tmp_path / "out",
        f"features a={tiny_vit} --data {data} --no-probe --no-tsne --no-cache --seed 5",
    )
    chosen = torch.randperm(1030, generator=torch.Generator().manual_seed(5))[:1000].sort().values
    read = vitlens.features(model, torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255)
    row = select_one(record.within, layer="0", other="1")
    assert row.rank == pytest.approx(
        rank_correlation(read.at(0)[chosen], read.at(1)[chosen]), abs=1e-6
    )


def test_other_images_and_too_few_are_refused() -> None:
    for wrong in (
        lambda: similarity(of(layers(9, 3)), of(layers(8, 3))),
        lambda: similarity(of(layers(3, 3))),
    ):
        with pytest.raises(InputError):
            wrong()
