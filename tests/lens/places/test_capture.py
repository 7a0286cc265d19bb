"""Captured tensors against hooks by hand on timm's modules, vitlens.attention, and autograd by hand."""

import copy

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.lens.places.models import ATTENTIVE, MODELS
from tests.lens.tiny import images, ours, shared_model
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.capture import capture, capture_attention, means
from vitlens.lens.places import places, resolve_places
from vitlens.models.model import Model

SAME = {"atol": 1e-5, "rtol": 1e-4}


def seen_by_hand(model: Model, batch: Tensor) -> dict[str, Tensor]:
    """Every place of timm's ViT by plain hooks and formulas: how one would do it without a lens."""
    found: dict[str, Tensor] = {}
    handles = []

    def keep(module: nn.Module, name: str) -> None:
        handles.append(module.register_forward_hook(lambda _m, _i, output: found.__setitem__(name, output)))

    def keep_input(module: nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda _m, inputs: found.__setitem__(name, inputs[0])))

    for index, block in enumerate(model.module.blocks):
        keep_input(block, f"blocks.{index}.input")
        keep(block, f"blocks.{index}.residual")
        keep(block.attn, f"blocks.{index}.attention")
        keep(block.mlp, f"blocks.{index}.mlp")
        keep(block.attn.qkv, f"{index}.qkv")
        keep_input(block.attn.proj, f"{index}.joined")
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    for index, block in enumerate(model.module.blocks):
        qkv = found.pop(f"{index}.qkv").unflatten(-1, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = found.pop(f"{index}.joined").unflatten(-1, (block.attn.num_heads, -1)).transpose(1, 2)
        scores = qkv[0] @ qkv[1].mT * block.attn.scale
        inside = {"queries": qkv[0], "keys": qkv[1], "values": qkv[2], "scores": scores, "weights": scores.softmax(-1)}
        found |= {f"blocks.{index}.attention.{part}": tensor for part, tensor in inside.items()}
        found |= {f"blocks.{index}.heads": heads}
        found |= {f"blocks.{index}.head.{head}": heads[:, head] for head in range(heads.shape[1])}
    return {**found, "patches": found["blocks.0.input"][:, 1:], "logits": model(batch)}


def test_every_place_of_timms_vit_is_what_hooks_by_hand_see():
    model = shared_model("vit")
    batch = images()
    expected = seen_by_hand(model, batch)
    captured = capture(model, batch, places(model).names)
    assert set(captured) == set(expected)
    for name, tensor in captured.items():
        torch.testing.assert_close(tensor, expected[name], **SAME)


@pytest.mark.parametrize("name", ATTENTIVE)
def test_weights_are_those_of_attention(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    expected = capture_attention(model, batch)
    captured = capture(model, batch, "blocks.*.attention.weights")
    assert len(captured) == len(expected.layers)
    for weights, layer in zip(captured.values(), expected.layers):
        joined = weights.flatten(0, 1) if weights.dim() == 5 else weights
        torch.testing.assert_close(joined, layer, atol=1e-6, rtol=0)
    scores = capture(model, batch, "blocks.*.attention.scores")
    for weights, each in zip(captured.values(), scores.values()):
        torch.testing.assert_close(each.softmax(-1), weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["ours", "ours-unfused", "registers"])
def test_rows_alone(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    wanted = ["blocks.0.attention.weights", "blocks.1.attention.scores", "blocks.1.mlp"]
    whole = capture(model, batch, wanted)
    prefix = len(model.layout.prefix)
    for rows, index in (("cls", [0]), (2, [2]), ([0, 5], [0, 5]), ("patch", list(range(prefix, model.layout.tokens)))):
        some = capture(model, batch, wanted, rows=rows)
        assert torch.equal(some.logits, whole.logits)
        assert torch.equal(some["blocks.1.mlp"], whole["blocks.1.mlp"])
        for place in wanted[:2]:
            torch.testing.assert_close(some[place], whole[place][:, :, index], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_untouched_and_nothing_is_in_a_graph(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    with torch.no_grad():
        plain = model(batch)
    captured = capture(model, batch, places(model).names)
    torch.testing.assert_close(captured.logits, plain, atol=1e-5 if name == "torchvision-vit" else 0, rtol=0)
    assert not any(tensor.requires_grad for tensor in captured.values())


@pytest.mark.parametrize("name", ["ours-unfused", "vit", "torchvision-vit", "swin", "torchvision-swin", "cnn"])
def test_gradients_are_those_of_a_difference_quotient(name):
    """Of every place: the gradient's product with a direction is the change of the logit along it."""
    model = copy.deepcopy(MODELS[name]()).double()
    batch = images(model.input_size).double()
    names = [place.name for place in places(model) if place.changeable]
    captured = capture(model, batch, names, graph=True)
    gradients = torch.autograd.grad(captured.logits[:, 1].sum(), list(captured.values()))
    for place, gradient in zip(names, gradients):
        direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)
        sides = []
        for step in (1e-5, -1e-5):
            changes = {place: lambda tensor, step=step, direction=direction: tensor + step * direction}
            with vitlens.intervene(model, changes), torch.no_grad():
                sides.append(model(batch)[:, 1].sum())
        slope = (sides[0] - sides[1]) / 2e-5
        torch.testing.assert_close((gradient * direction).sum(), slope, atol=1e-7, rtol=1e-4, msg=place)


def test_the_graph_starts_at_the_images_and_leaves_them_alone():
    model, batch = ours(), images((32, 48))
    captured = capture(model, batch, "blocks.0.attention.weights", graph=True)
    weights = captured["blocks.0.attention.weights"]
    by_hand = torch.autograd.grad(captured.logits[0, 2], weights)[0]
    assert by_hand[0].abs().sum() > 0
    assert by_hand[1].abs().sum() == 0  # of the other image
    assert not batch.requires_grad
    mine = batch.clone().requires_grad_()
    logit = capture(model, mine, "logits", graph=True).logits[0, 2]
    expected = torch.autograd.grad(model(mine)[0, 2], mine)[0]
    torch.testing.assert_close(torch.autograd.grad(logit, mine)[0], expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", ["ours", "swin", "cnn"])
def test_the_mean_over_images_in_batches(name, monkeypatch):
    model = MODELS[name]()
    batch = images(model.input_size, batch=5)
    chosen = resolve_places(model, [place.name for place in places(model) if place.changeable])
    expected = capture(model, batch, [access.name for access in chosen])
    monkeypatch.setattr("vitlens.lens.capture._AT_ONCE", 2)
    for place, mean in means(model, batch, chosen).items():
        torch.testing.assert_close(mean, expected[place].mean(0), atol=1e-5, rtol=1e-5)


def test_what_was_captured_is_a_mapping():
    captured = capture(ours(), images((32, 48)), ["blocks.1", "blocks.0.mlp[cls]", "logits"])
    assert list(captured) == ["blocks.1.residual", "blocks.0.mlp[cls]", "logits"] == [p.name for p in captured.places]
    assert captured["blocks.1"] is captured["blocks.1.residual"]
    assert captured["logits"] is captured.logits
    assert "blocks.1.residual: (2, 13, 16)" in repr(captured)
    with pytest.raises(UnknownNameError, match="no captured place 'blocks"):
        captured["blocks.0.mlp"]


def test_rows_that_are_not_there_are_refused():
    model, batch = ours(), images((32, 48))
    for rows, message in ((13, "positions from 0 to 12, found 13"), ("register", "a register token")):
        with pytest.raises(InputError, match=message):
            capture(model, batch, "blocks.0.attention.weights", rows=rows)
    with pytest.raises(InputError, match="either rows or graph=True"):
        capture(model, batch, "blocks.0.attention.weights", rows=0, graph=True)
