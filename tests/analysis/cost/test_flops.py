"""FLOPs and parameters by part: the counter equals the formula on our models, a sum over layers on all others."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.lens.tiny import EACH_FAMILY, FAMILIES, images, our_swin, ours, shared_model, timm_model, torchvision_vit
from vitlens.analysis.cost.flops import (
    BETWEEN,
    EMBEDDING,
    HEAD,
    MLP,
    NORMS,
    OTHER,
    PARTS,
    POSITIONS,
    PRODUCTS,
    PROJECTIONS,
    STEM,
    Parts,
    crossover,
    exponent,
    flops_by_part,
    in_order,
    parameters_by_part,
    vit_flops,
)  # fmt: skip
from vitlens.analysis.cost.profile import tokens_of
from vitlens.lens.observe import observe
from vitlens.models.loading import load
from vitlens.models.model import Model

SHAPES = {
    "plain": {},
    "distilled": {"distillation": True, "registers": 3},
    "mean": {"pooling": "mean", "mlp_ratio": 2.5},
    "without attention": {"attention": False},
    "without MLP": {"mlp": False, "depth": 3},
    "square": {"patch_size": (4, 4), "heads": 4, "dim": 32},
}
TOKENS = [17, 37, 65, 145, 257]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", [True, False])
def test_the_counter_equals_the_formula(shape, fused):
    model = ours(fused=fused, **SHAPES[shape])
    assert flops_by_part(model) == vit_flops(model.module.config)


def test_the_formula_is_that_of_the_papers_and_products_overtake_the_rest_at_the_crossover():
    """8 N d² + 4 N² d for attention, 16 N d² for an MLP of four times the width (twice what counts as one MAC)."""
    config = load("vit-tiny", random_weights=True).module.config
    tokens, dim = 65, 192
    found = vit_flops(config)
    assert found[PROJECTIONS] == 6 * 8 * tokens * dim**2
    assert found[PRODUCTS] == 6 * 4 * tokens**2 * dim
    assert found[MLP] == 6 * 16 * tokens * dim**2
    # 2 d + h tokens: where 4 N² d = 8 N d² + 4 N d h
    assert crossover(found, tokens) == pytest.approx(2 * 192 + 768)
    large = replace(config, image_size=(4 * 34, 4 * 34))
    found = vit_flops(large)
    assert found[PRODUCTS] > found[PROJECTIONS] + found[MLP]
    assert large.layout.tokens > 2 * 192 + 768


class Weighted(TorchFunctionMode):
    """Adds two for each multiplication of a linear map or a convolution, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (F.linear, F.conv2d):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.flops += 2 * found.numel() * weight[0].numel()  # of a convolution: its group's channels x window
        return found


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "torchvision-vit"])
def test_other_families_count_what_a_sum_over_their_layers_gives(family):
    """Products with weights as they are called, and products of tokens as the lens sees them."""
    model, products = shared_model(family), []
    batch, width = images(model.input_size, batch=1), 16 if family == "cait" else 8  # of a head that is not seen

    def add(call) -> None:
        seen = width if call.output is None else call.output.shape[-1]
        products.append(2 * 2 * call.weights().numel() * seen)

    with torch.no_grad(), Weighted() as mode:
        model(batch)
    observe(model, batch, add)
    found = flops_by_part(model)
    assert sum(found.values()) == mode.flops + sum(products)
    assert found[PRODUCTS] > 0


def test_torch_s_multihead_attention_is_seen_into():
    """Its inference kernel is one opaque operation; 16 tokens and CLS, width 32, two layers, an MLP of 64."""
    found = flops_by_part(torchvision_vit())
    tokens, dim, hidden = 17, 32, 64
    assert found[PROJECTIONS] == 2 * 8 * tokens * dim**2
    assert found[PRODUCTS] == 2 * 4 * tokens**2 * dim
    assert found[MLP] == 2 * 4 * tokens * dim * hidden
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_resnet_has_the_flops_of_its_paper():
    """He 2016, table 1: 1.8 billion multiplications and additions as one, at 224 px."""
    found = flops_by_part(load("torchvision:resnet18", random_weights=True))
    assert round(sum(found.values()) / 2e9, 1) == 1.8
    assert list(found) == ["stem", "stage 0", "stage 1", "stage 2", "stage 3", "head"]
    assert found["head"] == 2 * 512 * 1000


def swin_flops(model: Model) -> dict[str, int]:
    """FLOPs of our Swin by formula: in each window of n places 4 n² d for the two products; places include padding."""
    config, (height, width) = model.module.config, model.input_size
    maps, inside = config.maps((height, width)), config.window[0] * config.window[1]
    found = {EMBEDDING: 2 * prod(maps[0]) * 3 * prod(config.patch_size) * config.dim}
    for (rows, columns), dim, depth in zip(maps, config.widths, config.depths):
        windows = -(-rows // config.window[0]) * -(-columns // config.window[1])
        parts = {
            PROJECTIONS: depth * 8 * windows * inside * dim**2,
            PRODUCTS: depth * 4 * windows * inside**2 * dim,
            MLP: depth * 4 * rows * columns * dim * int(dim * config.mlp_ratio),
        }
        found |= {part: found.get(part, 0) + count for part, count in parts.items()}
    merging = [2 * prod(after) * 4 * dim * 2 * dim for after, dim in zip(maps[1:], config.widths)]
    return {**found, BETWEEN: sum(merging), HEAD: 2 * config.widths[-1] * config.classes}


@pytest.mark.parametrize(("size", "shift"), [((32, 32), False), ((33, 47), True), ((8, 20), True)])
def test_our_swin_by_counter_and_by_formula(size, shift):
    model = our_swin(size=size, shift=shift)
    assert flops_by_part(model) == swin_flops(model)


def test_products_grow_with_the_square_of_the_tokens_and_in_windows_with_the_tokens():
    """The exponents, fitted to counted FLOPs, leave no room between."""
    for make, power in ((ours, 2.0), (our_swin, 1.0)):
        models = [make(size=(side, side)) for side in (32, 64, 96, 128)]
        fit = exponent([tokens_of(model) for model in models], [flops_by_part(model)[PRODUCTS] for model in models])
        assert (fit.value, fit.low, fit.high) == pytest.approx((power, power, power), abs=1e-6)


@pytest.mark.parametrize("power", [-1.0, 0.0, 1.5])
def test_a_power_law_gives_its_exponent_without_width(power):
    found = exponent(TOKENS, [3 * tokens**power for tokens in TOKENS])
    assert (found.value, found.low, found.high) == pytest.approx((power, power, power), abs=1e-9)
    two = exponent([10, 100], [1, 10**power])
    assert (found.n, two.n, two.value, two.low, two.high) == (5, 2, pytest.approx(power), None, None)


def test_the_interval_is_that_of_least_squares():
    noise = np.random.default_rng(0).normal(size=5)
    x, y = np.log(TOKENS), 1.3 * np.log(TOKENS) + 0.1 * noise
    found = exponent(TOKENS, np.exp(y).tolist())
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - slope * x - intercept
    half = stats.t.ppf(0.975, 3) * np.sqrt((residual**2).sum() / 3 / ((x - x.mean()) ** 2).sum())
    assert (found.value, found.low, found.high) == pytest.approx((slope, slope - half, slope + half))


@pytest.mark.parametrize(
    ("name", "count"), [("vit-micro", 1_205_898), ("vit-tiny", 2_693_578), ("vit-mini", 809_354), ("resnet20", 269_722)]
)
def test_the_parameters_of_the_presets_follow_from_their_shapes(name, count):
    model = load(name, random_weights=True)
    assert sum(parameters_by_part(model).values()) == model.parameter_count() == count


def test_every_part_of_our_vit_and_of_a_cnn_has_what_its_shape_says():
    dim, depth, hidden, tokens = 128, 6, 512, 65
    assert parameters_by_part(load("vit-micro", random_weights=True)) == {
        EMBEDDING: 3 * 4 * 4 * dim + dim,
        POSITIONS: tokens * dim + dim,  # and the CLS token
        PROJECTIONS: depth * (4 * dim * dim + 4 * dim),
        MLP: depth * (2 * dim * hidden + hidden + dim),
        NORMS: (2 * depth + 1) * 2 * dim,
        HEAD: 10 * dim + 10,
    }
    blocks = [6 * (9 * 16 * 16 + 2 * 16)]
    for channels in (32, 64):  # the first convolution of a stage comes from half the channels
        blocks.append(9 * channels * channels // 2 + 5 * 9 * channels * channels + 6 * 2 * channels)
    stages = {f"stage {index}": count for index, count in enumerate(blocks)}
    found = parameters_by_part(load("resnet20", random_weights=True))
    assert found == {STEM: 27 * 16 + 2 * 16, **stages, HEAD: 650}


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_parameter_of_every_family_has_a_known_part(family):
    model = shared_model(family)
    found = parameters_by_part(model)
    assert sum(found.values()) == model.parameter_count()
    assert set(found) <= set(PARTS) - {OTHER}
    assert {EMBEDDING, PROJECTIONS, MLP, NORMS, HEAD} <= set(found)


def test_what_stands_between_the_stages_of_swin_is_its_patch_merging():
    found = parameters_by_part(timm_model("swin_tiny_patch4_window7_224"))
    assert found[BETWEEN] == 4 * 16 * 32  # without its norm


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("torchvision-vit", ("encoder.pos_embedding", "class_token")),
        ("torchvision-swin", ("features.1.0.attn.relative_position_bias_table",)),
        ("beit", ("cls_token", "blocks.0.attn.relative_position_bias_table")),
        ("swinv2", ("layers.0.blocks.0.attn.cpb_mlp.0.weight",)),
        ("siglip", ("pos_embed", "attn_pool.latent")),
    ],
)
def test_positions_are_found_under_every_library_s_names(family, names):
    parts = Parts(shared_model(family))
    assert {parts.of_parameter(name) for name in names} == {POSITIONS}


def test_downsampling_is_counted_with_the_stage_that_it_leads_to_and_parts_stand_in_order():
    parts = Parts(load("torchvision:convnext_tiny", random_weights=True))
    places = {"features.0.0": STEM, "features.1.2.block.0": "stage 0", "features.2.1": "stage 1", "classifier.2": HEAD}
    assert {name: parts.of_module(name) for name in places} == places
    shuffled = [HEAD, "stage 10", MLP, "stage 2", STEM, MLP]
    assert in_order(shuffled) == [STEM, MLP, "stage 2", "stage 10", HEAD]
