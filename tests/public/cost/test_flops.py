"""FLOPs and parameters by part: formulas of our models and of the papers, and a sum over the layers of all others."""

from math import prod

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

import vitlens
from tests.kit.commands import ran
from tests.kit.tiny import EACH_FAMILY, images, model_of, our_swin, ours, shaken, shared_model, small_cnn
from vitlens import Model
from vitlens.errors import LensError

EMBEDDING, POSITIONS, MLP, NORMS, BETWEEN = "patch embedding", "positions and tokens", "MLP", "norms", "between stages"
PROJECTIONS, PRODUCTS, STEM, HEAD = "attention projections", "attention products", "stem", "head"


def flops(model: Model) -> dict[str, int]:
    return dict(vitlens.profile(model, batch_sizes=()).flops)


def parameters(model: Model) -> dict[str, int]:
    return dict(vitlens.profile(model, batch_sizes=()).parameters)


SHAPES = {
    "plain": {},
    "own softmax": {"fused": False},
    "distilled": {"distillation": True, "registers": 3},
    "mean": {"pooling": "mean", "mlp_ratio": 2.5},
    "without attention": {"attention": False},
    "without MLP": {"mlp": False, "depth": 3},
    "square": {"patch_size": (4, 4), "heads": 4, "dim": 32},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_of_our_vit_every_part_counts_what_the_formula_of_the_papers_gives(shape):
    assert vitlens.profile(ours(**SHAPES[shape]), batch_sizes=()).by_formula


def test_where_counter_and_formula_differ_it_is_said():
    model = ours()
    model.module.blocks[0].mlp.fc1 = torch.nn.Linear(16, 32)
    model.module.blocks[0].mlp.fc2 = torch.nn.Linear(32, 16)
    with pytest.raises(LensError, match="by formula, counted"):
        vitlens.profile(model, batch_sizes=())


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


def test_a_cnn_counts_what_a_sum_over_its_layers_gives():
    model = small_cnn()
    with torch.no_grad(), Weighted() as mode:
        model(images((32, 48), batch=1))
    found = flops(model)
    assert sum(found.values()) == mode.flops
    assert list(found) == [STEM, "stage 0", "stage 1", "stage 2", HEAD]
    assert found[HEAD] == 2 * 64 * 5


@pytest.mark.parametrize("family", [each for each in EACH_FAMILY if each.values[0] != "torchvision-vit"])
def test_other_families_count_what_a_sum_over_their_layers_gives(family):
    """Products with weights as they are called, and products of tokens as the lens sees them."""
    model, products = shared_model(family), []
    batch, width = images(model.input_size, batch=1), 16 if family == "cait" else 8  # of a head that is not seen

    def add(call: vitlens.AttentionCall) -> None:
        seen = width if call.output is None else call.output.shape[-1]
        products.append(2 * 2 * call.weights().numel() * seen)

    with torch.no_grad(), Weighted() as mode:
        model(batch)
    vitlens.observe(model, batch, add)
    found = flops(model)
    assert sum(found.values()) == mode.flops + sum(products)
    assert found[PRODUCTS] > 0


def test_torch_s_multihead_attention_is_seen_into():
    """Its inference kernel is one opaque operation; 16 tokens and CLS, width 32, two layers, an MLP of 64."""
    found = flops(shared_model("torchvision-vit"))
    assert found[PROJECTIONS] == 2 * 8 * 17 * 32**2
    assert found[PRODUCTS] == 2 * 4 * 17**2 * 32
    assert found[MLP] == 2 * 4 * 17 * 32 * 64


def swin_flops(model: Model) -> dict[str, int]:
    """Of our Swin: in each window of n places 4 n² d for the two products; places include padding."""
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


@pytest.mark.parametrize(("size", "shift"), [((33, 47), True), ((8, 20), False)])
def test_our_swin_by_counter_and_by_formula(size, shift):
    model = our_swin(size=size, shift=shift)
    assert flops(model) == swin_flops(model)


def test_exponents_and_the_crossover_of_a_sweep_over_sizes(tiny_vit, tmp_path):
    """N² of the products, the interval of least squares on logarithms, and the tokens from which products lead."""
    sides, record = (16, 32, 64), ran(tmp_path / "run", f"profile {tiny_vit} --sizes 16,32,64 --batch-sizes 1")
    tokens = [1 + (side // 8) ** 2 for side in sides]
    dim, hidden = 16, vitlens.load(str(tiny_vit)).module.config.hidden
    # where 4 N² d = 8 N d² + 4 N d h
    assert record.costs[0].crossover == pytest.approx(2 * dim + hidden)
    counted = [flops(ours(size=(side, side), patch_size=(8, 8), classes=10, mlp_ratio=hidden / dim)) for side in sides]
    counts = {"products": [each[PRODUCTS] for each in counted], "flops": [sum(each.values()) for each in counted]}
    found = {row.cost: row.exponent for row in record.exponents}
    for cost, values in counts.items():
        fit = stats.linregress(np.log(tokens), np.log(values))
        half = stats.t.ppf(0.975, 1) * fit.stderr
        assert found[cost].value == pytest.approx(fit.slope, abs=1e-6)
        assert (found[cost].low, found[cost].high) == pytest.approx((fit.slope - half, fit.slope + half), abs=1e-5)


def test_every_part_of_our_vit_and_of_a_cnn_has_what_its_shape_says():
    dim, depth, hidden, tokens = 128, 6, 512, 65
    assert parameters(vitlens.load("vit-micro", random_weights=True)) == {
        EMBEDDING: 3 * 4 * 4 * dim + dim,
        POSITIONS: tokens * dim + dim,  # and the CLS token
        PROJECTIONS: depth * (4 * dim * dim + 4 * dim),
        MLP: depth * (2 * dim * hidden + hidden + dim),
        NORMS: (2 * depth + 1) * 2 * dim,
        HEAD: 10 * dim + 10,
    }
    cnn = parameters(vitlens.load("resnet20", random_weights=True))
    assert list(cnn) == [STEM, "stage 0", "stage 1", "stage 2", HEAD]
    assert (cnn[STEM], cnn["stage 0"], cnn[HEAD]) == (27 * 16 + 2 * 16, 6 * (9 * 16 * 16 + 2 * 16), 650)


PLACED = {  # parameters that are positions and tokens, under every library's names
    "torchvision-vit": ("encoder.pos_embedding", "class_token"),
    "torchvision-swin": ("relative_position_bias_table",),
    "beit": ("cls_token", "relative_position_bias_table"),
    "swinv2": ("cpb_mlp",),
    "siglip": ("pos_embed", "attn_pool.latent"),
}


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_every_parameter_of_every_family_has_a_known_part(family):
    model = shared_model(family)
    found, usual = parameters(model), {EMBEDDING, PROJECTIONS, MLP, NORMS, HEAD}
    assert sum(found.values()) == model.parameter_count()
    assert usual <= set(found) <= usual | {POSITIONS, BETWEEN}
    if family in PLACED:
        named = dict(model.module.named_parameters())
        own = [named[name].numel() for name in named if any(word in name for word in PLACED[family])]
        assert found[POSITIONS] == sum(own)
    if family == "our-swin":
        assert found[BETWEEN] == 4 * 16 * 32  # the patch merging, without its norm


def test_downsampling_is_counted_with_the_stage_that_it_leads_to():
    settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 1)]
    model = model_of(shaken(lambda: ConvNeXt(settings, num_classes=5)), alias="convnext")
    found = parameters(model)
    assert list(found) == [STEM, "stage 0", "stage 1", "stage 2", HEAD]
    for stage in (1, 2):  # of torchvision's features: the stem, then blocks and downsampling in turn
        own = [*model.module.features[2 * stage].parameters(), *model.module.features[2 * stage + 1].parameters()]
        assert found[f"stage {stage}"] == sum(parameter.numel() for parameter in own)
