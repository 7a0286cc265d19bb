"""The vision transformer: parameter counts, timm's weights and logits, its parts, its degenerate forms."""

from dataclasses import replace

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lens.tiny import shaken
from vitlens.errors import InputError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.configs import VIT_PRESETS, ViTConfig
from vitlens.models.positions import interpolate_positions
from vitlens.models.vit import PatchEmbedding, TransformerBlock, VisionTransformer
from vitlens.names import PRESETS
from vitlens.shapes import PrefixKind

# two blocks, two heads, a grid that is not square
TINY = ViTConfig(image_size=(8, 12), patch_size=(4, 2), dim=16, depth=2, heads=2, classes=5)


def build(config: ViTConfig = TINY, **change: object) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(replace(config, **change)).eval()


def pictures(height: int = 8, width: int = 12, *, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def expected_parameters(config: ViTConfig) -> int:
    """12 d² + 13 d a block (MLP ratio 4), the patches' map, CLS, positions, final norm and head."""
    dim, patch = config.dim, 3 * config.patch_size[0] * config.patch_size[1]
    block = 12 * dim**2 + 13 * dim
    return config.depth * block + (patch + 1) * dim + (1 + config.layout.tokens + 2) * dim + (dim + 1) * config.classes


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("vit-")])
def test_preset_has_its_parameters(name: str) -> None:
    stated = {"vit-micro": 1_205_898, "vit-mini": 809_354, "vit-tiny": 2_693_578}
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in VisionTransformer(VIT_PRESETS[name]).parameters())
    assert count == stated.get(name, count) == expected_parameters(VIT_PRESETS[name])


@pytest.mark.parametrize("size", ["tiny", *(pytest.param(size, marks=pytest.mark.slow) for size in ("small", "base"))])
def test_timms_weights_load_and_give_the_same_logits(size: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(f"vit_{size}_patch16_224", pretrained=False).eval()
    ours = VisionTransformer(VIT_PRESETS[f"vit-{size}-224"]).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = pictures(224, 224, batch=1)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=0)


TWINS = {
    "cls": ({}, {}),
    "no qkv bias": ({"qkv_bias": False}, {"qkv_bias": False}),
    "mean": ({"pooling": "mean"}, {"global_pool": "avg", "class_token": False}),
    # timm: no_embed_class takes positions from all prefix tokens; ours keeps CLS its own, set to 0 to compare
    "registers": ({"registers": 4}, {"reg_tokens": 4, "no_embed_class": True}),
    "distilled": ({"distillation": True}, {}),
}


@pytest.mark.parametrize("name", TWINS)
def test_tiny_model_equals_timms(name: str) -> None:
    change, options = TWINS[name]
    kind = timm.models.deit.VisionTransformerDistilled if name == "distilled" else timm.models.VisionTransformer
    shape = {"img_size": (8, 12), "patch_size": (4, 2), "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    theirs, ours, images = shaken(lambda: kind(**shape, **options), scale=0.2), build(**change), pictures()
    state = theirs.state_dict()
    if name == "registers":
        state["pos_embed"] = torch.cat((torch.zeros(1, 1, TINY.dim), state["pos_embed"]), dim=1)
    ours.load_state_dict(state, strict=True)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)
    if name == "distilled":
        theirs.set_distilled_training(True)
        torch.testing.assert_close(ours.forward_heads(images), theirs.train()(images), atol=1e-5, rtol=0)


def test_patch_embedding_is_unfold_and_linear() -> None:
    torch.manual_seed(0)
    embedding = PatchEmbedding((2, 3), 16)
    unfolded = F.unfold(pictures(), kernel_size=(2, 3), stride=(2, 3)).transpose(1, 2)
    linear = F.linear(unfolded, embedding.proj.weight.flatten(1), embedding.proj.bias)
    torch.testing.assert_close(embedding(pictures()), linear, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("prefix", "to"), [(0, (4, 4)), (2, (1, 7))])
def test_positions_are_resampled_as_timms(prefix: int, to: tuple[int, int]) -> None:
    positions = torch.randn(1, prefix + 6, 8)
    ours = interpolate_positions(positions, prefix=prefix, grid=(2, 3), to=to)
    torch.testing.assert_close(ours, resample_abs_pos_embed(positions, list(to), [2, 3], num_prefix_tokens=prefix))
    assert interpolate_positions(positions, prefix=prefix, grid=(2, 3), to=(2, 3)) is positions


@pytest.mark.parametrize(("height", "width"), [(4, 2), (12, 24)])
def test_other_sizes_run_and_positions_follow(height: int, width: int) -> None:
    model, images = build(), pictures(height, width)
    assert model(images).shape == (2, 5)
    added = model.tokens(images)[:, 1:] - model.patch_embed(images)
    expected = interpolate_positions(model.pos_embed, prefix=1, grid=(2, 6), to=(height // 4, width // 2))[:, 1:]
    torch.testing.assert_close(added, expected.expand_as(added), atol=1e-6, rtol=0)


PREFIXES: list[tuple[dict[str, object], tuple[PrefixKind, ...]]] = [
    ({}, ("cls",)),
    ({"pooling": "mean", "registers": 2}, ("register", "register")),
    ({"distillation": True, "registers": 1}, ("cls", "distillation", "register")),
]


@pytest.mark.parametrize(("change", "prefix"), PREFIXES)
def test_tokens_stand_as_the_layout_says(change: dict[str, object], prefix: tuple[PrefixKind, ...]) -> None:
    model = build(**change)
    assert (model.layout.prefix, model.layout.grid) == (prefix, (2, 6))
    tokens = model.tokens(pictures(batch=1))
    assert tokens.shape == (1, model.layout.tokens, 16)
    assert model.forward_features(pictures()).shape == (2, model.layout.tokens, 16)
    registers = model.layout.positions("register")
    if model.reg_token is not None:  # no position is added to a register
        assert torch.equal(tokens[:, list(registers)], model.reg_token)


def test_mean_pooling_reads_the_normalised_mean_of_the_patches_without_registers() -> None:
    model = shaken(lambda: build(pooling="mean", registers=2))
    read = model.fc_norm(model.forward_features(pictures())[:, 2:].mean(1))
    torch.testing.assert_close(model(pictures()), model.head(read))


def test_without_positions_the_order_of_patches_is_lost() -> None:
    images = pictures()
    swapped = torch.cat((images[..., 6:], images[..., :6]), dim=-1)  # three columns of patches change places
    for positions in ("learned", "none"):
        model = shaken(lambda positions=positions: build(positions=positions))
        assert torch.allclose(model(images), model(swapped), atol=1e-5) is (positions == "none")


DEGENERATE: list[dict[str, object]] = [
    {"classes": 1},
    {"patch_size": (8, 12)},
    {"attention": False},
    {"mlp": False},
    {"residual": False},
    {"norm": False},
    {"attention": False, "residual": False, "norm": False, "positions": "none", "pooling": "mean"},
    {"registers": 1, "distillation": True, "heads": 1, "depth": 1, "mlp_ratio": 0.5},
]


@pytest.mark.parametrize("change", DEGENERATE, ids=str)
def test_degenerate_models_run_and_learn(change: dict[str, object]) -> None:
    model = build(**change).train()
    logits = model(pictures(batch=1))
    assert logits.shape == (1, model.config.classes)
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_parts_taken_away_are_gone() -> None:
    gone = {"attention": MultiHeadSelfAttention, "mlp": nn.GELU, "norm": nn.LayerNorm}
    for part, kind in gone.items():
        assert kind in map(type, build().modules())
        assert kind not in map(type, build(**{part: False}).modules())
    tokens = torch.randn(2, 13, 16)
    block = TransformerBlock(replace(TINY, mlp=False, residual=False)).eval()
    assert torch.equal(block(tokens), block.attn(block.norm1(tokens)))
    block.residual = True
    assert torch.equal(block(tokens), tokens + block.attn(block.norm1(tokens)))


def test_without_attention_a_patch_changes_its_own_token_alone() -> None:
    model, images = build(attention=False), pictures()
    changed = images.clone()
    changed[:, :, 4:8, 2:4] += 1  # row 1, column 1 of a grid of 2 rows and 6 columns, after CLS
    moved = (model.forward_features(images) - model.forward_features(changed)).abs().amax(dim=(0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [1 + 1 * 6 + 1]


def test_drop_path_grows_with_depth_and_drops_whole_images() -> None:
    assert [block.drop_path.p for block in build(depth=3, drop_path=0.4).blocks] == pytest.approx([0, 0.2, 0.4])
    block = TransformerBlock(TINY, drop_path=0.4).train()
    tokens = torch.randn(400, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    untouched = (block(tokens) == tokens).all(dim=2).float()
    assert (untouched.mean(1).unique().tolist()) == [0, 1]  # an image's tokens go together
    assert untouched.mean().item() == pytest.approx(0.4**2, abs=4 * (0.16 * 0.84 / 400) ** 0.5)  # both branches out
    assert (block.eval()(tokens) != tokens).any(dim=2).all()


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "drop_path"])
def test_each_dropout_acts_in_training_alone(rate: str) -> None:
    model = build(**{rate: 0.5})
    assert torch.equal(model(pictures()), model(pictures()))
    model.train()
    assert not torch.equal(model(pictures()), model(pictures()))


def test_initial_weights() -> None:
    model = build(VIT_PRESETS["vit-tiny"])
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:  # positions and tokens are cut off at twice their deviation, which leaves 0.88 of it
            spread = 48**-0.5 if name == "patch_embed.proj.weight" else 0.02
            assert parameter.std().item() == pytest.approx(spread, rel=0.2), name
    for name, other in build(VIT_PRESETS["vit-tiny"]).named_parameters():
        assert torch.equal(other, model.get_parameter(name)), name  # same seed, same weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "expected dim divisible by heads, found dim 16 and 3 heads; try 2 heads"),
        ({"image_size": (8, 13)}, "expected an image width divisible by the patch's, found 13 and 2 px; try 12 px"),
        ({"image_size": (3, 12)}, "expected an image height divisible by the patch's, found 3 and 4 px; try 4 px"),
        ({"patch_size": (0, 2)}, "expected an image height divisible by the patch's, found 8 and 0 px; try 8 px"),
        ({"depth": 0}, "expected depth of at least 1, found 0"),
        ({"heads": 0}, "expected heads of at least 1, found 0"),
        ({"classes": 0}, "expected classes of at least 1, found 0"),
        ({"registers": -1}, "expected registers of at least 0, found -1"),
        ({"mlp_ratio": 0.0}, "expected mlp_ratio of at least 1/dim, found 0.0"),
        ({"dropout": 1.0}, "expected dropout in [0, 1), found 1.0"),
        ({"drop_path": -0.1}, "expected drop_path in [0, 1), found -0.1"),
        ({"distillation": True, "pooling": "mean"}, "expected pooling 'cls' with a distillation token, found 'mean'"),
        ({"attention": False, "mlp": False}, "expected blocks with attention or an MLP, found neither"),
        ({"residual": False, "drop_path": 0.1}, "expected drop_path 0 without residual connections"),
        ({"norm": False, "norm_first": False}, "expected norms with norm_first=False (post-norm), found norm=False"),
        ({"positions": "sine-2d", "dim": 18}, "dim divisible by 4 with positions 'sine-2d', found 18; try 20"),
        ({"positions": "sine", "dim": 15, "heads": 3}, "dim divisible by 2 with positions 'sine', found 15; try 16"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_built_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        replace(TINY, **change)
    assert message in str(error.value)


def test_what_a_model_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="expected a model with a distillation token, found none"):
        build().forward_heads(pictures())
    with pytest.raises(InputError, match="expected images divisible into patches of 4x2 px, found 8x13 px"):
        build()(pictures(8, 13))
    with pytest.raises(InputError, match="found positions 'none'"):
        build(positions="none").positions((2, 6))
