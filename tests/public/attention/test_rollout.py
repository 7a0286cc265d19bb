"""Rollout against the paper's matrices, written out here, for every way it can be asked for."""

from functools import partial

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.attention import product_by_matrices
from tests.kit.tiny import FAMILIES, images, ours, timm_model
from vitlens import Model
from vitlens.errors import UnsupportedError

CLOSE = {"atol": 1e-6, "rtol": 1e-4}


def fused_by_loops(weights: Tensor, fusion: str, discard: float, keep: tuple[int, ...]) -> Tensor:
    """Heads fused, then each row's lowest entries dropped, one row of one image at a time."""
    batch, heads, queries, keys = weights.shape
    fused = torch.zeros(batch, queries, keys)
    for image in range(batch):
        for query in range(queries):
            stacked = torch.stack([weights[image, head, query] for head in range(heads)])
            row = {"mean": stacked.mean(0), "max": stacked.max(0).values, "min": stacked.min(0).values}[fusion].clone()
            candidates = sorted((value.item(), key) for key, value in enumerate(row) if key not in keep)
            for _, key in candidates[: int(keys * discard)]:
                row[key] = 0
            fused[image, query] = row
    return fused


@pytest.fixture(scope="module")
def deep() -> Model:
    """Three blocks, CLS and two registers, a grid of 4 x 3; weights that are not nearly even."""
    model = ours(depth=3, registers=2)
    for parameter in model.module.parameters():
        parameter.mul_(2)
    return model


WAYS = [
    {},
    {"fusion": "max", "discard": 0.4, "alpha": 0.3},
    {"fusion": "min", "discard": 0.8, "alpha": 0.3},
    {"fusion": "mean", "discard": 0.4, "start_layer": 2},
    {"fusion": "min", "start_layer": 2},
    {"fusion": "max", "discard": 0.8, "start_layer": 1},
    {"fusion": "mean", "discard": 0.8, "alpha": 0.0},
    {"fusion": "mean", "alpha": 0.9, "start_layer": 1},
    {"fusion": "max", "alpha": 0.0, "start_layer": 1},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("readout", ["cls", "mean"])
def test_every_way_equals_the_textbook(deep, way, readout):
    batch = images((32, 48))
    fusion, discard = way.get("fusion", "mean"), way.get("discard", 0.0)
    weights = vitlens.attention(deep, batch)[way.get("start_layer", 0) :]
    layers = [fused_by_loops(layer, fusion, discard, (0,)) for layer in weights]
    matrix = product_by_matrices(layers, way.get("alpha", 0.5))
    expected = matrix[:, 0] if readout == "cls" else matrix[:, 3:].mean(1)
    maps = vitlens.rollout(deep, batch, readout=readout, **way)
    torch.testing.assert_close(maps.flatten(1), expected[:, 3:], **CLOSE)
    assert maps.max() > 0


@pytest.mark.parametrize(("fusion", "discard"), [("mean", 0.0), ("max", 0.5), ("min", 0.0)])
@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "vit_pe_core_tiny_patch16_384"])
def test_a_pooling_query_stands_on_top_of_the_matrices(name, fusion, discard):
    model = timm_model(name)
    prefix = len(model.layout.prefix)
    keep = tuple(range(prefix))
    *blocks, pooling = vitlens.attention(model, images())
    row = fused_by_loops(pooling, fusion, discard, keep)
    row = row / row.sum(-1, keepdim=True)
    matrix = product_by_matrices([fused_by_loops(w, fusion, discard, keep) for w in blocks], 0.5)
    maps = vitlens.rollout(model, images(), fusion=fusion, discard=discard)
    torch.testing.assert_close(maps.flatten(1), (row @ matrix)[:, 0, prefix:], **CLOSE)


@pytest.mark.parametrize("way", [{}, {"fusion": "max", "alpha": 0.2}, {"discard": 0.5}, {"start_layer": 1}])
def test_class_attention_as_matrices_over_cls_and_patches(way):
    """CaiT: patches talk first, then CLS reads them in layers that leave the patches as they are."""
    model = timm_model("cait_xxs24_224")
    fusion, discard, alpha = way.get("fusion", "mean"), way.get("discard", 0.0), way.get("alpha", 0.5)
    product = torch.eye(17).expand(2, 17, 17)
    for weights in vitlens.attention(model, images())[way.get("start_layer", 0) :]:
        whole = torch.eye(17).expand(2, 17, 17).clone()  # CLS and the patches; who does not look keeps itself
        if weights.shape[2] == 1:
            looked = fused_by_loops(weights, fusion, discard, (0,))[:, 0]
            whole[:, 0] = (1 - alpha) * looked / looked.sum(-1, keepdim=True) + alpha * torch.eye(17)[0]
        else:
            whole[:, 1:, 1:] = product_by_matrices([fused_by_loops(weights, fusion, discard, ())], alpha)
        product = whole @ product
    expected = product[:, 0, 1:] / product[:, 0, 1:].sum(-1, keepdim=True)
    torch.testing.assert_close(vitlens.rollout(model, images(), **way).flatten(1), expected, **CLOSE)


def test_with_the_identity_alone_nothing_moves():
    assert (vitlens.rollout(timm_model("cait_xxs24_224"), images(), alpha=1.0) == 0).all()  # and not NaN
    assert (vitlens.rollout(ours(), images((32, 48)), alpha=1.0) == 0).all()  # what stays on CLS is in no map
    even = vitlens.rollout(ours(pooling="mean"), images((32, 48)), alpha=1.0)
    torch.testing.assert_close(even, torch.full((2, 4, 3), 1 / 12))


@pytest.mark.parametrize(
    ("make", "readout", "words"),
    [
        (partial(ours, pooling="mean"), "cls", "try --readout mean"),
        (ours, "cls+distillation", "try --readout mean"),
        (ours, "pool", "attention pooling"),
        (FAMILIES["swin"], "cls", "readout mean for swin"),
    ],
)
def test_readouts_that_are_not_there_are_refused(make, readout, words):
    model = make()
    with pytest.raises(UnsupportedError, match=words):
        vitlens.rollout(model, images(model.input_size), readout=readout)
