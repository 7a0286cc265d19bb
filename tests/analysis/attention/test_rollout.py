"""Rollout against the paper's matrices, written out here, for every way it can be asked for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.analysis.attention.ways import followed, product_by_matrices
from tests.lens.tiny import CHAINED, images, model_of, ours, shared_model, timm_model
from vitlens.analysis.attention.chain import chained
from vitlens.analysis.attention.methods import (
    discard_lowest,
    fused,
    rollout,
    rollout_maps,
    scaled_step,
)
from vitlens.analysis.attention.registry import MethodSettings
from vitlens.analysis.attention.tokens import rollout_by_layer, rollouts_so_far
from vitlens.errors import InputError, UnknownNameError, UnsupportedError
from vitlens.lens.capture import capture_attention
from vitlens.models.hooks import watching
from vitlens.models.model import Model
from vitlens.models.resnet import build_resnet
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


@pytest.mark.parametrize(("alpha", "start_layer"), [(0.0, 0), (0.3, 0), (0.5, 2), (1.0, 1)])
@pytest.mark.parametrize("discard", [0.0, 0.4])
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


def test_nearly_everything_discarded(deep):
    model, batch = deep
    expected = textbook(model, batch, discard=0.97)
    torch.testing.assert_close(rollout(model, batch, discard=0.97).flatten(1), expected[:, 0, 3:])


def test_several_ways_from_one_pass_are_each_way_alone(deep):
    model, batch = deep
    chain = chained(model, batch)
    for way in ({}, {"fusion": "max", "discard": 0.5}, {"fusion": "min", "alpha": 0.2, "start_layer": 1}):
        assert torch.equal(rollout_maps(chain, **way), rollout(model, batch, **way))
    with torch.no_grad():
        assert torch.equal(chain.logits, model(batch))


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 5),
    tokens=st.integers(1, 9),
    alpha=st.floats(0, 1),
    query=st.integers(0, 8),
    seed=st.integers(0, 2**16),
)
def test_a_row_is_the_row_of_the_matrix(depth, tokens, alpha, query, seed):
    layers = [layer.double() for layer in random_layers(depth, 2, tokens, seed=seed)]
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
@given(scale=st.floats(0.01, 100), seed=st.integers(0, 2**16))
def test_rows_that_do_not_sum_to_one_are_scaled(scale, seed):
    layers = [scale * layer.double() for layer in random_layers(3, 2, 5, seed=seed)]
    row = of_row(layers, torch.full((2, 5), 0.2, dtype=torch.float64))
    torch.testing.assert_close(row, product_by_matrices(layers, 0.5).mean(1), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(row.sum(-1), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_identity_attention_gives_the_identity(alpha):
    layers = [torch.eye(6).expand(2, 6, 6)] * 4
    for token in range(6):
        start = torch.eye(6)[token].expand(2, 6)
        assert torch.equal(of_row(layers, start, alpha), start)


def test_alpha_one_keeps_everything_where_it_was():
    start = torch.rand(2, 6)
    torch.testing.assert_close(of_row(random_layers(3, 2, 6), start, 1.0), start)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_fusion_of_one_head_is_that_head(fusion):
    weights = torch.rand(2, 1, 4, 4)
    assert torch.equal(fused(weights, fusion), weights[:, 0])


@settings(max_examples=40, deadline=None)
@given(fraction=st.floats(0, 0.99), keys=st.integers(1, 12), kept=st.booleans(), seed=st.integers(0, 2**16))
def test_discard_drops_the_lowest_of_each_row(fraction, keys, kept, seed):
    weights = torch.rand(2, 3, keys, generator=torch.Generator().manual_seed(seed))
    keep = (0,) if kept else ()
    before = weights.clone()
    found = discard_lowest(weights, fraction, keep=keep)
    assert torch.equal(found, fused_by_loops(weights[:, None], "mean", fraction, keep))
    assert torch.equal(weights, before)


def full_readout(model: Model, batch: Tensor, readout: Tensor) -> Tensor:
    return (readout @ textbook(model, batch))[:, len(model.layout.prefix) :]


READOUTS = {  # readout vector by hand; tokens: prefix and 12 or 16 patches
    "cls": (lambda: ours(), [1] + [0] * 12),
    "cls, registers": (lambda: ours(registers=4), [1] + [0] * 16),
    "mean, prefix 0": (lambda: ours(pooling="mean"), [1 / 12] * 12),
    "mean, prefix 2": (lambda: ours(pooling="mean", registers=2), [0] * 2 + [1 / 12] * 12),
    "cls+distillation": (lambda: ours(distillation=True), [0.5, 0.5] + [0] * 12),
    "one head": (lambda: ours(heads=1), [1] + [0] * 12),
    "one block": (lambda: ours(depth=1), [1] + [0] * 12),
    "timm distilled": (lambda: timm_model("deit_tiny_distilled_patch16_224"), [0.5, 0.5] + [0] * 16),
    "timm mean": (lambda: timm_model("vit_wee_patch16_reg1_gap_256"), [0] + [1 / 16] * 16),
    "timm registers": (lambda: timm_model("vit_small_patch14_reg4_dinov2"), [1] + [0] * 20),
}


@pytest.mark.parametrize("case", READOUTS)
def test_readouts(case):
    make, row = READOUTS[case]
    model = make()
    batch = images(model.input_size)
    expected = full_readout(model, batch, torch.tensor([float(x) for x in row]))
    torch.testing.assert_close(rollout(model, batch).flatten(1), expected, atol=1e-6, rtol=1e-4)


def test_another_readout_than_the_models_own():
    model = ours(distillation=True)
    batch = images((32, 48))
    for readout, row in (("cls", [1.0, 0] + [0] * 12), ("mean", [0.0] * 2 + [1 / 12] * 12)):
        expected = full_readout(model, batch, torch.tensor(row))
        torch.testing.assert_close(rollout(model, batch, readout=readout).flatten(1), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("discard", [0.0, 0.5])
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


@pytest.mark.parametrize("name", CHAINED)
def test_a_row_sums_to_one_for_every_family(name):
    model = shared_model(name)
    batch = images(model.input_size)
    chain = chained(model, batch)
    with followed() as rows:
        for fusion in FUSIONS:
            for discard in (0.0, 0.5):
                rollout_maps(chain, fusion=fusion, discard=discard)
    assert len(rows) == 6
    for row in rows:
        assert row.shape == (2, model.layout.tokens)
        torch.testing.assert_close(row.sum(-1), torch.ones(2), atol=1e-5, rtol=0)


def test_images_do_not_depend_on_each_other_with_discard(deep):
    model, _ = deep
    batch = images((32, 48), batch=4)
    together = rollout(model, batch, fusion="max", discard=0.6)
    for index in range(4):
        alone = rollout(model, batch[index : index + 1], fusion="max", discard=0.6)
        torch.testing.assert_close(alone[0], together[index], atol=1e-6, rtol=0)


def test_a_constant_image_has_a_finite_map():
    model = ours()
    for value in (0.0, 0.5, 1.0):
        maps = rollout(model, torch.full((1, 3, 32, 48), value))
        assert torch.isfinite(maps).all()
        assert maps.sum() > 0


def test_images_of_another_size_are_resized():
    assert rollout(ours(), images((17, 90))).shape == (2, 4, 3)


def test_refusals():
    batch = images()
    cnn = model_of(build_resnet("resnet20", classes=5, image_size=(32, 32)), alias="cnn")
    with pytest.raises(UnsupportedError, match="softmax attention in the forward pass of cnn"):
        rollout(cnn, batch)
    with pytest.raises(UnsupportedError, match="channels attend to channels"):
        rollout(timm_model("xcit_nano_12_p16_224", img_size=32, patch_size=16, embed_dim=32), batch)
    with pytest.raises(InputError, match="below 2 layers, found 2"):
        rollout(ours(), batch, start_layer=2)
    with pytest.raises(UnsupportedError, match="try --readout mean"):
        rollout(ours(pooling="mean"), batch, readout="cls")
    with pytest.raises(UnsupportedError, match="try --readout mean"):
        rollout(ours(), batch, readout="cls+distillation")
    with pytest.raises(UnsupportedError, match="attention pooling"):
        rollout(ours(), batch, readout="pool")


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ({"discard": 1.0}, "discard in"),
        ({"discard": -0.1}, "discard in"),
        ({"discard": float("nan")}, "discard in"),
        ({"alpha": 1.1}, "alpha in"),
        ({"alpha": float("nan")}, "alpha in"),
    ],
)
def test_options_that_cannot_be(way, message):
    with pytest.raises(InputError, match=message):
        MethodSettings("rollout", **way)


def test_an_unknown_fusion_names_the_known():
    options = MethodSettings("rollout")
    object.__setattr__(options, "fusion", "men")  # the type checker of the tests would stop it at the constructor
    with pytest.raises(UnknownNameError, match="no fusion 'men'; did you mean 'mean'"):
        options.__post_init__()


def test_up_to_each_layer_from_one_pass(deep):
    """The rollout of a layer is that of the layers below; the model is run once for all."""
    model, batch = deep
    passes = []
    with watching(model.module, [""], before=lambda *call: passes.append(call)):
        rollout(model, batch)
        once = len(passes)
        found = rollout_by_layer(model, batch)
    assert len(passes) == 2 * once
    torch.testing.assert_close(found[:, -1], rollout(model, batch))
    assert not torch.allclose(found[:, 0], found[:, -1])
