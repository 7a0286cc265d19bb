"""Rollout, relevance and gradient-weighted rollout against the papers' matrices."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.attention import as_read, by_equation_six, by_rollout, close, raised
from tests.kit.tiny import FAMILIES, TIMM, images, ours, timm_model
from vitlens import Model
from vitlens.errors import InputError, UnsupportedError

gradient_rollout = partial(vitlens.explain, method="gradient-rollout")
READER = None  # the readout is the reader's row
PATCHES = [1 / 12] * 12


def deep(**options: object) -> Model:
    """Build three blocks, two registers and a grid of 4 x 3, with uneven weights."""
    model = ours(depth=3, registers=2, **options)
    for parameter in model.module.parameters():
        parameter.mul_(2)
    return model


# the readout over the tokens by hand: prefix, then 12, 16 or another number of patches
READOUTS = {
    "cls": (deep, [1.0] + [0.0] * 14),
    "mean": (partial(deep, pooling="mean"), [0.0] * 2 + PATCHES),
    "timm distilled": (lambda: timm_model(TIMM["deit-distilled"]), [0.5, 0.5] + [0.0] * 16),
    "beit": (lambda: timm_model(TIMM["beit"]), [0.0] + [1 / 16] * 16),
    "torchvision": (FAMILIES["torchvision-vit"], [1.0] + [0.0] * 16),
    "siglip": (lambda: timm_model(TIMM["siglip"]), READER),
    "pooling beside cls": (lambda: timm_model(TIMM["perception-encoder"]), READER),
    "pooling of patches only": (
        lambda: timm_model(TIMM["siglip"], class_token=True),
        READER,
    ),
    "cait, not square": (lambda: timm_model(TIMM["cait"], img_size=(32, 48)), READER),
}
Case = tuple[Model, Tensor, list[float] | None, list[Tensor]]


@pytest.fixture(scope="module", params=READOUTS)
def case(request: pytest.FixtureRequest) -> Case:
    """Return a model, images, its readout by hand, and the Ā of all its layers."""
    make, row = READOUTS[request.param]
    model = make()
    batch = images(model.input_size)
    return model, batch, row, raised(model, batch)


def rolled(matrix: Tensor, row: list[float] | None, model: Model) -> Tensor:
    """Share out among all patches what is left on a CLS token that joins late."""
    return as_read(matrix, row, model) / (
        1 if row is not READER else matrix[:, 0, 1:].sum(-1)[:, None, None]
    )


def fused_by_loops(
    weights: Tensor, fusion: str, discard: float, tokens: int, prefix: tuple[str, ...]
) -> Tensor:
    """Fuse heads, then drop each row's lowest entries except CLS, one row after the other."""
    fused = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}[fusion](weights, 1)
    first = 1 if "cls" in prefix or weights.shape[-1] > tokens else 0
    if weights.shape[-1] < tokens:  # only patches
        first = 0
    for row in fused.flatten(0, 1):
        lowest = sorted(range(first, len(row)), key=row.tolist().__getitem__)
        row[lowest[: int(len(row) * discard)]] = 0
    # of one query: scaled to sum to 1
    return fused / fused.sum(-1, keepdim=True) if weights.shape[2] == 1 else fused


WAYS = (
    {},
    {"fusion": "max", "discard": 0.4, "alpha": 0.3},
    {"fusion": "min", "discard": 0.8, "alpha": 0.3},
    {"discard": 0.4, "start_layer": 1},
    {"fusion": "min", "start_layer": 1},
    {"discard": 0.8, "alpha": 0.0},
    {"alpha": 0.9, "start_layer": 1},
    {"fusion": "max", "alpha": 0.0},
)


def test_rollout_is_the_product_of_the_papers_matrices(case):
    model, batch, row, _ = case
    weights = vitlens.attention(model, batch)
    tokens = model.layout.tokens
    for way in WAYS:
        fusion = way.get("fusion", "mean")
        discard = way.get("discard", 0.0)
        start = way.get("start_layer", 0)
        layers = [
            fused_by_loops(layer, fusion, discard, tokens, model.layout.prefix)
            for layer in weights[start:]
        ]
        expected = rolled(by_rollout(layers, tokens, way.get("alpha", 0.5)), row, model)
        close(vitlens.rollout(model, batch, **way), expected)


def test_with_the_identity_alone_nothing_moves():
    assert (
        vitlens.rollout(timm_model("cait_xxs24_224"), images(), alpha=1.0) == 0
    ).all()  # and not NaN
    assert (
        vitlens.rollout(ours(), images((32, 48)), alpha=1.0) == 0
    ).all()  # what stays on CLS is in no map
    even = vitlens.rollout(ours(pooling="mean"), images((32, 48)), alpha=1.0)
    torch.testing.assert_close(even, torch.full((2, 4, 3), 1 / 12))


def test_relevance_from_every_layer_on_is_equation_six(case):
    """Of Chefer 2021; LibraGrad's with gradients under its rules."""
    model, batch, row, layers = case
    for start in range(len(layers)):
        expected = as_read(by_equation_six(layers[start:], model.layout.tokens), row, model)
        close(vitlens.relevance(model, batch, start_layer=start), expected)
    by_rules = raised(model, batch, libra=True)
    expected = as_read(by_equation_six(by_rules, model.layout.tokens), row, model)
    close(vitlens.explain(model, batch, method="libra-relevance"), expected)
    assert (by_rules[0] - layers[0]).abs().max() > 1e-2 * layers[0].max()


def test_gradient_rollout_from_every_layer_on_is_a_rollout_of_what_raises_the_logit(case):
    model, batch, row, layers = case
    for start in range(len(layers)):
        for alpha in (0.5, 0.01):
            expected = rolled(by_rollout(layers[start:], model.layout.tokens, alpha), row, model)
            close(gradient_rollout(model, batch, start_layer=start, alpha=alpha), expected)


def test_another_readout_than_the_models_own():
    distilled = ours(distillation=True)
    pooled = timm_model(TIMM["siglip"])
    cases = (
        (distilled, "cls", [1.0, 0.0] + [0.0] * 12),
        (distilled, "mean", [0.0] * 2 + PATCHES),
        (pooled, "mean", [1 / 16] * 16),
    )
    for model, readout, row in cases:
        batch = images(model.input_size)
        tokens = model.layout.tokens
        weights = [layer.mean(1) for layer in vitlens.attention(model, batch) if layer.shape[2] > 1]
        close(
            vitlens.rollout(model, batch, readout=readout),
            as_read(by_rollout(weights, tokens), row, model),
        )
        layers = [layer for layer in raised(model, batch) if layer.shape[1] > 1]
        close(
            vitlens.relevance(model, batch, readout=readout),
            as_read(by_equation_six(layers, tokens), row, model),
        )
        close(
            gradient_rollout(model, batch, readout=readout),
            as_read(by_rollout(layers, tokens), row, model),
        )


@pytest.mark.parametrize(
    ("make", "readout", "words"),
    [
        (partial(ours, pooling="mean"), "cls", "try readout='mean'"),
        (ours, "cls+distillation", "try readout='mean'"),
        (ours, "pool", "attention pooling"),
        (FAMILIES["swin"], "cls", "readout mean for swin"),
    ],
)
def test_readouts_that_are_not_there_are_refused(make, readout, words):
    model = make()
    with pytest.raises(UnsupportedError, match=words):
        vitlens.rollout(model, images(model.input_size), readout=readout)


@pytest.mark.parametrize("method", ["relevance", "libra-relevance", "gradient-rollout"])
def test_targets_are_the_predicted_classes_or_those_given(method):
    model = ours()
    batch = images((32, 48), batch=4)
    classes = torch.tensor([0, 3, 1, 4])
    with torch.no_grad():
        predicted = model(batch).argmax(-1)
    of_predicted = vitlens.explain(model, batch, method=method, targets="predicted")
    of_classes = vitlens.explain(model, batch, method=method, targets=classes)
    assert torch.equal(
        of_predicted, vitlens.explain(model, batch, method=method, targets=predicted)
    )
    if method == "relevance":
        expected = by_equation_six(raised(model, batch, classes), 13)
        close(of_classes, as_read(expected, [1.0] + [0.0] * 12, model))
    close(
        vitlens.explain(model, batch[1:2], method=method, targets=classes[1:2].to(torch.int32)),
        of_classes[1:2],
    )
    assert (
        (of_classes - of_predicted).abs().amax((1, 2))[classes != predicted]
        > 0.01 * of_predicted.max()
    ).all()


def test_targets_go_with_their_images_through_several_batches():
    """As many images as do not fit at once on any machine."""
    model = ours()
    batch = images((32, 48), batch=5)
    targets = torch.tensor([0, 3, 1, 4, 2]).repeat(60)
    together = vitlens.relevance(model, batch, targets=targets[:5])
    close(
        vitlens.relevance(model, batch.repeat(60, 1, 1, 1), targets=targets),
        together.repeat(60, 1, 1),
    )
    for wrong in (targets[:4], 1 + targets[:5], targets[:5] - 1):
        with pytest.raises(InputError, match="found"):
            vitlens.relevance(model, batch, targets=wrong)


@pytest.mark.parametrize("name", ["ours", "vit-mean", "siglip", "cait", "swin"])
def test_without_gradient_relevance_is_zero_and_every_patch_keeps_itself(name):
    model = FAMILIES[name]()
    for module in model.module.modules():
        if isinstance(module, nn.Linear) and module.out_features == 5:
            module.weight.zero_()  # the same logits for every image
    batch = images(model.input_size)
    assert (vitlens.relevance(model, batch) == 0).all()
    is_mean = model.anatomy.readout == "mean"
    with nullcontext() if is_mean else pytest.warns(UserWarning, match="zero"):
        maps = gradient_rollout(model, batch)
    even = 1 / maps[0].numel() if is_mean else 0.0
    torch.testing.assert_close(maps, torch.full_like(maps, even))


def test_a_layer_that_has_no_part_in_the_logit_is_named():
    model = ours()
    model.module.blocks[0].register_forward_hook(lambda _module, _inputs, output: output.detach())
    model.requires_grad_(True)
    with pytest.raises(UnsupportedError, match=r"blocks\.0"):
        vitlens.relevance(model, images((32, 48)))
