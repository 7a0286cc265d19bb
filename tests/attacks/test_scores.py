"""Square's schedule and steps; noise."""

import torch

from tests.attacks.models import perceptron, pictures
from vitlens.attacks import scores
from vitlens.attacks.attack import attack
from vitlens.attacks.engine import worst_case
from vitlens.attacks.plan import AttackPlan, clean_images
from vitlens.attacks.registry import ATTACKS


def sides_of(queries: int, size: tuple[int, int]) -> list[int]:
    return scores.sides_of(queries, size, torch.device("cpu")).tolist()


def test_the_side_of_the_square_shrinks_as_published():
    sides = sides_of(10_000, (32, 32))
    expected = {0: 29, 10: 29, 11: 20, 50: 20, 51: 14, 201: 10, 501: 7, 1001: 5, 2001: 4, 4001: 3, 6001: 2, 8001: 1}
    for query, side in expected.items():
        assert abs(sides[query] - side) <= 1  # sqrt(0.8 / 2^k) of 32 px, rounded
    assert sides == sorted(sides, reverse=True)
    assert sides_of(100, (32, 32)) == sides[::100]
    assert min(sides_of(50, (4, 4))) == 1


def test_the_margin_never_rises_and_every_change_is_a_square(monkeypatch):
    model, images = perceptron(), pictures(1, low=0.4, high=0.6)
    clean, epsilon, queries = clean_images(model, images, "predicted"), 1e-3, 60
    seen: list[torch.Tensor] = []
    model.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach().clone()))
    monkeypatch.setattr(scores, "QUERIES", queries)
    outcome = worst_case(model, clean, ATTACKS["square"], AttackPlan((epsilon,), steps=1))
    assert outcome.level.tolist() == [-1]
    assert outcome.forwards.tolist() == [queries]
    assert outcome.backwards.tolist() == [0]
    torch.testing.assert_close((seen[0] - images).abs(), torch.full_like(images, epsilon), atol=1e-6, rtol=0)
    assert (seen[0] - images).diff(dim=2).abs().max() < 1e-6  # vertical stripes
    with torch.no_grad():
        logits = torch.cat([model(points) for points in seen[:queries]])
    label = clean.labels[0]
    others = logits.clone()
    others[:, label] = -torch.inf
    margins = logits[:, label] - others.amax(1)
    best = 0
    for query in range(1, queries):
        changed = ((seen[query] - seen[best]).abs() > 1e-6).any(1)[0]
        rows, columns = changed.any(1).nonzero()[:, 0], changed.any(0).nonzero()[:, 0]
        side = sides_of(queries, (8, 8))[query - 1]
        assert len(rows) <= side
        assert len(columns) <= side
        best = query if margins[query] < margins[best] else best
    assert best > 0


def test_square_finds_more_with_more_queries_and_more_than_noise_whose_draws_differ():
    model, images = perceptron(seed=5), pictures(30, seed=5)
    few, many, noise = (
        int(attack(model, images, "predicted", method=method, epsilon=0.03, steps=steps).success.sum())
        for method, steps in (("square", 1), ("square", 4), ("noise", 200))
    )
    assert max(few, noise) < many
    seen: list[torch.Tensor] = []
    model.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach().clone()))
    attack(model, images[:2], "predicted", method="noise", epsilon=1e-3, steps=4)
    assert len(torch.unique(torch.cat(seen[1:]).flatten(1), dim=0)) == 8
