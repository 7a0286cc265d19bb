"""Every point of an attack against the papers' algorithms for one image; regions."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.attacked import asked, perceptron, pictures, robust
from tests.kit.tiny import ours

# of epsilons large enough to see each step
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def points_of(model: vitlens.Model, image: Tensor, **options: object) -> list[Tensor]:
    """Return the images that the model is asked about after the clean image."""
    with asked(model) as seen:
        result = vitlens.attack(model, image, "predicted", **options)
    assert options["method"] == "deepfool" or not result.success.any()
    return [points.detach() for points in seen[1:]]


def margin(logits: Tensor, label: int) -> Tensor:
    without_label = logits.clone()
    without_label[label] = -torch.inf
    return logits[label] - without_label.max()


def ascent(
    model: vitlens.Model, image: Tensor, loss: str, target: int | None = None, *, l2: bool = False
):
    """Return the maximised objective of one image of class 0, and its steepest step of length 1."""
    leaf = image.clone().requires_grad_()
    logits = model(leaf)[0]
    ranked = logits.sort(descending=True).values
    if loss == "ce":
        value = -logits.log_softmax(0)[0] if target is None else logits.log_softmax(0)[target]
    elif target is None:
        value = -margin(logits, 0) / (ranked[0] - ranked[2] + 1e-12)
    else:
        value = (logits[target] - logits[0]) / (ranked[0] - (ranked[2] + ranked[3]) / 2 + 1e-12)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.item(), gradient / gradient.norm() if l2 else gradient.sign()


def projected(image: Tensor, clean: Tensor, epsilon: float, *, l2: bool = False) -> Tensor:
    change = image - clean
    inside = (
        change * min(1.0, epsilon / change.norm().item()) if l2 else change.clamp(-epsilon, epsilon)
    )
    return (clean + inside).clamp(0, 1)


@pytest.mark.parametrize(
    ("name", "loss", "length", "steps"),
    [
        ("fgsm", "ce", 1.0, 1),
        ("bim", "ce", 1.25, 10),
        ("pgd", "ce", 2.5, 10),
        ("pgd-l2", "ce", 2.5, 10),
        ("pgd-targeted", "ce", 2.5, 10),
        ("pgd-dlr", "dlr", 2.5, 10),
    ],
)
def test_projected_gradient_descent(name, loss, length, steps):
    """Steps of 2.5 (BIM: 1.25) epsilons together, each projected into the ball and the range of
    pixels.
    """
    model = robust()
    clean = pictures(1).double()
    l2 = name == "pgd-l2"
    epsilon = 2.0 if l2 else 0.2
    target = 2 if name == "pgd-targeted" else None
    options = {} if target is None else {"targets": torch.tensor([target])}
    points = points_of(model, clean, method=name, epsilon=epsilon, steps=steps, **options)
    assert len(points) >= steps + 1
    assert torch.equal(points[0], clean) == (name in ("fgsm", "bim"))
    for here, after in pairwise(points[: steps + 1]):
        _, direction = ascent(model, here, loss, target, l2=l2)
        expected = projected(here + length * epsilon / steps * direction, clean, epsilon, l2=l2)
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=0)


def auto_pgd(model, clean, start, epsilon, steps, loss, target):
    """Return all points of Croce & Hein 2020, algorithm 1."""
    share = 0.22
    before = 0.0
    marks = []
    while share <= 1:
        marks.append(math.ceil(share * steps - 1e-9))
        before, share = share, share + max(share - before - 0.03, 0.06)
    points = [start]
    eta = 2 * epsilon
    value, gradient = ascent(model, start, loss, target)
    values = [value]
    best = start
    best_value = value
    best_gradient = gradient
    x = start
    previous = start
    last_mark = 0
    last_best = value
    halved = False
    for k in range(steps):
        z = projected(x + eta * gradient, clean, epsilon)
        share = 0.75 if k else 1.0
        moved = projected(x + share * (z - x) + (1 - share) * (x - previous), clean, epsilon)
        previous = x
        x = moved
        points.append(x)
        value, gradient = ascent(model, x, loss, target)
        values.append(value)
        if value > best_value:
            best = x
            best_value = value
            best_gradient = gradient
        if k + 1 in marks:
            rises = sum(values[i + 1] > values[i] for i in range(last_mark, k + 1))
            reduce = rises < 0.75 * (k + 1 - last_mark) or (not halved and best_value == last_best)
            if reduce:
                eta = eta / 2
                x = best
                gradient = best_gradient
            halved = reduce
            last_best = best_value
            last_mark = k + 1
    return points


@pytest.mark.parametrize(
    ("name", "loss", "seed"),
    [("apgd-ce", "ce", 0), ("apgd-dlr", "dlr", 1), ("apgd-targeted", "dlr", 1)],
)
def test_auto_pgd(name, loss, seed):
    model = robust(seed=seed)
    clean = pictures(1, seed=seed).double()
    epsilon = 0.2
    steps = 30
    options = {"targets": torch.tensor([3])} if name == "apgd-targeted" else {}
    points = points_of(
        model, clean, method=name, epsilon=epsilon, steps=steps, seed=seed, **options
    )[: steps + 1]
    assert 0.9 * epsilon < (points[0] - clean).abs().max() <= epsilon
    expected = auto_pgd(model, clean, points[0], epsilon, steps, loss, 3 if options else None)
    torch.testing.assert_close(torch.cat(points), torch.cat(expected), atol=1e-7, rtol=0)
    assert len(torch.unique(torch.cat(points).flatten(1), dim=0)) > steps // 2


def carlini_wagner(model, clean, label, steps):
    """Run Carlini & Wagner 2017: Adam on distance² + c x margin in tanh space, with a search."""
    origin = torch.atanh((2 * clean - 1) * (1 - 1e-6))
    points = []
    c = 1e-3
    low = 0.0
    high = math.inf
    for _ in range(9):
        shift = torch.zeros_like(origin).requires_grad_()
        checked = math.inf
        still = 0
        success = False
        adam = torch.optim.Adam([shift], lr=0.01)
        for tick in range(steps):
            image = ((origin + shift).tanh() + 1) / 2
            logits = model(image)[0]
            points.append(image.detach())
            lead = (margin(logits, label) + 1e-5 * logits.detach().abs().max()).clamp_min(0)
            distance = (image - (origin.tanh() + 1) / 2).square().sum()
            loss = distance + c * lead
            success |= bool(margin(logits, label) < -1e-5 * logits.abs().max())
            adam.zero_grad()
            loss.backward()
            adam.step()
            if tick % math.ceil(steps / 10) == 0:  # two checks without a fall end a search
                still = still + 1 if loss.item() > 0.9999 * checked else 0
                checked = loss.item()
            if still == 2:
                break
        low, high = (low, c) if success else (c, high)
        c = c * 10 if math.isinf(high) else (low + high) / 2
    return points


@pytest.mark.parametrize(
    ("seed", "steps", "is_fooled"), [(1, 8, True), (2, 25, True), (4, 25, False)]
)
def test_carlini_and_wagners(seed, steps, is_fooled):
    """And the result is the nearest of all adversarial images on the way, or nearer still."""
    model = perceptron(seed=seed).double()
    clean = pictures(1, seed=seed).double()
    with torch.no_grad():
        label = int(model(clean).argmax())
    expected = torch.cat(carlini_wagner(model, clean, label, steps))
    with asked(model) as seen:
        result = vitlens.attack(model, clean, "predicted", method="cw", steps=steps)
    torch.testing.assert_close(
        torch.cat(seen[1:]).detach()[: len(expected)], expected, atol=1e-6, rtol=0
    )
    assert result.success.item() == is_fooled
    assert result.forwards.item() == len(expected) + 24 * is_fooled  # of the line search
    with torch.no_grad():
        fooled = model(expected).argmax(1) != label
    nearest = (expected - clean).flatten(1).norm(dim=1)[fooled]
    assert (len(nearest) > 2) == is_fooled
    if is_fooled:
        assert 0.98 * nearest.min() <= result.distance.item() <= nearest.min() + 1e-6


def test_deepfool():
    """Moosavi-Dezfooli 2016, algorithm 2, and an overshoot of 0.02."""
    model = perceptron(seed=1).double()
    clean = pictures(1, seed=1).double()
    with torch.no_grad():
        label = int(model(clean).argmax())
    points = points_of(model, clean, method="deepfool", steps=10)
    total = torch.zeros_like(clean)
    image = clean
    count = 0
    while True:
        torch.testing.assert_close(points[count], image, atol=1e-6, rtol=0)
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
        image = (clean + 1.02 * total).clamp(0, 1)
        count = count + 1
    assert 0 < count < 10


def test_square_changes_one_square_of_the_best_image_so_far_and_never_gets_worse():
    """Andriushchenko 2020: stripes, then squares of 0.8 of the image, halved on the published
    schedule.
    """
    model = robust((16, 16))
    clean = pictures(1, (16, 16), low=0.4, high=0.6).double()
    epsilon = 1e-3
    queries = 100
    seen = points_of(model, clean, method="square", epsilon=epsilon, steps=2)
    assert len(seen) == queries
    torch.testing.assert_close(
        (seen[0] - clean).abs(), torch.full_like(clean, epsilon), atol=1e-9, rtol=0
    )
    assert (seen[0] - clean).diff(dim=2).abs().max() < 1e-9  # vertical stripes
    assert len((seen[0] - clean)[0, :, 0].round(decimals=4).unique()) == 2
    with torch.no_grad():
        margins = [margin(model(points)[0], 0).item() for points in seen]
    best = 0
    reached = 0
    accepted = 0
    for query in range(1, queries):
        halvings = sum(
            (query - 1) * 10_000 // queries > mark
            for mark in (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
        )
        side = max(1, round(math.sqrt(0.8 / 2**halvings) * 16))
        changed = ((seen[query] - seen[best]).abs() > 1e-9).any(1)[0]
        rows = changed.any(1).nonzero()[:, 0]
        columns = changed.any(0).nonzero()[:, 0]
        spans = [0, 0]
        if len(rows):
            spans = [int(indices.max() - indices.min()) + 1 for indices in (rows, columns)]
        assert max(spans) <= side
        reached += max(spans) == side
        if margins[query] < margins[best]:
            best = query
            accepted = accepted + 1
    assert accepted > 3
    assert reached > queries / 2


@pytest.mark.parametrize("part", ["low", "high"])
def test_changes_have_the_frequencies_of_their_part_alone(part):
    """Low: up to half of Nyquist's."""
    model = perceptron((16, 12))
    images = pictures(10, (16, 12), low=0.4, high=0.6)
    result = vitlens.attack(model, images, "predicted", method=f"{part}-frequency", epsilon=0.2)
    assert result.success.any()
    spectrum = torch.fft.rfft2((result.images - images)[result.success]).abs()
    down = 2 * torch.fft.fftfreq(16)
    across = 2 * torch.fft.rfftfreq(12)
    inside = (torch.hypot(down[:, None], across[None]) <= 0.5 + 1e-6) == (part == "low")
    assert spectrum[..., ~inside].max() < 1e-4 * spectrum[..., inside].max()
    assert 0.19 < result.distance.max() <= 0.2 + 1e-6  # the whole budget is used


def boxes(images: Tensor, clean: Tensor) -> list[tuple[int, int, int, int]]:
    """Return top, left, bottom and right of what was changed."""
    corners = []
    for changed in (images != clean).any(1):
        rows = changed.any(1).nonzero()[:, 0].tolist()
        columns = changed.any(0).nonzero()[:, 0].tolist()
        corners.append((rows[0], columns[0], rows[-1], columns[-1]))
    return corners


@pytest.mark.parametrize(("aligned", "side"), [(False, 3), (True, None)])
def test_a_patch_is_one_square_on_tokens_or_anywhere(aligned, side):
    model = ours(size=(16, 12), patch_size=(4, 4), depth=1)
    images = pictures(16, (16, 12))
    result = vitlens.attack(
        model,
        images,
        "predicted",
        method="patch",
        side=side,
        aligned=aligned,
        restarts=6,
        steps=5,
        seed=3,
    )
    assert result.success.sum() > 3
    changed = boxes(result.images[result.success], images[result.success])
    length = side or 3
    for top, left, bottom, right in changed:
        assert max(bottom - top, right - left) < length
        assert not aligned or (top // 4 == bottom // 4 and left // 4 == right // 4)
    assert aligned or any(top % 4 and left % 4 for top, left, _, _ in changed)
    assert len({(top // 4, left // 4) for top, left, _, _ in changed}) > 1
    assert max(bottom - top for top, _, bottom, _ in changed) == length - 1


def test_a_patch_may_lie_at_every_place():
    model = robust((6, 4))
    images = pictures(200, (6, 4)).double()
    with asked(model) as seen:
        vitlens.attack(
            model,
            images,
            "predicted",
            method="patch",
            side=2,
            aligned=False,
            steps=1,
            batch_size=200,
        )
    starts = torch.cat([points.detach() for points in seen])
    moved = [row for row in range(len(starts)) if not torch.equal(starts[row], images[row % 200])]
    places = set()
    for row in moved:
        drawn = boxes(starts[row : row + 1], images[row % 200 : row % 200 + 1])
        places |= {box[:2] for box in drawn}
    assert places >= {(top, left) for top in range(5) for left in range(3)}


def test_each_restart_takes_the_place_of_the_next_largest_attribution():
    """Of equal ones the first in reading order; after the last place the first again."""
    model = robust((4, 6))
    images = pictures(2, (4, 6), low=0.2, high=0.8).double()
    maps = torch.tensor([[[0.0, 3.0, 5.0], [1.0, 2.0, 4.0]], [[-1.0, -2.0, 0.0], [5.0, 5.0, -3.0]]])
    with asked(model) as seen:
        vitlens.attack(
            model, images, "predicted", method="patch", side=2, maps=maps, steps=1, restarts=7
        )
    firsts = [boxes(points.detach(), images) for points in seen[1::2]]
    squares = [[3 * (both[row][0] // 2) + both[row][1] // 2 for both in firsts] for row in range(2)]
    assert squares == [[2, 5, 1, 4, 3, 0, 2], [3, 4, 2, 0, 1, 5, 3]]
