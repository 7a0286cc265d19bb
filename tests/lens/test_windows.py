"""Windows in image coordinates: where the libraries' own partitions put each patch, and where attention is known."""

import pytest
import timm
import torch
from timm.models.hiera import Unroll
from timm.models.maxxvit import grid_partition
from torch import Tensor
from torchvision.models.maxvit import MaxVit, SwapAxes, WindowPartition

from tests.lens.put_back import unwindow
from tests.lens.tiny import images, model_of, shaken
from vitlens.analysis.attention.weights import attention_maps, patch_views
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.statistics import statistics
from vitlens.attribution.explain import explain
from vitlens.lens.call import received, row_by_row, window_index
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import survey
from vitlens.lens.site import Windows
from vitlens.models.model import Model


def hiera() -> Model:
    shape = {"img_size": (64, 64), "embed_dim": 8, "num_heads": 1, "stages": (1, 2, 2, 2)}
    return model_of(shaken(lambda: timm.create_model("hiera_tiny_224", num_classes=5, **shape)), size=(64, 64))


def maxvit() -> Model:
    return model_of(shaken(lambda: timm.create_model("test_maxvit", num_classes=5, img_size=64)), size=(64, 64))


def torchvision_maxvit() -> Model:
    shape = {"stem_channels": 8, "partition_size": 4, "block_channels": [8, 16], "block_layers": [1, 1], "head_dim": 4}
    return model_of(shaken(lambda: MaxVit((64, 64), stochastic_depth_prob=0.0, num_classes=5, **shape)), size=(64, 64))


MAKERS = {"hiera": hiera, "maxvit": maxvit, "torchvision": torchvision_maxvit}


def numbered(rows: int, columns: int) -> Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns)


def test_a_grid_is_that_of_timm_and_of_torchvision():
    index = window_index(Windows((8, 12), (4, 4), dilated=True))
    theirs = grid_partition(numbered(8, 12)[None, ..., None], [4, 4]).flatten(1)
    assert torch.equal(index, theirs.long())
    square = window_index(Windows((12, 12), (4, 4), dilated=True))
    blocks = WindowPartition()(numbered(12, 12)[None, None], 3)
    assert torch.equal(square, SwapAxes(-2, -3)(blocks)[0, ..., 0].long())


def test_unwindowed_grid_attention_by_loops():
    windows = Windows((4, 6), (2, 3), dilated=True)  # patches 2 apart on both axes
    weights = torch.rand(4, 2, 6, 6, generator=torch.Generator().manual_seed(0)).softmax(-1)
    expected = torch.zeros(1, 2, 24, 24)
    for down in range(2):
        for across in range(2):
            inside = [(down + 2 * row) * 6 + across + 2 * column for row in range(2) for column in range(3)]
            for query, at in enumerate(inside):
                for key, to in enumerate(inside):
                    expected[0, :, at, to] = weights[2 * down + across, :, query, key]
    assert torch.equal(unwindow(weights, windows), expected)


def test_hieras_tokens_are_where_its_own_unrolling_puts_them():
    model = hiera()
    unroll = Unroll((64, 64), (4, 4), [(2, 2)] * 3)
    for site in survey(model, images((64, 64))):
        windows = site.windows
        assert windows is not None
        rows, columns = windows.resolution
        stage = {16: 3, 8: 2, 4: 1, 2: 0}[rows]
        left = Unroll((rows, columns), (1, 1), [(2, 2)] * stage) if stage != 3 else unroll
        tokens = left(numbered(rows, columns).view(1, -1, 1)).long().view(-1, windows.count)  # (inside, windows)
        keys = torch.tensor(windows.keys or range(len(tokens)))
        assert torch.equal(window_index(windows), tokens[keys].T)
        # a query stands at each of the 2x2 patches of which timm takes the maximum
        if site.queries < site.keys:
            queries = torch.tensor(windows.queries).view(windows.window)
            children = queries.unfold(0, 2, 2).unfold(1, 2, 2).flatten(2)
            assert (children == children[..., :1]).all()
            assert sorted(children[..., 0].flatten().tolist()) == list(range(site.queries))


@pytest.mark.parametrize("name", MAKERS)
def test_uniform_and_one_hot_attention_in_image_coordinates(name):
    """Every patch attends to the first key of its window: it is where the map says, and each window has one."""
    model = MAKERS[name]()
    for site in survey(model, images((64, 64))):
        windows = site.windows
        assert windows is not None
        uniform = torch.full((windows.count, 1, site.queries, site.keys), 1 / site.keys)
        maps = received(row_by_row(uniform, windows), windows)
        torch.testing.assert_close(maps, torch.full_like(maps, 1 / site.keys))
        one_hot = torch.zeros_like(uniform)
        first = windows.keys[0] if windows.keys else 0
        one_hot[..., first] = 1  # the patch of the window that is first row by row
        corner = received(row_by_row(one_hot, windows), windows)[0, 0]
        assert set(corner.flatten().nonzero()[:, 0].tolist()) == set(window_index(windows)[:, 0].tolist())
        whole = unwindow(row_by_row(uniform, windows), windows)
        torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole.sum(-1)))


@pytest.mark.parametrize("name", MAKERS)
def test_a_patchs_row_and_column_are_those_of_the_whole_matrix(name):
    model = MAKERS[name]()
    batch = images((64, 64))
    layers = capture_attention(model, batch).layers
    views = zip(
        layers,
        patch_views(model, batch, side="query", patch=(3, 5)),
        patch_views(model, batch, side="key", patch=(3, 5)),
        strict=True,
    )
    for weights, query, key in views:
        windows = query.site.windows
        assert windows is not None
        whole = unwindow(row_by_row(weights, windows), windows)
        patch = query.patch[0] * windows.resolution[1] + query.patch[1]
        torch.testing.assert_close(query.maps.flatten(2), whole[:, :, patch])
        torch.testing.assert_close(key.maps.flatten(2), whole[..., patch])


@pytest.mark.parametrize("name", MAKERS)
def test_distance_is_that_of_the_whole_matrix_in_pixels(name):
    model = MAKERS[name]()
    batch = images((64, 64))
    layers, table = capture_attention(model, batch).layers, statistics(model, batch)
    for site, weights in zip(survey(model, batch), layers, strict=True):
        assert site.windows is not None
        whole = unwindow(row_by_row(weights, site.windows), site.windows)
        rows, columns = site.windows.resolution
        apart = Geometry((rows, columns), (64 / rows, 64 / columns)).distances()[0]
        expected = (whole.double() * apart).sum(-1).mean((0, 2))
        torch.testing.assert_close(table.distance[site.layer, : site.heads], expected, rtol=1e-4, atol=1e-4)


def test_patches_that_lie_apart_are_no_neighbours():
    model = maxvit()
    table = statistics(model, images((64, 64)))
    for site, geometry in zip(table.sites, table.geometries, strict=True):
        assert geometry is not None
        assert geometry == geometry_of(site, model)
        down, rows = geometry.spacing[0], geometry.span[0]
        mass = table.offset_mass[site.layer]
        assert mass is not None
        torch.testing.assert_close(mass.sum((1, 2)), torch.ones_like(mass[:, 0, 0]), atol=1e-5, rtol=0)
        if down > 1:
            assert table.neighbour_mass[site.layer, : site.heads].tolist() == [0.0] * site.heads
            assert (mass[:, rows - 1 + down] > 0).any()
    assert {geometry.spacing for geometry in table.geometries if geometry} == {(1, 1), (8, 8), (4, 4), (2, 2)}


@pytest.mark.parametrize("name", MAKERS)
def test_maps_of_every_layer_and_cams_of_the_last(name):
    model = MAKERS[name]()
    batch = images((64, 64))
    maps = attention_maps(model, batch)
    assert [layer.maps.shape[2:] for layer in maps] == [site.windows.resolution for site in survey(model, batch)]  # type: ignore[union-attr]
    last = maps[-1].maps.shape[2:]
    assert explain(model, batch, method="gradcam").shape[1:] == last
    assert explain(model, batch, method="attention").shape[1:] == last
