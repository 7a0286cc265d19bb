"""Windows in image coordinates: where the libraries' own partitions put each patch, and where attention is known."""

from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
from timm.models.hiera import Unroll
from torch import Tensor
from torchvision.models.maxvit import MaxVit

import vitlens
from tests.kit.tiny import images, model_of, our_swin, shaken, timm_model, torchvision_swin
from tests.kit.windows import numbered, unwindow, window_places
from vitlens import AttentionCall, Model

SWIN, SWIN2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"


def made(name: str, size: tuple[int, int], **options: object) -> Model:
    return model_of(shaken(partial(timm.create_model, name, num_classes=5, **options)), alias=name, size=size)


def torchvision_maxvit() -> Model:
    shape = {"stem_channels": 8, "partition_size": 4, "block_channels": [8, 16], "block_layers": [1, 1], "head_dim": 4}
    return model_of(shaken(lambda: MaxVit((64, 64), stochastic_depth_prob=0.0, num_classes=5, **shape)), size=(64, 64))


HIERA = {"img_size": (64, 64), "embed_dim": 8, "num_heads": 1, "stages": (1, 2, 2, 2)}
HIERADET = {
    "embed_dim": 8, "num_heads": 1, "stages": (1, 2, 2), "window_spec": (8, 4, 6), "q_pool": 2, "patch_stride": (2, 2),
    "patch_kernel": (3, 3), "patch_padding": (1, 1), "global_att_blocks": (4,),
}  # fmt: skip
SHIFTED: dict[str, tuple[Callable[[], Model], bool]] = {  # and whether maps are padded before they are shifted
    "timm": (lambda: timm_model(SWIN), False),
    "timm, padded": (lambda: timm_model(SWIN, img_size=(20, 36)), False),
    "timm's v2, padded": (lambda: timm_model(SWIN2, img_size=(20, 36)), False),
    "torchvision": (torchvision_swin, True),
    "torchvision, padded": (lambda: torchvision_swin((20, 36)), True),
    "torchvision, one window": (lambda: torchvision_swin((12, 12)), True),  # 3x3 patches padded into one of 4x4
    "ours, padded": (lambda: our_swin(size=(20, 36)), False),
}
OTHERS: dict[str, Callable[[], Model]] = {
    "hiera": lambda: made("hiera_tiny_224", (64, 64), **HIERA),
    "hieradet": lambda: made("hieradet_small", (32, 32), **HIERADET),  # pooled queries, padded windows
    "maxvit": lambda: made("test_maxvit", (64, 64), img_size=64),  # blocks and grids
    "torchvision's maxvit": torchvision_maxvit,
}
WINDOWED = {**{name: make for name, (make, _) in SHIFTED.items()}, **OTHERS}


def calls_of(model: Model, batch: Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    vitlens.observe(model, batch, calls.append)
    return calls


@pytest.mark.parametrize("name", SHIFTED)
def test_shifted_windows_are_read_from_the_model(name):
    """Put back, no weight joins patches a window apart: the mask of a shifted window keeps far corners apart."""
    make, pad_first = SHIFTED[name]
    model = make()
    height, width = model.input_size
    resolutions = [(height // 2, width // 2)] * 2 + [(-(-height // 4), -(-width // 4))] * 2
    for call, resolution in zip(calls_of(model, images(model.input_size)), resolutions, strict=True):
        windows = call.site.windows
        assert windows.resolution == resolution
        assert name.startswith("ours") or windows.pad_first == pad_first
        index = window_places(windows)
        assert len(call.weights()) == 2 * len(index)
        whole = unwindow(call.placed(), windows)
        assert (whole.sum(-1) <= 1 + 1e-5).all()
        if -1 not in index:
            torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole[..., 0]))
            place = torch.cartesian_prod(torch.arange(resolution[0]), torch.arange(resolution[1]))
            apart = (place[:, None] - place).abs().amax(-1) >= windows.window[0]
            assert whole[:, :, apart].abs().sum() < 1e-6


@pytest.mark.parametrize("name", WINDOWED)
def test_a_map_of_a_layer_is_what_each_patch_receives_by_loops(name):
    """The mean over the patches of its window; padding neither gives nor receives."""
    model = WINDOWED[name]()
    batch = images(model.input_size)
    for call in calls_of(model, batch):
        windows = call.site.windows
        whole = unwindow(call.placed(), windows).mean(1)
        mates = torch.zeros(whole.shape[-1])
        for places in window_places(windows).tolist():
            real = [place for place in places if place >= 0]
            mates[real] += len(real)
        maps = vitlens.explain(model, batch, method="attention", layer=call.site.layer)
        assert maps.shape[1:] == windows.resolution
        torch.testing.assert_close(maps.flatten(1), whole.sum(-2) / mates, atol=1e-6, rtol=1e-5)


def test_even_attention_gives_an_even_map_in_a_shifted_window():
    model = timm_model(SWIN)
    for name, parameter in model.module.named_parameters():
        if ".qkv." in name or "relative_position" in name:
            parameter.zero_()
    for layer in range(4):
        maps = vitlens.explain(model, images(), method="attention", layer=layer)
        torch.testing.assert_close(maps, torch.full_like(maps, 1 / 16), atol=1e-6, rtol=0)


def test_hieras_tokens_are_where_its_own_unrolling_puts_them():
    model = OTHERS["hiera"]()
    for call in calls_of(model, images((64, 64))):
        windows, site = call.site.windows, call.site
        rows, columns = windows.resolution
        stage = {16: 3, 8: 2, 4: 1, 2: 0}[rows]  # merges that are still to come
        left = Unroll((rows, columns), (1, 1), [(2, 2)] * stage)
        inside = left(numbered(rows, columns).view(1, -1, 1)).long().view(-1, windows.count)
        places = window_places(windows)  # row by row in each window
        raw, placed = call.weights()[0, 0], call.placed()[0, 0]
        pooled = site.keys // site.queries  # a query stands at each of the patches of which timm takes the maximum
        for place, query in enumerate(inside[:, 0].tolist()):
            for other, key in enumerate(inside[:, 0].tolist()):
                at = [(places[0] == patch).nonzero().item() for patch in (query, key)]
                assert placed[at[0], at[1]] == raw[place % site.queries, other]
        assert placed.shape == (site.keys, site.keys)
        assert pooled in (1, 4)
