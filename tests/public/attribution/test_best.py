"""`best` against plain loops over its equation; what it leaves behind, what it costs, and which models have it."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitlens
import vitlens.attribution.best as best
from tests.kit.tiny import FAMILIES, images, ours, timm_model
from vitlens.analysis.faithfulness.league import forward_equivalents
from vitlens.analysis.faithfulness.maps import enlarged
from vitlens.analysis.faithfulness.removal import substrate_images
from vitlens.attribution.best import best_maps
from vitlens.attribution.explain import explain
from vitlens.data.digits import digits
from vitlens.models.model import Model

GRID, SIDE, PATCH = 8, 32, 4  # of vit-digits
Rows = list[list[float]]


@pytest.fixture(scope="module")
def model() -> Model:
    return vitlens.load("vit-digits")


@pytest.fixture(scope="module")
def scenes() -> tuple[Tensor, Tensor]:
    (batch,) = digits("test").limit(4).batches(4)
    return batch.images, batch.labels


class Plain:
    """One image through vit-digits by matrix products, in double precision, a leaf wherever a gradient is asked for.

    weights: of each block (heads, query, key); cells, detached: the input of the last block's attention (tokens, dim),
    once with plain gradients behind it and once with LibraGrad's.
    """

    def __init__(self, module: Any, image: Tensor, target: int) -> None:
        self.module, stream = module, module.tokens(image[None])[0]
        self.weights: list[Tensor] = []
        for block in module.blocks:
            self.cells = block.norm1(stream).detach().requires_grad_() if block is module.blocks[-1] else None
            into = block.norm1(stream)
            self.before, stream = stream, self.block(block, stream, into, libra=False)
        logit = module.head(module.norm(stream)[0])[target]
        self.weight_gradients = torch.autograd.grad(logit, self.weights)
        last, kept = module.blocks[-1], list(self.weights)
        assert self.cells is not None
        self.cell_gradients = []
        for libra in (False, True):
            end = self.block(last, self.before.detach(), self.cells, libra=libra)
            normed = constant_norm(module.norm, end) if libra else module.norm(end)
            self.cell_gradients.append(torch.autograd.grad(module.head(normed[0])[target], self.cells)[0])
        self.weights = [weights.detach() for weights in kept]

    def block(self, block: Any, stream: Tensor, into: Tensor, *, libra: bool) -> Tensor:
        attention = block.attn
        query, key, value = attention.qkv(into).unflatten(-1, (3, attention.heads, -1)).permute(1, 2, 0, 3)
        weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        self.weights.append(weights)
        weights = weights.detach() if libra else weights
        stream = stream + attention.proj((weights @ value).transpose(0, 1).flatten(1))
        if not libra:
            return stream + block.mlp(block.norm2(stream)[None])[0]
        first, second = (layer for layer in block.mlp.modules() if isinstance(layer, nn.Linear))
        hidden = first(constant_norm(block.norm2, stream))
        gate = (1 + torch.erf(hidden.detach() / math.sqrt(2))) / 2
        return stream + second(hidden * gate)


def constant_norm(norm: Any, tokens: Tensor) -> Tensor:
    """A LayerNorm whose standard deviation is a constant."""
    spread = (tokens.detach().var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    return (tokens - tokens.mean(-1, keepdim=True)) / spread * norm.weight + norm.bias


def rollout_by_loops(plain: Plain) -> list[float]:
    """G: the row of CLS in the product of (Ā + I) / 2, rows scaled to sum to 1, without CLS's own column."""
    tokens = plain.weights[0].shape[-1]
    product = torch.eye(tokens, dtype=torch.double)
    for weights, gradient in zip(plain.weights, plain.weight_gradients, strict=True):
        mixed = (weights * gradient).clamp_min(0).mean(0) / 2 + torch.eye(tokens, dtype=torch.double) / 2
        product = (mixed / mixed.sum(1, keepdim=True)) @ product
    return product[0, 1:].tolist()


def affinity_by_loops(plain: Plain) -> Rows:
    """S: attention between patches plus its transpose, over the layers 2 to 5 and heads, rows scaled to sum to 1."""
    total = sum(weights[:, 1:, 1:].sum(0) for weights in plain.weights[2:])
    assert isinstance(total, Tensor)
    values, count = total.tolist(), len(total)
    both = [[values[i][j] + values[j][i] for j in range(count)] for i in range(count)]
    return [[value / sum(row) for value in row] for row in both]


def smoothed(values: list[float], similarity: Rows | None) -> list[float]:
    """S² of what is positive (None: that itself), divided by its mean."""
    values = [max(value, 0.0) for value in values]
    for _ in range(2 if similarity else 0):
        assert similarity is not None
        values = [sum(a * b for a, b in zip(row, values, strict=True)) for row in similarity]
    mean = sum(values) / len(values)
    return [value / mean for value in values] if mean else values


def parts_by_loops(model: Model, image: Tensor, target: int) -> tuple[Tensor, ...]:
    """V = S²G · (S²C⁺ + S²N⁺), G and C⁺ + N⁺, each factor divided by its mean; S of the upper two thirds of layers."""
    module = model.module.double().requires_grad_(True)
    plain = Plain(module, model.prepare(image[None])[0].double(), target)
    similarity, rollout = affinity_by_loops(plain), rollout_by_loops(plain)
    assert plain.cells is not None
    cells = plain.cells.detach()[1:]
    gradient, libra = (each[1:] for each in plain.cell_gradients)
    cams = (cells * gradient.mean(0)).sum(1).tolist(), (cells * libra).sum(1).tolist()
    first, second = (smoothed(cam, similarity) for cam in cams)
    where = [g * (c + n) for g, c, n in zip(smoothed(rollout, similarity), first, second, strict=True)]
    agreed = [sum(pair) for pair in zip(*(smoothed(cam, None) for cam in cams), strict=True)]
    found = (where, smoothed(rollout, None), agreed)
    maps = tuple(torch.tensor(each, dtype=torch.double).view(GRID, GRID) for each in found)
    return (*maps, alike_by_formula(cells))


def alike_by_formula(tokens: Tensor) -> Tensor:
    """T: of tokens less their mean, exp(5 cos), rows scaled to sum to 1."""
    centred = tokens - tokens.mean(0)
    lengths = (centred**2).sum(1).sqrt()
    found = (5 * (centred @ centred.T) / (lengths[:, None] * lengths)).exp()
    return found / found.sum(1, keepdim=True)


def effects_by_differences(image: Tensor, target: int) -> Tensor:
    """e: by how much the logit changes at 9/10 blurred and 1/10 image as one patch moves to the image's pixels."""
    model = vitlens.load("vit-digits")
    model.module.double()
    blurred = substrate_images(image[None], "blur")[0].double()
    change, step = image.double() - blurred, 1e-5
    moves = torch.zeros(GRID * GRID, *image.shape, dtype=torch.double)
    for patch in range(GRID * GRID):
        row, column = PATCH * (patch // GRID), PATCH * (patch % GRID)
        area = (slice(None), slice(row, row + PATCH), slice(column, column + PATCH))
        moves[patch][area] = change[area]
    mean, std = model.mean.double(), model.std.double()
    start = blurred + 0.1 * change
    with torch.no_grad():
        more, less = (model.module((start + way * step * moves - mean) / std)[:, target] for way in (1, -1))
    slopes = (more - less) / (2 * step)
    return (slopes / slopes.abs().sum()).view(GRID, GRID)


def test_effects_are_those_of_finite_differences(scenes):
    batch, labels = (each[:2] for each in scenes)
    found = best.effects(vitlens.load("vit-digits"), batch, labels)
    torch.testing.assert_close(found.abs().sum((1, 2)), torch.ones(len(batch)))
    for place, (image, label) in enumerate(zip(batch, labels, strict=True)):
        wanted = effects_by_differences(image, int(label))
        assert (wanted < 0).sum() > 3
        torch.testing.assert_close(found[place].double(), wanted, atol=1e-5, rtol=1e-3)


def test_its_parts_are_those_of_plain_loops(scenes):
    batch, labels = scenes
    model = vitlens.load("vit-digits")
    found = best._parts(model, batch, labels)
    for place, (image, label) in enumerate(zip(batch, labels, strict=True)):
        expected = parts_by_loops(vitlens.load("vit-digits"), image, int(label))
        for name, wanted in zip(("where", "rollout", "agreed", "alike"), expected, strict=True):
            own = getattr(found, name)[place].double()
            assert wanted.std() > (0.05 if name != "alike" else 1e-3)
            torch.testing.assert_close(own, wanted, atol=1e-4 * wanted.max().item(), rtol=1e-4)


def kept_by_loops(model: Model, image: Tensor, target: int, candidate: Tensor) -> float:
    """The target's probability with the highest 32 of 64 patches, the others from the blurred image."""
    shown = substrate_images(image[None], "blur")[0].clone()
    for patch in candidate.flatten().argsort(descending=True, stable=True).tolist()[:32]:
        row, column = PATCH * (patch // GRID), PATCH * (patch % GRID)
        area = (slice(None), slice(row, row + PATCH), slice(column, column + PATCH))
        shown[area] = image[area]
    with torch.no_grad():
        return float(model(shown[None]).softmax(-1)[0, target])


def smooth_by_loops(where: Tensor, rollout: Tensor, alike: Tensor, effect: Tensor) -> Tensor:
    """((4/5 Q + 1/5 BQ) / max + 3/2 e)⁺ over its greatest value and to a power, with Q = (R + TR) / 2 and R =
    (V⁶ G)^⅙; B has the kernel (1, 6, 1) / 8 along each axis, the border repeated."""
    root = (where**6 * rollout).double() ** (1 / 6)
    root = (root + (alike.double() @ root.flatten()).view_as(root)) / 2
    rows, columns = root.shape
    found = torch.zeros_like(root)
    for row in range(rows):
        for column in range(columns):
            blurred = 0.0
            for down, across in itertools.product((-1, 0, 1), repeat=2):
                share = (1, 6, 1)[down + 1] * (1, 6, 1)[across + 1] / 64
                near = min(max(row + down, 0), rows - 1), min(max(column + across, 0), columns - 1)
                blurred += share * float(root[near])
            found[row, column] = 0.8 * float(root[row, column]) + 0.2 * blurred
    found = (found / found.max() + 1.5 * effect.double()).clamp_min(0)
    found /= found.max()
    powers = [1 + 3 * step / 5000 for step in range(5001)]
    power = max([each for each in powers if spread(found**each) >= 0.15], default=1.0)
    return (found**power).to(where.dtype)


def spread(values: Tensor) -> float:
    """(Σ m)² / (N Σ m²): the share of the patches that a map of zeros and equal values would mark."""
    return float(values.sum()) ** 2 / (values.numel() * float((values**2).sum()))


def test_contrast_leaves_the_order_and_enough_patches_bright():
    """As high a power as leaves the spread, from 1 to 4: at both ends, and between them."""
    torch.manual_seed(0)
    maps = torch.stack([torch.rand(8, 8) ** sharpness + 1e-3 for sharpness in (0.1, 1, 3, 40)])
    made = best._contrasted(maps)
    assert torch.equal(made.flatten(1).argsort(1), maps.flatten(1).argsort(1))
    torch.testing.assert_close(made.amax((1, 2)), torch.ones(4))
    wanted = maps / maps.amax((1, 2), keepdim=True)
    torch.testing.assert_close(made[0], wanted[0] ** 4, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made[3], wanted[3])
    assert spread(maps[3]) < 0.15
    assert spread(made[2]) == pytest.approx(0.15, abs=1e-3)
    assert best._contrasted(torch.zeros(1, 8, 8)).abs().sum() == 0


@pytest.fixture(scope="module")
def candidates(scenes) -> tuple[Tensor, list[list[float]]]:
    """The three candidate maps of each scene, and what each keeps of its target's probability."""
    batch, labels = scenes
    model = vitlens.load("vit-digits")
    parts = best._parts(model, batch, labels)
    sharp = parts.where**3 * parts.rollout * parts.agreed
    maps = zip(parts.where, parts.rollout, parts.alike, best.effects(model, batch, labels), strict=True)
    smooth = torch.stack([smooth_by_loops(*of_image) for of_image in maps])
    maps = torch.stack([smooth, sharp, parts.rollout])
    return maps, [
        [kept_by_loops(model, image, int(label), each) for each in maps[:, place]]
        for place, (image, label) in enumerate(zip(batch, labels, strict=True))
    ]


@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.1, 2.0])
def test_the_image_decides_between_the_candidates(scenes, candidates, margin, monkeypatch):
    """By what each keeps of the target's probability; a margin of -1 never gives the smooth one, 2 always does."""
    monkeypatch.setattr(best, "MARGIN", margin)
    found = best_maps(vitlens.load("vit-digits"), *scenes)
    for place, kept in enumerate(candidates[1]):
        number = max(range(3), key=lambda each: kept[each] + (margin if each == 0 else 0.0))
        assert number != 0 or margin > -1
        assert number == 0 or margin < 2
        wanted = candidates[0][number, place]
        torch.testing.assert_close(found[place], wanted, atol=1e-5 * wanted.max().item(), rtol=5e-3)  # p to 1/1000


def test_it_is_zero_where_no_attention_raises_the_logit(monkeypatch):
    """One block of one head: gradient-weighted rollout is exactly 0 at many patches.

    The blur, similar tokens and single patches' effects reach others; they are left out.
    """
    for name in ("_BLURRED", "_ALIKE", "_EFFECT_WEIGHT"):
        monkeypatch.setattr(best, name, 0.0)
    model = ours(depth=1, heads=1, size=(64, 96))
    batch, targets = images(model.input_size, batch=3), torch.tensor([3, 0, 4])
    found = explain(model, batch, targets=targets, method="best")
    rollout = explain(model, batch, targets=targets, method="gradient-rollout")
    nothing = enlarged(rollout, (found.shape[1], found.shape[2])) == 0
    assert nothing.sum() > 10
    assert not bool(found[nothing].any())
    assert bool(found[~nothing].any())


def test_a_model_that_ignores_the_image_has_a_map_of_zeros(scenes):
    batch, labels = scenes
    model = vitlens.load("vit-digits")
    model.module.head.weight.data.zero_()
    found = explain(model, batch, targets=labels, method="best")
    assert torch.equal(found, torch.zeros(4, GRID, GRID))


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm_model("vit_tiny_patch16_224", reg_tokens=4),
        *(FAMILIES[name] for name in ("vit-mean", "deit-distilled", "siglip", "cait")),
    ],
)
def test_vits_that_read_their_tokens_otherwise(make):
    model = make()
    batch, targets = images(model.input_size, batch=3), torch.tensor([3, 0, 4])
    found = explain(model, batch, targets=targets, method="best")
    rows, columns = model.layout.grid
    assert found.shape == (3, rows, columns)
    assert torch.isfinite(found).all()
    assert found.min() >= 0
    assert found.flatten(1).std(1).min() > 0
    alone = explain(model, batch[1:2], targets=targets[1:2], method="best")[0]
    torch.testing.assert_close(alone, found[1], atol=1e-3 * found[1].max().item(), rtol=0)


def test_it_costs_at_most_ten_forward_passes(model, scenes):
    batch, labels = scenes
    best_maps(model, batch, labels)
    cost = forward_equivalents(model, batch, labels, best_maps)
    assert 4 < cost <= 10
