"""Windows put back into the image: timm's and torchvision's own partition say which patch stands where."""

import pytest
import torch
from timm.models.swin_transformer import window_partition
from torch import Tensor
from torch.nn import functional as F

from tests.lens.tiny import images, timm_model, torchvision_swin
from vitlens.analysis.attention.weights import attention_maps
from vitlens.lens.observe import capture
from vitlens.lens.site import Windows
from vitlens.lens.windows import received, unwindow, window_index

SHAPES = {  # resolution, window, shift
    "plain": ((8, 8), (4, 4), (0, 0)),
    "shifted": ((8, 8), (4, 4), (2, 2)),
    "not square": ((8, 12), (4, 4), (2, 2)),
    "window not square": ((8, 12), (4, 6), (2, 3)),
    "padded": ((5, 7), (4, 4), (2, 2)),
    "one window": ((4, 4), (4, 4), (0, 0)),
    "one padded window": ((3, 4), (4, 4), (2, 2)),
}


def timm_tokens(resolution: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """Numbers of the patches as timm's block lays them out: rolled, then padded, then cut (its _attn)."""
    tokens = torch.arange(1.0, 1 + resolution[0] * resolution[1]).view(1, *resolution, 1)
    tokens = tokens.roll((-shift[0], -shift[1]), (1, 2))
    tokens = F.pad(tokens, (0, 0, 0, -resolution[1] % window[1], 0, -resolution[0] % window[0]))
    return window_partition(tokens, window).flatten(1) - 1  # 0 was padding


def torchvision_tokens(resolution: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """The same as torchvision's shifted_window_attention: padded, then rolled (never where one window covers all)."""
    tokens = torch.arange(1.0, 1 + resolution[0] * resolution[1]).view(1, *resolution, 1)
    tokens = F.pad(tokens, (0, 0, 0, -resolution[1] % window[1], 0, -resolution[0] % window[0]))
    _, height, width, _ = tokens.shape
    down, across = (0 if size <= w else s for size, w, s in zip((height, width), window, shift))
    tokens = tokens.roll((-down, -across), (1, 2))
    tokens = tokens.view(1, height // window[0], window[0], width // window[1], window[1], 1)
    return tokens.permute(0, 1, 3, 2, 4, 5).reshape(-1, window[0] * window[1]) - 1


@pytest.mark.parametrize("pad_first", [False, True], ids=["timm", "torchvision"])
@pytest.mark.parametrize("shape", SHAPES)
def test_index_is_the_librarys_own_order(shape, pad_first):
    resolution, window, shift = SHAPES[shape]
    if not pad_first and shape == "one padded window":
        shift = (0, 0)  # timm makes a window no larger than the map and shifts none
    oracle = (torchvision_tokens if pad_first else timm_tokens)(resolution, window, shift)
    assert torch.equal(window_index(Windows(resolution, window, shift, pad_first)), oracle.long())


def random_weights(calls: int, inside: int, *, heads: int = 2) -> Tensor:
    return torch.randn(calls, heads, inside, inside, generator=torch.Generator().manual_seed(0)).softmax(-1)


@pytest.mark.parametrize("pad_first", [False, True], ids=["timm", "torchvision"])
@pytest.mark.parametrize("shape", SHAPES)
def test_unwindow_entry_by_entry(shape, pad_first):
    windows = Windows(*SHAPES[shape], pad_first)
    index = window_index(windows)
    weights = random_weights(2 * len(index), index.shape[1])
    full = unwindow(weights, windows)
    patches = windows.resolution[0] * windows.resolution[1]
    expected = torch.zeros(2, 2, patches, patches)
    for image in range(2):
        for number, places in enumerate(index):
            call = weights[image * len(index) + number]
            for row, query in enumerate(places):
                for column, key in enumerate(places):
                    if query >= 0 and key >= 0:
                        expected[image, :, query, key] = call[:, row, column]
    assert torch.equal(full, expected)
    if -1 not in index:
        torch.testing.assert_close(full.sum(-1), torch.ones(2, 2, patches))


@pytest.mark.parametrize("pad_first", [False, True], ids=["timm", "torchvision"])
@pytest.mark.parametrize("shape", SHAPES)
def test_received_is_the_mean_of_the_window_put_back(shape, pad_first):
    windows = Windows(*SHAPES[shape], pad_first)
    index = window_index(windows)
    weights = random_weights(3 * len(index), index.shape[1])
    full = unwindow(weights, windows)  # zero outside the window
    mates = torch.zeros(full.shape[-1])  # how many patches share the window of each
    for places in index:
        real = places[places >= 0]
        mates[real] = len(real)
    expected = full.sum(-2) / mates
    maps = received(weights, windows)
    assert maps.shape == (3, 2, *windows.resolution)
    torch.testing.assert_close(maps.flatten(2), expected, atol=1e-6, rtol=1e-5)


def swin_sites(model, size):
    captured = capture(model, images(size))
    return [(site, weights) for site, weights in zip(captured.sites, captured.layers)]


@pytest.mark.parametrize(
    ("make", "size", "pad_first"),
    [
        (lambda size: timm_model("swin_tiny_patch4_window7_224", img_size=size), (32, 32), False),
        (lambda size: timm_model("swin_tiny_patch4_window7_224", img_size=size), (20, 36), False),
        (lambda size: timm_model("swinv2_tiny_window8_256", img_size=size), (20, 36), False),
        (torchvision_swin, (32, 32), True),
        (torchvision_swin, (20, 36), True),
        (torchvision_swin, (12, 12), True),  # second stage: 3x3 patches padded into one window of 4x4
    ],
    ids=["timm", "timm-padded", "timm-v2-padded", "torchvision", "torchvision-padded", "torchvision-one-window"],
)
def test_a_models_windows_are_read_from_it(make, size, pad_first):
    """Uniform attention gives an even map, masks and all; and the geometry is the model's own."""
    model = make(size)
    sites = swin_sites(model, size)
    resolutions = [(size[0] // 2, size[1] // 2)] * 2 + [(-(-size[0] // 4), -(-size[1] // 4))] * 2
    for (site, weights), resolution in zip(sites, resolutions):
        assert site.windows is not None
        assert site.windows.resolution == resolution
        assert site.windows.pad_first is pad_first
        assert len(weights) == 2 * len(window_index(site.windows))
        rows = unwindow(weights, site.windows).sum(-1)
        assert (rows <= 1 + 1e-5).all()
        if -1 not in window_index(site.windows):
            torch.testing.assert_close(rows, torch.ones_like(rows))
    maps = attention_maps(model, images(size))
    assert [layer.maps.shape[2:] for layer in maps] == resolutions


@pytest.mark.parametrize(
    "make", [lambda: timm_model("swin_tiny_patch4_window7_224"), torchvision_swin], ids=["timm", "torchvision"]
)
def test_a_patch_looks_only_at_neighbours_in_the_image(make):
    """The mask of a shifted window keeps far corners apart; put back, no weight may join patches a window apart."""
    for site, weights in swin_sites(make(), (32, 32)):
        full = unwindow(weights, site.windows)
        rows, columns = site.windows.resolution
        place = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).view(-1, 2)
        apart = (place[:, None] - place).abs().amax(-1) >= site.windows.window[0]
        assert full[:, :, apart].abs().max() < 1e-6
        assert full[:, :, ~apart].max() > 0


def test_even_attention_gives_an_even_map_in_a_shifted_window():
    model = timm_model("swin_tiny_patch4_window7_224")
    for name, parameter in model.module.named_parameters():
        if ".qkv." in name or "relative_position" in name:
            parameter.zero_()
    for layer in attention_maps(model, images()):
        torch.testing.assert_close(layer.maps, torch.full_like(layer.maps, 1 / 16), atol=1e-6, rtol=0)
