"""A profile: FLOPs and parameters against sums over the layers, memory, moved clocks."""

from math import prod

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torchvision.models.convnext import CNBlockConfig, ConvNeXt

import vitlens
from tests.kit.clock import clock_of_passes
from tests.kit.commands import ran
from tests.kit.odd import odd
from tests.kit.select import values_of
from tests.kit.tiny import (
    EACH_FAMILY,
    images,
    model_of,
    our_swin,
    ours,
    pruned,
    shaken,
    shared_model,
    small_cnn,
)
from vitlens import Model
from vitlens.errors import LensError

EMBEDDING = "patch embedding"
POSITIONS = "positions and tokens"
MLP = "MLP"
NORMS = "norms"
BETWEEN = "between stages"
PROJECTIONS = "attention projections"
PRODUCTS = "attention products"
STEM = "stem"
HEAD = "head"
PIXELS = 3 * 32 * 32


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
    model.module.blocks[0].mlp.fc1 = nn.Linear(16, 32)
    model.module.blocks[0].mlp.fc2 = nn.Linear(32, 16)
    with pytest.raises(LensError, match="by formula, counted"):
        vitlens.profile(model, batch_sizes=())


class Weighted(TorchFunctionMode):
    """Adds two for each multiplication of a linear map or a convolution, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (F.linear, F.conv2d):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            # of a convolution: its group's channels x window
            self.flops += 2 * result.numel() * weight[0].numel()
        return result


def test_a_cnn_counts_what_a_sum_over_its_layers_gives():
    model = small_cnn()
    with torch.no_grad(), Weighted() as mode:
        model(images((32, 48), batch=1))
    by_part = flops(model)
    assert sum(by_part.values()) == mode.flops
    assert list(by_part) == [STEM, "stage 0", "stage 1", "stage 2", HEAD]
    assert by_part[HEAD] == 2 * 64 * 5


@pytest.mark.parametrize(
    "family", [family for family in EACH_FAMILY if family.values[0] != "torchvision-vit"]
)
def test_other_families_count_what_a_sum_over_their_layers_gives(family):
    """Products with weights as they are called, and products of tokens as the lens sees them."""
    model = shared_model(family)
    products = []
    # of a head that is not seen
    batch = images(model.input_size, batch=1)
    width = 16 if family == "cait" else 8

    def add(call: vitlens.AttentionCall) -> None:
        seen = width if call.output is None else call.output.shape[-1]
        products.append(2 * 2 * call.weights().numel() * seen)

    with torch.no_grad(), Weighted() as mode:
        model(batch)
    vitlens.observe(model, batch, add)
    by_part = flops(model)
    assert sum(by_part.values()) == mode.flops + sum(products)
    assert by_part[PRODUCTS] > 0


def test_torch_s_multihead_attention_is_seen_into():
    """Its inference kernel is one opaque operation; 16 tokens and CLS, width 32, two layers, an MLP
    of 64.
    """
    by_part = flops(shared_model("torchvision-vit"))
    assert by_part[PROJECTIONS] == 2 * 8 * 17 * 32**2
    assert by_part[PRODUCTS] == 2 * 4 * 17**2 * 32
    assert by_part[MLP] == 2 * 4 * 17 * 32 * 64


def swin_flops(model: Model) -> dict[str, int]:
    """Count the FLOPs of our Swin: 4 n² d for the two products of a window of n places.

    Places include padding.
    """
    config, (height, width) = model.module.config, model.input_size
    maps = config.maps((height, width))
    inside = config.window[0] * config.window[1]
    by_part = {EMBEDDING: 2 * prod(maps[0]) * 3 * prod(config.patch_size) * config.dim}
    for (rows, columns), dim, depth in zip(maps, config.widths, config.depths):
        windows = -(-rows // config.window[0]) * -(-columns // config.window[1])
        parts = {
            PROJECTIONS: depth * 8 * windows * inside * dim**2,
            PRODUCTS: depth * 4 * windows * inside**2 * dim,
            MLP: depth * 4 * rows * columns * dim * int(dim * config.mlp_ratio),
        }
        by_part |= {part: by_part.get(part, 0) + count for part, count in parts.items()}
    merging = [2 * prod(after) * 4 * dim * 2 * dim for after, dim in zip(maps[1:], config.widths)]
    return {**by_part, BETWEEN: sum(merging), HEAD: 2 * config.widths[-1] * config.classes}


@pytest.mark.parametrize(("size", "shift"), [((33, 47), True), ((8, 20), False)])
def test_our_swin_by_counter_and_by_formula(size, shift):
    model = our_swin(size=size, shift=shift)
    assert flops(model) == swin_flops(model)


def test_exponents_and_the_crossover_of_a_sweep_over_sizes(tiny_vit, tmp_path):
    """N² of the products, the interval of least squares on logarithms, and the tokens from which
    products lead.
    """
    sides = (16, 32, 64)
    record = ran(tmp_path / "run", f"profile {tiny_vit} --sizes 16,32,64 --batch-sizes 1")
    tokens = [1 + (side // 8) ** 2 for side in sides]
    dim = 16
    hidden = vitlens.load(str(tiny_vit)).module.config.hidden
    # where 4 N² d = 8 N d² + 4 N d h
    assert record.costs[0].crossover == pytest.approx(2 * dim + hidden)
    counted = [
        flops(ours(size=(side, side), patch_size=(8, 8), classes=10, mlp_ratio=hidden / dim))
        for side in sides
    ]
    counts = {
        "products": [costs[PRODUCTS] for costs in counted],
        "flops": [sum(costs.values()) for costs in counted],
    }
    exponents = {row.cost: row.exponent for row in record.exponents}
    for cost, values in counts.items():
        fit = stats.linregress(np.log(tokens), np.log(values))
        half = stats.t.ppf(0.975, 1) * fit.stderr
        assert exponents[cost].value == pytest.approx(fit.slope, abs=1e-6)
        assert (exponents[cost].low, exponents[cost].high) == pytest.approx(
            (fit.slope - half, fit.slope + half), abs=1e-5
        )


def test_every_part_of_our_vit_and_of_a_cnn_has_what_its_shape_says():
    dim = 128
    depth = 6
    hidden = 512
    tokens = 65
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
    assert (cnn[STEM], cnn["stage 0"], cnn[HEAD]) == (
        27 * 16 + 2 * 16,
        6 * (9 * 16 * 16 + 2 * 16),
        650,
    )


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
    by_part = parameters(model)
    common = {EMBEDDING, PROJECTIONS, MLP, NORMS, HEAD}
    assert sum(by_part.values()) == model.parameter_count()
    assert common <= set(by_part) <= common | {POSITIONS, BETWEEN}
    if family in PLACED:
        tensors = dict(model.module.named_parameters())
        position_counts = []
        for name, tensor in tensors.items():
            if any(word in name for word in PLACED[family]):
                position_counts.append(tensor.numel())
        assert by_part[POSITIONS] == sum(position_counts)
    if family == "our-swin":
        assert by_part[BETWEEN] == 4 * 16 * 32  # the patch merging, without its norm


def test_downsampling_is_counted_with_the_stage_that_it_leads_to():
    settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 24, 2), CNBlockConfig(24, None, 1)]
    model = model_of(shaken(lambda: ConvNeXt(settings, num_classes=5)), alias="convnext")
    by_part = parameters(model)
    assert list(by_part) == [STEM, "stage 0", "stage 1", "stage 2", HEAD]
    # of torchvision's features: the stem, then blocks and downsampling in turn
    for stage in (
        1,
        2,
    ):
        stage_parameters = [
            *model.module.features[2 * stage].parameters(),
            *model.module.features[2 * stage + 1].parameters(),
        ]
        assert by_part[f"stage {stage}"] == sum(parameter.numel() for parameter in stage_parameters)


def cost(module: nn.Module) -> object:
    return vitlens.profile(model_of(module), batch_sizes=())


def test_a_profile_holds_together():
    model = ours()
    measured = vitlens.profile(model, batch_sizes=[1, 2])
    assert sum(measured.parameters.values()) == model.parameter_count()
    assert measured.by_formula
    assert measured.tokens == 13
    # the images at least
    assert min(measured.training_bytes, measured.inference_bytes) > 4 * 3 * 32 * 48
    assert [one.images for one in measured.latencies] == [1, 2]
    for one in measured.latencies:
        assert 0 < one.low <= one.median <= one.high
    less = vitlens.profile(pruned(model, {0: {1}}), batch_sizes=())
    assert not less.by_formula
    assert less.flops["attention products"] == 0.75 * measured.flops["attention products"]
    other_size = vitlens.profile(model_of(model.module, size=(64, 48)), batch_sizes=())
    assert (other_size.tokens, other_size.by_formula) == (25, False)


@pytest.mark.parametrize(
    ("family", "tokens"), [("swinv2", 16 * 16), ("torchvision-vit", 17), ("cait", 16)]
)
def test_every_family_has_a_profile(family, tokens):
    measured = vitlens.profile(shared_model(family), batch_sizes=())
    assert min(sum(measured.flops.values()), measured.training_bytes, measured.inference_bytes) > 0
    assert (measured.by_formula, measured.latencies, measured.tokens) == (False, (), tokens)


def test_positions_of_a_cnn_are_those_of_its_first_block():
    for name, size, positions in (("resnet20", (32, 32), 32 * 32), ("resnet18", (64, 96), 16 * 24)):
        model = vitlens.load(name, random_weights=True, image_size=size)
        assert vitlens.profile(model, batch_sizes=()).tokens == positions
    assert (
        cost(nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())).tokens
        == 32 * 32
    )


def mlp(width: int = 7) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width), nn.GELU(), nn.Linear(width, 5))


class Twice(nn.Module):
    """Two products of one activation with one parameter; their first five sums are logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(PIXELS))

    def forward(self, batch: Tensor) -> Tensor:
        flat = batch.flatten(1)
        return (flat * self.scale + flat.view(len(flat), -1) * self.scale)[:, :5]


def test_a_training_step_keeps_what_its_layers_need_and_draws_nothing():
    """Inputs of both linear maps and of GELU; of cross-entropy log-probabilities, labels and the
    total weight: half of what two images need.
    """
    labels = 8 * 2
    assert cost(mlp()).training_bytes == (4 * (2 * (PIXELS + 7 + 7 + 5) + 1) + labels) // 2
    # a storage is counted once, and parameters never
    assert cost(Twice()).training_bytes == (4 * (2 * (PIXELS + 5) + 1) + labels) // 2
    fused = vitlens.profile(ours(fused=True), batch_sizes=()).training_bytes
    explicit = vitlens.profile(ours(fused=False), batch_sizes=()).training_bytes
    rows = 4 * 2 * 2 * 13  # bytes of a number for each layer, head and token
    # the fused kernel keeps one number a row in place of the weights
    assert explicit >= fused + 12 * rows
    torch.manual_seed(3)
    before = torch.get_rng_state()
    vitlens.profile(odd(), batch_sizes=())  # which has dropout
    assert torch.equal(torch.get_rng_state(), before)


def test_the_peak_of_inference_is_that_of_the_widest_place():
    """The image, its normalised copy (made in two steps), then ever less; or two neighbouring
    activations.
    """
    assert cost(mlp()).inference_bytes == 4 * 3 * PIXELS
    wide = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 100_000), nn.ReLU())
    held = 4 * (2 * 100_000 + PIXELS)  # before and after ReLU, and the image
    assert held <= cost(wide).inference_bytes <= held + 4 * (PIXELS + 10)


class Metronome(nn.Module):
    """Takes a time for each image by its clock, and records how many images it gets."""

    def __init__(self, move: object) -> None:
        super().__init__()
        self.move = move
        self.given = []
        self.each = 1.0

    def forward(self, batch: Tensor) -> Tensor:
        self.given.append(len(batch))
        self.move(self.each * len(batch))
        return batch.mean((2, 3))


def test_latencies_are_quartiles_of_passes_after_those_that_warm_up(monkeypatch):
    model = model_of(Metronome(clock_of_passes(monkeypatch).move), size=(8, 8))
    slow = vitlens.profile(model, batch_sizes=[1, 4]).latencies
    assert [(one.low, one.median, one.high) for one in slow] == [(1.0,) * 3, (4.0,) * 3]
    assert [one.repeats for one in slow] == [6, 6]  # at least two in each of three rounds
    assert slow[1].images_per_second == 1.0
    # of which a quarter of a second holds four
    model.module.each = 1 / 16
    model.module.given = []
    (quick,) = vitlens.profile(model, batch_sizes=[3]).latencies
    assert (quick.median, quick.repeats) == (3 / 16, 6)
    # a round: two to warm up and choose, two timed
    assert model.module.given.count(3) == 3 * (2 + 2)
    (quicker,) = vitlens.profile(model, batch_sizes=[1]).latencies
    assert quicker.repeats == 12
    model.module.each = 1e-9
    assert vitlens.profile(model, batch_sizes=[1]).latencies[0].repeats == 30  # at most ten a round


def test_on_the_command_line_models_take_turns_and_no_larger_batch_than_is_worth_while(
    monkeypatch, tiny_vit, tiny_cnn, tmp_path
):
    clock_of_passes(monkeypatch, tick=2.0)
    turns: list[str] = []

    def keep(module: nn.Module, _inputs: object) -> None:
        # as passes are timed
        if isinstance(module, vitlens.Model) and torch.is_inference_mode_enabled():
            turns.append(module.alias)

    with nn.modules.module.register_module_forward_pre_hook(keep):
        speed = ran(tmp_path / "run", f"profile {tiny_vit} {tiny_cnn} --sizes 32").speed
    # a round: two passes to warm up and choose, two timed; the sweep over sizes comes afterwards
    assert turns[:24] == (["tiny-vit"] * 4 + ["tiny-cnn"] * 4) * 3
    # longer than a second
    assert values_of(speed, "images", "latency.value") == [
        (1, 2000.0),
        (1, 2000.0),
    ]
