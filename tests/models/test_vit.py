"""The vision transformer: parameter counts, timm's weights and logits, its parts, its degenerate forms."""

from dataclasses import replace

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.errors import InputError
from vitlens.models.attention import MultiHeadSelfAttention
from vitlens.models.configs import VIT_PRESETS, ViTConfig
from vitlens.models.positions import interpolate_positions
from vitlens.models.vit import PatchEmbedding, TransformerBlock, VisionTransformer
from vitlens.names import PRESETS
from vitlens.shapes import PrefixKind

# two blocks, two heads, a grid that is not square
TINY = ViTConfig(image_size=(8, 12), patch_size=(4, 2), dim=16, depth=2, heads=2, classes=5)


def build(config: ViTConfig = TINY, *, seed: int = 0) -> VisionTransformer:
    torch.manual_seed(seed)
    return VisionTransformer(config).eval()


def pictures(height: int = 8, width: int = 12, *, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def expected_parameters(config: ViTConfig) -> int:
    """12 d² + 13 d a block (MLP ratio 4), the patches' map, CLS, positions, final norm and head."""
    dim, patch = config.dim, 3 * config.patch_size[0] * config.patch_size[1]
    block = 12 * dim**2 + 13 * dim
    return config.depth * block + (patch + 1) * dim + (1 + config.layout.tokens + 2) * dim + (dim + 1) * config.classes


def randomise(model: nn.Module) -> None:
    """Every parameter away from 0 and 1, so that a forgotten bias or norm shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


def timm_twin(config: ViTConfig, **options: object) -> nn.Module:
    model: nn.Module = timm.models.VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        embed_dim=config.dim,
        depth=config.depth,
        num_heads=config.heads,
        num_classes=config.classes,
        **options,
    ).eval()
    randomise(model)
    return model


def test_presets_are_the_names() -> None:
    assert tuple(VIT_PRESETS) == tuple(name for name in PRESETS if name.startswith("vit-"))


@pytest.mark.parametrize("name", VIT_PRESETS)
def test_preset_has_its_parameters(name: str) -> None:
    stated = {"vit-micro": 1_205_898, "vit-mini": 809_354, "vit-tiny": 2_693_578}
    with torch.device("meta"):
        model = VisionTransformer(VIT_PRESETS[name])
        if name not in stated:
            size = name.split("-")[1]
            stated[name] = parameters(timm.create_model(f"vit_{size}_patch16_224", pretrained=False))
    assert parameters(model) == stated[name] == expected_parameters(VIT_PRESETS[name])


@pytest.mark.parametrize(
    "size", ["tiny", pytest.param("small", marks=pytest.mark.slow), pytest.param("base", marks=pytest.mark.slow)]
)
def test_timms_weights_load_and_give_the_same_logits(size: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(f"vit_{size}_patch16_224", pretrained=False).eval()
    ours = VisionTransformer(VIT_PRESETS[f"vit-{size}-224"]).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = pictures(224, 224, batch=1)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=0)


def test_same_keys_and_shapes_as_timms_base() -> None:
    with torch.device("meta"):
        for size in ("small", "base"):
            theirs = timm.create_model(f"vit_{size}_patch16_224", pretrained=False).state_dict()
            ours = VisionTransformer(VIT_PRESETS[f"vit-{size}-224"]).state_dict()
            assert {key: value.shape for key, value in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, {}),
        ({"qkv_bias": False}, {"qkv_bias": False}),
        ({"pooling": "mean"}, {"global_pool": "avg", "class_token": False}),
    ],
    ids=["cls", "no qkv bias", "mean"],
)
def test_tiny_model_equals_timms(change: dict[str, object], options: dict[str, object]) -> None:
    theirs = timm_twin(TINY, **options)
    ours = build(replace(TINY, **change))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(ours(pictures()), theirs(pictures()), atol=1e-5, rtol=0)


def test_registers_equal_timms() -> None:
    # timm: no_embed_class takes positions from all prefix tokens; ours keeps CLS its own, set to 0 to compare
    theirs = timm_twin(TINY, reg_tokens=4, no_embed_class=True)
    ours = build(replace(TINY, registers=4))
    state = theirs.state_dict()
    state["pos_embed"] = torch.cat((torch.zeros(1, 1, TINY.dim), state["pos_embed"]), dim=1)
    ours.load_state_dict(state, strict=True)
    torch.testing.assert_close(ours(pictures()), theirs(pictures()), atol=1e-5, rtol=0)


def test_distilled_model_equals_timms() -> None:
    torch.manual_seed(0)
    theirs = timm.models.deit.VisionTransformerDistilled(
        img_size=(8, 12), patch_size=(4, 2), embed_dim=16, depth=2, num_heads=2, num_classes=5
    ).eval()
    randomise(theirs)
    ours = build(replace(TINY, distillation=True))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    images = pictures()
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)
    theirs.set_distilled_training(True)
    torch.testing.assert_close(ours.forward_heads(images), theirs.train()(images), atol=1e-5, rtol=0)
    label, teacher = ours.forward_heads(images)
    torch.testing.assert_close(ours(images), (label + teacher) / 2)
    assert not torch.allclose(label, teacher)


def test_one_head_has_no_pair() -> None:
    with pytest.raises(InputError, match="expected a model with a distillation token, found none"):
        build().forward_heads(pictures())


@pytest.mark.parametrize("patch_size", [(4, 2), (2, 3), (8, 12), (1, 1)])
def test_patch_embedding_is_unfold_and_linear(patch_size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    embedding = PatchEmbedding(patch_size, 16)
    unfolded = F.unfold(pictures(), kernel_size=patch_size, stride=patch_size).transpose(1, 2)
    linear = F.linear(unfolded, embedding.proj.weight.flatten(1), embedding.proj.bias)
    torch.testing.assert_close(embedding(pictures()), linear, atol=1e-5, rtol=0)


def test_patches_stand_row_by_row() -> None:
    embedding = PatchEmbedding((4, 2), 16)
    images = pictures()
    changed = images.clone()
    changed[:, :, 4:8, 2:4] += 1  # row 1, column 1 of a grid of 2 rows and 6 columns
    moved = (embedding(images) - embedding(changed)).abs().amax(dim=(0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [1 * 6 + 1]


@pytest.mark.parametrize(("prefix", "to"), [(0, (4, 4)), (1, (3, 5)), (2, (1, 7)), (5, (2, 3))])
def test_positions_are_resampled_as_timms(prefix: int, to: tuple[int, int]) -> None:
    positions = torch.randn(1, prefix + 6, 8)
    ours = interpolate_positions(positions, prefix=prefix, grid=(2, 3), to=to)
    theirs = resample_abs_pos_embed(positions, list(to), [2, 3], num_prefix_tokens=prefix)
    torch.testing.assert_close(ours, theirs)


def test_positions_stay_on_their_own_grid_and_keep_constants() -> None:
    positions = torch.randn(1, 7, 8)
    assert interpolate_positions(positions, prefix=1, grid=(2, 3), to=(2, 3)) is positions
    constant = positions[:, :1].expand(1, 7, 8)
    resized = interpolate_positions(constant, prefix=1, grid=(2, 3), to=(5, 4))
    torch.testing.assert_close(resized, constant[:, :1].expand(1, 21, 8))


@pytest.mark.parametrize(("height", "width"), [(4, 2), (8, 8), (16, 6), (12, 24)])
def test_other_sizes_run_and_positions_follow(height: int, width: int) -> None:
    model = build()
    images = pictures(height, width)
    assert model(images).shape == (2, 5)
    added = model.tokens(images)[:, 1:] - model.patch_embed(images)
    assert model.pos_embed is not None
    grid = (height // 4, width // 2)
    expected = interpolate_positions(model.pos_embed, prefix=1, grid=(2, 6), to=grid)[:, 1:]
    torch.testing.assert_close(added, expected.expand_as(added), atol=1e-6, rtol=0)


def test_image_that_patches_do_not_cover_is_refused() -> None:
    with pytest.raises(InputError, match="expected images divisible into patches of 4x2 px, found 8x13 px"):
        build()(pictures(8, 13))


PREFIXES: list[tuple[dict[str, object], tuple[PrefixKind, ...]]] = [
    ({"pooling": "mean"}, ()),
    ({}, ("cls",)),
    ({"distillation": True}, ("cls", "distillation")),
    ({"registers": 4}, ("cls", *["register"] * 4)),
    ({"pooling": "mean", "registers": 2}, ("register", "register")),
    ({"distillation": True, "registers": 1}, ("cls", "distillation", "register")),
]


@pytest.mark.parametrize(("change", "prefix"), PREFIXES)
def test_tokens_stand_as_the_layout_says(change: dict[str, object], prefix: tuple[PrefixKind, ...]) -> None:
    model = build(replace(TINY, **change))
    assert model.layout.prefix == prefix
    assert model.layout.grid == (2, 6)
    tokens = model.tokens(pictures(batch=1))
    assert tokens.shape == (1, model.layout.tokens, 16)
    assert model.forward_features(pictures()).shape == (2, model.layout.tokens, 16)
    registers = model.layout.positions("register")
    if model.reg_token is not None:  # no position is added to a register
        assert torch.equal(tokens[:, list(registers)], model.reg_token)
    model(pictures(batch=1)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mean_pooling_reads_the_normalised_mean_of_the_patches() -> None:
    model = build(replace(TINY, pooling="mean", registers=2))
    randomise(model)
    features = model.forward_features(pictures())
    read = model.fc_norm(features[:, 2:].mean(1))
    torch.testing.assert_close(model(pictures()), model.head(read))


def test_cls_is_read_alone() -> None:
    model = build()
    features = model.forward_features(pictures())
    torch.testing.assert_close(model(pictures()), model.head(features[:, 0]))


def test_without_positions_the_order_of_patches_is_lost() -> None:
    images = pictures()
    swapped = torch.cat((images[..., 6:], images[..., :6]), dim=-1)  # three columns of patches change places
    for positions in (True, False):
        model = build(replace(TINY, positions=positions))
        randomise(model)
        assert torch.allclose(model(images), model(swapped), atol=1e-5) is not positions


DEGENERATE: list[dict[str, object]] = [
    {"heads": 1},
    {"depth": 1},
    {"classes": 1},
    {"patch_size": (8, 12)},
    {"attention": False},
    {"mlp": False},
    {"residual": False},
    {"norm": False},
    {"positions": False},
    {"attention": False, "residual": False, "norm": False, "positions": False, "pooling": "mean"},
    {"registers": 1, "distillation": True, "heads": 1, "depth": 1},
    {"mlp_ratio": 0.5},
]


@pytest.mark.parametrize("change", DEGENERATE, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_degenerate_models_run_and_learn(change: dict[str, object], batch: int) -> None:
    model = build(replace(TINY, **change)).train()
    logits = model(pictures(batch=batch))
    assert logits.shape == (batch, model.config.classes)
    logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_parts_taken_away_are_gone() -> None:
    def modules(**change: bool) -> set[type]:
        return {type(module) for module in build(replace(TINY, **change)).modules()}

    assert MultiHeadSelfAttention in modules()
    assert MultiHeadSelfAttention not in modules(attention=False)
    assert nn.GELU not in modules(mlp=False)
    assert nn.LayerNorm not in modules(norm=False)
    tokens = torch.randn(2, 13, 16)
    block = TransformerBlock(replace(TINY, mlp=False, residual=False)).eval()
    assert torch.equal(block(tokens), block.attn(block.norm1(tokens)))
    block.residual = True
    assert torch.equal(block(tokens), tokens + block.attn(block.norm1(tokens)))


def test_without_attention_a_patch_changes_its_own_token_alone() -> None:
    model = build(replace(TINY, attention=False))
    images = pictures()
    changed = images.clone()
    changed[:, :, :4, :2] += 1
    moved = (model.forward_features(images) - model.forward_features(changed)).abs().amax(dim=(0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [1]


def test_image_does_not_depend_on_its_batch() -> None:
    model = build()
    images = pictures(batch=4)
    torch.testing.assert_close(model(images)[2:3], model(images[2:3]), atol=1e-6, rtol=0)


def test_fused_and_raw_attention_give_the_same_logits() -> None:
    model = build()
    randomise(model)
    fused = model(pictures())
    for module in model.modules():
        if isinstance(module, MultiHeadSelfAttention):
            module.fused = False
    torch.testing.assert_close(model(pictures()), fused, atol=1e-5, rtol=0)


def test_drop_path_grows_with_depth_and_drops_whole_images() -> None:
    model = build(replace(TINY, depth=3, drop_path=0.4))
    assert [block.drop_path.p for block in model.blocks] == pytest.approx([0, 0.2, 0.4])
    block = TransformerBlock(TINY, drop_path=0.4).train()
    tokens = torch.randn(400, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    untouched = (block(tokens) == tokens).all(dim=2).float()
    assert (untouched.mean(1).unique().tolist()) == [0, 1]  # an image's tokens go together
    assert untouched.mean().item() == pytest.approx(0.4**2, abs=4 * (0.16 * 0.84 / 400) ** 0.5)  # both branches out
    assert (block.eval()(tokens) != tokens).any(dim=2).all()


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "drop_path"])
def test_each_dropout_acts_in_training_alone(rate: str) -> None:
    model = build(replace(TINY, **{rate: 0.5}))
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
        else:
            others = {"patch_embed.proj.weight": 48**-0.5, "pos_embed": 0.02}
            spread = others.get(name, 0.02)  # of positions and tokens cut off at twice that, which leaves 0.88 of it
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
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_built_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        replace(TINY, **change)
    assert message in str(error.value)
