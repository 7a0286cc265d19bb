"""Statistics of windows, of pooled queries, of channels and of layers with several calls; where tokens lie."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

import vitlens
from tests.kit.tiny import images, model_of, timm_model
from tests.kit.windows import WINDOWED, unwindow
from vitlens import Model

SHAPES = ("swin", "swin, padded", "swinv2", "torchvision", "torchvision, padded", "maxvit")


def weights_of(model: Model, batch: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    vitlens.observe(model, batch, lambda call: found.append(call.weights().double()))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_windows_are_measured_in_image_coordinates(name):
    """A sink is a key that stands out among all keys; offsets are of neighbours in the image, not across a seam."""
    model = WINDOWED[name]()
    batch = images(model.input_size, batch=2)
    table = vitlens.statistics(model, batch)
    assert len({place.pitch for place in table.geometries}) > 1  # stages are coarser and coarser
    for layer, (site, weights) in enumerate(zip(table.sites, weights_of(model, batch), strict=True)):
        place, (rows, columns) = table.geometries[layer], site.windows.resolution
        full = unwindow(weights, site.windows).numpy()
        ones = torch.ones_like(weights[: site.windows.count])
        together = unwindow(ones, site.windows)[0, 0].bool().numpy()
        row, column = np.divmod(np.arange(rows * columns), columns)
        down, across = row - row[:, None], column - column[:, None]
        height, width = (side / count for side, count in zip(model.input_size, (rows, columns)))
        assert place.pitch == (height, width)
        received = full.sum(-2) / together.sum(0)
        middle = np.median(received, -1, keepdims=True)
        sinks = received > middle + 5 * np.median(np.abs(received - middle), -1, keepdims=True)
        for statistic, value in {
            "distance": ((full * np.hypot(down * height, across * width)).sum(-1) / full.sum(-1)).mean(-1),
            "self_mass": full.diagonal(axis1=-2, axis2=-1).mean(-1),
            "neighbour_mass": full[..., np.abs(down) + np.abs(across) == 1].sum(-1) / (rows * columns),
            "sinks": sinks.sum(-1),
            "sink_mass": (full.sum(-2) * sinks).sum(-1) / (rows * columns),
        }.items():
            measured = getattr(table, statistic)[layer, : site.heads].numpy()
            np.testing.assert_allclose(measured, value.mean(0), rtol=1e-5, atol=1e-9, err_msg=f"{statistic} {site}")
            assert getattr(table, statistic)[layer, site.heads :].isnan().all()
        near = unwindow(place.pairs()[:, None].double(), site.windows)[0, 0].numpy()
        tall, wide = (each.shape[-1] // 2 for each in (table.offset_mass[layer].mT, table.offset_mass[layer]))
        sums = np.zeros((site.heads, 2 * tall + 1, 2 * wide + 1))
        for query, key in np.argwhere(near):
            offset = down[query, key] + tall, across[query, key] + wide
            sums[:, offset[0], offset[1]] += full[:, :, query, key].mean(0) / (rows * columns)
        np.testing.assert_allclose(table.offset_mass[layer].numpy(), sums, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "cait_xxs24_224"])
def test_a_pooling_query_has_a_row_and_no_place(name):
    model = timm_model(name)
    batch = images(batch=3)
    table, weights = vitlens.statistics(model, batch), weights_of(model, batch)[-1]
    last = table.sites[-1]
    assert (last.kind, table.geometries[-1], table.offset_mass[-1]) == ("class", None, None)
    assert table.uniform_distance()[-1].isnan()
    assert table.token_norm[-1].isnan()  # of a block that puts out CLS alone
    assert all(getattr(table, name)[-1].isnan().all() for name in ("distance", "entropy", "self_mass", "sinks"))
    first = table.geometries[0]
    assert (first.grid, first.pitch, first.prefix) == ((4, 4), (8.0, 8.0), 0)  # CLS that comes in later is no patch
    rows = weights[:, :, 0]
    entropy = -(rows * rows.log()).sum(-1)
    root = rows.shape[-1] ** 0.5
    hoyer = (root - 1 / rows.square().sum(-1).sqrt()) / (root - 1)
    for found, expected in ((table.cls_entropy, entropy), (table.cls_hoyer, hoyer)):
        torch.testing.assert_close(found[-1, : last.heads], expected.mean(0), rtol=1e-5, atol=1e-7)
    assert table.cls_effective_keys[-1, 0].item() == pytest.approx(entropy[:, 0].exp().mean().item(), rel=1e-5)


def test_attention_of_channels_has_no_statistics():
    """XCiT's blocks attend over channels, its class attention at the end over tokens."""
    shape = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
    table = vitlens.statistics(model_of(timm.create_model("xcit_nano_12_p16_224", **shape)), images())
    kinds = [site.kind for site in table.sites]
    assert kinds == ["channel", "class", "class"]
    assert table.entropy.isnan().all()
    assert table.cls_entropy.isfinite().any(1).tolist() == [False, True, True]
