"""Our vision transformer: parameters, timm's weights, tokens, parts and attention."""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.layers.pos_embed_sincos import build_sincos2d_pos_embed
from torch import Tensor, nn

import vitlens
from tests.kit.select import values_of
from tests.kit.tiny import ours, shaken
from vitlens.errors import InputError

NARROW = {"size": (8, 12), "patch_size": (4, 2)}  # 2 x 6 patches


def pictures(height: int = 8, width: int = 12, *, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "depth", "dim", "heads", "side", "patch", "classes"),
    [
        ("vit-micro", 6, 128, 4, 32, 4, 10),
        ("vit-mini", 4, 128, 4, 32, 4, 10),
        ("vit-tiny", 6, 192, 3, 32, 4, 10),
        ("vit-tiny-224", 12, 192, 3, 224, 16, 1000),
        ("vit-small-224", 12, 384, 6, 224, 16, 1000),
        ("vit-base-224", 12, 768, 12, 224, 16, 1000),
    ],
)
def test_a_preset_has_its_parameters(name, depth, dim, heads, side, patch, classes):
    """12 d² + 13 d a block (MLP ratio 4), the map of patches, CLS, positions, final norm and
    head."""
    expected = (
        depth * (12 * dim**2 + 13 * dim)
        + (3 * patch**2 + 1) * dim
        + ((side // patch) ** 2 + 4) * dim
    )
    with torch.device("meta"):
        model = vitlens.load(f"{name}@random", device="meta")
    assert model.parameter_count() == expected + (dim + 1) * classes
    assert (model.input_size, len(model.classes)) == ((side, side), classes)
    assert set(values_of(model.anatomy.attention, "heads")) == {heads}


TWINS = {
    "cls": ({}, {}),
    "no qkv bias": ({"qkv_bias": False}, {"qkv_bias": False}),
    "mean": (
        {"pooling": "mean", "registers": 2},
        {"global_pool": "avg", "class_token": False, "reg_tokens": 2, "no_embed_class": True},
    ),
    # timm: no_embed_class takes positions from all prefix tokens; ours keeps CLS its own, set to 0
    # to compare
    "registers": ({"registers": 4}, {"reg_tokens": 4, "no_embed_class": True}),
    "distilled": ({"distillation": True}, {}),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_tiny_model_equals_timms(name: str):
    change, options = TWINS[name]
    kind = (
        timm.models.deit.VisionTransformerDistilled
        if name == "distilled"
        else timm.models.VisionTransformer
    )
    shape = {
        "img_size": (8, 12),
        "patch_size": (4, 2),
        "embed_dim": 16,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 5,
    }
    theirs, model, images = (
        shaken(lambda: kind(**shape, **options), scale=0.2),
        ours(**NARROW, **change),
        pictures(),
    )
    state = theirs.state_dict()
    if name == "registers":
        state["pos_embed"] = torch.cat((torch.zeros(1, 1, 16), state["pos_embed"]), dim=1)
    model.module.load_state_dict(state, strict=True)
    prepared = (images - 0.5) / 0.5
    torch.testing.assert_close(model(images), theirs(prepared), atol=1e-5, rtol=0)
    if name == "distilled":
        theirs.set_distilled_training(True)
        torch.testing.assert_close(
            model.module.forward_heads(prepared), theirs.train()(prepared), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("change", "prefix"), [({}, 1), ({"distillation": True}, 2), ({"pooling": "mean"}, 0)]
)
@pytest.mark.parametrize("size", [(4, 2), (12, 24)])
def test_for_other_sizes_positions_are_resampled_as_timms(change, prefix, size):
    module = ours(**NARROW, **change).module
    images = pictures(*size)
    grid = [size[0] // 4, size[1] // 2]
    added = module.tokens(images)[:, prefix:] - module.patch_embed(images)
    expected = resample_abs_pos_embed(module.pos_embed, grid, [2, 6], num_prefix_tokens=prefix)[
        :, prefix:
    ]
    torch.testing.assert_close(added, expected.expand_as(added), atol=1e-6, rtol=0)
    assert module(images).shape == (2, 5)


PREFIXES = {  # and what the classifier reads
    ("cls", "register"): ({"registers": 1}, "cls"),
    ("register", "register"): ({"pooling": "mean", "registers": 2}, "mean"),
    ("cls", "distillation", "register"): (
        {"distillation": True, "registers": 1},
        "cls+distillation",
    ),
}


@pytest.mark.parametrize("prefix", PREFIXES, ids="-".join)
def test_tokens_stand_as_the_layout_says_and_no_position_is_added_to_a_register(prefix):
    change, readout = PREFIXES[prefix]
    model = ours(**NARROW, **change)
    assert (model.layout.prefix, model.layout.grid, model.anatomy.readout) == (
        prefix,
        (2, 6),
        readout,
    )
    tokens = model.module.tokens(pictures())
    module = model.module
    assert tokens.shape == module.forward_features(pictures()).shape == (2, 12 + len(prefix), 16)
    assert torch.equal(tokens[:1, list(model.layout.positions("register"))], module.reg_token)


def test_without_positions_the_order_of_patches_is_lost():
    images = pictures()
    # three columns of patches change places
    swapped = torch.cat((images[..., 6:], images[..., :6]), dim=-1)
    for positions in ("learned", "none"):
        model = ours(**NARROW, positions=positions)
        assert torch.allclose(model(images), model(swapped), atol=1e-5) is (positions == "none")


def test_one_dimension_of_sines_is_the_formula_of_vaswani_and_no_parameter():
    model = ours(**NARROW, positions="sine")
    angles = torch.arange(12)[:, None] / 10_000 ** (torch.arange(0, 16, 2) / 16)
    expected = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
    torch.testing.assert_close(
        model.module.pos_embed, torch.cat((torch.zeros(1, 16), expected))[None]
    )
    assert model.parameter_count() == ours(**NARROW, positions="none").parameter_count()
    assert "pos_embed" not in model.module.state_dict()


@pytest.mark.parametrize(
    "change", [{"pooling": "mean"}, {"distillation": True, "registers": 2}], ids=str
)
@pytest.mark.parametrize(
    ("size", "grid"), [((8, 12), (2, 6)), ((16, 12), (4, 6)), ((4, 4), (1, 2))]
)
def test_two_dimensions_of_sines_are_maes_and_computed_again_for_another_size(change, size, grid):
    """MAE's are timm's with rows and columns exchanged; registers have none, CLS has zeros."""
    module = ours(**NARROW, positions="sine-2d", **change).module
    rows, columns = build_sincos2d_pos_embed(list(grid), dim=16, interleave_sin_cos=True).chunk(
        2, dim=1
    )
    expected = torch.cat((columns, rows), dim=1)
    images = pictures(*size)
    layout = module.layout
    tokens = module.tokens(images)
    added = tokens[:, len(layout.prefix) :] - module.patch_embed(images)
    torch.testing.assert_close(added, expected.expand(2, -1, -1), atol=1e-5, rtol=0)
    for place in layout.positions("cls"):
        torch.testing.assert_close(tokens[:, place], module.cls_token[0].expand(2, -1))


DEGENERATE: list[dict[str, object]] = [
    {"classes": 1, "patch_size": (8, 12), "attention": False},
    {"attention": False, "residual": False, "norm": False, "positions": "none", "pooling": "mean"},
    {"registers": 1, "distillation": True, "heads": 1, "depth": 1, "mlp_ratio": 0.5},
]


@pytest.mark.parametrize("change", DEGENERATE, ids=str)
def test_degenerate_models_run_and_learn(change: dict[str, object]):
    model = ours(**{**NARROW, **change}).train().requires_grad_(True)
    logits = model(pictures(batch=1))
    assert logits.shape == (1, change.get("classes", 5))
    logits.square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_parts_taken_away_are_gone_and_without_attention_a_patch_changes_its_own_token_alone():
    kinds = [type(part) for part in ours(**NARROW).modules()]
    for part, kind in {"attention": nn.Linear, "mlp": nn.GELU, "norm": nn.LayerNorm}.items():
        left = [type(part_module) for part_module in ours(**NARROW, **{part: False}).modules()]
        assert left.count(kind) < kinds.count(kind)
    tokens = torch.randn(2, 13, 16)
    images = pictures()
    for residual in (False, True):
        block = ours(**NARROW, mlp=False, residual=residual).module.blocks[0]
        assert torch.equal(block(tokens), residual * tokens + block.attn(block.norm1(tokens)))
    model = ours(**NARROW, attention=False)
    changed = images.clone()
    assert (model.anatomy.family, model.anatomy.blocks) == ("vit", ("blocks.0", "blocks.1"))
    changed[:, :, 4:8, 2:4] += 1  # row 1, column 1 of a grid of 2 rows and 6 columns, after CLS
    moved = (
        model.module.forward_features(images) - model.module.forward_features(changed)
    ).abs().amax((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == [1 + 1 * 6 + 1]


def test_drop_path_grows_with_depth_and_drops_whole_images():
    blocks = ours(**NARROW, depth=3, drop_path=0.4).module.blocks
    assert [block.drop_path.p for block in blocks] == pytest.approx([0, 0.2, 0.4])
    block = blocks[2].train()
    tokens = torch.randn(400, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    untouched = (block(tokens) == tokens).all(dim=2).float()
    assert (untouched.mean(1).unique().tolist()) == [0, 1]  # an image's tokens go together
    # both branches out
    assert untouched.mean().item() == pytest.approx(0.4**2, abs=4 * (0.16 * 0.84 / 400) ** 0.5)
    assert (block.eval()(tokens) != tokens).any(dim=2).all()


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "drop_path"])
def test_each_dropout_acts_in_training_alone(rate: str):
    model = ours(**NARROW, **{rate: 0.5})
    assert torch.equal(model(pictures()), model(pictures()))
    model.train()
    assert not torch.equal(model(pictures()), model(pictures()))


def test_initial_weights():
    for name, parameter in vitlens.load("vit-tiny@random").module.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:  # positions and tokens are cut off at twice their deviation, which leaves 0.88 of it
            spread = 48**-0.5 if name == "patch_embed.proj.weight" else 0.02
            assert parameter.std().item() == pytest.approx(spread, rel=0.2), name


REFUSED = [  # what is asked for, and the word of the message that says what to change
    ({"heads": 3}, "found dim 16 and 3 heads; try 2 heads"),
    ({"size": (3, 12)}, "found 3 and 4 px; try 4 px"),
    ({"size": (8, 13)}, "found 13 and 2 px; try 12 px"),
    ({"patch_size": (0, 2)}, "found 8 and 0 px; try 8 px"),
    ({"depth": 0}, "depth of at least 1"),
    ({"classes": -1}, "classes of at least 0"),
    ({"heads": 0}, "heads of at least 1"),
    ({"registers": -1}, "registers of at least 0"),
    ({"mlp_ratio": 0.0}, "mlp_ratio"),
    ({"dropout": 1.0}, "expected dropout"),
    ({"drop_path": -0.1}, "expected drop_path"),
    ({"distillation": True, "pooling": "mean"}, "try pooling='cls'"),
    ({"pooling": "max"}, "'max'"),
    ({"positions": "rotary"}, "sine-2d"),
    ({"attention": False, "mlp": False}, "try mlp=True"),
    ({"residual": False, "drop_path": 0.1}, "try drop_path=0"),
    ({"norm": False, "norm_first": False}, "try norm_first=True"),
    ({"positions": "sine-2d", "dim": 18}, "try 20"),
    ({"positions": "sine", "dim": 15, "heads": 3}, "try 16"),
]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_without_classes_its_outputs_are_what_a_head_would_read(pooling: str):
    model = ours(**NARROW, pooling=pooling)
    inputs: list[Tensor] = []
    model.module.head.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    model(pictures())
    model.module.reset_classifier(0)
    assert torch.equal(model(pictures()), inputs[0])
    assert model.module.config.classes == 0
    model.module.reset_classifier(3)
    assert model(pictures()).shape == (2, 3)


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=str)
def test_what_cannot_be_built_is_refused(change: dict[str, object], words: str):
    with pytest.raises(InputError) as error:
        ours(**{**NARROW, **change})
    assert words in str(error.value)


def test_what_a_model_does_not_have_is_refused():
    for call, words in (
        (lambda: ours(**NARROW).module.forward_heads(pictures()), "distillation=True"),
        (lambda: ours(**NARROW).module(pictures(8, 13)), "patches of 4x2 px, found 8x13 px"),
        (lambda: ours(**NARROW, positions="none").module.positions((2, 6)), "'none'"),
    ):
        with pytest.raises(InputError, match=words):
            call()


# ---- its attention against torch's own module: fused and by matrix products, masks, dropout,
# gradients


TOKENS = 5
DIM = 12
HEADS = 3
DRAWN = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))
EMPTY = torch.ones(TOKENS, TOKENS, dtype=torch.bool).index_fill(0, torch.tensor([2]), value=False)
BOOLEAN = (DRAWN < 0.5) | torch.eye(TOKENS, dtype=torch.bool)  # True = take part


def attention(*, fused: bool = False, **options: object) -> nn.Module:
    return ours(fused=fused, dim=DIM, heads=HEADS, **options).module.blocks[0].attn


def tokens() -> Tensor:
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("fused", "bias", "mask"),
    [(True, False, BOOLEAN), (True, True, DRAWN), (False, True, BOOLEAN), (False, False, DRAWN)],
    ids=range(4),
)
def test_output_and_gradients_are_those_of_torchs_module(fused: bool, bias: bool, mask: Tensor):
    module = attention(fused=fused, qkv_bias=bias).requires_grad_(True)
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(module.qkv.weight)
        theirs.in_proj_bias.copy_(module.qkv.bias if bias else torch.zeros(3 * DIM))
        theirs.out_proj.load_state_dict(module.proj.state_dict())
    opposite = ~mask if mask.dtype == torch.bool else mask  # there, True = leave out
    expected = theirs(*[tokens()] * 3, attn_mask=opposite)[0]
    outputs = module(tokens(), mask)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        module.qkv.weight.grad, theirs.in_proj_weight.grad, atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        module.proj.weight.grad, theirs.out_proj.weight.grad, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "mask", [EMPTY, torch.zeros(TOKENS, TOKENS).masked_fill(~EMPTY, -torch.inf)]
)
def test_a_token_that_may_attend_to_nothing_reads_nothing_and_has_no_gradient(mask: Tensor):
    module = attention().requires_grad_(True)
    inputs = tokens().requires_grad_()
    outputs = module(inputs, mask)
    torch.testing.assert_close(outputs[:, 2], module.proj.bias.expand(2, -1))
    torch.testing.assert_close(outputs, attention(fused=True)(inputs, mask), atol=1e-5, rtol=0)
    outputs[:, 2].sum().backward()
    assert not inputs.grad.any()  # and no NaN
    module(inputs, mask).square().sum().backward()
    assert inputs.grad.isfinite().all()


def test_dropout_falls_on_the_weights():
    """With equal keys and one-hot values, twice, the output is the weights twice: each 1/tokens, or
    dropped; dropout of the output instead would treat the two copies differently.
    """
    count = 64
    dropout = 0.25
    module = (
        ours(dim=2 * count, heads=1, attention_dropout=dropout, fused=False)
        .module.blocks[0]
        .attn.train()
    )
    for parameter in module.parameters():
        parameter.zero_()
    module.qkv.weight.view(3, 2 * count, 2 * count)[2, :, :count] = torch.eye(count).repeat(2, 1)
    module.proj.weight.copy_(torch.eye(2 * count))
    one_hot = torch.cat((torch.eye(count), torch.zeros(count, count)), dim=1)[None]
    torch.manual_seed(0)
    weights, twice = module(one_hot).chunk(2, dim=-1)
    assert torch.equal(weights, twice)
    dropped = weights == 0
    torch.testing.assert_close(
        weights[~dropped], torch.full_like(weights[~dropped], 1 / count / (1 - dropout))
    )
    assert dropped.float().mean().item() == pytest.approx(
        dropout, abs=4 * (dropout * (1 - dropout) / count**2) ** 0.5
    )
    torch.testing.assert_close(
        module.eval()(one_hot)[..., :count], torch.full((1, count, count), 1 / count)
    )
