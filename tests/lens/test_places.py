"""Places: what is listed, patterns, and captured tensors against hooks by hand, vitlens.attention and differences."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import vitlens
from tests.lens.oracles import ATTENTIVE, EVERY, HANDWRITTEN, MODELS, changed
from tests.lens.tiny import images, model_of, ours, shared_model
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.capture import capture, capture_attention, means
from vitlens.lens.places import KIND_WORDS, places, resolve_places
from vitlens.models.model import Model

SAME = {"atol": 1e-5, "rtol": 1e-4}
ATTENTION = tuple(f"attention.{part}" for part in ("queries", "keys", "values", "scores", "weights"))
BLOCK = ("input", *ATTENTION, "heads", "head.0", "head.1", "attention", "mlp", "residual")


def test_every_place_of_our_vit_in_forward_order():
    expected = ["patches", *(f"blocks.{block}.{part}" for block in (0, 1) for part in BLOCK), "logits"]
    model = ours()
    assert list(places(model).names) == expected
    assert model.places() == vitlens.places(model) == places(model)
    shapes = {place.name: dict(zip(place.axes, place.shape)) for place in places(model)}
    assert shapes["patches"] == {"patches": 12, "dim": 16}
    assert shapes["blocks.1.residual"] == shapes["blocks.0.mlp"] == {"tokens": 13, "dim": 16}
    assert shapes["blocks.0.attention.weights"] == {"heads": 2, "query": 13, "key": 13}
    assert shapes["blocks.0.attention.keys"] == {"heads": 2, "key": 13, "head_dim": 8}
    assert shapes["blocks.1.head.1"] == {"tokens": 13, "head_dim": 8}
    assert [place.name for place in places(model) if not place.changeable] == ["logits"]
    assert {place.kind for place in places(model)} <= KIND_WORDS.keys()


@pytest.mark.parametrize("name", EVERY)
def test_every_place_has_the_shape_that_is_listed(name):
    """And the logits are untouched, and nothing is in a graph."""
    model = EVERY[name]()
    batch, listed = images(model.input_size, batch=3), places(model)
    captured = capture(model, batch, listed.names)
    assert tuple(captured) == listed.names
    for place in listed:
        assert captured[place.name].shape == (3, *place.shape), place
        assert len(place.axes) == len(place.shape)
    exact = 1e-5 if name in ("torchvision-vit", "multihead", "encoder") else 0  # another kernel when unobserved
    torch.testing.assert_close(captured.logits, changed(model, batch, {}), atol=exact, rtol=0)
    assert not any(tensor.requires_grad for tensor in captured.values())


def test_what_a_model_does_not_have_is_not_listed():
    """No queries where the model computes its own softmax, windows as an axis, maps alone in a CNN, pooling last."""
    names = {name: set(places(make()).names) for name, make in EVERY.items()}
    assert "blocks.0.attention.scores" in names["ours-unfused"]
    assert "blocks.0.attention.queries" not in names["ours-unfused"]
    assert {"blocks.2", "blocks.2.attention.weights"} <= names["siglip"]
    assert not {"blocks.2.residual", "blocks.2.input", "blocks.2.attention"} & names["siglip"]
    assert names["cnn"] == {f"{part}.{index}" for part in ("blocks", "stages") for index in range(3)} | {"logits"}
    windows = {place.name: place for place in places(shared_model("swin"))}
    assert windows["blocks.0.attention.weights"].axes == ("windows", "heads", "query", "key")
    assert windows["blocks.0.residual"].axes == ("rows", "columns", "dim")
    without = model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)))
    assert places(without).names == ("logits",)
    convnext = model_of(timm.create_model("convnext_atto", num_classes=5).eval(), alias="convnext")
    assert sum(name.startswith("blocks.") for name in places(convnext).names) == 2 + 2 + 6 + 2  # its stages are none
    # attention in no block has its output alone; attention and MLP in one module are a block; tokens may be first
    assert "blocks.0.attention" in names["einsum"]
    assert not {"blocks.0", "blocks.0.residual", "blocks.0.input"} & names["einsum"]
    assert {"blocks.2.input", "blocks.2.residual", "blocks.2.mlp"} <= names["inline"]
    assert "blocks.2.attention" not in names["inline"]
    assert {"blocks.1.residual", "blocks.1.attention", "blocks.1.mlp"} <= names["encoder"]
    assert {"patches", "blocks.2.residual", "blocks.2.head.2"} <= names["softmax"]


@pytest.mark.parametrize("name", [*MODELS, *HANDWRITTEN])
def test_the_table_is_made_of_patterns(name):
    model = EVERY[name]()
    listed, found = places(model), []
    for pattern, shape, words in listed.lines():
        fitting = resolve_places(model, pattern)
        assert {access.place.described() for access in fitting} == {shape}
        assert words
        found += [access.name for access in fitting]
    assert sorted(found) == sorted(listed.names)
    if name == "ours":
        assert "blocks.{0..1}.head.{0..1}" in str(listed)
        assert str(listed[0]) == "patches (patches 12, dim 16)"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.1.mlp", ["blocks.1.mlp"]),
        ("blocks.*.mlp", ["blocks.0.mlp", "blocks.1.mlp"]),
        ("blocks.{0,1}.head.1", ["blocks.0.head.1", "blocks.1.head.1"]),
        ("blocks.1.head.*", ["blocks.1.head.0", "blocks.1.head.1"]),
        ("blocks.{0..1}.{mlp,head.0}", ["blocks.0.mlp", "blocks.0.head.0", "blocks.1.mlp", "blocks.1.head.0"]),
        ("blocks.1", ["blocks.1.residual"]),
        ("blocks.*", ["blocks.0.residual", "blocks.1.residual"]),
        ("blocks.0.mlp[cls]", ["blocks.0.mlp[cls]"]),
        ("blocks.*.head.0[0,5]", ["blocks.0.head.0[0,5]", "blocks.1.head.0[0,5]"]),
        ("blocks.0.input[*]", [f"blocks.0.input[{token}]" for token in range(13)]),
    ],
)
def test_patterns(pattern, expected):
    assert sorted(access.name for access in resolve_places(ours(), pattern)) == sorted(expected)


def test_positions_by_word_and_by_number():
    model = ours(registers=2)  # CLS, two registers, 12 patches
    batch, whole = images(model.input_size), slice(None)
    words = {"cls": [0], "register": [1, 2], "patch": list(range(3, 15)), "3..5": [3, 4, 5], "0,14": [0, 14]}
    captured = capture(model, batch, ["blocks.1.residual", *(f"blocks.1.residual[{word}]" for word in words)])
    for word, tokens in words.items():
        assert torch.equal(captured[f"blocks.1.residual[{word}]"], captured["blocks.1.residual"][:, tokens])
    names = ["patches", "blocks.0.input", "patches[0,11]", "blocks.0.input[all]"]
    patches, tokens, some, every = (capture(model, batch, names)[name] for name in names)
    assert torch.equal(patches, tokens[:, 3:])
    assert torch.equal(some, tokens[:, [3, 14]])
    assert torch.equal(every, tokens[:, whole])


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("blocks.1.residuel", UnknownNameError, "no place 'blocks.1.residuel'; did you mean 'blocks.1.residual'"),
        ("block.0.mlp", UnknownNameError, "did you mean 'blocks.0.mlp'.*see model.places"),
        ("blocks.2.mlp", UnknownNameError, "no place 'blocks.2.mlp'"),
        ("blocks.*.hed.*", InputError, r"no place of ours fits 'blocks.\*.hed.\*'.*see model.places"),
        ("blocks.{0,7}.mlp", UnknownNameError, "no place 'blocks.7.mlp'; did you mean"),
        ("blocks.0.mlp[13]", InputError, "positions from 0 to 12 at blocks.0.mlp, found 13"),
        ("blocks.0.mlp[registers]", InputError, r"expected positions \(cls.*found \[registers\]"),
        ("blocks.0.mlp[²]", InputError, "expected positions"),
        ("blocks.0.mlp[register]", InputError, "expected a model with a register token"),
        ("blocks.0.attention.weights[cls]", InputError, "an axis of tokens.*leave the brackets out"),
        ("blocks.0.attention.weights[*]", InputError, "an axis of tokens"),
        ("blocks.0.mlp[cls", InputError, "at the end of a place"),
        (3, InputError, "expected the name of a place, found int"),
    ],
)
def test_a_wrong_name_is_answered_in_one_line(name, error, message):
    with pytest.raises(error, match=message) as told:
        resolve_places(ours(), [name])
    assert "\n" not in str(told.value)


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
    model, batch = shared_model("vit"), images()
    expected, captured = seen_by_hand(model, batch), capture(model, batch, places(model).names)
    assert set(captured) == set(expected)
    for name, tensor in captured.items():
        torch.testing.assert_close(tensor, expected[name], **SAME)


@pytest.mark.parametrize("name", ATTENTIVE)
def test_weights_are_those_of_attention(name):
    model = MODELS[name]()
    batch = images(model.input_size)
    expected = capture_attention(model, batch)
    captured = capture(model, batch, "blocks.*.attention.weights")
    scores = capture(model, batch, "blocks.*.attention.scores")
    for weights, each, layer in zip(captured.values(), scores.values(), expected.layers, strict=True):
        joined = weights.flatten(0, 1) if weights.dim() == 5 else weights
        torch.testing.assert_close(joined, layer, atol=1e-6, rtol=0)
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
            moved = {place: lambda tensor, step=step, direction=direction: tensor + step * direction}
            sides.append(changed(model, batch, moved)[:, 1].sum())
        slope = (sides[0] - sides[1]) / 2e-5
        torch.testing.assert_close((gradient * direction).sum(), slope, atol=1e-7, rtol=1e-4, msg=place)


def test_the_graph_starts_at_the_images_and_leaves_them_alone():
    model, batch = ours(), images((32, 48))
    captured = capture(model, batch, "blocks.0.attention.weights", graph=True)
    gradient = torch.autograd.grad(captured.logits[0, 2], captured["blocks.0.attention.weights"])[0]
    assert gradient[0].abs().sum() > 0
    assert gradient[1].abs().sum() == 0  # of the other image
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
