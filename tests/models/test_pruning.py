"""A pruned model answers as the whole one with those heads masked, is smaller, and comes back from its file."""

import copy
import json
from functools import partial

import pytest
import torch

from tests.lens.tiny import FAMILIES, images, ours, shaken, timm_model
from tests.models.test_saved import OVERRIDES, rewritten
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.lens.capture import capture, capture_attention
from vitlens.lens.intervene import intervene
from vitlens.lens.replay import replaying
from vitlens.lens.trace import layers
from vitlens.models.loading import load, untrained
from vitlens.models.model import Model
from vitlens.models.rebuild import Architecture, build, prune_heads, untrained_like
from vitlens.models.saved import WEIGHTS_FILE, save

CUT = {
    **{name: FAMILIES[name] for name in ("ours", "deit-distilled", "siglip", "dinov2-registers", "torchvision-vit")},
    "query-and-key-norms": partial(timm_model, "vit_tiny_patch16_224", qk_norm=True),
    "no-bias": partial(timm_model, "vit_tiny_patch16_224", qkv_bias=False),
}
SOME = {"one": {0: (1,)}, "two": {0: (0,), 1: (1,)}, "a-layer": {0: (0, 1)}, "every": {1: (0, 1), 0: (1, 0)}}


@torch.no_grad()
def masked(model: Model, heads: dict[int, tuple[int, ...]], batch: torch.Tensor) -> torch.Tensor:
    with intervene(model, {f"blocks.{layer}.head.{head}": "zero" for layer, some in heads.items() for head in some}):
        return model(batch)


def assert_same(first: Model, second: Model) -> None:
    """Equal logits, bit by bit, and everything known of them."""
    batch = images(first.input_size)
    with torch.no_grad():
        assert torch.equal(first(batch), second(batch))
    assert first.anatomy == second.anatomy
    assert first.architecture["pruned"] == second.architecture["pruned"]


@pytest.mark.parametrize("heads", SOME.values(), ids=SOME)
@pytest.mark.parametrize("name", CUT)
def test_the_logits_of_masked_heads_with_fewer_parameters(name, heads):
    whole = CUT[name]()
    batch = images(whole.input_size)
    before = {key: value.clone() for key, value in whole.module.state_dict().items()}
    expected, clean = masked(whole, heads, batch), whole(batch)
    pruned = prune_heads(whole, heads)
    with torch.no_grad():
        torch.testing.assert_close(pruned(batch), expected, atol=1e-5, rtol=0)
    assert (expected - clean).abs().max() > 1e-3
    dim = 16 if name == "ours" else 32
    biases = 0 if name == "no-bias" else 3 * dim // 2
    lost = sum(map(len, heads.values())) * (4 * dim * dim // 2 + biases)
    if name == "query-and-key-norms":  # shared by a layer's heads, and lost with the last of them
        lost += sum(4 * dim // 2 for some in heads.values() if len(some) == 2)
    assert pruned.parameter_count() == whole.parameter_count() - lost
    assert all(torch.equal(value, before[key]) for key, value in whole.module.state_dict().items())
    assert whole.architecture["pruned"] == {}
    assert pruned.provenance.notes[-1].startswith(f"removed {sum(map(len, heads.values()))} of ")


@pytest.mark.parametrize("name", ["ours", "no-bias", "torchvision-vit"])
@pytest.mark.parametrize("heads", [SOME["two"], SOME["a-layer"]], ids=str)
@torch.no_grad()
def test_means_go_into_the_bias(name, heads):
    whole = CUT[name]()
    batch = images(whole.input_size)
    captured = capture(whole, images(whole.input_size, batch=4, seed=3), "blocks.*.heads")
    means = {layer: captured[f"blocks.{layer}.heads"].mean((0, 2)) for layer in heads}
    what = {f"blocks.{layer}.head.{head}": means[layer][head] for layer, some in heads.items() for head in some}
    with intervene(whole, what):
        expected = whole(batch)
    torch.testing.assert_close(prune_heads(whole, heads, means=means)(batch), expected, atol=1e-5, rtol=0)
    assert (prune_heads(whole, heads)(batch) - expected).abs().max() > 1e-4


@torch.no_grad()
def test_means_keep_the_precision_of_the_model():
    whole, batch = ours().double(), images((32, 48)).double()
    means = torch.full((2, 8), 1 / 3, dtype=torch.float64)
    with intervene(whole, {"blocks.0.head.1": means[1]}):
        expected = whole(batch)
    pruned = prune_heads(whole, {0: (1,)}, means={0: means})
    torch.testing.assert_close(pruned(batch), expected, atol=1e-12, rtol=0)
    other = untrained_like(loaded := load("vit-digits").double(), seed=0)  # built anew, in fp32
    assert other(images().double()).shape == loaded(images().double()).shape


@pytest.mark.parametrize("name", ["ours", "vit", "torchvision-vit"])
@torch.no_grad()
def test_pruned_again_is_pruned_at_once(name):
    """What is second in a layer that lost its first head was third."""
    if name == "torchvision-vit":
        whole = FAMILIES[name]()
        twice = prune_heads(prune_heads(whole, {0: (0,), 1: (1,)}), {0: (0,)})
        once = prune_heads(whole, {0: (0, 1), 1: (1,)})
    else:
        make = ours if name == "ours" else partial(timm_model, "vit_tiny_patch16_224")
        whole = make(depth=3, **({"dim": 24, "heads": 4} if name == "ours" else {"num_heads": 4}))
        # layer 1 is gone after the first, so that layer 2 is then layer 1
        twice = prune_heads(prune_heads(whole, {0: (0,), 1: (0, 1, 2, 3), 2: (3,)}), {0: (1,), 1: (0, 2)})
        once = prune_heads(whole, {0: (0, 2), 1: (0, 1, 2, 3), 2: (0, 2, 3)})
    assert_same(twice, once)


@pytest.mark.parametrize("heads", [{0: (1,)}, {0: (0, 1)}, {1: (0, 1)}], ids=str)
@pytest.mark.parametrize("name", ["ours", "no-bias", "torchvision-vit"])
def test_the_lens_sees_the_heads_that_are_left_and_replays_them(name, heads):
    whole = CUT[name]()
    pruned, batch = prune_heads(whole, heads), images(whole.input_size)
    ((layer, gone),) = heads.items()
    left = [1, 2] if len(gone) == 1 else [2]
    assert [site.heads for site in capture_attention(pruned, batch).sites] == left
    assert [(each.index, each.heads) for each in layers(pruned)] == list(enumerate(left))
    assert pruned.anatomy.layout == whole.anatomy.layout
    kept = (
        whole.anatomy.blocks if len(left) == 2 else tuple(b for i, b in enumerate(whole.anatomy.blocks) if i != layer)
    )
    assert pruned.anatomy.blocks == kept
    with replaying(pruned, batch) as replay:
        assert replay.exact
        last = len(left) - 1
        found = replay.run([{f"blocks.{last}.head.0": "zero"}])[0]
        torch.testing.assert_close(found, masked(pruned, {last: (0,)}, batch), atol=1e-5, rtol=0)


def test_no_heads_at_all():
    pruned = prune_heads(ours(), SOME["every"])
    assert (pruned.anatomy.family, pruned.anatomy.blocks) == ("vit", ("blocks.0", "blocks.1"))
    with pytest.raises(UnsupportedError, match="softmax attention"):
        layers(pruned)


@pytest.mark.parametrize("heads", SOME.values(), ids=SOME)
def test_ours_comes_back_from_its_file(tmp_path, heads):
    whole = untrained("vit-micro", classes=("x", "y"), image_size=(32, 48), overrides=OVERRIDES, seed=1)
    shaken(lambda: whole)
    means = {layer: torch.randn(2, 8) for layer in heads}
    pruned = prune_heads(whole.eval(), heads, means=means)
    save(pruned, tmp_path / "a" / WEIGHTS_FILE)
    loaded = load(str(tmp_path / "a"))
    assert_same(loaded, pruned)
    assert loaded.parameter_count() == pruned.parameter_count() < whole.parameter_count()
    save(loaded, tmp_path / "b" / WEIGHTS_FILE)
    first, second = ((tmp_path / part / WEIGHTS_FILE).read_bytes() for part in "ab")
    assert first == second
    other, batch = load(str(tmp_path / "a"), image_size=(64, 32)), images((64, 32))
    torch.testing.assert_close(other(batch), pruned.module((batch - pruned.mean) / pruned.std))
    assert load(f"{tmp_path / 'a'}@random").parameter_count() == pruned.parameter_count()


def test_timms_comes_back_from_its_file(tmp_path):
    whole = load("timm:vit_tiny_patch16_224", random_weights=True, image_size=(32, 32))
    pruned = prune_heads(whole, {0: (0, 1, 2), 3: (1,), 11: (0, 2)})
    save(pruned, tmp_path / WEIGHTS_FILE)
    assert_same(load(str(tmp_path)), pruned)
    other = load(str(tmp_path), image_size=(48, 64))  # its positions are resized by timm, which knows whole models
    assert other.layout.grid == (3, 4)
    assert other.parameter_count() - pruned.parameter_count() == (12 - 4) * 192
    assert torch.isfinite(other(images((48, 64)))).all()


@pytest.mark.parametrize("removed", [[0], [0, 1]])
@pytest.mark.parametrize("name", ["torchvision-vit", "query-and-key-norms"])
@torch.no_grad()
def test_a_cut_module_is_built_again_from_its_weights(monkeypatch, name, removed):
    """By a library that builds and loads whole models only."""
    whole = CUT[name]()

    def make(*_, state, **__):
        module = copy.deepcopy(whole.module)
        for parameter in module.parameters():
            parameter.normal_()
        if state is not None:
            module.load_state_dict(state)
        return module, whole.preprocessing

    monkeypatch.setattr("vitlens.models.rebuild.resolved", lambda _: make)
    pruned = prune_heads(whole, {0: removed}).module.state_dict()
    attention = whole.anatomy.attention_modules[0]
    module, _ = build(Architecture("timm", name, pruned={attention: removed}), state=pruned)
    assert module.state_dict().keys() == pruned.keys()
    assert all(torch.equal(value, pruned[key]) for key, value in module.state_dict().items())
    with pytest.raises(ModelError, match="do not fit"):
        build(Architecture("timm", name, pruned={attention: removed}), state=pruned | {f"{attention}.x": torch.ones(1)})
    with pytest.raises(InputError, match="expected heads from 0 to 1"):
        build(Architecture("timm", name, pruned={attention: [2]}), state=pruned)


@pytest.mark.parametrize(
    "pruned",
    [{"blocks.7.attn": [0]}, {"blocks.0": [0]}, {"blocks.0.attn": [0, 1]}, {}, [[0]], {"blocks.0.attn": 0}, None],
)
def test_a_record_that_does_not_fit_the_weights_is_refused(tmp_path, pruned):
    whole = untrained("vit-micro", classes=("x", "y"), image_size=(32, 48), overrides=OVERRIDES | {"heads": 4}, seed=1)
    made = prune_heads(whole, {0: (1,)})
    save(made, tmp_path / WEIGHTS_FILE)
    rewritten(tmp_path, {"architecture": json.loads(json.dumps({**made.architecture, "pruned": pruned}))})
    with pytest.raises(ModelError, match=r"expected|weights do not fit") as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("heads", "means", "message"),
    [
        ({0: ()}, None, "expected at least one head to remove, found none"),
        ({2: (0,)}, None, "expected a layer from 0 to 1 of ours, found 2"),
        ({-1: (0,)}, None, "expected a layer from 0 to 1 of ours, found -1"),
        ({1: (0, 2)}, None, "expected a head from 0 to 1 in layer 1 of ours, found 2"),
        ({0: (1,)}, {0: torch.ones(2, 13, 8)}, r"expected means \(heads, head_dim\) = \(2, 8\) for layer 0, found \(2"),
        ({1: (0,)}, {0: torch.ones(2, 8)}, "for layer 1, found none"),
    ],
)
def test_heads_and_means_that_are_not_there(heads, means, message):
    with pytest.raises(InputError, match=message):
        prune_heads(ours(), heads, means=means)
    bare = timm_model("vit_tiny_patch16_224", proj_bias=False)
    with pytest.raises(UnsupportedError, match="expected an output projection with a bias at layer 0"):
        prune_heads(bare, {0: (1,)}, means={0: torch.zeros(2, 16)})


@pytest.mark.parametrize(
    ("name", "layer"),
    [(name, 0) for name in ("beit", "eva02", "perception-encoder", "cait", "swin", "torchvision-swin", "our-swin")]
    + [("siglip", 2)],  # its pooling; its blocks can be cut
)
def test_attention_that_cannot_be_cut(name, layer):
    with pytest.raises(UnsupportedError, match="expected attention that can be cut") as caught:
        prune_heads(FAMILIES[name](), {layer: (0,)})
    assert "\n" not in str(caught.value)


def test_training_mode_and_gradients_are_kept():
    frozen = prune_heads(ours(), {0: (0,)})
    assert not any(module.training for module in frozen.modules())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    pruned = prune_heads(ours(dropout=0.5).train().requires_grad_(True), {0: (0,)}, means={0: torch.zeros(2, 8)})
    assert all(module.training for module in pruned.modules())
    assert all(parameter.requires_grad for parameter in pruned.parameters())
    pruned(images(pruned.input_size)).sum().backward()
    assert all(parameter.grad is not None for parameter in pruned.parameters())
