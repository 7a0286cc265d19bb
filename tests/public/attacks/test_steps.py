"""Every point that an attack asks the model about, beside the papers' algorithms written out for one image."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.attacked import asked, perceptron, pictures, robust

SEEDS = pytest.mark.parametrize("seed", range(2))


def points_of(model: vitlens.Model, image: Tensor, **options: object) -> list[Tensor]:
    """What the model is asked about after the clean image."""
    with asked(model) as seen:
        result = vitlens.attack(model, image, "predicted", **options)
    assert options["method"] in ("cw", "deepfool") or not result.success.any()
    return [points.detach() for points in seen[1:]]


def objective(logits: Tensor, label: int, loss: str, target: int | None) -> Tensor:
    """What is maximised, of one image."""
    ranked = logits.sort(descending=True).values
    if loss == "dlr" and target is not None:
        return (logits[target] - logits[label]) / (ranked[0] - (ranked[2] + ranked[3]) / 2 + 1e-12)
    if loss == "dlr":
        others = torch.cat((logits[:label], logits[label + 1 :]))
        return (others.max() - logits[label]) / (ranked[0] - ranked[2] + 1e-12)
    return -logits.log_softmax(0)[label] if target is None else logits.log_softmax(0)[target]


def ascent(model: vitlens.Model, image: Tensor, label: int, loss: str, target: int | None = None, *, l2: bool = False):
    """The objective, and its steepest step of length 1."""
    leaf = image.clone().requires_grad_()
    value = objective(model(leaf)[0], label, loss, target)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), gradient / gradient.norm() if l2 else gradient.sign()


def projected(image: Tensor, clean: Tensor, epsilon: float, *, l2: bool = False) -> Tensor:
    change = image - clean
    inside = change * min(1.0, epsilon / change.norm().item()) if l2 else change.clamp(-epsilon, epsilon)
    return (clean + inside).clamp(0, 1)


@SEEDS
@pytest.mark.parametrize(
    ("name", "loss", "length"),
    [("bim", "ce", 1.25), *((name, "ce", 2.5) for name in ("pgd", "pgd-l2", "pgd-targeted")), ("pgd-dlr", "dlr", 2.5)],
)
def test_projected_gradient_descent(name, loss, length, seed):
    """Steps of 2.5 (BIM: 1.25) epsilons together, each projected into the ball and the range of pixels."""
    model, clean, l2 = robust(seed=seed), pictures(1, seed=seed).double(), name == "pgd-l2"
    epsilon, steps, target = (2.0, 10, None) if l2 else (0.2, 10, None)
    given = {"targets": torch.tensor([2])} if name == "pgd-targeted" else {}
    target = 2 if given else None
    found = points_of(model, clean, method=name, epsilon=epsilon, steps=steps, seed=seed, **given)
    assert len(found) >= steps + 1
    assert torch.equal(found[0], clean) == (name == "bim")
    for here, after in pairwise(found[: steps + 1]):
        _, direction = ascent(model, here, 0, loss, target, l2=l2)
        expected = projected(here + length * epsilon / steps * direction, clean, epsilon, l2=l2)
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=0)


def auto_pgd(model, clean, start, epsilon, steps, loss, target):
    """Croce & Hein 2020, algorithm 1: all its points."""
    share, before, marks = 0.22, 0.0, []
    while share <= 1:
        marks.append(math.ceil(share * steps - 1e-9))
        before, share = share, share + max(share - before - 0.03, 0.06)
    points, eta = [start], 2 * epsilon
    value, gradient = ascent(model, start, 0, loss, target)
    values, best, best_value, best_gradient = [value], start, value, gradient
    x, previous, last_mark, last_best, halved = start, start, 0, value, False
    for k in range(steps):
        z = projected(x + eta * gradient, clean, epsilon)
        share = 0.75 if k else 1.0
        moved = projected(x + share * (z - x) + (1 - share) * (x - previous), clean, epsilon)
        previous, x = x, moved
        points.append(x)
        value, gradient = ascent(model, x, 0, loss, target)
        values.append(value)
        if value > best_value:
            best, best_value, best_gradient = x, value, gradient
        if k + 1 in marks:
            rises = sum(values[i + 1] > values[i] for i in range(last_mark, k + 1))
            reduce = rises < 0.75 * (k + 1 - last_mark) or (not halved and best_value == last_best)
            if reduce:
                eta, x, gradient = eta / 2, best, best_gradient
            halved, last_best, last_mark = reduce, best_value, k + 1
    return points


@SEEDS
@pytest.mark.parametrize(("name", "loss"), [("apgd-ce", "ce"), ("apgd-dlr", "dlr"), ("apgd-targeted", "dlr")])
def test_auto_pgd(name, loss, seed):
    model, clean, epsilon, steps = robust(seed=seed), pictures(1, seed=seed).double(), 0.2, 30
    given = {"targets": torch.tensor([3])} if name == "apgd-targeted" else {}
    found = points_of(model, clean, method=name, epsilon=epsilon, steps=steps, seed=seed, **given)[: steps + 1]
    assert 0.9 * epsilon < (found[0] - clean).abs().max() <= epsilon
    expected = auto_pgd(model, clean, found[0], epsilon, steps, loss, 3 if given else None)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=1e-7, rtol=0)
    assert len(torch.unique(torch.cat(found).flatten(1), dim=0)) > steps // 2


def margin(logits: Tensor, label: int) -> Tensor:
    others = logits.clone()
    others[label] = -torch.inf
    return logits[label] - others.max()


def carlini_wagner(model, clean, label, steps):
    """Carlini & Wagner 2017: Adam on distance² + c x margin in tanh space, and a binary search for c."""
    origin, points = torch.atanh((2 * clean - 1) * (1 - 1e-6)), []
    c, low, high = 1e-3, 0.0, math.inf
    for _ in range(9):
        shift, mean, power = torch.zeros_like(origin), torch.zeros_like(origin), torch.zeros_like(origin)
        checked, still, success = math.inf, 0, False
        for tick in range(steps):
            leaf = shift.clone().requires_grad_()
            image = ((origin + leaf).tanh() + 1) / 2
            logits = model(image)[0]
            points.append(image.detach())
            lead = (margin(logits, label) + 1e-5 * logits.detach().abs().max()).clamp_min(0)
            distance = (image - (origin.tanh() + 1) / 2).square().sum()
            loss = distance + c * lead
            success |= bool(margin(logits, label) < -1e-5 * logits.abs().max())
            (gradient,) = torch.autograd.grad(loss, leaf)
            mean, power = 0.9 * mean + 0.1 * gradient, 0.999 * power + 0.001 * gradient.square()
            rates = mean / (1 - 0.9 ** (tick + 1)), power / (1 - 0.999 ** (tick + 1))
            shift = shift - 0.01 * rates[0] / (rates[1].sqrt() + 1e-8)
            if tick % math.ceil(steps / 10) == 0:  # two checks without a fall end a search
                still = still + 1 if loss.item() > 0.9999 * checked else 0
                checked = loss.item()
            if still == 2:
                break
        low, high = (low, c) if success else (c, high)
        c = c * 10 if math.isinf(high) else (low + high) / 2
    return points


@pytest.mark.parametrize(("seed", "steps", "found"), [(1, 8, True), (2, 25, True), (4, 25, False)])
def test_carlini_and_wagners(seed, steps, found):
    """And the result is the nearest of all adversarial images on the way, or nearer still."""
    model, clean = perceptron(seed=seed).double(), pictures(1, seed=seed).double()
    with torch.no_grad():
        label = int(model(clean).argmax())
    expected = torch.cat(carlini_wagner(model, clean, label, steps))
    ours = torch.cat(points_of(model, clean, method="cw", steps=steps))[: len(expected)]
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
    result = vitlens.attack(model, clean, "predicted", method="cw", steps=steps)
    assert result.success.item() == found
    assert result.forwards.item() == len(expected) + 24 * found  # of the line search
    with torch.no_grad():
        fooled = model(expected).argmax(1) != label
    nearest = (expected - clean).flatten(1).norm(dim=1)[fooled]
    assert (len(nearest) > 2) == found
    if found:
        assert 0.98 * nearest.min() <= result.distance.item() <= nearest.min() + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_deepfool(seed):
    """Moosavi-Dezfooli 2016, algorithm 2, and an overshoot of 0.02."""
    model, clean = perceptron(seed=seed).double(), pictures(1, seed=seed).double()
    with torch.no_grad():
        label = int(model(clean).argmax())
    found = points_of(model, clean, method="deepfool", steps=10)
    total, image, count = torch.zeros_like(clean), clean, 0
    while True:
        torch.testing.assert_close(found[count], image, atol=1e-6, rtol=0)
        leaf = image.clone().requires_grad_()
        logits = model(leaf)[0]
        if margin(logits, label) < -1e-5 * logits.abs().max():
            break
        steps = []
        for other in set(range(5)) - {label}:
            gap = logits[other] - logits[label]
            (gradient,) = torch.autograd.grad(gap, leaf, retain_graph=True)
            distance = (gap.abs() + 1e-5 * logits.abs().max()) / gradient.norm()
            steps.append((distance.item(), gradient / gradient.norm()))
        length, direction = min(steps, key=lambda step: step[0])
        total = total + (length + 1e-4) * direction
        image, count = (clean + 1.02 * total).clamp(0, 1), count + 1
    assert 0 < count < 10


def test_square_changes_one_square_of_the_best_image_so_far_and_never_gets_worse():
    """Andriushchenko 2020: stripes, then squares of 0.8 of the image, halved on the published schedule."""
    model, clean, epsilon, queries = robust((16, 16)), pictures(1, (16, 16), low=0.4, high=0.6).double(), 1e-3, 100
    seen = points_of(model, clean, method="square", epsilon=epsilon, steps=2)
    assert len(seen) == queries
    torch.testing.assert_close((seen[0] - clean).abs(), torch.full_like(clean, epsilon), atol=1e-9, rtol=0)
    assert (seen[0] - clean).diff(dim=2).abs().max() < 1e-9  # vertical stripes
    assert len((seen[0] - clean)[0, :, 0].round(decimals=4).unique()) == 2
    with torch.no_grad():
        margins = [margin(model(points)[0], 0).item() for points in seen]
    best, reached, kept = 0, 0, 0
    for query in range(1, queries):
        halvings = sum(
            (query - 1) * 10_000 // queries > mark for mark in (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
        )
        side = max(1, round(math.sqrt(0.8 / 2**halvings) * 16))
        changed = ((seen[query] - seen[best]).abs() > 1e-9).any(1)[0]
        rows, columns = changed.any(1).nonzero()[:, 0], changed.any(0).nonzero()[:, 0]
        spans = [int(each.max() - each.min()) + 1 if len(each) else 0 for each in (rows, columns)]
        assert max(spans) <= side
        reached += max(spans) == side
        if margins[query] < margins[best]:
            best, kept = query, kept + 1
    assert kept > 3
    assert reached > queries / 2
