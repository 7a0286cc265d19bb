"""Places: what is listed, patterns, and what is refused."""

import pytest
import timm
import torch
from torch import nn

import vitlens
from tests.kit.lens import EVERY, MODELS, changed, of
from tests.kit.tiny import images, model_of, ours, shared_model
from vitlens.errors import InputError, UnknownNameError

ATTENTION = tuple(f"attention.{part}" for part in ("queries", "keys", "values", "scores", "weights"))
BLOCK = ("input", *ATTENTION, "heads", "head.0", "head.1", "attention", "mlp", "residual")


def test_every_place_of_our_vit_is_listed_in_forward_order():
    model = ours()
    expected = ["patches", *(f"blocks.{block}.{part}" for block in (0, 1) for part in BLOCK), "logits"]
    assert list(vitlens.places(model).names) == expected
    assert model.places() == vitlens.places(model)
    shapes = {place.name: dict(zip(place.axes, place.shape)) for place in model.places()}
    assert shapes["patches"] == {"patches": 12, "dim": 16}
    assert shapes["blocks.1.residual"] == shapes["blocks.0.mlp"] == {"tokens": 13, "dim": 16}
    assert shapes["blocks.0.attention.weights"] == {"heads": 2, "query": 13, "key": 13}
    assert shapes["blocks.0.attention.keys"] == {"heads": 2, "key": 13, "head_dim": 8}
    assert shapes["blocks.1.head.1"] == {"tokens": 13, "head_dim": 8}
    assert [place.name for place in model.places() if not place.changeable] == ["logits"]


@pytest.mark.parametrize("name", EVERY)
def test_every_place_has_the_shape_that_is_listed_and_reading_it_changes_nothing(name):
    model = EVERY[name]()
    batch, listed = of(model), vitlens.places(model)
    captured = vitlens.capture(model, batch, listed.names)
    assert tuple(captured) == listed.names
    for place in listed:
        assert captured[place.name].shape == (3, *place.shape), place
        assert len(place.axes) == len(place.shape)
    exact = 1e-5 if name in ("torchvision-vit", "multihead", "encoder") else 0  # another kernel when unobserved
    torch.testing.assert_close(captured.logits, changed(model, batch, {}), atol=exact, rtol=0)
    assert not any(tensor.requires_grad for tensor in captured.values())


def test_what_a_model_does_not_have_is_not_listed():
    """No queries where the model computes its own softmax, windows as an axis, maps alone in a CNN, pooling last."""
    names = {name: set(vitlens.places(make()).names) for name, make in EVERY.items()}
    assert "blocks.0.attention.scores" in names["ours-unfused"]
    assert "blocks.0.attention.queries" not in names["ours-unfused"]
    assert {"blocks.2", "blocks.2.attention.weights"} <= names["siglip"]
    assert not {"blocks.2.residual", "blocks.2.input", "blocks.2.attention"} & names["siglip"]
    assert names["cnn"] == {f"{part}.{index}" for part in ("blocks", "stages") for index in range(3)} | {"logits"}
    windows = {place.name: place for place in vitlens.places(shared_model("swin"))}
    assert windows["blocks.0.attention.weights"].axes == ("windows", "heads", "query", "key")
    assert windows["blocks.0.residual"].axes == ("rows", "columns", "dim")
    assert vitlens.places(model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)))).names == ("logits",)
    convnext = model_of(timm.create_model("convnext_atto", num_classes=5).eval(), alias="convnext")
    blocks = [name for name in vitlens.places(convnext).names if name.startswith("blocks.")]
    assert len(blocks) == 2 + 2 + 6 + 2  # its stages are none
    # attention in no block has its output alone; attention and MLP in one module are a block; tokens may be first
    assert "blocks.0.attention" in names["einsum"]
    assert not {"blocks.0", "blocks.0.residual", "blocks.0.input"} & names["einsum"]
    assert {"blocks.2.input", "blocks.2.residual", "blocks.2.mlp"} <= names["inline"]
    assert "blocks.2.attention" not in names["inline"]
    assert {"blocks.1.residual", "blocks.1.attention", "blocks.1.mlp"} <= names["encoder"]
    assert {"patches", "blocks.2.residual", "blocks.2.head.2"} <= names["softmax"]


@pytest.mark.parametrize("name", EVERY)
def test_the_printed_table_is_made_of_patterns_that_name_every_place(name):
    model = EVERY[name]()
    listed, found = vitlens.places(model), []
    for pattern, shape, words in listed.lines():
        fitting = vitlens.capture(model, of(model, batch=1), pattern).places
        assert {place.described() for place in fitting} == {shape}
        assert words
        found += [place.name for place in fitting]
    assert sorted(found) == sorted(listed.names)
    assert name != "ours" or "blocks.{0..1}.head.{0..1}" in str(listed)


PATTERNS = {
    "blocks.1.mlp": ["blocks.1.mlp"],
    "blocks.*.mlp": ["blocks.0.mlp", "blocks.1.mlp"],
    "blocks.{0,1}.head.1": ["blocks.0.head.1", "blocks.1.head.1"],
    "blocks.1.head.*": ["blocks.1.head.0", "blocks.1.head.1"],
    "blocks.{0..1}.{mlp,head.0}": ["blocks.0.mlp", "blocks.0.head.0", "blocks.1.mlp", "blocks.1.head.0"],
    "blocks.1": ["blocks.1.residual"],
    "blocks.*": ["blocks.0.residual", "blocks.1.residual"],
    "blocks.0.mlp[cls]": ["blocks.0.mlp[cls]"],
    "blocks.*.head.0[0,5]": ["blocks.0.head.0[0,5]", "blocks.1.head.0[0,5]"],
    "blocks.0.input[*]": [f"blocks.0.input[{token}]" for token in range(13)],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_names_its_places(pattern):
    assert sorted(vitlens.capture(ours(), images((32, 48)), pattern)) == sorted(PATTERNS[pattern])


def test_positions_by_word_and_by_number():
    model = ours(registers=2)  # CLS, two registers, 12 patches
    batch = of(model)
    words = {"cls": [0], "register": [1, 2], "patch": list(range(3, 15)), "3..5": [3, 4, 5], "0,14": [0, 14]}
    captured = vitlens.capture(model, batch, ["blocks.1.residual", *(f"blocks.1.residual[{word}]" for word in words)])
    for word, tokens in words.items():
        assert torch.equal(captured[f"blocks.1.residual[{word}]"], captured["blocks.1.residual"][:, tokens])
    names = ["patches", "blocks.0.input", "patches[0,11]", "blocks.0.input[all]"]
    patches, tokens, some, every = vitlens.capture(model, batch, names).values()
    assert torch.equal(patches, tokens[:, 3:])
    assert torch.equal(some, tokens[:, [3, 14]])
    assert torch.equal(every, tokens)


WRONG = {
    "blocks.1.residuel": (UnknownNameError, "did you mean 'blocks.1.residual'"),
    "block.0.mlp": (UnknownNameError, "did you mean 'blocks.0.mlp'.*see model.places"),
    "blocks.2.mlp": (UnknownNameError, "no place 'blocks.2.mlp'"),
    "blocks.*.hed.*": (InputError, r"no place of ours fits 'blocks.\*.hed.\*'.*see model.places"),
    "blocks.{0,7}.mlp": (UnknownNameError, "no place 'blocks.7.mlp'"),
    "blocks.0.mlp[13]": (InputError, "from 0 to 12 at blocks.0.mlp, found 13"),
    "blocks.0.mlp[registers]": (InputError, r"found \[registers\]"),
    "blocks.0.mlp[²]": (InputError, "expected positions"),
    "blocks.0.mlp[register]": (InputError, "a register token"),
    "blocks.0.attention.weights[cls]": (InputError, "leave the brackets out"),
    "blocks.0.attention.weights[*]": (InputError, "an axis of tokens"),
    "blocks.0.mlp[cls": (InputError, "at the end of a place"),
    3: (InputError, "found int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_is_answered_in_one_line(name, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # the tests' own check of types would be first
    error, message = WRONG[name]
    with pytest.raises(error, match=message) as told:
        vitlens.capture(MODELS["ours"](), images((32, 48)), [name])
    assert "\n" not in str(told.value)
