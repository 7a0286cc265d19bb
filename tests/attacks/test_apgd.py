"""APGD beside the paper's algorithm 1, written out for one image."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.attacks.models import Flat, made, pictures, seeded
from vitlens.attacks.apgd import windows
from vitlens.attacks.engine import worst_case
from vitlens.attacks.losses import LossName
from vitlens.attacks.norms import L2, LINF, Norm
from vitlens.attacks.plan import AttackPlan, clean_images
from vitlens.attacks.registry import ATTACKS
from vitlens.data.draws import keys
from vitlens.models.model import Model


def lengths(steps: int) -> list[int]:
    return windows(steps, torch.device("cpu")).tolist()


def checkpoints(steps: int) -> list[int]:
    return [step for step, length in enumerate(lengths(steps)) if length]


def test_checkpoints_are_the_papers():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]  # 0.22, 0.41, 0.57, 0.70, 0.80, 0.87, 0.93, 0.99
    assert checkpoints(1) == [1]
    assert [length for length in lengths(100) if length] == [22, 19, 16, 13, 10, 7, 6, 6]
    assert all(sum(lengths(steps)) == checkpoints(steps)[-1] for steps in range(1, 60))


class Wave(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return (4 * tokens).sin()


def wavy(seed: int) -> Model:
    """A model whose losses have many maxima, and which always predicts 0: no attack ends early."""

    def build() -> nn.Module:
        last = nn.Linear(16, 5)
        with torch.no_grad():
            last.bias[0] = 4
        return Flat(nn.Linear(192, 16), Wave(), last)

    return made(seeded(build, seed), (8, 8)).double()


def projected(image: Tensor, clean: Tensor, epsilon: float, norm: Norm) -> Tensor:
    change = image - clean
    if norm is LINF:
        change = change.clamp(-epsilon, epsilon)
    else:
        change = change * min(1.0, epsilon * (1 - 1e-6) / change.norm().item())
    return (clean + change).clamp(0, 1)


def by_hand(
    model: Model, clean: Tensor, label: Tensor, start: Tensor, epsilon: float, steps: int, norm: Norm,
    loss: LossName,
) -> Tensor:  # fmt: skip
    """Croce & Hein 2020, algorithm 1: all its points."""

    def f(image: Tensor) -> tuple[float, Tensor]:
        leaf = image.clone().requires_grad_()
        logits = model(leaf)[0]
        others = torch.cat((logits[:label], logits[label + 1 :]))
        ranked = logits.sort(descending=True).values
        value = (
            torch.nn.functional.cross_entropy(logits[None], label[None])
            if loss == "cross-entropy"
            else -(logits[label] - others.max()) / (ranked[0] - ranked[2] + 1e-12)
        )
        (gradient,) = torch.autograd.grad(value, leaf)
        return value.item(), gradient.sign() if norm is LINF else gradient / gradient.norm()

    share, before, marks = 0.22, 0.0, []
    while share <= 1:
        marks.append(math.ceil(share * steps - 1e-9))
        before, share = share, share + max(share - before - 0.03, 0.06)
    points, eta = [start], 2 * epsilon
    value, gradient = f(start)
    values, best, best_value, best_gradient = [value], start, value, gradient
    x, previous, last_mark, last_best, halved = start, start, 0, value, False
    for k in range(steps):
        z = projected(x + eta * gradient, clean, epsilon, norm)
        share = 0.75 if k else 1.0
        moved = projected(x + share * (z - x) + (1 - share) * (x - previous), clean, epsilon, norm)
        previous, x = x, moved
        points.append(x)
        value, gradient = f(x)
        values.append(value)
        if value > best_value:
            best, best_value, best_gradient = x, value, gradient
        if k + 1 in marks:
            rises = sum(values[i + 1] > values[i] for i in range(last_mark, k + 1))
            reduce = rises < 0.75 * (k + 1 - last_mark) or (not halved and best_value == last_best)
            if reduce:
                eta, x, gradient = eta / 2, best, best_gradient
            halved, last_best, last_mark = reduce, best_value, k + 1
    return torch.stack(points)


@pytest.mark.parametrize("norm", [LINF, L2], ids=lambda norm: norm.name)
@pytest.mark.parametrize("loss", ["cross-entropy", "dlr"])
@pytest.mark.parametrize("seed", range(3))
def test_every_point_is_that_of_algorithm_1(norm, loss, seed):
    model, images = wavy(seed), pictures(1, seed=seed).double()
    clean = clean_images(model, images, "predicted")
    seen: list[Tensor] = []
    model.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach().clone()))
    epsilon, steps = (0.2, 30) if norm is LINF else (2.0, 30)
    entry = replace(ATTACKS["apgd-ce"], norm=norm.name, options={"loss": loss, "norm": norm.name})
    outcome = worst_case(model, clean, entry, AttackPlan((epsilon,), steps=steps, seed=seed))
    assert outcome.level.tolist() == [-1]
    key = keys(seed, clean.indices, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    start = (images + norm.project(norm.draw(key, images) * epsilon, torch.full((1,), epsilon).double())).clamp(0, 1)
    expected = by_hand(model, images, clean.labels[0], start, epsilon, steps, norm, loss)
    ours = torch.cat(seen[: steps + 1])
    assert len(expected) == len(ours) == steps + 1
    torch.testing.assert_close(ours, expected[:, 0], atol=1e-7, rtol=0)
    assert len(torch.unique(ours.flatten(1), dim=0)) > steps // 2
