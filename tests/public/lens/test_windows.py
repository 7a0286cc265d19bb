"""Windows in image coordinates, as the libraries partition them, and where attention is known."""

from functools import partial

import pytest
import torch
from timm.models.hiera import Unroll

import vitlens
from tests.kit.lens import calls_of
from tests.kit.tiny import images, our_swin, torchvision_swin
from tests.kit.windows import WINDOWED, numbered, of_timm, unwindow, window_places

ONE_WINDOW = "torchvision, one window"
OURS = "ours, padded"
MODELS = {
    **{
        name: make
        for name, make in WINDOWED.items()
        if name not in ("swin", "swinv2, padded", "torchvision")
    },
    ONE_WINDOW: partial(torchvision_swin, (12, 12)),  # 3x3 patches padded into one of 4x4
    OURS: partial(our_swin, size=(33, 47)),
}


@pytest.mark.parametrize("name", MODELS)
def test_windows_are_read_from_the_model_and_a_map_is_what_each_patch_receives(name):
    """Put back, no weight joins patches a window apart: the mask of a shifted window keeps far
    corners apart. A map is the mean over the patches of a window; padding neither gives nor
    receives.
    """
    model = MODELS[name]()
    batch = images(model.input_size)
    for layer, call in enumerate(calls_of(model, batch)):
        windows = call.site.windows
        index = window_places(windows)
        weights = unwindow(call.placed(), windows)
        assert len(call.weights()) == 2 * len(index)
        assert (weights.sum(-1) <= 1 + 1e-5).all()
        if "maxvit" not in name and "hiera" not in name:
            assert windows.resolution == tuple(
                -(-side // (2, 2, 4, 4)[layer]) for side in model.input_size
            )
            assert name == OURS or windows.pad_first == name.startswith("torchvision")
        if -1 not in index:
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
            place = torch.cartesian_prod(*map(torch.arange, windows.resolution))
            apart = (place[:, None] - place).abs().amax(-1) >= windows.window[0]
            assert "maxvit" in name or weights[:, :, apart].abs().sum() < 1e-6
        mates = torch.zeros(weights.shape[-1])
        for places in index.tolist():
            real = [place for place in places if place >= 0]
            mates[real] += len(real)
        maps = vitlens.explain(model, batch, method="attention", layer=layer)
        assert maps.shape[1:] == windows.resolution
        torch.testing.assert_close(
            maps.flatten(1), weights.mean(1).sum(-2) / mates, atol=1e-6, rtol=1e-5
        )


def test_hieras_tokens_are_where_its_own_unrolling_puts_them():
    for call in calls_of(WINDOWED["hiera"](), images()):
        windows = call.site.windows
        site = call.site
        rows, columns = windows.resolution
        stage = {16: 3, 8: 2, 4: 1, 2: 0}[rows]  # merges that are still to come
        left = Unroll((rows, columns), (1, 1), [(2, 2)] * stage)
        inside = left(numbered(rows, columns).view(1, -1, 1)).long().view(-1, windows.count)
        places = window_places(windows)  # row by row in each window
        raw = call.weights()[0, 0]
        placed = call.placed()[0, 0]
        # a query stands at each of the patches of which timm takes the maximum
        pooled = site.keys // site.queries
        for place, query in enumerate(inside[:, 0].tolist()):
            for other, key in enumerate(inside[:, 0].tolist()):
                at = [(places[0] == patch).nonzero().item() for patch in (query, key)]
                assert placed[at[0], at[1]] == raw[place % site.queries, other]
        assert placed.shape == (site.keys, site.keys)
        assert pooled in (1, 4)


DAVIT = {"depths": (1, 1, 1, 1), "embed_dims": (20, 24, 40, 48), "num_heads": (1, 1, 1, 1)}
TINY = {
    "depths": (1, 1, 1, 1),
    "embed_dims": (16, 16, 32, 32),
    "num_heads": (1, 1, 2, 2),
    "window_sizes": (7, 7, 5, 3),
}


@pytest.mark.parametrize(  # the first map; the first stage of TinyViT are convolutions
    ("name", "shape", "first", "sides"),
    [("davit_tiny", DAVIT, (16, 24), [7, 7, 7, 7]), ("tiny_vit_5m_224", TINY, (8, 12), [7, 5, 3])],
)
def test_windows_that_are_never_shifted_are_padded_below_and_on_the_right(
    name, shape, first, sides
):
    calls = calls_of(of_timm(name, size=(64, 96), **shape), images((64, 96)))
    # every second layer of DaViT
    windows = [call.site.windows for call in calls if call.site.kind != "channel"]
    placements = [
        (layer_windows.resolution, layer_windows.window, layer_windows.shift)
        for layer_windows in windows
    ]
    maps = [tuple(side >> stage for side in first) for stage in range(len(sides))]
    assert placements == [(place, (side, side), (0, 0)) for place, side in zip(maps, sides)]
