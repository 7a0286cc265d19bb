"""`best` against plain loops over its equation; what it leaves behind, what it costs, and which models have it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitlens
from tests.contracts.uses import Break, BrokenError, state_of
from tests.lens.tiny import FAMILIES, images, ours, timm_model
from vitlens.analysis.attention.relevance import gradient_rollout
from vitlens.analysis.faithfulness.league import forward_equivalents
from vitlens.analysis.faithfulness.resampled import enlarged
from vitlens.attribution.best import best_maps
from vitlens.attribution.explain import explain, methods_for
from vitlens.data.digits import digits
from vitlens.errors import UnsupportedError
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
    """S: attention between patches plus its transpose, over layers and heads, rows scaled to sum to 1."""
    total = sum(weights[:, 1:, 1:].sum(0) for weights in plain.weights)
    assert isinstance(total, Tensor)
    values, count = total.tolist(), len(total)
    both = [[values[i][j] + values[j][i] for j in range(count)] for i in range(count)]
    return [[value / sum(row) for value in row] for row in both]


def smoothed(values: list[float], similarity: Rows) -> list[float]:
    """S² of what is positive, divided by its mean."""
    values = [max(value, 0.0) for value in values]
    for _ in range(2):
        values = [sum(a * b for a, b in zip(row, values, strict=True)) for row in similarity]
    mean = sum(values) / len(values)
    return [value / mean for value in values] if mean else values


def doubled(cells: list[float]) -> Rows:
    """GRID x GRID values at twice the resolution: each finer cell 3/4 of its own and 1/4 of the nearest other one."""

    def along(line: list[float]) -> list[float]:
        ends = [line[0], *line, line[-1]]
        return [0.75 * ends[1 + i // 2] + 0.25 * ends[(i // 2) + (2 if i % 2 else 0)] for i in range(2 * len(line))]

    rows = [along(cells[GRID * row : GRID * (row + 1)]) for row in range(GRID)]
    return [list(line) for line in zip(*(along(list(column)) for column in zip(*rows, strict=True)), strict=True)]


def moved(image: Tensor) -> Tensor:
    """Half a patch up and left; what comes in is the image mirrored at its edge."""
    step = PATCH // 2
    source = [place if place < SIDE else 2 * (SIDE - 1) - place for place in range(step, SIDE + step)]
    return image[:, source][:, :, source]


def best_by_loops(model: Model, image: Tensor, target: int) -> Tensor:
    """V³ · G with V = S²G · (S²C⁺ + S²N⁺), mean of two views, each of V and G divided by its mean."""
    module = model.module.double().requires_grad_(True)
    places = torch.zeros(2 * GRID, 2 * GRID, dtype=torch.double)
    first_rollout: list[float] = []
    for view in range(2):
        prepared = model.prepare((moved(image) if view else image)[None])[0].double()
        plain = Plain(module, prepared, target)
        similarity, rollout = affinity_by_loops(plain), rollout_by_loops(plain)
        cells = plain.cells.detach()[1:]
        gradient, libra = (each[1:] for each in plain.cell_gradients)
        gradcam = (cells * gradient.mean(0)).sum(1).tolist()
        hirescam = (cells * libra).sum(1).tolist()
        where = [
            g * (c + n)
            for g, c, n in zip(*(smoothed(each, similarity) for each in (rollout, gradcam, hirescam)), strict=True)
        ]
        large = doubled(where)
        for row in range(2 * GRID):
            for column in range(2 * GRID):  # a view's cell lies one finer cell further up and left
                places[row, column] += large[max(row - view, 0)][max(column - view, 0)] / 2
        first_rollout = first_rollout or rollout
    raw = torch.tensor(doubled([max(value, 0.0) for value in first_rollout]), dtype=torch.double)
    return (places / places.mean()) ** 3 * raw / (sum(first_rollout) / len(first_rollout))


def test_it_is_its_equation(scenes):
    batch, labels = scenes
    found = explain(vitlens.load("vit-digits"), batch, targets=labels, method="best")
    assert found.shape == (4, 2 * GRID, 2 * GRID)
    assert found.min() >= 0
    for image, label, own in zip(batch, labels, found, strict=True):
        expected = best_by_loops(vitlens.load("vit-digits"), image, int(label))
        assert expected.std() > 0.5
        torch.testing.assert_close(own.double(), expected, atol=1e-4 * expected.max().item(), rtol=1e-4)


def test_the_logits_and_the_model_are_as_before(scenes):
    batch, labels = scenes
    model = vitlens.load("vit-digits")
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    best_maps(model, batch, labels)  # what is found out once about a model is found
    before, logits = state_of(model), model(batch)
    best_maps(model, batch, labels)
    assert state_of(model) == before
    assert torch.equal(model(batch), logits)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("passes", range(1, 7))
def test_nothing_stays_after_an_exception_in_any_pass(scenes, passes):
    """Two views, each with a pass for the attention, one for GradCAM and one with LibraGrad's gradients."""
    batch, labels = scenes
    model = vitlens.load("vit-digits")
    best_maps(model, batch, labels)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    handle = model.module.head.register_forward_pre_hook(Break(BrokenError, passes))
    before = state_of(model)
    with pytest.raises(BrokenError):
        best_maps(model, batch, labels)
    assert state_of(model) == before
    handle.remove()


def test_it_is_zero_where_no_attention_raises_the_logit():
    """One block of one head: gradient-weighted rollout is exactly 0 at many patches, and on the finer grid between."""
    model = ours(depth=1, heads=1, size=(64, 96))
    batch, targets = images(model.input_size, batch=3), torch.tensor([3, 0, 4])
    found = explain(model, batch, targets=targets, method="best")
    rollout = gradient_rollout(model, batch, targets=targets)
    nothing = enlarged(rollout, (found.shape[1], found.shape[2])) == 0
    assert nothing.sum() > 10
    assert not bool(found[nothing].any())
    assert bool(found[~nothing].any())


def test_a_model_that_ignores_the_image_has_a_map_of_zeros(scenes):
    batch, labels = scenes
    model = vitlens.load("vit-digits")
    model.module.head.weight.data.zero_()
    found = explain(model, batch, targets=labels, method="best")
    assert torch.equal(found, torch.zeros(4, 2 * GRID, 2 * GRID))


def test_a_cnn_is_told_what_it_has():
    model = vitlens.load("cnn-digits")
    assert "best" not in methods_for(model)
    with pytest.raises(UnsupportedError, match=r"found 'best'; it has gradcam, ") as raised:
        explain(model, images(), method="best")
    assert "\n" not in str(raised.value)
    for family in ("swin", "torchvision-swin"):
        assert "best" not in methods_for(FAMILIES[family]())


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm_model("vit_tiny_patch16_224", global_pool="avg", class_token=False, fc_norm=True),
        lambda: timm_model("vit_tiny_patch16_224", reg_tokens=4),
        *(FAMILIES[name] for name in ("vit-mean", "deit-distilled", "dinov2-registers", "siglip", "cait")),
    ],
)
def test_vits_that_read_their_tokens_otherwise(make):
    model = make()
    batch, targets = images(model.input_size, batch=3), torch.tensor([3, 0, 4])
    found = explain(model, batch, targets=targets, method="best")
    rows, columns = model.layout.grid
    assert found.shape == (3, 2 * rows, 2 * columns)
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
