"""Views of one patch, windows as attention shows them, and how far attention moved: by whole matrices and loops."""

import copy
from functools import partial

import pytest
import torch

import vitlens
from tests.kit.tiny import FAMILIES, images, our_swin, ours, shared_model, timm_model, torchvision_swin
from tests.kit.windows import WINDOWED, unwindow
from vitlens.analysis.attention.weights import (
    attention_maps,
    attention_moved,
    merged,
    patch_views,
    reached,
    window_layers,
)  # fmt: skip
from vitlens.errors import InputError, UnsupportedError


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if "swin" not in name), "registers of several images"])
def test_row_and_column_of_a_patch_in_every_family(family):
    """More images than go at once, too."""
    several = family not in FAMILIES
    model = ours(registers=3, size=(64, 96), patch_size=(4, 4)) if several else shared_model(family)
    batch, layout, patch = images(model.input_size, batch=9 if several else 2), model.layout, (1, 2)
    token = len(layout.prefix) + patch[0] * layout.grid[1] + patch[1]
    full = [weights for weights in vitlens.attention(model, batch) if weights.shape[-2:] == (layout.tokens,) * 2]
    looks, seen = (patch_views(model, batch, side=side, patch=patch) for side in ("query", "key"))
    for look, see, weights in zip(looks, seen, full, strict=True):  # without layers whose query is no patch
        row, column = (torch.cat([view.prefix, view.maps.flatten(2)], -1) for view in (look, see))
        torch.testing.assert_close(row, weights[:, :, token], atol=1e-6, rtol=0)
        torch.testing.assert_close(column, weights[..., token], atol=1e-6, rtol=0)
        assert look.maps.shape[2:] == see.maps.shape[2:] == layout.grid
        assert look.patch == see.patch == patch


SWINS = [name for name in WINDOWED if name not in ("swinv2, padded", "torchvision's maxvit")]


@pytest.mark.parametrize("patch", [(0, 0), (9, 9)])
@pytest.mark.parametrize("name", SWINS)
def test_row_and_column_of_a_patch_in_windows(name, patch):
    model, full = WINDOWED[name](), []
    batch = images(model.input_size)
    vitlens.observe(model, batch, lambda call: full.append(unwindow(call.placed(), call.site.windows)))
    looks, seen = (patch_views(model, batch, side=side, patch=patch) for side in ("query", "key"))
    first = looks[0].site.windows.resolution
    for look, see, weights in zip(looks, seen, full, strict=True):
        now = look.site.windows.resolution
        where = tuple(place * side // before for place, side, before in zip(patch, now, first))
        assert look.patch == see.patch == where
        token = where[0] * now[1] + where[1]
        torch.testing.assert_close(look.maps.flatten(2), weights[:, :, token], atol=1e-6, rtol=0)
        torch.testing.assert_close(see.maps.flatten(2), weights[..., token], atol=1e-6, rtol=0)
        assert look.maps.shape[2:] == now
        assert look.prefix.shape[2] == see.prefix.shape[2] == 0


@pytest.mark.parametrize(
    ("place", "before", "now", "expected"),
    [(7, 8, 4, 3), (4, 5, 3, 2), (3, 5, 3, 1), (2, 3, 2, 1), (3, 8, 8, 3), (19, 20, 14, 13), (0, 14, 20, 0)],
)
def test_a_place_after_merging(place, before, now, expected):
    assert merged(place, before, now) == expected


XCIT = partial(timm_model, "xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32)


@pytest.mark.parametrize(
    ("make", "side", "patch", "error", "words"),
    [
        (ours, "query", (4, 0), InputError, r"--query .*4x3 grid \(0,0 to 3,2\), found 4,0"),
        (ours, "key", (0, 3), InputError, "--key .* found 0,3"),
        (ours, "key", (0, -1), InputError, "found 0,-1"),
        (ours, "key", (-1, 0), InputError, "found -1,0"),
        (torchvision_swin, "query", (16, 0), InputError, r"\(0,0 to 15,15\), found 16,0"),
        (XCIT, "key", (0, 0), UnsupportedError, "leave --key out"),
    ],
)
def test_a_patch_that_is_not_there_is_refused(make, side, patch, error, words):
    model = make()
    with pytest.raises(error, match=words):
        patch_views(model, images(model.input_size), side=side, patch=patch)


def test_a_map_has_the_prefix_beside_it_and_sums_with_it_to_one():
    for name, prefix in (("dinov2-registers", 5), ("vit-mean", 1), ("deit-distilled", 2), ("cait", 0)):
        model = shared_model(name)
        for layer, weights in zip(attention_maps(model, images()), vitlens.attention(model, images()), strict=True):
            assert layer.prefix.shape[2] in (prefix, weights.shape[-1] - 16)
            torch.testing.assert_close(layer.maps.sum((2, 3)) + layer.prefix.sum(-1), torch.ones(layer.maps.shape[:2]))
        if name != "vit-mean":
            torch.testing.assert_close(layer.prefix, weights[:, :, 0, :-16], atol=1e-6, rtol=0)


def meets(one: tuple[int, int], other: tuple[int, int], *, shift: int, side: int, window: int = 4) -> bool:
    """Whether two patches share a window of the shifted map, without crossing its seam."""
    places = [tuple((axis - shift) % side for axis in patch) for patch in (one, other)]
    near = all(a - b == p - q for a, b, p, q in zip(*places, one, other))
    return near and all(a // window == b // window for a, b in zip(*places))


PATCHES = [(row, column) for row in range(16) for column in range(16)]
PLAIN, SHIFTED = ({(a, b) for a in PATCHES for b in PATCHES if meets(a, b, shift=shift, side=16)} for shift in (0, 2))
THROUGH = {a: {c for b in PATCHES if (a, b) in SHIFTED for c in PATCHES if (b, c) in PLAIN} for a in PATCHES}


@pytest.mark.parametrize("name", ["our-swin", "swin", "torchvision-swin"])
def test_pairs_reach_and_parts_by_loops(name):
    first, second, third, fourth = layers = window_layers(shared_model(name), images())
    assert [layer.shift for layer in layers[:2]] == [layer.windows.shift for layer in layers[2:]] == [(0, 0), (2, 2)]
    assert (first.pairs, first.new, first.padding) == (len(PLAIN), None, 0) == (256 * 16, None, 0)
    assert (second.pairs, second.new) == (len(SHIFTED), len(SHIFTED - PLAIN))
    assert third.new is None  # the first layer after merging
    assert fourth.new > 0
    assert len(first.part.unique()) == 16
    assert len(second.part.unique()) == 25  # 3x3 whole windows, and 16 parts of those that the map's end cuts
    assert first.reach == third.reach == 16.0
    every = torch.arange(0, 256, 4)
    assert second.reach == pytest.approx(sum(len(THROUGH[PATCHES[int(i)]]) for i in every) / len(every))
    found = reached([first, second], torch.tensor([5 * 16 + 6]))[0]
    assert {PATCHES[int(index)] for index in found.nonzero()} == THROUGH[5, 6]


def test_without_shift_nothing_new_is_connected():
    layers = window_layers(our_swin(shift=False), images())
    assert [layer.new for layer in layers] == [None, 0, None, 0]
    assert [layer.reach for layer in layers] == [16.0] * 4


def test_padding_is_no_patch_and_one_window_is_not_shifted():
    (first, second, *_) = window_layers(our_swin(size=(18, 24)), images((18, 24)))  # maps of 9 x 12
    assert first.padding == second.padding == 12 * 12 - 9 * 12
    assert first.pairs == 16 * 16 * 6 + 4 * 4 * 3  # two rows of whole windows; one row of patches is left
    assert (first.part.shape, second.shift) == ((9, 12), (2, 2))
    layers = window_layers(torchvision_swin((8, 16)), images((8, 16)))[:2]  # maps of 4 x 8 in windows of 4 x 4
    assert [layer.shift for layer in layers] == [(0, 0), (0, 2)]
    with pytest.raises(UnsupportedError, match="try swin-micro"):
        window_layers(ours(), images((32, 48)))


def test_nothing_passes_through_padding():
    """torchvision's patches attend to padding, which is no patch and depends on none."""
    layers = window_layers(torchvision_swin((18, 34)), images((18, 34)))[:2]  # maps of 9 x 17
    edges = [set(), set()]
    for met, layer in zip(edges, layers):
        assert layer.padding > 0
        real = layer.places >= 0
        for window, query, key in (layer.allowed & real[:, :, None] & real[:, None]).nonzero().tolist():
            met.add((int(layer.places[window, query]), int(layer.places[window, key])))
    for patch in (0, 76, 152):
        expected = {c for a, b in edges[1] if a == patch for b2, c in edges[0] if b2 == b}
        assert set(reached(layers, torch.tensor([patch]))[0].nonzero().flatten().tolist()) == expected


def test_attention_moved_by_its_total_variation_and_only_from_the_changed_block_on():
    """In more images than are held at once; windows are averaged over."""
    vit, digits = vitlens.load("vit-digits"), vitlens.load_data("digits", limit=17)
    other = copy.deepcopy(vit)
    other.module.blocks[3].mlp.fc1.weight.data.mul_(1.5)
    same, moved = attention_moved(vit, [vit, other], digits)
    assert all(not layer.any() for layer in same)
    assert [bool(layer.any()) for layer in moved] == [False] * 4 + [True] * 2  # its MLP is read by the next block
    swins = torchvision_swin(), torchvision_swin()
    for parameter in swins[1].module.parameters():
        parameter.data.mul_(1.5)
    (in_windows,) = attention_moved(swins[0], [swins[1]], digits)
    for found, models in ((moved, (vit, other)), (in_windows, swins)):
        for layer, (one, two) in enumerate(zip(*(vitlens.attention(model, digits) for model in models))):
            variation = (one - two).clamp_min(0).sum(-1).mean(-1)  # (images x windows, heads)
            expected = variation.view(17, -1, variation.shape[1]).mean(1)
            torch.testing.assert_close(found[layer], expected, atol=1e-6, rtol=1e-4)
    with pytest.raises(InputError, match="of one architecture at one image size"):
        attention_moved(vit, [ours(size=(32, 32), depth=6)], digits)
