"""Windows as attention shows them, against loops over the map, for ours, timm's and torchvision's Swin."""

import pytest
import torch

from tests.lens.tiny import images, our_swin, ours, shared_model, torchvision_swin
from vitlens.analysis.attention.weights import reached, window_layers
from vitlens.errors import UnsupportedError

SWINS = ("our-swin", "swin", "torchvision-swin")


def meets(one: tuple[int, int], other: tuple[int, int], *, shift: int, side: int, window: int = 4) -> bool:
    """Whether two patches share a window of the shifted map, without crossing its seam."""
    places = [tuple((axis - shift) % side for axis in patch) for patch in (one, other)]
    near = all(a - b == p - q for a, b, p, q in zip(*places, one, other))
    return near and all(a // window == b // window for a, b in zip(*places))


@pytest.mark.parametrize("name", SWINS)
def test_pairs_reach_and_parts_by_loops(name) -> None:
    layers = window_layers(shared_model(name), images())
    patches = [(row, column) for row in range(16) for column in range(16)]
    plain = {(a, b) for a in patches for b in patches if meets(a, b, shift=0, side=16)}
    shifted = {(a, b) for a in patches for b in patches if meets(a, b, shift=2, side=16)}
    first, second, third, _ = layers
    assert [layer.windows.shift for layer in layers] == [(0, 0), (2, 2)] * 2
    assert (first.pairs, first.new, first.padding) == (len(plain), None, 0) == (256 * 16, None, 0)
    assert (second.pairs, second.new) == (len(shifted), len(shifted - plain))
    assert third.new is None  # the first layer after merging
    assert len(first.part.unique()) == 16
    assert len(second.part.unique()) == 25  # 3x3 whole windows, and 16 parts of those that the map's end cuts
    assert first.reach == 16.0
    through = {a: {c for b in patches if (a, b) in shifted for c in patches if (b, c) in plain} for a in patches}
    every = torch.arange(0, 256, 4)
    assert second.reach == pytest.approx(sum(len(through[patches[int(i)]]) for i in every) / len(every))
    found = reached([first, second], torch.tensor([5 * 16 + 6]))[0]
    assert {patches[int(index)] for index in found.nonzero()} == through[5, 6]


def test_without_shift_nothing_new_is_connected() -> None:
    layers = window_layers(our_swin(shift=False), images())
    assert [layer.new for layer in layers] == [None, 0, None, 0]
    assert [layer.reach for layer in layers] == [16.0] * 4


def test_padding_is_no_patch() -> None:
    (first, second, *_) = window_layers(our_swin(size=(18, 24)), images((18, 24)))  # maps of 9 x 12
    assert first.padding == second.padding == 12 * 12 - 9 * 12
    assert first.pairs == 16 * 16 * 6 + 4 * 4 * 3  # two rows of whole windows; one row of patches is left
    assert (first.part.shape, second.shift) == ((9, 12), (2, 2))


def test_one_window_is_not_shifted() -> None:
    layers = window_layers(torchvision_swin((8, 16)), images((8, 16)))[:2]  # maps of 4 x 8 in windows of 4 x 4
    assert [layer.shift for layer in layers] == [(0, 0), (0, 2)]


def test_a_vit_has_no_windows() -> None:
    with pytest.raises(UnsupportedError, match="windows"):
        window_layers(ours(), images((32, 48)))


def test_nothing_passes_through_padding() -> None:
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
