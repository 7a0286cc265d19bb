"""`vitlens.walkthrough`: every step equals the model's in every family."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vitlens
from tests.kit.lens import HANDWRITTEN
from tests.kit.select import index_by, values_of
from tests.kit.tiny import FAMILIES, images, ours, torchvision_swin
from vitlens.errors import InputError, UnsupportedError

WALKED = {
    name: FAMILIES[name]
    for name in (
        "ours",
        "vit-mean",
        "deit-distilled",
        "beit",
        "dinov2-registers",
        "dinov3",
        "siglip",
        "perception-encoder",
        "torchvision-vit",
    )
} | {"wrapped": HANDWRITTEN["softmax"]}
ROTARY = {"dinov3", "perception-encoder"}  # queries and keys are rotated after their projection
# positions that do not leave with the vectors added to the patches
IN_ATTENTION = {
    "beit",
    "dinov3",
}
STEPS = [
    "embedding",
    "positions",
    "norm",
    "queries",
    "scores",
    "softmax",
    "values",
    "projection",
    "residual",
]
ONE = images((32, 48), batch=1)


def entropy(weights: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of each row, in nats."""
    return torch.special.entr(weights).sum(-1)


@pytest.fixture(scope="module", params=WALKED)
def walked(request):
    model = WALKED[request.param]()
    return (
        request.param,
        model,
        vitlens.walkthrough(model, images(model.input_size, batch=1), layer=1, head=1),
    )


def by_step(walk):
    return index_by(walk.checks, "step")


def test_every_step_equals_the_models_own(walked):
    name, _, walk = walked
    assert values_of(walk.checks, "step") == STEPS
    steps = by_step(walk)
    for check in walk.checks:
        if check.difference is None:
            assert check.note
            assert check.step in ("positions", "norm", "queries", "residual")
        else:
            assert check.difference <= 1e-4 * check.largest, (name, check)
            assert check.equal
    assert ("rotated" in steps["queries"].note) == (name in ROTARY)
    assert ("bias" in steps["scores"].note) == (name == "beit")
    assert ("nothing is added" in steps["positions"].note) == (name in IN_ATTENTION)


def test_the_weights_and_entropies_are_those_of_attention(walked):
    name, model, walk = walked
    weights = vitlens.attention(model, images(model.input_size, batch=1))
    torch.testing.assert_close(walk.weights, weights[1][0, 1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(walk.weights @ walk.values, walk.outputs, rtol=1e-4, atol=1e-5)
    assert walk.scale == pytest.approx(walk.queries.shape[-1] ** -0.5)
    prefix = len(model.layout.prefix)
    assert walk.key == prefix + int(walk.weights[walk.query, prefix:].argmax())
    if name == "wrapped":  # the lens sees no queries
        assert walk.entropies.scaled.numel() == 0
        return
    expected = torch.stack(
        [entropy(layer).mean((0, 2)) for layer in weights if layer.shape[-1] == layer.shape[-2]]
    )
    torch.testing.assert_close(walk.entropies.scaled, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        walk.entropies.unscaled[1, 1], entropy(walk.unscaled).mean(), rtol=1e-3, atol=1e-4
    )


def test_permuted_patches_give_permuted_outputs_only_without_positions(walked):
    name, _, walk = walked
    # a norm before the first block: what is added is no fixed vector
    if name == "perception-encoder":
        assert walk.permutations == ()
        assert walk.positions is None
        return
    placed, without = walk.permutations
    assert (placed.positions, without.positions) == (True, False)
    assert (without.difference <= 1e-4 * without.largest) == (name not in IN_ATTENTION)
    assert placed.difference > 1e-3 * placed.largest
    if name not in IN_ATTENTION:
        assert without.logits < 1e-5
        assert placed.logits > without.logits


def test_what_the_classifier_reads(walked):
    _, model, walk = walked
    changed = index_by(walk.changed, "change")
    assert torch.equal(changed["none"].logits[0], walk.logits)
    reads_prefix = model.anatomy.readout in ("cls", "cls+distillation")
    assert (changed["patches-zero"].difference == 0) == reads_prefix
    if model.layout.prefix and model.anatomy.readout != "pool":
        assert (changed["prefix-zero"].difference > 0) == reads_prefix
    assert ("mean-read" in changed) == reads_prefix


def test_the_changed_models_are_ones_without_positions_or_scaling():
    model = ours()
    walk = vitlens.walkthrough(model, ONE, layer=0, head=0)
    torch.testing.assert_close(walk.unscaled, (walk.queries @ walk.keys.T).softmax(-1))
    changed = {row.change: row.logits for row in walk.changed}
    for (
        block
    ) in model.module.blocks:  # the same model with queries that are larger by sqrt(head_dim)
        block.attn.qkv.weight[:16] *= 8**0.5
        block.attn.qkv.bias[:16] *= 8**0.5
    torch.testing.assert_close(changed["unscaled"], model(ONE), rtol=1e-4, atol=1e-5)
    other = ours()
    other.module.pos_embed[:, 1:] = 0
    torch.testing.assert_close(changed["no-positions"], other(ONE), rtol=1e-4, atol=1e-5)


def test_a_convolution_is_unfold_and_a_linear_map():
    model = ours()
    embedding = vitlens.walkthrough(model, ONE).embedding
    assert embedding.patches.shape[-1] == 3 * 8 * 16
    pixels = (ONE - model.mean) / model.std
    tokens = model.module.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embedding.embedded, tokens, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embedding.convolved, tokens, rtol=1e-4, atol=1e-5)
    # row 0, column 1
    torch.testing.assert_close(embedding.patches[0, 1], pixels[0, :, :8, 16:32].flatten())


def test_a_block_that_adds_something_else_is_seen():
    class Block(type(ours().module.blocks[0])):
        def forward(self, tokens):
            return super().forward(tokens) + 0.5

    model = ours()
    model.module.blocks[1].__class__ = Block
    checks = by_step(vitlens.walkthrough(model, ONE, layer=1))
    assert checks["residual"].difference == pytest.approx(0.5, rel=1e-3)
    assert not checks["residual"].equal
    assert checks["projection"].equal


@pytest.mark.parametrize(
    "names",
    [
        ("q_proj", "k_proj", "v_proj"),
        ("query", "key", "value"),
        ("to_q", "to_k", "to_v"),
        ("a", "b", "c"),
    ],
)
def test_three_projections_are_found_under_the_names_of_the_libraries(names):
    class Separate(type(ours().module.blocks[0].attn)):
        def forward(self, tokens, mask=None):
            heads = [
                self.get_submodule(name)(tokens).unflatten(-1, (2, -1)).transpose(1, 2)
                for name in names
            ]
            return self.proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    model = ours()
    for attention in (block.attn for block in model.module.blocks):
        for name, weight, bias in zip(
            names, attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3)
        ):
            attention.add_module(name, nn.Linear(16, 16))
            attention.get_submodule(name).load_state_dict({"weight": weight, "bias": bias})
        del attention.qkv
        attention.__class__ = Separate
    queries = by_step(vitlens.walkthrough(model, ONE))["queries"]
    assert queries.equal == (names[0] != "a")
    assert ("have known names" in queries.note) == (names[0] == "a")


def test_a_key_that_a_bias_masks_is_masked_without_scaling_too():
    class Masked(type(ours().module.blocks[0].attn)):
        def forward(self, tokens, mask=None):
            heads = (
                part.unflatten(-1, (2, -1)).transpose(1, 2)
                for part in self.qkv(tokens).chunk(3, -1)
            )
            bias = torch.zeros(tokens.shape[1], tokens.shape[1])
            bias[:, 3] = -torch.inf
            attended = F.scaled_dot_product_attention(*heads, attn_mask=bias)
            return self.proj(attended.transpose(1, 2).flatten(2))

    model = ours()
    for block in model.module.blocks:
        block.attn.__class__ = Masked
    walk = vitlens.walkthrough(model, ONE)
    unscaled = (walk.queries @ walk.keys.T).index_fill(1, torch.tensor([3]), -torch.inf).softmax(-1)
    torch.testing.assert_close(
        walk.entropies.unscaled[walk.layer, walk.head], entropy(unscaled).mean(), rtol=1e-3, atol=0
    )


def test_wrong_values_are_seen_next_to_large_keys():
    class Scaled(type(ours().module.blocks[0].attn)):
        def forward(self, tokens, mask=None):
            queries, keys, values = (
                part.unflatten(-1, (2, -1)).transpose(1, 2)
                for part in self.qkv(tokens).chunk(3, -1)
            )
            values = values + 1e-3 * values.abs().max()
            return self.proj(
                F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
            )

    model = ours()
    with torch.no_grad():
        for attention in (block.attn for block in model.module.blocks):
            attention.qkv.bias[16:32] += 1e3  # a constant of all keys changes no weight
            attention.__class__ = Scaled
    assert not by_step(vitlens.walkthrough(model, ONE))["queries"].equal


def test_the_epsilon_of_a_norm_is_its_own():
    model = ours()
    for block in model.module.blocks:
        block.norm1.eps = 0.5
    walk = vitlens.walkthrough(model, ONE)
    assert by_step(walk)["norm"].equal
    torch.testing.assert_close(
        walk.normed, model.module.blocks[1].norm1(walk.input), rtol=1e-4, atol=1e-5
    )


def test_by_default_the_layer_in_the_middle_and_its_sharpest_head():
    model = ours(depth=4, heads=4)
    walk = vitlens.walkthrough(model, ONE)
    weights = vitlens.attention(model, ONE)[2][0]
    assert (walk.layer, walk.head, walk.heads, walk.layers) == (
        2,
        int(entropy(weights).mean(-1).argmin()),
        4,
        4,
    )
    assert walk.query == 0  # CLS
    same = vitlens.walkthrough(model, ONE, seed=0).order
    other = vitlens.walkthrough(model, ONE, seed=1).order
    assert torch.equal(walk.order, same)
    assert not torch.equal(walk.order, other)
    assert sorted(other.tolist()) == list(range(model.layout.patches))
    # without CLS the patch in the middle is followed
    walk = vitlens.walkthrough(ours(pooling="mean"), ONE)
    assert (
        walk.query == model.layout.grid[0] // 2 * model.layout.grid[1] + model.layout.grid[1] // 2
    )
    assert set(values_of(walk.changed, "change")) == {
        "none",
        "no-positions",
        "unscaled",
        "patches-zero",
    }


@pytest.mark.parametrize(
    ("build", "batch", "options", "error", "said"),
    [
        (torchvision_swin, 1, {}, UnsupportedError, "the same steps hold within each window"),
        (FAMILIES["cait"], 1, {}, UnsupportedError, "talking heads"),
        # tests/public/cli/test_refusals.py has the others
        (
            ours,
            1,
            {"head": -1},
            InputError,
            "from 0 to 1",
        ),
        (ours, 2, {}, InputError, "found 2"),
    ],
)
def test_what_cannot_be_walked_through_is_refused(build, batch, options, error, said):
    model = build()
    with pytest.raises(error, match=said):
        vitlens.walkthrough(model, images(model.input_size, batch=batch), **options)
