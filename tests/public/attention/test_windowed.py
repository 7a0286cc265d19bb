"""Rollout and relevance through windows and merging, against full matrices over patches."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.attention import close, explicit_gradients, raising
from tests.kit.lens import calls_of
from tests.kit.tiny import TIMM, images, timm_model, torchvision_swin, with_kernel
from tests.kit.windows import WINDOWED, Pair, of_timm, unwindow
from vitlens import Model
from vitlens.errors import UnsupportedError

gradient_rollout = partial(vitlens.explain, method="gradient-rollout")
THREE = {"depths": (1, 2, 1), "num_heads": (2, 4, 4)}
MODELS: dict[str, Callable[[], Model]] = {
    **{name: WINDOWED[name] for name in ("swinv2, padded", "hiera", "sam2's hiera")},
    # 9 x 5 patches become 5 x 3
    "swin, three stages": partial(timm_model, TIMM["swin"], img_size=(36, 20), **THREE),
    # timm leaves the fused kernel off unless it is asked for: its bias and masks are then given to
    # the kernel
    "swin, fused": lambda: with_kernel(WINDOWED["swin, padded"](), fused=True),
    # patches merged out of fewer than four
    "torchvision, merged": partial(torchvision_swin, (18, 28)),
}


def merging(fine: Pair) -> Tensor:
    """Return which patches were merged into which: (merged, fine), 1 / number of children."""
    rows = (fine[0] + 1) // 2
    columns = (fine[1] + 1) // 2
    matrix = torch.zeros(rows, columns, *fine)
    for row in range(rows):
        for column in range(columns):
            matrix[row, column, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 1
    matrix = matrix.view(rows * columns, -1)
    return matrix / matrix.sum(1, keepdim=True)


def row_by_row(tensor: Tensor, windows: Any) -> Tensor:
    """Order each window's queries and keys by rows; a pooled query stands at its patches."""
    return (
        tensor[..., list(windows.queries), :][..., list(windows.keys)] if windows.keys else tensor
    )


def whole_layers(
    model: Model, batch: Tensor, *, libra: bool = False
) -> tuple[list[Tensor], list[Tensor], list[Pair]]:
    """Return weights and Ā over all patches of each layer's map, and the maps.

    Weights and Ā: (batch, .., patches, patches).
    """
    windows = [call.site.windows for call in calls_of(model, batch)]

    def without_windows(layers):
        full = []
        for layer, layer_windows in zip(layers, windows, strict=True):
            full.append(unwindow(row_by_row(layer, layer_windows), layer_windows))
        return full

    weights, gradients = map(without_windows, explicit_gradients(model, batch, libra=libra))
    return (
        weights,
        [raising(*pair) for pair in zip(weights, gradients)],
        [layer_windows.resolution for layer_windows in windows],
    )


def product(layers: list[Tensor], maps: list[Pair], start_layer: int) -> Tensor:
    """Multiply the layers' matrices from the last patches down, merging where needed."""
    patches = layers[-1].shape[-1]
    row = layers[-1].new_full((len(layers[0]), 1, patches), 1 / patches)
    for layer in range(len(layers) - 1, -1, -1):
        if layer + 1 < len(layers) and maps[layer] != maps[layer + 1]:
            row = row @ merging(maps[layer]).to(row)
        if layer >= start_layer:
            row = row @ layers[layer]
    return row[:, 0].unflatten(1, maps[0])


def mixed(layer: Tensor, alpha: float) -> Tensor:
    """Return (1 - alpha) A + alpha I, rows scaled to 1; a row loses what lies on padding."""
    mixture = (1 - alpha) * layer + alpha * torch.eye(layer.shape[-1])
    return mixture / mixture.sum(-1, keepdim=True)


@pytest.fixture(scope="module", params=MODELS)
def case(
    request: pytest.FixtureRequest,
) -> tuple[Model, Tensor, list[Tensor], list[Tensor], list[Pair]]:
    """Return a model and images in double precision, with its weights, Ā and maps by layer."""
    model = MODELS[request.param]().double()
    batch = images(model.input_size).double()
    return model, batch, *whole_layers(model, batch)


@pytest.mark.parametrize(
    ("fusion", "alpha"), [("mean", 0.5), ("mean", 0.0), ("max", 0.3), ("min", 0.5)]
)
def test_rollout_is_the_product_of_whole_matrices(case, fusion, alpha):
    model, batch, weights, _, maps = case
    fuse = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}[fusion]
    layers = [mixed(fuse(layer, 1), alpha) for layer in weights]
    for start in range(len(layers)):
        rollout = vitlens.rollout(model, batch, fusion=fusion, alpha=alpha, start_layer=start)
        close(rollout, product(layers, maps, start))
    assert rollout.shape == (2, model.input_size[0] // 2, model.input_size[1] // 2)


def test_relevance_is_the_product_of_whole_matrices(case):
    """Equation 6, R ← R + Ā R; where patches merge, R is theirs. What nothing was asked of is taken
    off: R - I.
    """
    model, batch, _, layers, maps = case
    steps = [torch.eye(layer.shape[-1]) + layer for layer in layers]
    for start in range(len(steps)):
        expected = product(steps, maps, start) - product(steps, maps, len(steps))
        close(vitlens.relevance(model, batch, start_layer=start), expected, rtol=1e-8)
        assert (expected >= 0).all()
    close(
        vitlens.relevance(copy.deepcopy(model).float(), batch.float(), start_layer=start),
        expected.float(),
        rtol=1e-3,
    )
    steps = [
        torch.eye(layer.shape[-1]) + layer for layer in whole_layers(model, batch, libra=True)[1]
    ]
    expected = product(steps, maps, 0) - product(steps, maps, len(steps))
    close(vitlens.explain(model, batch, method="libra-relevance"), expected.float(), rtol=1e-6)


def test_gradient_rollout_is_the_product_of_whole_matrices(case):
    model, batch, _, raises, maps = case
    layers = [mixed(layer, 0.1) for layer in raises]
    for start in range(len(layers)):
        close(
            gradient_rollout(model, batch, alpha=0.1, start_layer=start),
            product(layers, maps, start).float(),
        )


def test_many_images_are_those_of_one_at_a_time():
    """More than the processor's cache holds at once."""
    model = torchvision_swin()
    batch = images(batch=24)
    for method in (vitlens.rollout, vitlens.relevance, gradient_rollout):
        together = method(model, batch)
        for image in (0, 11, 23):
            close(together[image : image + 1], method(model, batch[image : image + 1]), rtol=1e-4)


PVT = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 16, 16), "num_heads": (1, 1, 1, 1)}
XCIT = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 1}
VISFORMER = {"img_size": 32, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2}
LARGE = {"size": (64, 64), "img_size": 64}


@pytest.mark.parametrize(
    ("name", "shape", "layer", "does"),
    [
        ("xcit_nano_12_p16_224", XCIT, "blocks.0.attn", "channels attend to channels"),
        ("pvt_v2_b0", PVT, "stages.0.blocks.0.attn", "fewer, pooled keys"),
        ("nest_tiny", LARGE, "levels.0.transformer_encoder.0.attn", "their window"),
        (
            "maxvit_rmlp_pico_rw_256",
            LARGE,
            "stages.0.blocks.1.conv.conv2_kxk",
            "between them that mixes patches",
        ),
        ("visformer_tiny", VISFORMER, "stage2.0.attn", "a different number of tokens (4)"),
    ],
)
def test_refused_in_one_line_that_names_the_layer_and_what_it_does(name, shape, layer, does):
    model = of_timm(name, **shape)
    for method in (vitlens.rollout, vitlens.relevance):
        with pytest.raises(UnsupportedError) as refusal:  # surveyed once, then remembered
            method(model, images(model.input_size, batch=1))
        message = str(refusal.value)
        assert f"'{layer}'" in message
        assert does in message
        assert message == model.supports("rollout")
        assert "\n" not in message
