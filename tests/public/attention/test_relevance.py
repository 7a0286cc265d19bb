"""Relevance and gradient-weighted rollout against Chefer 2021, equations 5 and 6, as full matrices."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.kit.attention import as_read, by_equation_six, by_rollout, close, raised
from tests.kit.tiny import FAMILIES, TIMM, images, ours, timm_model
from tests.kit.uses import state_of
from vitlens import Model
from vitlens.errors import InputError, LensError

gradient_rollout = partial(vitlens.explain, method="gradient-rollout")
READER = None  # the readout is the reader's row
CLS, PATCHES = [1.0] + [0.0] * 12, [1 / 12] * 12
READOUTS = {  # the readout over the tokens by hand: prefix, then 12, 16 or another number of patches
    "cls": (lambda: ours(depth=3), CLS),
    "one head": (lambda: ours(heads=1, depth=1), CLS),
    "mean, prefix 0": (lambda: ours(pooling="mean", depth=3), PATCHES),
    "mean, prefix 2": (lambda: ours(pooling="mean", registers=2, depth=3), [0.0] * 2 + PATCHES),
    "timm distilled": (lambda: timm_model(TIMM["deit-distilled"]), [0.5, 0.5] + [0.0] * 16),
    "timm registers": (lambda: timm_model(TIMM["dinov2-registers"]), [1.0] + [0.0] * 20),
    "beit": (lambda: timm_model(TIMM["beit"]), [0.0] + [1 / 16] * 16),
    "torchvision": (FAMILIES["torchvision-vit"], [1.0] + [0.0] * 16),
    "siglip": (lambda: timm_model(TIMM["siglip"]), READER),
    "pooling beside cls": (lambda: timm_model(TIMM["perception-encoder"]), READER),
    "cait": (lambda: timm_model(TIMM["cait"]), READER),
    "cait, not square": (lambda: timm_model(TIMM["cait"], img_size=(32, 48)), READER),
}


@pytest.fixture(scope="module", params=READOUTS)
def case(request: pytest.FixtureRequest) -> tuple[Model, Tensor, list[float] | None, list[Tensor]]:
    """A model, images, its readout by hand, and the Ā of all its layers."""
    make, row = READOUTS[request.param]
    model = make()
    batch = images(model.input_size)
    return model, batch, row, raised(model, batch)


def test_relevance_from_every_layer_on_is_equation_six(case):
    model, batch, row, layers = case
    for start in range(len(layers)):
        expected = as_read(by_equation_six(layers[start:], model.layout.tokens), row, model)
        close(vitlens.relevance(model, batch, start_layer=start), expected)


def test_libra_relevance_is_equation_six_of_gradients_under_its_rules(case):
    model, batch, row, plain = case
    layers = raised(model, batch, libra=True)
    expected = as_read(by_equation_six(layers, model.layout.tokens), row, model)
    close(vitlens.explain(model, batch, method="libra-relevance"), expected)
    assert (layers[0] - plain[0]).abs().max() > 1e-2 * plain[0].max()


def test_gradient_rollout_from_every_layer_on_is_a_rollout_of_what_raises_the_logit(case):
    model, batch, row, layers = case
    for start in range(len(layers)):
        for alpha in (0.5, 0.01):
            matrix = by_rollout(layers[start:], model.layout.tokens, alpha)
            expected = as_read(matrix, row, model)
            if row is READER:  # what is left on a late CLS has no place in the image: it is shared out
                expected = expected / matrix[:, 0, 1:].sum(-1)[:, None, None]
            close(gradient_rollout(model, batch, start_layer=start, alpha=alpha), expected)


def test_another_readout_than_the_models_own():
    distilled, pooled = ours(distillation=True), timm_model(TIMM["siglip"])
    cases = (
        (distilled, "cls", [1.0, 0.0] + [0.0] * 12),
        (distilled, "mean", [0.0] * 2 + PATCHES),
        (pooled, "mean", [1 / 16] * 16),
    )
    for model, readout, row in cases:
        batch = images(model.input_size)
        layers = [layer for layer in raised(model, batch) if layer.shape[1] > 1]
        expected = as_read(by_equation_six(layers, model.layout.tokens), row, model)
        close(vitlens.relevance(model, batch, readout=readout), expected)
        expected = as_read(by_rollout(layers, model.layout.tokens, 0.5), row, model)
        close(gradient_rollout(model, batch, readout=readout), expected)


@pytest.mark.parametrize("method", ["relevance", "libra-relevance", "gradient-rollout"])
def test_targets_are_the_predicted_classes_or_those_given(method):
    model, batch = ours(), images((32, 48), batch=4)
    with torch.no_grad():
        predicted = model(batch).argmax(-1)
    own = vitlens.explain(model, batch, method=method)
    assert torch.equal(own, vitlens.explain(model, batch, method=method, targets=predicted))
    given = torch.tensor([0, 3, 1, 4])
    found = vitlens.explain(model, batch, method=method, targets=given)
    if method == "relevance":
        close(found, as_read(by_equation_six(raised(model, batch, given), 13), CLS, model))
    close(vitlens.explain(model, batch[1:2], method=method, targets=given[1:2].to(torch.int32)), found[1:2])
    other = given != predicted
    assert ((found - own).abs().amax((1, 2))[other] > 0.01 * own.max()).all()


def test_targets_go_with_their_images_through_several_batches():
    """As many images as do not fit at once on any machine."""
    model, batch = ours(), images((32, 48), batch=5)
    targets = torch.tensor([0, 3, 1, 4, 2]).repeat(60)
    together = vitlens.relevance(model, batch, targets=targets[:5])
    close(vitlens.relevance(model, batch.repeat(60, 1, 1, 1), targets=targets), together.repeat(60, 1, 1))
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
    maps = gradient_rollout(model, batch)
    even = 1 / maps[0].numel() if model.anatomy.readout == "mean" else 0.0
    torch.testing.assert_close(maps, torch.full_like(maps, even))


def test_a_layer_that_has_no_part_in_the_logit_is_named_and_nothing_stays():
    model = ours()
    model.module.blocks[0].register_forward_hook(lambda _module, _inputs, output: output.detach())
    model.requires_grad_(True)
    before = state_of(model)
    with pytest.raises(LensError, match=r"blocks\.0\.attn"):
        vitlens.relevance(model, images((32, 48)))
    assert state_of(model) == before


def constant_norm(norm: Any, tokens: Tensor) -> Tensor:
    """A LayerNorm whose standard deviation is a constant."""
    spread = (tokens.detach().var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    return (tokens - tokens.mean(-1, keepdim=True)) / spread * norm.weight + norm.bias


def constant_gate(mlp: Any, tokens: Tensor) -> Tensor:
    """An MLP whose GELU is its input times a constant, Φ of the input."""
    first, second = (layer for layer in mlp.modules() if isinstance(layer, nn.Linear))
    hidden = first(tokens)
    return second(hidden * (1 + torch.erf(hidden.detach() / math.sqrt(2))) / 2)


def libra_by_hand(module: Any, image: Tensor, target: int) -> list[Tensor]:
    """Ā of every layer of one image (1, tokens, tokens), every rule of LibraGrad (Mehri 2025) written as a constant."""
    stream, layers = module.tokens(image[None])[0], []
    for block in module.blocks:
        qkv = block.attn.qkv(constant_norm(block.norm1, stream))
        query, key, value = qkv.unflatten(-1, (3, block.attn.heads, -1)).permute(1, 2, 0, 3)
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1).detach()
        output = weights @ value
        layers.append((weights, output, value.detach()))
        stream = stream + block.attn.proj(output.transpose(0, 1).flatten(1))
        stream = stream + constant_gate(block.mlp, constant_norm(block.norm2, stream))
    if module.cls_token is None:
        patches = stream[len(module.layout.prefix) :]
        logits = module.head(constant_norm(module.fc_norm, patches.mean(0)))
    else:
        logits = module.head(constant_norm(module.norm, stream)[0])
    gradients = torch.autograd.grad(logits[target], [output for _, output, _ in layers])
    found = []
    for (weights, _, value), gradient in zip(layers, gradients, strict=True):
        heads = [weights[head] * (gradient[head] @ value[head].T) for head in range(len(weights))]
        found.append(torch.stack([head.clamp_min(0) for head in heads]).mean(0)[None])
    return found


@pytest.mark.parametrize(
    ("make", "row"),
    [
        (partial(ours, depth=3), CLS),
        (partial(ours, depth=2, registers=2), [1.0] + [0.0] * 14),
        (partial(ours, depth=3, pooling="mean"), PATCHES),
    ],
)
def test_libra_relevance_of_our_vit_by_hand(make, row):
    model, targets = make(), torch.tensor([3, 0, 4])
    batch = images(model.input_size, batch=3)
    found = vitlens.explain(model, batch, targets=targets, method="libra-relevance").double()
    plain = vitlens.relevance(model, batch, targets=targets).double()
    prepared, module = model.prepare(batch).double(), model.module.double().requires_grad_(True)
    expected = []
    for image, target in zip(prepared, targets.tolist(), strict=True):
        layers = libra_by_hand(module, image, target)
        expected.append(as_read(by_equation_six(layers, model.layout.tokens), row, model)[0])
    close(found, torch.stack(expected))
    assert (found - plain).abs().max() > 0.05 * plain.max()
