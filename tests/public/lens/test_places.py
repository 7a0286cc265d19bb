"""Places: the list, patterns, refusals, and where features are read."""

from functools import partial

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import vitlens
from tests.kit.lens import EVERY, changed, of
from tests.kit.select import values_of
from tests.kit.tiny import images, model_of, ours, shaken, shared_model, small_cnn
from vitlens.errors import InputError, UnknownNameError, UnsupportedError

STAGES = tuple(f"attention.{part}" for part in ("queries", "keys", "values", "scores", "weights"))
BLOCK = ("input", *STAGES, "heads", "head.0", "head.1", "attention", "mlp", "residual")


def test_every_place_of_our_vit_is_listed_in_forward_order():
    model = ours()
    listed = {place.name: dict(zip(place.axes, place.shape)) for place in vitlens.places(model)}
    assert model.places() == vitlens.places(model)
    assert list(listed) == [
        "patches",
        *(f"blocks.{block}.{part}" for block in (0, 1) for part in BLOCK),
        "logits",
    ]
    assert listed["patches"] == {"patches": 12, "dim": 16}
    assert listed["blocks.1.residual"] == listed["blocks.0.mlp"] == {"tokens": 13, "dim": 16}
    assert listed["blocks.0.attention.weights"] == {"heads": 2, "query": 13, "key": 13}
    assert listed["blocks.0.attention.keys"] == {"heads": 2, "key": 13, "head_dim": 8}
    assert listed["blocks.1.head.1"] == {"tokens": 13, "head_dim": 8}
    assert [place.name for place in model.places() if not place.changeable] == ["logits"]


@pytest.mark.parametrize("name", EVERY)
def test_every_place_has_the_shape_that_is_listed_and_reading_it_changes_nothing(name):
    """The printed table is made of patterns that name every place."""
    model = EVERY[name]()
    batch = of(model)
    listed = vitlens.places(model)
    printed = list[str]()
    captured = vitlens.capture(model, batch, listed.names)
    assert tuple(captured) == listed.names
    for place in listed:
        assert captured[place.name].shape == (3, *place.shape), place
        assert len(place.axes) == len(place.shape)
    # another kernel when unobserved
    exact = 1e-5 if name in ("torchvision-vit", "multihead", "encoder") else 0
    torch.testing.assert_close(captured.logits, changed(model, batch, {}), atol=exact, rtol=0)
    for tensor in captured.values():
        assert not tensor.requires_grad
    for pattern, shape, words in listed.lines():
        fitting = vitlens.capture(model, batch[:1], pattern).places
        assert {place.described() for place in fitting} == {shape}
        assert words
        printed += values_of(fitting, "name")
    assert sorted(printed) == sorted(listed.names)
    assert name != "ours" or "blocks.{0..1}.head.{0..1}" in str(listed)


def test_what_a_model_does_not_have_is_not_listed():
    """No queries where the model computes its own softmax, windows as an axis, only maps in a CNN,
    pooling last.
    """
    listed = {name: set(vitlens.places(make()).names) for name, make in EVERY.items()}
    convnext = model_of(timm.create_model("convnext_atto", num_classes=5).eval())
    listed["convnext"] = {
        name for name in vitlens.places(convnext).names if name.startswith("blocks.")
    }
    assert listed["cnn"] == {
        f"{part}.{index}" for part in ("blocks", "stages") for index in range(3)
    } | {"logits"}
    assert len(listed["convnext"]) == 2 + 2 + 6 + 2  # its stages are none
    for name, some, none in (
        ("ours-unfused", {"blocks.0.attention.scores"}, {"blocks.0.attention.queries"}),
        (
            "siglip",
            {"blocks.2", "blocks.2.attention.weights"},
            {"blocks.2.residual", "blocks.2.attention"},
        ),
        # attention in no block has only its output; attention and MLP in one module are a block;
        # tokens may be first
        ("einsum", {"blocks.0.attention"}, {"blocks.0", "blocks.0.residual", "blocks.0.input"}),
        ("inline", {"blocks.2.input", "blocks.2.residual", "blocks.2.mlp"}, {"blocks.2.attention"}),
        ("encoder", {"blocks.1.residual", "blocks.1.attention", "blocks.1.mlp"}, set()),
        ("softmax", {"patches", "blocks.2.residual", "blocks.2.head.2"}, set()),
    ):
        assert some <= listed[name], name
        assert not none & listed[name], name
    windows = {place.name: place.axes for place in vitlens.places(shared_model("swin"))}
    assert windows["blocks.0.attention.weights"] == ("windows", "heads", "query", "key")
    assert windows["blocks.0.residual"] == ("rows", "columns", "dim")
    assert vitlens.places(
        model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)))
    ).names == ("logits",)


PATTERNS = {
    "blocks.1.mlp": ["blocks.1.mlp"],
    "blocks.{0,1}.head.1": ["blocks.0.head.1", "blocks.1.head.1"],
    "blocks.1.head.*": ["blocks.1.head.0", "blocks.1.head.1"],
    "blocks.{0..1}.{mlp,head.0}": [
        "blocks.0.head.0",
        "blocks.0.mlp",
        "blocks.1.head.0",
        "blocks.1.mlp",
    ],
    "blocks.1": ["blocks.1.residual"],
    "blocks.*": ["blocks.0.residual", "blocks.1.residual"],
    "blocks.*.head.0[0,5]": ["blocks.0.head.0[0,5]", "blocks.1.head.0[0,5]"],
    "blocks.0.input[*]": sorted(f"blocks.0.input[{token}]" for token in range(13)),
}


def test_a_pattern_names_its_places():
    model = shared_model("ours")
    for pattern, names in PATTERNS.items():
        assert sorted(vitlens.capture(model, images((32, 48)), pattern)) == names


def test_positions_by_word_and_by_number():
    model = ours(registers=2)  # CLS, two registers, 12 patches
    batch = of(model)
    words = {
        "cls": [0],
        "register": [1, 2],
        "patch": list(range(3, 15)),
        "3..5": [3, 4, 5],
        "0,14": [0, 14],
    }
    captured = vitlens.capture(
        model, batch, ["blocks.1.residual", *(f"blocks.1.residual[{word}]" for word in words)]
    )
    for word, tokens in words.items():
        assert torch.equal(
            captured[f"blocks.1.residual[{word}]"], captured["blocks.1.residual"][:, tokens]
        )
    names = ["patches", "blocks.0.input", "patches[0,11]", "blocks.0.input[all]"]
    patches, tokens, some, every = vitlens.capture(model, batch, names).values()
    assert torch.equal(patches, tokens[:, 3:])
    assert torch.equal(some, tokens[:, [3, 14]])
    assert torch.equal(every, tokens)


WRONG = {
    "blocks.1.residuel": (UnknownNameError, "did you mean 'blocks.1.residual'"),
    "block.0.mlp": (UnknownNameError, "did you mean 'blocks.0.mlp'.*see model.places"),
    "blocks.*.hed.*": (InputError, r"no place of ours fits 'blocks.\*.hed.\*'.*see model.places"),
    "blocks.{0,7}.mlp": (UnknownNameError, "no place 'blocks.7.mlp'"),
    "blocks.{1..0}.mlp": (InputError, "write 0..1"),
    "blocks.0.mlp[8..3]": (InputError, "write 3..8"),
    "blocks.0.mlp[13]": (InputError, "from 0 to 12 at blocks.0.mlp, found 13"),
    "blocks.0.mlp[registers]": (InputError, r"found \[registers\]"),
    "blocks.0.mlp[²]": (InputError, "expected positions"),
    "blocks.0.mlp[register]": (InputError, "a register token"),
    "blocks.0.attention.weights[cls]": (InputError, "leave the brackets out"),
    "blocks.0.attention.weights[*]": (InputError, "an axis of tokens"),
    "blocks.0.mlp[cls": (InputError, "at the end of a place"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_is_answered_in_one_line(name):
    error, message = WRONG[name]
    with pytest.raises(error, match=message) as raised:
        vitlens.capture(shared_model("ours"), images((32, 48)), [name])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["dinov2-registers", "siglip", "cait", "swinv2"])
def test_features_are_read_from_every_block_of_every_family(name):
    """The mean over the patches of what the block puts out; not of those that only CLS passes."""
    model = shared_model(name)
    batch = of(model)
    prefix = 0 if model.anatomy.layout is None else len(model.layout.prefix)
    features = vitlens.features(model, batch, pool="mean", norm=False)
    blocks = [block for block in model.anatomy.blocks if "token_only" not in block]
    assert values_of(features.layers, "module", "title") == [
        (block, f"block {index}") for index, block in enumerate(blocks)
    ]
    streams = vitlens.capture(
        model, batch, [f"blocks.{layer.index}.residual" for layer in features.layers]
    ).values()
    for layer, values, stream in zip(features.layers, features.values, streams, strict=True):
        tokens = stream.flatten(1, -2)
        torch.testing.assert_close(values, tokens[:, prefix:].mean(1), atol=1e-5, rtol=1e-5)
        assert layer.dim == tokens.shape[-1]


def test_the_stages_of_a_cnn_are_what_each_resolution_ends_with():
    model = small_cnn((16, 24))
    features = vitlens.features(model, of(model))
    assert values_of(features.layers, "title", "module", "dim", "norm") == [
        (f"stage {index}", f"layer{index + 1}.0", 16 << index, None) for index in range(3)
    ]
    for values, tensor in zip(
        features.values, vitlens.capture(model, of(model), "stages.*").values(), strict=True
    ):
        torch.testing.assert_close(values, tensor.mean((2, 3)), atol=1e-6, rtol=1e-5)


def test_a_model_of_another_family_has_a_stage_for_each_resolution_or_its_blocks():
    trunk = torchvision.models.vgg.make_layers([8, "M", 16, 16, "M", 24])
    vgg = nn.Sequential(trunk, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(24 * 49, 5)).eval()
    assert values_of(vitlens.features(model_of(vgg), images()).layers, "dim") == [
        8,
        16,
        24,
        24,
    ]
    for name, size in (
        ("mixer_s32_224", 224),
        ("convnext_atto", 64),
        ("mobilenetv3_small_050", 64),
    ):
        model = model_of(timm.create_model(name, num_classes=5).eval(), size=(size, size))
        features = vitlens.features(model, of(model, batch=1))
        assert len(features.layers) >= 4
        assert [values.shape[1] for values in features.values] == values_of(features.layers, "dim")
    flat = model_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)), alias="flat")
    with pytest.raises(UnsupportedError, match="flat"):  # neither tokens nor maps
        vitlens.features(flat, images())


DAVIT = {"depths": (1, 1, 1, 1), "embed_dims": (20, 24, 40, 48), "num_heads": (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("build", "channels"),
    [
        (partial(timm.create_model, "test_maxvit", img_size=64), -1),
        (partial(timm.create_model, "davit_tiny", **DAVIT), 1),
    ],
)
def test_the_norms_of_a_stream_of_maps_are_those_of_its_channels(build, channels):
    model = model_of(shaken(partial(build, num_classes=5), scale=0.01), size=(64, 64))
    seen = list[Tensor]()
    table = vitlens.statistics(model, images((64, 64)))
    for block in model.anatomy.blocks:
        model.module.get_submodule(block).register_forward_hook(
            lambda _m, _i, output: seen.append(output)
        )
    model(images((64, 64)))
    for output in seen:
        assert output.dim() == 4
        assert output.shape[channels] != output.shape[2]
    expected = [
        float(output.norm(dim=channels).flatten(1).quantile(0.5, dim=1).mean()) for output in seen
    ]
    assert table.token_norm[:, 0].tolist() == pytest.approx(expected, rel=1e-4)
