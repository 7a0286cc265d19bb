"""Captured tensors against hooks by hand, the model's attention, and difference quotients."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.lens import ATTENTIVE, MODELS, SAME, changeable, changed, of
from tests.kit.tiny import images, ours, shared_model
from vitlens import Model
from vitlens.errors import InputError, UnknownNameError

WEIGHTS = "blocks.0.attention.weights"


def seen_by_hand(model: Model, batch: Tensor) -> dict[str, Tensor]:
    """Read every place of timm's ViT by plain hooks and formulas, without a lens."""
    values: dict[str, Tensor] = {}
    handles = []

    def keep(module: nn.Module, name: str, *, entering: bool = False) -> None:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            values[name] = inputs[0] if entering else output

        handles.append(module.register_forward_hook(hook))

    for index, block in enumerate(model.module.blocks):
        keep(block, f"blocks.{index}.input", entering=True)
        keep(block, f"blocks.{index}.residual")
        keep(block.attn, f"blocks.{index}.attention")
        keep(block.mlp, f"blocks.{index}.mlp")
        keep(block.attn.qkv, f"{index}.qkv")
        keep(block.attn.proj, f"{index}.joined", entering=True)
    values["logits"] = model(batch)
    for handle in handles:
        handle.remove()
    for index, block in enumerate(model.module.blocks):
        qkv = (
            values.pop(f"{index}.qkv")
            .unflatten(-1, (3, block.attn.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        heads = (
            values.pop(f"{index}.joined").unflatten(-1, (block.attn.num_heads, -1)).transpose(1, 2)
        )
        scores = qkv[0] @ qkv[1].mT * block.attn.scale
        inside = {
            "queries": qkv[0],
            "keys": qkv[1],
            "values": qkv[2],
            "scores": scores,
            "weights": scores.softmax(-1),
        }
        values |= {f"blocks.{index}.attention.{part}": tensor for part, tensor in inside.items()}
        values |= {f"blocks.{index}.heads": heads}
        values |= {f"blocks.{index}.head.{head}": heads[:, head] for head in range(heads.shape[1])}
    return {**values, "patches": values["blocks.0.input"][:, 1:]}


def test_every_place_of_timms_vit_is_what_hooks_by_hand_see():
    model = shared_model("vit")
    batch = images()
    expected = seen_by_hand(model, batch)
    captured = vitlens.capture(model, batch, model.places().names)
    assert set(captured) == set(expected)
    for name, tensor in captured.items():
        torch.testing.assert_close(tensor, expected[name], **SAME)


@pytest.mark.parametrize("name", ATTENTIVE)
def test_captured_weights_are_those_of_attention_and_the_softmax_of_the_scores(name):
    model = MODELS[name]()
    batch = of(model)
    weights = vitlens.capture(model, batch, "blocks.*.attention.weights").values()
    scores = vitlens.capture(model, batch, "blocks.*.attention.scores").values()
    for layer_weights, before, layer in zip(
        weights, scores, vitlens.attention(model, batch), strict=True
    ):
        joined = layer_weights.flatten(0, 1) if layer_weights.dim() == 5 else layer_weights
        torch.testing.assert_close(joined, layer, atol=1e-6, rtol=0)
        torch.testing.assert_close(before.softmax(-1), layer_weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["ours-unfused", "registers", "torchvision-vit"])
def test_rows_alone_are_the_rows_of_all_weights(name):
    model = MODELS[name]()
    batch = of(model)
    first = len(model.layout.prefix)
    names = [WEIGHTS, "blocks.1.attention.scores", "blocks.1.mlp"]
    full = vitlens.capture(model, batch, names)
    for rows, index in (
        ("cls", [0]),
        (2, [2]),
        ([3, 1], [3, 1]),
        ("patch", list(range(first, model.layout.tokens))),
    ):
        some = vitlens.capture(model, batch, names, rows=rows)
        assert torch.equal(some.logits, full.logits)
        assert torch.equal(some["blocks.1.mlp"], full["blocks.1.mlp"])
        for place in names[:2]:
            torch.testing.assert_close(some[place], full[place][:, :, index], atol=1e-6, rtol=0)
    pooled = vitlens.capture(
        shared_model("cait"), images(), "blocks.*.attention.weights", rows=[2]
    ).values()
    assert [layer.shape[2:] for layer in pooled] == [(1, 16)] * 2 + [
        (1, 17)
    ] * 2  # a pooling query has one row


class TwoCalls(type(ours().module.blocks[0].attn)):
    """Our attention with a call for each of its two heads."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        outputs = []
        for head in range(self.heads):
            query, key, value = parts[:, :, head : head + 1]
            outputs.append(F.scaled_dot_product_attention(query, key, value, mask))
        return self.proj(torch.cat(outputs, 1).transpose(1, 2).flatten(2))


def test_a_layer_of_several_calls_has_the_heads_of_all_of_them():
    model = ours()
    batch = of(model)
    expected = vitlens.attention(model, batch)
    model.module.blocks[0].attn.__class__ = TwoCalls
    for layer, expected_layer in zip(vitlens.attention(model, batch), expected, strict=True):
        torch.testing.assert_close(layer, expected_layer, **SAME)


@pytest.mark.parametrize("name", ["ours-unfused", "torchvision-vit", "swin", "cnn"])
def test_gradients_of_every_place_are_those_of_a_difference_quotient(name):
    """The gradient's product with a direction is the change of the logit along it."""
    model = copy.deepcopy(MODELS[name]()).double()
    batch = of(model, batch=2).double()
    names = changeable(model)
    captured = vitlens.capture(model, batch, names, graph=True)
    gradients = torch.autograd.grad(captured.logits[:, 1].sum(), list(captured.values()))
    for place, gradient in zip(names, gradients):
        direction = torch.randn(
            gradient.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double
        )
        shift = partial(torch.add, other=direction)
        forth = changed(model, batch, {place: partial(shift, alpha=1e-5)})[:, 1].sum()
        back = changed(model, batch, {place: partial(shift, alpha=-1e-5)})[:, 1].sum()
        torch.testing.assert_close(
            (gradient * direction).sum(), (forth - back) / 2e-5, atol=1e-7, rtol=1e-4, msg=place
        )


def test_the_graph_starts_at_the_images():
    model = ours()
    pixels = images((32, 48)).requires_grad_()
    logit = vitlens.capture(model, pixels, "logits", graph=True).logits[0, 2]
    expected = torch.autograd.grad(model(pixels)[0, 2], pixels)[0]
    torch.testing.assert_close(
        torch.autograd.grad(logit, pixels)[0], expected, atol=1e-7, rtol=1e-5
    )


def test_what_was_captured_is_a_mapping_in_the_order_that_was_asked_for():
    captured = vitlens.capture(
        ours(), images((32, 48)), ["blocks.1", "blocks.0.mlp[cls]", "logits"]
    )
    assert (
        list(captured)
        == ["blocks.1.residual", "blocks.0.mlp[cls]", "logits"]
        == [p.name for p in captured.places]
    )
    assert len(captured) == 3
    assert captured["blocks.1"] is captured["blocks.1.residual"]
    assert captured["logits"] is captured.logits
    with pytest.raises(UnknownNameError):
        captured["blocks.0.mlp"]


@pytest.mark.parametrize(
    "options", [{"rows": 13}, {"rows": "register"}, {"rows": 0, "graph": True}]
)
def test_rows_that_are_not_there_and_rows_of_a_graph_are_refused(options):
    with pytest.raises(InputError):
        vitlens.capture(ours(), images((32, 48)), WEIGHTS, **options)
