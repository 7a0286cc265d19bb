"""Windows in image coordinates: where the libraries' own partitions put each patch, and where attention is known."""

import pytest
import timm
import torch
from timm.models.hiera import Unroll
from timm.models.maxxvit import grid_partition
from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit, SwapAxes, WindowPartition

from tests.lens.oracles import SHAPES, timm_tokens, torchvision_tokens, unwindow
from tests.lens.tiny import images, model_of, shaken, timm_model, torchvision_swin
from vitlens.analysis.attention.weights import attention_maps, patch_views
from vitlens.analysis.heads.geometry import Geometry, geometry_of
from vitlens.analysis.heads.statistics import statistics
from vitlens.attribution.explain import explain
from vitlens.lens.call import received, row_by_row, window_index
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import survey
from vitlens.lens.site import Caller, Windows, windows_of
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
SWIN, SWIN2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"


def numbered(rows: int, columns: int) -> Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns)


@pytest.mark.parametrize("pad_first", [False, True], ids=["timm", "torchvision"])
@pytest.mark.parametrize("shape", SHAPES)
def test_index_is_the_librarys_own_order(shape, pad_first):
    resolution, window, shift = SHAPES[shape]
    if not pad_first and shape == "one padded window":
        shift = (0, 0)  # timm makes a window no larger than the map and shifts none
    oracle = (torchvision_tokens if pad_first else timm_tokens)(resolution, window, shift)
    assert torch.equal(window_index(Windows(resolution, window, shift, pad_first)), oracle.long())


def test_a_grid_is_that_of_timm_and_of_torchvision():
    index = window_index(Windows((8, 12), (4, 4), dilated=True))
    theirs = grid_partition(numbered(8, 12)[None, ..., None], [4, 4]).flatten(1)
    assert torch.equal(index, theirs.long())
    square = window_index(Windows((12, 12), (4, 4), dilated=True))
    blocks = WindowPartition()(numbered(12, 12)[None, None], 3)
    assert torch.equal(square, SwapAxes(-2, -3)(blocks)[0, ..., 0].long())


WINDOWS = {
    "grid": Windows((4, 6), (2, 3), dilated=True),
    **{f"{name}-{first}": Windows(*shape, first) for name, shape in SHAPES.items() for first in (False, True)},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_a_patch_receives_by_loops(name):
    """The mean over the patches of its window; padding neither gives nor receives."""
    windows = WINDOWS[name]
    index = window_index(windows)
    shape = (2 * len(index), 2, index.shape[1], index.shape[1])
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).softmax(-1)
    patches = windows.resolution[0] * windows.resolution[1]
    whole, mates = torch.zeros(2, 2, patches, patches), torch.zeros(patches)
    for number, places in enumerate(index.tolist()):
        for row, query in enumerate(places):
            for column, key in enumerate(places):
                if min(query, key) >= 0:
                    whole[:, :, query, key] = weights[number :: len(index), :, row, column]
                    mates[key] += 1
    assert torch.equal(unwindow(weights, windows), whole)
    torch.testing.assert_close(received(weights, windows).flatten(2), whole.sum(-2) / mates, atol=1e-6, rtol=1e-5)


def timm_swin(name: str, size: tuple[int, int]) -> Model:
    return timm_model(name, img_size=size)


@pytest.mark.parametrize(
    ("make", "size", "pad_first"),
    [
        (lambda size: timm_swin(SWIN, size), (32, 32), False),
        (lambda size: timm_swin(SWIN, size), (20, 36), False),
        (lambda size: timm_swin(SWIN2, size), (20, 36), False),
        (torchvision_swin, (32, 32), True),
        (torchvision_swin, (20, 36), True),
        (torchvision_swin, (12, 12), True),  # second stage: 3x3 patches padded into one window of 4x4
    ],
    ids=["timm", "timm-padded", "timm-v2-padded", "torchvision", "torchvision-padded", "torchvision-one-window"],
)
def test_a_models_windows_are_read_from_it(make, size, pad_first):
    """Put back, no weight joins patches a window apart: the mask of a shifted window keeps far corners apart."""
    captured = capture_attention(model := make(size), images(size))
    resolutions = [(size[0] // 2, size[1] // 2)] * 2 + [(-(-size[0] // 4), -(-size[1] // 4))] * 2
    for site, weights, resolution in zip(captured.sites, captured.layers, resolutions):
        assert (site.windows.resolution, site.windows.pad_first) == (resolution, pad_first)
        index = window_index(site.windows)
        assert len(weights) == 2 * len(index)
        whole = unwindow(weights, site.windows)
        assert (whole.sum(-1) <= 1 + 1e-5).all()
        if -1 not in index:
            torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole[..., 0]))
            place = torch.cartesian_prod(torch.arange(resolution[0]), torch.arange(resolution[1]))
            apart = (place[:, None] - place).abs().amax(-1) >= site.windows.window[0]
            assert whole[:, :, apart].abs().amax() < 1e-6 if apart.any() else True
    assert [layer.maps.shape[2:] for layer in attention_maps(model, images(size))] == resolutions


def test_even_attention_gives_an_even_map_in_a_shifted_window():
    model = timm_model(SWIN)
    for name, parameter in model.module.named_parameters():
        if ".qkv." in name or "relative_position" in name:
            parameter.zero_()
    for layer in attention_maps(model, images()):
        torch.testing.assert_close(layer.maps, torch.full_like(layer.maps, 1 / 16), atol=1e-6, rtol=0)


class TinyVitBlock(nn.Module):
    """As timm's, of a map with channels last; of DaViT's SpatialBlock channels come first."""

    window_size = (4, 2)


SpatialBlock = type("SpatialBlock", (TinyVitBlock,), {})


def test_windows_that_are_never_shifted_are_padded_below_and_on_the_right():
    for kind, shape in ((TinyVitBlock, (2, 6, 10, 8)), (SpatialBlock, (2, 8, 6, 10))):
        found = windows_of(nn.Module(), [Caller("block", kind(), shape)], calls=10, queries=8, keys=8)
        assert found == Windows((6, 10), (4, 2))
        assert windows_of(nn.Module(), [Caller("block", kind(), (2, 60, 8))], calls=10, queries=8, keys=8) is None


class Pooling(nn.Module):
    """As a block of timm's SAM 2: windows of a map with channels last, whose queries may be maxima of 2x2 patches."""

    def __init__(self, *, is_windowed: bool, q_stride: tuple[int, int] | None) -> None:
        super().__init__()
        self.is_windowed, self.q_stride, self.window_size = is_windowed, q_stride, (4, 6)


def test_windows_of_sam_2_whose_queries_are_pooled():
    pooled = numbered(2, 3).repeat_interleave(2, 0).repeat_interleave(2, 1).flatten().int().tolist()
    for stride, queries in ((None, ()), ((2, 2), tuple(pooled))):
        inside = {"queries": 6 if stride else 24, "keys": 24}
        caller = Caller("block", Pooling(is_windowed=True, q_stride=stride), (2, 8, 12, 5))
        found = windows_of(nn.Module(), [caller], calls=4, **inside)
        assert found == Windows((8, 12), (4, 6), queries=queries, keys=tuple(range(24)) if stride else ())
        whole = Caller("block", Pooling(is_windowed=False, q_stride=stride), (2, 4, 6, 5))
        expected = Windows((4, 6), (4, 6), queries=queries, keys=found.keys)
        assert windows_of(nn.Module(), [whole], calls=1, **inside) == expected


def test_hieras_tokens_are_where_its_own_unrolling_puts_them():
    unroll = Unroll((64, 64), (4, 4), [(2, 2)] * 3)
    for site in survey(hiera(), images((64, 64))):
        windows = site.windows
        rows, columns = windows.resolution
        stage = {16: 3, 8: 2, 4: 1, 2: 0}[rows]
        left = Unroll((rows, columns), (1, 1), [(2, 2)] * stage) if stage != 3 else unroll
        tokens = left(numbered(rows, columns).view(1, -1, 1)).long().view(-1, windows.count)  # (inside, windows)
        keys = torch.tensor(windows.keys or range(len(tokens)))
        assert torch.equal(window_index(windows), tokens[keys].T)
        # a query stands at each of the 2x2 patches of which timm takes the maximum
        if site.queries < site.keys:
            children = torch.tensor(windows.queries).view(windows.window).unfold(0, 2, 2).unfold(1, 2, 2).flatten(2)
            assert (children == children[..., :1]).all()
            assert sorted(children[..., 0].flatten().tolist()) == list(range(site.queries))


@pytest.mark.parametrize("name", MAKERS)
def test_uniform_and_one_hot_attention_in_image_coordinates(name):
    """Every patch attends to the first key of its window: it is where the map says, and each window has one."""
    for site in survey(MAKERS[name](), images((64, 64))):
        windows = site.windows
        uniform = torch.full((windows.count, 1, site.queries, site.keys), 1 / site.keys)
        maps = received(row_by_row(uniform, windows), windows)
        torch.testing.assert_close(maps, torch.full_like(maps, 1 / site.keys))
        one_hot = torch.zeros_like(uniform)
        one_hot[..., windows.keys[0] if windows.keys else 0] = 1  # the patch of the window that is first row by row
        corner = received(row_by_row(one_hot, windows), windows)[0, 0]
        assert set(corner.flatten().nonzero()[:, 0].tolist()) == set(window_index(windows)[:, 0].tolist())


@pytest.mark.parametrize("name", MAKERS)
def test_views_and_distances_are_those_of_the_whole_matrix(name):
    model, batch = MAKERS[name](), images((64, 64))
    layers, table = capture_attention(model, batch).layers, statistics(model, batch)
    views = [patch_views(model, batch, side=side, patch=(3, 5)) for side in ("query", "key")]
    for weights, query, key in zip(layers, *views, strict=True):
        site = query.site
        rows, columns = site.windows.resolution
        whole = unwindow(row_by_row(weights, site.windows), site.windows)
        patch = query.patch[0] * columns + query.patch[1]
        torch.testing.assert_close(query.maps.flatten(2), whole[:, :, patch])
        torch.testing.assert_close(key.maps.flatten(2), whole[..., patch])
        apart = Geometry((rows, columns), (64 / rows, 64 / columns)).distances()[0]  # px
        expected = (whole.double() * apart).sum(-1).mean((0, 2))
        torch.testing.assert_close(table.distance[site.layer, : site.heads], expected, rtol=1e-4, atol=1e-4)
    maps = attention_maps(model, batch)
    assert [layer.maps.shape[2:] for layer in maps] == [site.windows.resolution for site in survey(model, batch)]
    for method in ("gradcam", "attention"):
        assert explain(model, batch, method=method).shape[1:] == maps[-1].maps.shape[2:]


def test_patches_that_lie_apart_are_no_neighbours():
    model = maxvit()
    table = statistics(model, images((64, 64)))
    for site, geometry in zip(table.sites, table.geometries, strict=True):
        assert geometry == geometry_of(site, model)
        down, rows = geometry.spacing[0], geometry.span[0]
        mass = table.offset_mass[site.layer]
        torch.testing.assert_close(mass.sum((1, 2)), torch.ones_like(mass[:, 0, 0]), atol=1e-5, rtol=0)
        if down > 1:
            assert table.neighbour_mass[site.layer, : site.heads].tolist() == [0.0] * site.heads
            assert (mass[:, rows - 1 + down] > 0).any()
    assert {geometry.spacing for geometry in table.geometries} == {(1, 1), (8, 8), (4, 4), (2, 2)}
