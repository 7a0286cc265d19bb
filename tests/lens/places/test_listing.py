"""What is listed: names, axes and sizes of every family, patterns, and what a wrong name is answered."""

import pytest
import torch
from torch import nn

import vitlens
from tests.lens.places.models import EVERY, HANDWRITTEN, MODELS
from tests.lens.tiny import images, model_of, ours, shared_model
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.capture import capture
from vitlens.lens.places import KIND_WORDS, places, resolve_places

BLOCK = (
    "input",
    "attention.queries",
    "attention.keys",
    "attention.values",
    "attention.scores",
    "attention.weights",
    "heads",
    "head.0",
    "head.1",
    "attention",
    "mlp",
    "residual",
)


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
    model = EVERY[name]()
    listed = places(model)
    captured = capture(model, images(model.input_size, batch=3), listed.names)
    assert tuple(captured) == listed.names
    for place in listed:
        assert captured[place.name].shape == (3, *place.shape), place
        assert len(place.axes) == len(place.shape)


def test_what_a_model_does_not_have_is_not_listed():
    """No queries where the model computes its own softmax, windows as an axis, maps alone in a CNN, pooling last."""
    names = {name: set(places(MODELS[name]()).names) for name in ("ours-unfused", "siglip", "cnn")}
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


def test_the_table_is_made_of_patterns():
    for name, make in MODELS.items():
        model = make()
        listed, found = places(model), []
        for pattern, shape, words in listed.lines():
            fitting = resolve_places(model, pattern)
            assert {access.place.described() for access in fitting} == {shape}, name
            assert words
            found += [access.name for access in fitting]
        assert sorted(found) == sorted(listed.names), name
    assert "blocks.{0..1}.head.{0..1}" in str(places(ours()))
    assert str(places(ours())[0]) == "patches (patches 12, dim 16)"


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
)  # fmt: skip
def test_patterns(pattern, expected):
    assert sorted(access.name for access in resolve_places(ours(), pattern)) == sorted(expected)


def test_positions_by_word_and_by_number():
    model = ours(registers=2)  # CLS, two registers, 12 patches
    batch = images(model.input_size)
    words = {"cls": [0], "register": [1, 2], "patch": list(range(3, 15)), "3..5": [3, 4, 5], "0,14": [0, 14]}
    captured = capture(model, batch, ["blocks.1.residual", *(f"blocks.1.residual[{word}]" for word in words)])
    for word, tokens in words.items():
        assert torch.equal(captured[f"blocks.1.residual[{word}]"], captured["blocks.1.residual"][:, tokens])
    captured = capture(model, batch, ["patches", "blocks.0.input", "patches[0,11]"])
    assert torch.equal(captured["patches"], captured["blocks.0.input"][:, 3:])
    assert torch.equal(captured["patches[0,11]"], captured["blocks.0.input"][:, [3, 14]])


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


def test_modules_of_the_users_own():
    """Attention in no block has its output alone; attention and MLP in one module are a block; tokens may be first."""
    names = {name: set(places(make()).names) for name, make in HANDWRITTEN.items()}
    assert "blocks.0.attention" in names["einsum"]
    assert not {"blocks.0", "blocks.0.residual", "blocks.0.input"} & names["einsum"]
    assert {"blocks.2.input", "blocks.2.residual", "blocks.2.mlp"} <= names["inline"]
    assert "blocks.2.attention" not in names["inline"]
    assert {"blocks.1.residual", "blocks.1.attention", "blocks.1.mlp"} <= names["encoder"]
    assert {"patches", "blocks.2.residual", "blocks.2.head.2"} <= names["softmax"]
