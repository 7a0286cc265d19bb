"""AttentionCall and the door's function: masks, causality, grouped queries, masked rows, joined heads."""

import math

import pytest
import torch
from timm.models.swin_transformer import window_partition
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lens.put_back import unwindow
from tests.lens.tiny import images, timm_model, torchvision_swin
from vitlens.analysis.attention.weights import attention_maps
from vitlens.lens.call import AttentionCall, AttentionInputs, per_head, received, window_index
from vitlens.lens.capture import capture_attention
from vitlens.lens.observe import observing
from vitlens.lens.site import Site, Windows, decide_kind


class Attends(nn.Module):
    """A module that calls F.scaled_dot_product_attention exactly as told; its child makes it no leaf."""

    num_heads = 4

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options
        self.value = nn.Identity()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, self.value(value), **self.options)


class Wrapped(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.attn = Attends(**options)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attn(query, key, value)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def seen(query: Tensor, key: Tensor, value: Tensor, *, explicit: bool = False, **options: object):
    calls: list[AttentionCall] = []
    model = Wrapped(**options)
    with observing(model, calls.append, explicit=explicit):
        output = model(query, key, value)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    return calls[0], output, expected


def triple(heads: int = 4, key_heads: int = 4, tokens: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return random(2, heads, tokens, 8), random(2, key_heads, tokens, 8, seed=1), random(2, key_heads, tokens, 8, seed=2)


def softmax_by_hand(query: Tensor, key: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    """Element by element, from the definition: exp(score) over the allowed keys' sum."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(query.shape[-1]) + bias
    exponentials = scores.exp() * allowed
    return exponentials / exponentials.sum(-1, keepdim=True).clamp_min(1e-30)


BOOLEAN = random(6, 6, seed=3) > -0.5
ADDITIVE = random(1, 4, 6, 6, seed=4)
CASES = {
    "none": ({}, torch.ones(6, 6), torch.zeros(6, 6)),
    "boolean": ({"attn_mask": BOOLEAN}, BOOLEAN.float(), torch.zeros(6, 6)),
    "boolean per image": (
        {"attn_mask": torch.stack([BOOLEAN, ~BOOLEAN])[:, None]},
        torch.stack([BOOLEAN, ~BOOLEAN])[:, None].float(),
        torch.zeros(6, 6),
    ),
    "one row for all queries": ({"attn_mask": BOOLEAN[:1]}, BOOLEAN[:1].float(), torch.zeros(6, 6)),
    "additive": ({"attn_mask": ADDITIVE}, torch.ones(6, 6), ADDITIVE),
    "causal": ({"is_causal": True}, torch.ones(6, 6).tril(), torch.zeros(6, 6)),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_masks(case, explicit):
    options, allowed, bias = CASES[case]
    query, key, value = triple()
    call, output, expected = seen(query, key, value, explicit=explicit, **options)
    weights = softmax_by_hand(query, key, allowed, bias)
    torch.testing.assert_close(call.weights(), weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(call.rows((2, 0)), weights[..., (2, 0), :], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(call.weights() @ value, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(call.pick(1).weights(), weights[1:], atol=1e-6, rtol=1e-5)
    if explicit:
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    else:
        assert torch.equal(output, expected)


def test_a_row_that_is_masked_everywhere_is_zeros_and_has_a_finite_gradient():
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[3] = False
    query, key, value = triple()
    for given in (mask, torch.zeros(6, 6).masked_fill(~mask, -torch.inf)):
        call, output, _ = seen(query.requires_grad_(), key, value, explicit=True, attn_mask=given)
        assert (call.weights()[:, :, 3] == 0).all()
        torch.testing.assert_close(call.weights().sum(-1)[:, :, (0, 1, 2, 4, 5)], torch.ones(2, 4, 5))
        assert torch.isfinite(torch.autograd.grad(output.sum(), query)[0]).all()


def test_grouped_queries_share_keys_in_order():
    query, key, value = triple(heads=4, key_heads=2)
    call, output, expected = seen(query, key, value, enable_gqa=True)
    assert torch.equal(output, expected)
    for head in range(4):
        own = (query[:, head] @ key[:, head // 2].transpose(-1, -2) / math.sqrt(8)).softmax(-1)
        torch.testing.assert_close(call.weights()[:, head], own, atol=1e-6, rtol=1e-5)


def test_a_scale_of_its_own():
    query, key, value = triple()
    call, _, _ = seen(query, key, value, scale=0.5)
    expected = (0.5 * query @ key.transpose(-1, -2)).softmax(-1)
    torch.testing.assert_close(call.weights(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("leading", [(8,), (2, 3, 4), (2, 4, 3)], ids=["joined", "windows first", "heads first"])
def test_other_layouts_of_the_axes(leading, explicit):
    """(batch x heads, ..), (batch, windows, heads, ..) and Hiera's (batch, heads, windows, ..), each with a mask."""
    query, key, value = (random(*leading, 6, 8, seed=seed) for seed in range(3))
    mask = random(*leading, 6, 6, seed=5) > -0.7
    calls: list[AttentionCall] = []
    options = {} if leading == (2, 4, 3) else {"attn_mask": mask}
    model = Wrapped(**options)
    plain = model(query, key, value)
    with observing(model, calls.append, explicit=explicit):
        output = model(query, key, value)
    torch.testing.assert_close(output, plain, atol=1e-6, rtol=1e-5)
    expected = query @ key.transpose(-1, -2) / math.sqrt(8)
    if options:
        expected = expected.masked_fill(~mask, -torch.inf)
    expected = expected.softmax(-1).nan_to_num()
    if leading == (2, 4, 3):
        expected = expected.transpose(1, 2)
    torch.testing.assert_close(calls[0].weights(), expected.reshape(-1, 4, 6, 6), atol=1e-6, rtol=1e-5)
    assert calls[0].site.heads == 4


def test_per_head_joins_and_parts():
    assert per_head(torch.zeros(2, 3, 4, 5, 6)).shape == (6, 4, 5, 6)
    assert per_head(torch.zeros(8, 5, 6), 4).shape == (2, 4, 5, 6)
    assert per_head(torch.zeros(8, 5, 6), 3).shape == (8, 1, 5, 6)  # 8 is no multiple of 3 heads
    assert per_head(torch.zeros(2, 4, 5, 6)).shape == (2, 4, 5, 6)


def test_pick_takes_the_windows_of_an_image_and_its_bias():
    scored = AttentionInputs(*(random(6, 2, 5, 4, seed=seed) for seed in range(3)), random(6, 1, 5, 5, seed=9), 0.5)
    site = Site(0, "attn", 0, "window", 2, 5, 5)
    call = AttentionCall(site, 2, scored, None, random(6, 2, 5, 4, seed=7))
    assert torch.equal(call.pick(1).weights(), call.weights()[3:])
    assert torch.equal(call.pick(0).output, call.output[:3])
    made = AttentionCall(site, 2, None, call.weights())
    assert torch.equal(made.pick(1).weights(), call.weights()[3:])


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"calls": 1, "queries": 17, "keys": 17, "tokens": 17, "channels": False}, "patch"),
        ({"calls": 1, "queries": 17, "keys": 17, "tokens": 17, "channels": True}, "patch"),
        ({"calls": 4, "queries": 16, "keys": 16, "tokens": 16, "channels": False}, "window"),
        ({"calls": 1, "queries": 1, "keys": 17, "tokens": 17, "channels": False}, "class"),
        ({"calls": 1, "queries": 32, "keys": 32, "tokens": 196, "channels": True}, "channel"),
        ({"calls": 1, "queries": 196, "keys": 49, "tokens": 196, "channels": False}, "pooled"),
        ({"calls": 1, "queries": 49, "keys": 49, "tokens": 196, "channels": False}, "pooled"),
        ({"calls": 1, "queries": 1, "keys": 1, "tokens": 1, "channels": False}, "patch"),
    ],
)
def test_what_looks_at_what(shape, kind):
    assert decide_kind(**shape) == kind


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
    captured = capture_attention(model, images(size))
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
