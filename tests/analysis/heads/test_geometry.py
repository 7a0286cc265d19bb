"""Where tokens lie: distances of uniform attention, every pair by hand, windows in their library's order, offsets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lens.oracles import SHAPES, timm_tokens, torchvision_tokens
from tests.lens.tiny import images, ours, timm_model, torchvision_swin
from vitlens.analysis.heads.geometry import Geometry, geometry_of, square_grid
from vitlens.lens.observe import survey
from vitlens.lens.site import Site, Windows


@pytest.mark.parametrize("grid", [(3, 5), (1, 4), (4, 1), (1, 1)])
def test_all_pairs_by_hand(grid):
    place = Geometry(grid, (8.0, 16.0), prefix=2)
    (found,) = place.distances()
    total = 0.0
    for query in range(grid[0] * grid[1]):
        for key in range(grid[0] * grid[1]):
            down, across = key // grid[1] - query // grid[1], key % grid[1] - query % grid[1]
            pixels = math.hypot(8 * down, 16 * across)
            assert found[query, key].item() == pytest.approx(pixels, abs=1e-12)
            total += pixels
    assert place.pairs().all()
    even = place.uniform()
    assert (even.distance, even.energy) == pytest.approx((total / place.patches**2, 1 / place.patches), abs=1e-12)
    assert even.received.tolist() == pytest.approx([1 / (2 + place.patches)] * (2 + place.patches))
    assert place.places().tolist() == [list(range(place.patches))]


def wrapped(windows: Windows) -> Tensor:
    """For every place of every window, whether it came round the edge: (windows, inside, down and across)."""
    (rows, columns), (height, width) = windows.resolution, windows.window
    padded = (rows + -rows % height, columns + -columns % width)
    shift = tuple(0 if window >= size else step for size, window, step in zip(padded, windows.window, windows.shift))
    round_edge = padded if windows.pad_first else windows.resolution
    flags = torch.zeros(*padded, 2, dtype=torch.bool)
    for row in range(padded[0]):
        for column in range(padded[1]):
            flags[row, column, 0] = row + shift[0] >= round_edge[0]
            flags[row, column, 1] = column + shift[1] >= round_edge[1]
    blocks = [
        flags[top : top + height, left : left + width].reshape(-1, 2)
        for top in range(0, padded[0], height)
        for left in range(0, padded[1], width)
    ]
    return torch.stack(blocks)


@pytest.mark.parametrize("pad_first", [False, True], ids=["timm", "torchvision"])
@pytest.mark.parametrize("shape", SHAPES)
def test_windows_pair_by_pair(shape, pad_first):
    resolution, window, shift = SHAPES[shape]
    if not pad_first and shape == "one padded window":
        shift = (0, 0)
    windows = Windows(resolution, window, shift, pad_first)
    place = Geometry(window, (2.0, 3.0), windows=windows)
    index = (torchvision_tokens if pad_first else timm_tokens)(resolution, window, shift).long()
    assert torch.equal(place.places(), index)
    edges, pairs, distances = wrapped(windows), place.pairs(), place.distances()
    rows = []
    for number, inside in enumerate(index.tolist()):
        for row, query in enumerate(inside):
            seen = []
            for column, key in enumerate(inside):
                real = query >= 0 and key >= 0
                near = real and bool((edges[number, row] == edges[number, column]).all())
                assert pairs[number, row, column].item() == near
                if real:
                    down, across = (
                        key // resolution[1] - query // resolution[1],
                        key % resolution[1] - query % resolution[1],
                    )
                    pixels = math.hypot(2 * down, 3 * across)
                    assert distances[number, row, column].item() == pytest.approx(pixels, abs=1e-12)
                    seen += [pixels] if near else []
            rows += [sum(seen) / len(seen)] if query >= 0 else []
    assert len(rows) == resolution[0] * resolution[1]
    assert place.uniform().distance == pytest.approx(sum(rows) / len(rows), abs=1e-12)


SQUARES = {  # patches and image: grid of square patches
    (196, (224, 224)): (14, 14),
    (24, (32, 48)): (4, 6),
    (24, (48, 32)): (6, 4),
    (12, (32, 48)): None,  # 3 x 4 would not be of square patches
    (50, (224, 224)): None,  # 49 and a CLS that is not known
    (1, (32, 32)): (1, 1),
    (8, (16, 128)): (1, 8),
}


@pytest.mark.parametrize("case", SQUARES)
def test_grids_of_square_patches(case):
    assert square_grid(*case) == SQUARES[case]


PREFIXES = {  # grid, pitch, prefix, cls, registers
    "ours": (ours, (4, 3), (8.0, 16.0), 1, (0,), ()),
    "registers": (lambda: ours(registers=4), (4, 3), (8.0, 16.0), 5, (0,), (1, 2, 3, 4)),
    "mean, registers": (lambda: ours(pooling="mean", registers=2), (4, 3), (8.0, 16.0), 2, (), (0, 1)),
    "distilled": (lambda: timm_model("deit_tiny_distilled_patch16_224"), (4, 4), (8.0, 8.0), 2, (0,), (1,)),
    "dinov2": (lambda: timm_model("vit_small_patch14_reg4_dinov2"), (4, 4), (8.0, 8.0), 5, (0,), (1, 2, 3, 4)),
    "cait": (lambda: timm_model("cait_xxs24_224"), (4, 4), (8.0, 8.0), 0, (), ()),
}


@pytest.mark.parametrize("case", PREFIXES)
def test_where_a_familys_tokens_lie(case):
    make, grid, pitch, prefix, cls, registers = PREFIXES[case]
    model = make()
    sites = survey(model, images(model.input_size))
    found = [geometry_of(site, model) for site in sites]
    assert found[0] == Geometry(grid, pitch, prefix, cls, registers)
    for site, place in zip(sites, found):
        assert (place is None) == (site.kind == "class")  # a pooling query has no place
        assert place is None or place.prefix + place.patches == site.keys


def test_a_cls_that_comes_in_later_is_no_patch():
    """ConViT's first layers are of patches alone, its later ones of CLS and patches."""
    model = timm_model("convit_tiny", local_up_to_layer=1)
    found = {site.layer: geometry_of(site, model) for site in survey(model, images())}
    assert found[0] == Geometry((4, 4), (8.0, 8.0))
    assert found[1] == Geometry((4, 4), (8.0, 8.0), 1, (0,))


def test_patches_that_are_not_square_before_the_prefix_comes_in():
    """32x48 pixels in patches of 8x16: no grid of square patches, but the model's own."""
    site = Site(0, "early", 0, "patch", 2, 12, 12)
    assert geometry_of(site, ours()) == Geometry((4, 3), (8.0, 16.0))


@pytest.mark.parametrize("make", [lambda: timm_model("swin_tiny_patch4_window7_224"), torchvision_swin])
def test_swins_stages_are_coarser_and_coarser(make):
    model = make()
    found = [geometry_of(site, model) for site in survey(model, images())]
    assert [(place.pitch, place.grid) for place in found] == [((2.0, 2.0), (4, 4))] * 2 + [((4.0, 4.0), (4, 4))] * 2


@pytest.mark.parametrize("kind", ["pooled", "class", "channel"])
def test_what_is_no_patch_looking_at_patches_has_no_place(kind):
    assert geometry_of(Site(0, "any", 0, kind, 2, 13, 13), ours()) is None


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_sums_by_offset_are_the_loop_over_all_pairs(rows, columns, seed):
    patches = rows * columns
    weights = torch.randn(2, 3, patches, patches, generator=torch.Generator().manual_seed(seed)).double()
    sums = torch.zeros(2, 3, 2 * rows - 1, 2 * columns - 1, dtype=torch.float64)
    for query in range(patches):
        for key in range(patches):
            down, across = key // columns - query // columns, key % columns - query % columns
            sums[..., down + rows - 1, across + columns - 1] += weights[..., query, key]
    found = Geometry((rows, columns), (1.0, 1.0)).by_offset(weights)
    torch.testing.assert_close(found, sums, atol=1e-12, rtol=1e-12)


def test_offsets_of_patches_that_lie_apart_are_those_in_the_image():
    """A window of MaxViT's grid: 2 x 3 patches, 4 apart down and 2 across."""
    place = Geometry((2, 3), (4.0, 4.0), windows=Windows((8, 6), (2, 3), dilated=True))
    assert (place.spacing, place.span) == ((4, 2), (5, 5))
    sums = place.by_offset(torch.ones(6, 6))
    assert sums.shape == (9, 9)
    assert sums.nonzero().unique(dim=0).tolist() == [[down, across] for down in (0, 4, 8) for across in (0, 2, 4, 6, 8)]
    assert sums[4, 4] == 6
