"""`best` against plain loops over its equation, and what it costs."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from vitlens import Model

GRID, SIDE, PATCH = 8, 32, 4  # of vit-digits
Rows = list[list[float]]


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


def parts_by_loops(image: Tensor, target: int) -> tuple[Tensor, ...]:
    """V = S²G · (S²C⁺ + S²N⁺), G and C⁺ + N⁺, each factor divided by its mean, and T."""
    model = vitlens.load("vit-digits")
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
    return (*(torch.tensor(each, dtype=torch.double).view(GRID, GRID) for each in found), alike_by_formula(cells))


def alike_by_formula(tokens: Tensor) -> Tensor:
    """T: of tokens less their mean, exp(5 cos), rows scaled to sum to 1."""
    centred = tokens - tokens.mean(0)
    lengths = (centred**2).sum(1).sqrt()
    found = (5 * (centred @ centred.T) / (lengths[:, None] * lengths)).exp()
    return found / found.sum(1, keepdim=True)


def blurred(image: Tensor) -> Tensor:
    """A Gaussian blur of an eighth of the side, truncated at three standard deviations, mirrored at the edges."""
    sigma = SIDE / 8
    places = torch.arange(-12, 13.0)
    kernel = torch.exp(-(places**2) / (2 * sigma**2))
    kernel /= kernel.sum()
    wide = F.pad(image[None], (12, 12, 12, 12), mode="reflect").transpose(0, 1)
    return F.conv2d(F.conv2d(wide, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))[:, 0]


def area(patch: int) -> tuple[slice, slice, slice]:
    row, column = PATCH * (patch // GRID), PATCH * (patch % GRID)
    return slice(None), slice(row, row + PATCH), slice(column, column + PATCH)


def effects_by_differences(image: Tensor, target: int) -> Tensor:
    """e: by how much the logit changes at 9/10 blurred and 1/10 image as one patch moves to the image's pixels."""
    model = vitlens.load("vit-digits")
    model.module.double()
    smooth = blurred(image).double()
    change, step = image.double() - smooth, 1e-5
    moves = torch.zeros(GRID * GRID, *image.shape, dtype=torch.double)
    for patch in range(GRID * GRID):
        moves[patch][area(patch)] = change[area(patch)]
    mean, std = model.mean.double(), model.std.double()
    start = smooth + 0.1 * change
    with torch.no_grad():
        more, less = (model.module((start + way * step * moves - mean) / std)[:, target] for way in (1, -1))
    slopes = (more - less) / (2 * step)
    return (slopes / slopes.abs().sum()).view(GRID, GRID)


def kept_by_loops(model: Model, image: Tensor, target: int, candidate: Tensor) -> float:
    """The target's probability with the highest 32 of 64 patches, the others from the blurred image."""
    shown = blurred(image)
    for patch in candidate.flatten().argsort(descending=True, stable=True).tolist()[:32]:
        shown[area(patch)] = image[area(patch)]
    with torch.no_grad():
        return float(model(shown[None]).softmax(-1)[0, target])


def smooth_by_loops(where: Tensor, rollout: Tensor, alike: Tensor, effect: Tensor) -> Tensor:
    """((4/5 Q + 1/5 BQ) / max + 3/2 e)⁺ over its greatest value and to a power, with Q = (R + TR) / 2 and R =
    (V⁶ G)^⅙; B has the kernel (1, 6, 1) / 8 along each axis, the border repeated."""
    root = (where**6 * rollout) ** (1 / 6)
    root = (root + (alike @ root.flatten()).view_as(root)) / 2
    rows, columns = root.shape
    found = torch.zeros_like(root)
    for row in range(rows):
        for column in range(columns):
            around = 0.0
            for down, across in itertools.product((-1, 0, 1), repeat=2):
                share = (1, 6, 1)[down + 1] * (1, 6, 1)[across + 1] / 64
                near = min(max(row + down, 0), rows - 1), min(max(column + across, 0), columns - 1)
                around += share * float(root[near])
            found[row, column] = 0.8 * float(root[row, column]) + 0.2 * around
    found = (found / found.max() + 1.5 * effect).clamp_min(0)
    found /= found.max()
    powers = [1 + 3 * step / 5000 for step in range(5001)]
    return found ** max([each for each in powers if spread(found**each) >= 0.15], default=1.0)


def spread(values: Tensor) -> float:
    """(Σ m)² / (N Σ m²): the share of the patches that a map of zeros and equal values would mark."""
    return float(values.sum()) ** 2 / (values.numel() * float((values**2).sum()))


def candidates_by_loops(image: Tensor, target: int) -> tuple[Tensor, list[float]]:
    """The smooth, the sharp and the rollout candidate, and what each keeps of the target's probability."""
    where, rollout, agreed, alike = parts_by_loops(image, target)
    smooth = smooth_by_loops(where, rollout, alike, effects_by_differences(image, target))
    found = torch.stack([smooth, where**3 * rollout * agreed, rollout])
    model = vitlens.load("vit-digits")
    return found, [kept_by_loops(model, image, target, each.float()) for each in found]


@pytest.fixture(scope="module")
def scenes() -> tuple[Tensor, Tensor]:
    (batch,) = vitlens.load_data("digits", limit=4).batches(4)
    return batch.images, batch.labels


@pytest.fixture(scope="module")
def candidates(scenes) -> list[tuple[Tensor, list[float]]]:
    return [candidates_by_loops(image, int(label)) for image, label in zip(*scenes, strict=True)]


@pytest.mark.parametrize("margin", [None, -1.0, 0.0, 2.0])
def test_the_map_is_that_of_plain_loops_and_the_image_decides_between_the_candidates(
    scenes, candidates, margin, monkeypatch
):
    """By what each keeps of the target's probability; a margin of -1 never gives the smooth one, 2 always does."""
    if margin is not None:
        monkeypatch.setattr("vitlens.attribution.best.MARGIN", margin)
    margin = 0.1 if margin is None else margin
    found = vitlens.explain(vitlens.load("vit-digits"), scenes[0], targets=scenes[1], method="best")
    for own, (maps, kept) in zip(found.double(), candidates, strict=True):
        number = max(range(3), key=lambda each: kept[each] + (margin if each == 0 else 0.0))
        assert number != 0 or margin > -1
        assert number == 0 or margin < 2
        wanted = maps[number]
        torch.testing.assert_close(own, wanted, atol=1e-4 * wanted.max().item(), rtol=5e-3)  # p to 1/1000


def test_a_model_that_ignores_the_image_has_a_map_of_zeros(scenes):
    model = vitlens.load("vit-digits")
    model.module.head.weight.data.zero_()
    found = vitlens.explain(model, scenes[0], targets=scenes[1], method="best")
    assert torch.equal(found, torch.zeros(4, GRID, GRID))


def test_it_passes_an_image_through_the_model_at_most_ten_times(scenes):
    model, passed = vitlens.load("vit-digits"), []
    vitlens.explain(model, scenes[0], targets=scenes[1], method="best")  # what is read of a model once does not count
    with model.module.blocks[0].register_forward_pre_hook(lambda _block, given: passed.append(len(given[0]))):
        vitlens.explain(model, scenes[0], targets=scenes[1], method="best")
    assert 4 < sum(passed) / len(scenes[0]) <= 10
