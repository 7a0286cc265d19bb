"""Models made from models: without some heads, for other classes, with random weights.

Without heads they equal the masked model and are smaller. For other classes the backbone stays and
the logits are zero. The image size may change.
"""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

import vitlens
from tests.kit.models.files import one_line, small, written
from tests.kit.models.handwritten import half
from tests.kit.models.transformers import folder_of
from tests.kit.tiny import FAMILIES, images, ours, timm_model
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.models.derived import classifiers, for_classes, prune_heads, untrained_like

Heads = Mapping[int, tuple[int, ...]]
VIT = "vit_tiny_patch16_224"
CUT: dict[str, Callable[[], vitlens.Model]] = {
    **{name: FAMILIES[name] for name in ("ours", "siglip", "torchvision-vit")},
    "query-and-key-norms": lambda: timm_model(VIT, qk_norm=True),
    "no-bias": lambda: timm_model(VIT, qkv_bias=False),
    "post-norm": lambda: ours(norm_first=False),
}
PRUNED: list[
    tuple[str, Heads]
] = [  # every pair of a family and a number of heads that matters to it
    ("ours", {0: (0,), 1: (1,)}),
    ("ours", {0: (0, 1)}),
    ("ours", {1: (0, 1), 0: (1, 0)}),
    ("siglip", {1: (1,)}),
    ("torchvision-vit", {0: (0,), 1: (1,)}),
    ("torchvision-vit", {0: (0, 1)}),
    ("no-bias", {0: (0,), 1: (0, 1)}),
    ("query-and-key-norms", {0: (1,)}),
    ("query-and-key-norms", {0: (0, 1)}),
    ("post-norm", {1: (0,)}),
]


@torch.no_grad()
def masked(model: vitlens.Model, heads: Heads, batch: torch.Tensor) -> torch.Tensor:
    changes = {}
    for layer, removed in heads.items():
        changes |= {f"blocks.{layer}.head.{head}": "zero" for head in removed}
    with vitlens.intervene(model, changes):
        return model(batch)


def values(model: vitlens.Model) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.module.state_dict().items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("name", "heads"), PRUNED, ids=str)
def test_the_logits_of_masked_heads_with_fewer_parameters_and_the_lens_sees_those_that_are_left(
    name, heads
):
    model = CUT[name]()
    batch = images(model.input_size)
    before = values(model)
    expected = masked(model, heads, batch)
    clean = model(batch)
    pruned = prune_heads(model, heads)
    torch.testing.assert_close(pruned(batch), expected, atol=1e-5, rtol=0)
    assert (expected - clean).abs().max() > 1e-3
    dim = 16 if name in ("ours", "post-norm") else 32
    count = sum(map(len, heads.values()))
    lost = count * (4 * dim * dim // 2 + (0 if name == "no-bias" else 3 * dim // 2))
    if name == "query-and-key-norms":  # shared by a layer's heads, and lost with the last of them
        lost += sum(4 * dim // 2 for some in heads.values() if len(some) == 2)
    assert pruned.parameter_count() == model.parameter_count() - lost
    assert same(values(model), before)
    assert pruned.provenance.notes[-1].startswith(f"removed {count} of ")
    counts = [model.anatomy.parts[name].heads for name in model.anatomy.attention_modules]
    left = [count - len(heads.get(layer, ())) for layer, count in enumerate(counts)]
    left = [count for count in left if count > 0]
    assert [pruned.anatomy.parts[name].heads for name in pruned.anatomy.attention_modules] == left
    assert pruned.anatomy.layout == model.anatomy.layout
    if not left:
        assert pruned.anatomy.blocks == model.anatomy.blocks
        return
    last = {[*pruned.anatomy.attention_by_layer][:2][-1]: (0,)}
    with vitlens.replay(pruned, batch) as replayed_pass:
        replayed = replayed_pass.run([{f"blocks.{layer}.head.0": "zero" for layer in last}])[0]
    torch.testing.assert_close(replayed, masked(pruned, last, batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "heads"), [("ours", {0: (0,), 1: (1,)}), ("torchvision-vit", {0: (0, 1)})]
)
@torch.no_grad()
def test_means_go_into_the_bias_in_the_precision_of_the_model(name, heads):
    model = CUT[name]().double()
    batch = images(model.input_size).double()
    seen = vitlens.capture(
        model, images(model.input_size, batch=4, seed=3).double(), "blocks.*.heads"
    )
    means = {layer: seen[f"blocks.{layer}.heads"].mean((0, 2)) for layer in heads}
    what = {}
    for layer, removed in heads.items():
        what |= {f"blocks.{layer}.head.{head}": means[layer][head] for head in removed}
    with vitlens.intervene(model, what):
        expected = model(batch)
    torch.testing.assert_close(
        prune_heads(model, heads, means=means)(batch), expected, atol=1e-12, rtol=0
    )
    assert (prune_heads(model, heads)(batch) - expected).abs().max() > 1e-4


def test_pruned_again_is_pruned_at_once():
    """The second head of a layer without its first was its third; a layer without heads stays."""
    model = ours(depth=3, dim=24, heads=4)
    twice = prune_heads(
        prune_heads(model, {0: (0,), 1: (0, 1, 2, 3), 2: (3,)}), {0: (1,), 2: (0, 2)}
    )
    once = prune_heads(model, {0: (0, 2), 1: (0, 1, 2, 3), 2: (0, 2, 3)})
    assert same(values(twice), values(once))
    assert (twice.anatomy, twice.architecture["pruned"]) == (
        once.anatomy,
        once.architecture["pruned"],
    )


def test_a_block_that_lost_its_heads_keeps_the_numbers_of_the_others():
    model = vitlens.load("vit-digits")
    batch = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    pruned = prune_heads(model, {1: range(4)})
    weights = vitlens.attention(pruned, batch)
    assert [layer.shape[1] for layer in weights] == [4, 0, 4, 4, 4, 4]
    assert pruned.anatomy.blocks == model.anatomy.blocks
    again = prune_heads(pruned, {2: [0]})
    assert [layer.shape[1] for layer in vitlens.attention(again, batch)] == [4, 0, 3, 4, 4, 4]
    with pytest.raises(InputError, match="0, 2, 3, 4 or 5"):
        prune_heads(pruned, {1: [0]})


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("vit-micro", {0: (0,), 1: (0, 1)}),
        ("vit-micro", {0: (0, 1), 1: (0, 1)}),
        ("timm:test_vit", {0: (1,)}),
    ],
    ids=str,
)
def test_it_comes_back_from_its_file(tmp_path, name, heads):
    model = small() if name == "vit-micro" else vitlens.load(f"{name}@random", image_size=32)
    means = {layer: torch.randn(2, 8) for layer in heads} if name == "vit-micro" else None
    pruned = prune_heads(model, heads, means=means)
    loaded = vitlens.load(str(written(pruned, tmp_path)))
    batch = images(model.input_size)
    assert torch.equal(loaded(batch), pruned(batch))
    assert loaded.anatomy == pruned.anatomy
    assert loaded.parameter_count() == pruned.parameter_count() < model.parameter_count()
    # timm resizes positions, and knows whole models
    other = vitlens.load(str(tmp_path), image_size=(64, 32))
    assert (other.input_size, other.layout.grid) == (
        (64, 32),
        (8, 2) if name == "vit-micro" else (4, 2),
    )
    assert torch.isfinite(other(images((64, 32)))).all()
    if name == "vit-micro":
        torch.testing.assert_close(
            other(images((64, 32))), pruned.module((images((64, 32)) - 0.5) / 0.5)
        )


WRONG: list[tuple[Heads, dict[int, torch.Tensor] | None, str]] = [  # heads, means, and what is said
    ({0: ()}, None, "at least one head"),
    ({2: (0,)}, None, "layer from 0 to 1"),
    ({-1: (0,)}, None, "layer from 0 to 1"),
    ({1: (0, 2)}, None, "head from 0 to 1 in layer 1"),
    ({0: (1,)}, {0: torch.ones(2, 13, 8)}, r"take \.mean\(1\)"),
    ({1: (0,)}, {0: torch.ones(2, 8)}, "layer 1, found none"),
]


@pytest.mark.parametrize(("heads", "means", "words"), WRONG)
def test_heads_and_means_that_are_not_there(heads, means, words):
    with pytest.raises(InputError, match=words):
        prune_heads(ours(), heads, means=means)


UNCUT: dict[str, tuple[Callable[[], vitlens.Model], int]] = {  # and the layer
    **{name: (FAMILIES[name], 0) for name in ("beit", "cait", "swin", "our-swin")},
    "siglip": (FAMILIES["siglip"], 2),  # its pooling; its blocks can be cut
    "a norm after the heads": (lambda: timm_model(VIT, scale_attn_norm=True), 0),
}


@pytest.mark.parametrize("name", UNCUT)
def test_attention_that_cannot_be_cut(name):
    make, layer = UNCUT[name]
    with one_line(UnsupportedError, "vitlens ablate"):
        prune_heads(make(), {layer: (0,)})


def test_a_projection_without_a_bias_takes_no_means():
    with pytest.raises(UnsupportedError, match="leave the means out"):
        prune_heads(timm_model(VIT, proj_bias=False), {0: (1,)}, means={0: torch.zeros(2, 16)})


def test_training_mode_and_gradients_are_kept():
    frozen = prune_heads(ours(), {0: (0,)})
    for module in frozen.modules():
        assert not module.training
    for parameter in frozen.parameters():
        assert not parameter.requires_grad
    pruned = prune_heads(
        ours(dropout=0.5).train().requires_grad_(True), {0: (0,)}, means={0: torch.zeros(2, 8)}
    )
    for module in pruned.modules():
        assert module.training
    pruned(images(pruned.input_size)).sum().backward()
    for parameter in pruned.parameters():
        assert parameter.grad is not None


# ---- for other classes, with random weights

NEW = ("x", "y", "z", "w")

MADE: dict[str, tuple[Callable[[], vitlens.Model], int]] = {  # and the number of heads
    "ours, distilled": (lambda: small(distillation=True), 2),
    "resnet": (lambda: small("resnet20"), 1),
    "timm, distilled": (
        lambda: vitlens.load("timm:deit_tiny_distilled_patch16_224@random", image_size=32),
        2,
    ),
    "timm, without a head": (
        lambda: vitlens.load("timm:vit_tiny_patch16_dinov3_qkvb@random", image_size=32),
        1,
    ),
    "timm, a CNN": (lambda: vitlens.load("timm:test_resnet@random", image_size=32), 1),
    "torchvision": (lambda: vitlens.load("torchvision:mobilenet_v3_small@random"), 1),
}


@pytest.mark.parametrize("name", MADE)
def test_the_head_is_new_and_nothing_else(name: str, tmp_path):
    build_model, count = MADE[name]
    old = build_model()
    before = values(old)
    new = for_classes(old, NEW)
    batch = images(new.input_size)
    heads = tuple(f"{path}." for path in classifiers(new))
    assert len(heads) == count
    assert new.classes == NEW
    assert new(batch).shape == (2, 4)
    assert new(batch).abs().max() == 0
    for key, value in new.module.state_dict().items():
        assert key.startswith(heads) or torch.equal(value, before[key]), key
    assert same(values(old), before)
    assert new.provenance.notes[-1].startswith(
        "replaced the head of" if old.has_classifier else "added a head"
    )
    assert not new.training
    for parameter in new.parameters():
        assert not parameter.requires_grad
    for path in classifiers(new):
        new.module.get_submodule(path).weight.normal_()
    again = vitlens.load(str(written(new, tmp_path)))  # and it is a model like any other
    assert again.classes == NEW
    assert torch.equal(again(batch), new(batch))


@pytest.mark.parametrize("family", ["deit-distilled", "vit-features"])
def test_a_model_of_transformers_gets_a_new_head(family):
    pytest.importorskip("transformers", minversion="5", reason="the extra hf is not installed")
    new = for_classes(vitlens.load(f"hf:{folder_of(family)[0]}"), NEW)
    assert new.classes == NEW
    assert torch.equal(new(images()), torch.zeros(2, 4))


@pytest.mark.parametrize("positions", ["learned", "sine-2d", "none"])
def test_a_head_for_the_same_classes_is_kept_and_positions_are_those_of_another_input_size(
    tmp_path, positions
):
    plain = small(positions=positions)
    same_size = for_classes(plain, plain.classes)
    assert same(values(same_size), values(plain))
    assert (same_size.provenance.notes, same_size.module is plain.module) == ((), False)
    old = vitlens.load(str(written(small(positions=positions), tmp_path)), image_size=(64, 32))
    new = for_classes(old, old.classes)
    batch = images((64, 32))
    # which interpolates in every pass
    torch.testing.assert_close(new(batch), old(batch), atol=1e-5, rtol=0)
    assert (new.module.config.image_size, new.layout.grid) == ((64, 32), (8, 2))
    assert "from 32x48 to 64x32 px" in new.provenance.notes[-1]
    assert torch.equal(vitlens.load(str(written(new, tmp_path / "again")))(batch), new(batch))


def test_random_weights_have_the_same_shapes_and_depend_on_the_seed():
    retrained = for_classes(small(), ("cat", "dog")).double()
    state = torch.random.get_rng_state()
    first = untrained_like(retrained, seed=0)
    again = untrained_like(retrained, seed=0)
    other = untrained_like(retrained, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (first.classes, first.provenance.weights, first.alias) == (
        ("cat", "dog"),
        "random",
        retrained.alias,
    )
    for part in first.modules():
        assert not part.training
    for parameter in first.parameters():
        assert not parameter.requires_grad
    assert same(values(first), values(again))
    assert not same(values(first), values(other))
    shapes = [
        {key: value.shape for key, value in values(model).items()} for model in (first, retrained)
    ]
    assert shapes[0] == shapes[1]


def test_another_image_size():
    """A ViT has positions of its new grid and the heads it had; a ResNet keeps its stem; timm's
    models follow.
    """
    model = prune_heads(small(), {0: {1}})
    larger = untrained_like(model, seed=0, size=(64, 32))
    assert larger.layout.grid == (8, 2)
    assert larger.parameter_count() - model.parameter_count() == (8 * 2 - 4 * 3) * 16
    for name in ("resnet18", "torchvision:mobilenet_v3_small"):
        model = vitlens.load(f"{name}@random")
        other = untrained_like(model, seed=0, size=(96, 128))
        stem = next(iter(model.module.state_dict()))
        assert other.module.state_dict()[stem].shape == model.module.state_dict()[stem].shape
        assert (other.parameter_count(), other.input_size) == (model.parameter_count(), (96, 128))
    model = vitlens.load("timm:test_vit@random", image_size=64)
    assert untrained_like(for_classes(model, NEW), seed=1)(images((64, 64))).shape == (2, 4)


def test_what_cannot_be_built_anew_is_refused():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 4))
    wrapped = half(net, 8)
    with pytest.raises(UnsupportedError, match="timm:NAME"):
        untrained_like(wrapped, seed=0)
    with pytest.raises(InputError, match="30 and 8 px"):
        untrained_like(small(), seed=0, size=(30, 32))
    with pytest.raises(ModelError, match="check sizes="):
        untrained_like(vitlens.load("torchvision:squeezenet1_1@random"), seed=0, size=(8, 8))
