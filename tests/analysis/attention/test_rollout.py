"""Rollout against the paper's matrices, written out here, for every way it can be asked for."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.analysis.attention.ways import followed, product_by_matrices
from tests.lens.tiny import FAMILIES, images, ours, timm_model
from vitlens.analysis.attention.methods import discard_lowest, rollout, scaled_step
from vitlens.analysis.attention.tokens import rollout_by_layer, rollouts_so_far
from vitlens.errors import UnsupportedError
from vitlens.lens.capture import capture_attention
from vitlens.models.hooks import watching
from vitlens.models.model import Model
from vitlens.names import FUSIONS


def random_layers(depth: int, batch: int, tokens: int, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, tokens, generator=generator).softmax(-1) for _ in range(depth)]


def fused_by_loops(weights: Tensor, fusion: str, discard: float, keep: tuple[int, ...]) -> Tensor:
    """Heads fused, then each row's lowest entries dropped, one row of one image at a time."""
    batch, heads, queries, keys = weights.shape
    fused = torch.zeros(batch, queries, keys)
    for image in range(batch):
        for query in range(queries):
            rows = [weights[image, head, query] for head in range(heads)]
            stacked = torch.stack(rows)
            row = {"mean": stacked.mean(0), "max": stacked.max(0).values, "min": stacked.min(0).values}[fusion].clone()
            candidates = sorted((value.item(), key) for key, value in enumerate(row) if key not in keep)
            for _, key in candidates[: int(keys * discard)]:
                row[key] = 0
            fused[image, query] = row
    return fused


def of_row(layers: list[Tensor], start: Tensor, alpha: float = 0.5) -> Tensor:
    """The row that steps from the last layer back make of a row."""
    row = start
    for layer in reversed(layers):
        row = scaled_step(row, layer, alpha)
    return row


def textbook(
    model: Model,
    batch: Tensor,
    *,
    fusion: str = "mean",
    discard: float = 0.0,
    alpha: float = 0.5,
    start_layer: int = 0,
) -> Tensor:
    """All rows, for a model whose every layer is over the same tokens."""
    keep = model.layout.positions("cls")
    layers = [fused_by_loops(w, fusion, discard, keep) for w in capture_attention(model, batch).layers[start_layer:]]
    return product_by_matrices(layers, alpha)


@pytest.mark.parametrize(("alpha", "start_layer"), [(0.3, 0), (0.5, 2), (1.0, 1)])
@pytest.mark.parametrize("discard", [0.0, 0.4, 0.97])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_way_equals_the_textbook(deep, fusion, discard, alpha, start_layer):
    model, batch = deep
    way = {"fusion": fusion, "discard": discard, "alpha": alpha, "start_layer": start_layer}
    expected = textbook(model, batch, **way)
    with followed() as rows:
        rollout(model, batch, **way)
    (row,) = rows
    torch.testing.assert_close(row, expected[:, 0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(row.sum(-1), torch.ones(2), atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def deep() -> tuple[Model, Tensor]:
    """Three blocks, CLS and two registers, a grid of 4 x 3."""
    model = ours(depth=3, registers=2)
    for parameter in model.module.parameters():
        parameter.mul_(2)  # weights that are not nearly even
    return model, images((32, 48))


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 5),
    tokens=st.integers(1, 9),
    alpha=st.floats(0, 1),
    query=st.integers(0, 8),
    scale=st.floats(0.01, 100),
    seed=st.integers(0, 2**16),
)
def test_a_row_is_the_row_of_the_matrix(depth, tokens, alpha, query, scale, seed):
    """Also where rows do not sum to 1."""
    layers = [scale * layer.double() for layer in random_layers(depth, 2, tokens, seed=seed)]
    start = torch.zeros(2, tokens, dtype=torch.float64)
    start[:, query % tokens] = 1
    matrix = product_by_matrices(layers, alpha)
    torch.testing.assert_close(of_row(layers, start, alpha), matrix[:, query % tokens], atol=1e-12, rtol=1e-9)
    exact = [layer / layer.sum(-1, keepdim=True) for layer in layers]  # a softmax in fp32 sums to 1 to 1e-7 only
    so_far = rollouts_so_far(reversed(exact), start)
    for layer in range(depth):
        expected = product_by_matrices(exact[: layer + 1])[:, query % tokens]
        torch.testing.assert_close(so_far[:, layer], expected, atol=1e-12, rtol=1e-9)


@settings(max_examples=40, deadline=None)
@given(fraction=st.floats(0, 0.99), keys=st.integers(1, 12), kept=st.booleans(), seed=st.integers(0, 2**16))
def test_discard_drops_the_lowest_of_each_row(fraction, keys, kept, seed):
    weights = torch.rand(2, 3, keys, generator=torch.Generator().manual_seed(seed))
    keep = (0,) if kept else ()
    before = weights.clone()
    found = discard_lowest(weights, fraction, keep=keep)
    assert torch.equal(found, fused_by_loops(weights[:, None], "mean", fraction, keep))
    assert torch.equal(weights, before)


@pytest.mark.parametrize(("fusion", "discard"), [("mean", 0.0), ("max", 0.5), ("min", 0.0)])
@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "vit_pe_core_tiny_patch16_384"])
def test_a_pooling_query_stands_on_top_of_the_matrices(name, fusion, discard):
    model = timm_model(name)
    batch = images()
    *blocks, pooling = capture_attention(model, batch).layers
    keep = model.layout.positions("cls")
    row = fused_by_loops(pooling, fusion, discard, keep)
    row = row / row.sum(-1, keepdim=True)
    matrix = product_by_matrices([fused_by_loops(w, fusion, discard, keep) for w in blocks], 0.5)
    expected = (row @ matrix)[:, 0, len(model.layout.prefix) :]
    maps = rollout(model, batch, fusion=fusion, discard=discard)
    torch.testing.assert_close(maps.flatten(1), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("way", [{}, {"fusion": "max", "alpha": 0.2}, {"discard": 0.5}, {"start_layer": 1}])
def test_class_attention_as_matrices_over_cls_and_patches(way):
    """CaiT: patches talk first, then CLS reads them in layers that leave the patches as they are."""
    model = timm_model("cait_xxs24_224")
    batch = images()
    fusion, discard, alpha = way.get("fusion", "mean"), way.get("discard", 0.0), way.get("alpha", 0.5)
    matrices = []
    for layer, weights in enumerate(capture_attention(model, batch).layers):
        if layer < way.get("start_layer", 0):
            continue
        whole = torch.eye(17).expand(2, 17, 17).clone()  # CLS and the patches; who does not look keeps itself
        if weights.shape[2] == 1:
            looked = fused_by_loops(weights, fusion, discard, (0,))[:, 0]
            whole[:, 0] = (1 - alpha) * looked / looked.sum(-1, keepdim=True) + alpha * torch.eye(17)[0]
        else:
            whole[:, 1:, 1:] = product_by_matrices([fused_by_loops(weights, fusion, discard, ())], alpha)
        matrices.append(whole)
    product = torch.eye(17).expand(2, 17, 17)
    for whole in matrices:
        product = whole @ product
    expected = product[:, 0, 1:] / product[:, 0, 1:].sum(-1, keepdim=True)
    torch.testing.assert_close(rollout(model, batch, **way).flatten(1), expected, atol=1e-6, rtol=1e-4)


def test_alpha_one_on_class_attention_is_an_empty_map_and_not_nan():
    maps = rollout(timm_model("cait_xxs24_224"), images(), alpha=1.0)
    assert (maps == 0).all()


@pytest.mark.parametrize(
    ("make", "readout", "words"),
    [
        (partial(ours, pooling="mean"), "cls", "try --readout mean"),
        (ours, "cls+distillation", "try --readout mean"),
        (ours, "pool", "attention pooling"),
        (FAMILIES["swin"], "cls", "expected the readout mean for swin"),
    ],
)
def test_readouts_that_are_not_there(make, readout, words):
    model = make()
    with pytest.raises(UnsupportedError, match=words):
        rollout(model, images(model.input_size), readout=readout)


def test_up_to_each_layer_from_one_pass(deep):
    """The rollout of a layer is that of the layers below; the model is run once for all."""
    model, batch = deep
    passes = []
    with watching(model.module, [""], before=lambda *call: passes.append(call)):
        rollout(model, batch)
        once = len(passes)
        rollout_by_layer(model, batch)
    assert len(passes) == 2 * once
