"""Relevance with LibraGrad's gradients against loops over the equations of Mehri 2025 and Chefer 2021."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.analysis.attention.test_gradients import close, explicit_gradients
from tests.lens.tiny import images, ours, shared_model
from vitlens.analysis.attention.chain import chained
from vitlens.analysis.faithfulness.localisation import roc_auc
from vitlens.attribution.explain import explain
from vitlens.data.catalogue import load_data
from vitlens.lens.libra import libra_gradients
from vitlens.models import loading

TARGETS = torch.tensor([3, 0, 4])
Layer = tuple[Tensor, Tensor, Tensor]  # of each head: weights (query, key), output (query, dim), value (key, dim)


def constant_norm(norm: Any, tokens: Tensor) -> Tensor:
    """A LayerNorm whose standard deviation is a constant."""
    spread = (tokens.detach().var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    return (tokens - tokens.mean(-1, keepdim=True)) / spread * norm.weight + norm.bias


def constant_gate(mlp: Any, tokens: Tensor) -> Tensor:
    """An MLP whose GELU is its input times a constant, Φ of the input."""
    first, second = (layer for layer in mlp.modules() if isinstance(layer, nn.Linear))
    hidden = first(tokens)
    return second(hidden * (1 + torch.erf(hidden.detach() / math.sqrt(2))) / 2)


def by_hand(module: Any, image: Tensor) -> tuple[Tensor, list[Layer]]:
    """Logits (classes,) of one image, and each layer's heads, every rule of LibraGrad written out as a constant."""
    stream, layers = module.tokens(image[None])[0], []
    for block in module.blocks:
        qkv = block.attn.qkv(constant_norm(block.norm1, stream))
        query, key, value = qkv.unflatten(-1, (3, block.attn.heads, -1)).permute(1, 2, 0, 3)
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1).detach()
        output = weights @ value
        layers.append((weights, output, value.detach()))
        stream = stream + block.attn.proj(output.transpose(0, 1).flatten(1))
        stream = stream + constant_gate(block.mlp, constant_norm(block.norm2, stream))
    first = len(module.layout.prefix)
    if module.cls_token is None:
        return module.head(constant_norm(module.fc_norm, stream[first:].mean(0))), layers
    return module.head(constant_norm(module.norm, stream)[0]), layers


def relevance_by_loops(logit: Tensor, layers: list[Layer], reader: list[float]) -> Tensor:
    """R - I, read by a row over the tokens; Ā entry by entry from the gradient of a head's output times valueᵀ."""
    gradients = torch.autograd.grad(logit, [output for _, output, _ in layers])
    tokens = layers[0][0].shape[-1]
    product = torch.eye(tokens, dtype=torch.double)
    for (weights, _, value), gradient in zip(layers, gradients, strict=True):
        fused = torch.zeros(tokens, tokens, dtype=torch.double)
        for head in range(len(weights)):
            for query in range(tokens):
                for key in range(tokens):
                    raised = float(gradient[head, query] @ value[head, key]) * float(weights[head, query, key])
                    fused[query, key] += max(raised, 0.0) / len(weights)
        product = product + fused @ product
    return torch.tensor(reader, dtype=torch.double) @ (product - torch.eye(tokens, dtype=torch.double))


@pytest.mark.parametrize(
    ("make", "reader"),
    [
        (partial(ours, depth=3), [1.0] + [0.0] * 12),
        (partial(ours, depth=2, registers=2), [1.0] + [0.0] * 14),
        (partial(ours, depth=3, pooling="mean"), [1 / 12] * 12),
    ],
)
def test_our_vit_by_loops(make, reader):
    model = make()
    batch = images(model.input_size, batch=3)
    found = explain(model, batch, targets=TARGETS, method="libra-relevance").double()
    plain = explain(model, batch, targets=TARGETS, method="relevance").double()
    prepared, module = model.prepare(batch).double(), model.module.double().requires_grad_(True)
    expected = []
    for image, target in zip(prepared, TARGETS.tolist(), strict=True):
        logits, layers = by_hand(module, image)
        row = relevance_by_loops(logits[target], layers, reader)
        expected.append(row[len(model.layout.prefix) :].unflatten(0, model.layout.grid))
    close(found, torch.stack(expected))
    assert (found - plain).abs().max() > 0.05 * plain.max()


@pytest.mark.parametrize("name", ["vit-mean", "eva02", "siglip", "cait", "swin"])
def test_the_gradients_are_autograds_of_explicit_attention_under_the_same_rules(name):
    """∂logit/∂output · valueᵀ against autograd's own, the weights a leaf of the graph."""
    model = shared_model(name)
    batch = images(model.input_size, batch=3)
    calls = chained(model, batch, targets=TARGETS, gradient=True, rules="libra").calls
    with libra_gradients(model):
        weights, expected = explicit_gradients(model, batch, TARGETS)
    plain = explicit_gradients(model, batch, TARGETS)[1]
    for call, own, gradient in zip(calls, weights, expected, strict=True):
        found = call.weight_gradient()
        assert found is not None
        torch.testing.assert_close(call.weights(), own, atol=1e-5, rtol=1e-4)
        close(found, gradient)
    first = expected[0] - plain[0]
    assert first.abs().max() > 1e-2 * plain[0].abs().max(), "plain gradients would be the same"


@pytest.mark.slow
def test_localisation_on_the_coco_masks(real_data: Path):
    """Mean ROC-AUC, measured apart from this project on the same pairs: Chefer's rule on LibraGrad's gradients 0.884,
    on plain ones 0.872."""
    model = loading.load(f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}")
    split = load_data(str(real_data / "coco_masks"), preprocessing=model.preprocessing)
    (batch,) = split.batches(56)
    for method, expected in (("libra-relevance", 0.884), ("relevance", 0.872)):
        maps = explain(model, batch.images, targets=batch.labels, method=method)
        assert roc_auc(maps, split.masks).mean().item() == pytest.approx(expected, abs=5e-3)
