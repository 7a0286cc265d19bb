"""The contract of every attack, on random models, shapes, epsilons and seeds."""

from collections.abc import Iterable

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attacks.models import MODELS, adversarial, perceptron, pictures, predictions, swept
from vitlens.attacks.attack import attack
from vitlens.attacks.registry import ATTACKS

QUICK = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
BOUNDED = tuple(name for name, attack in ATTACKS.items() if attack.kind == "budget" and attack.norm != "patch")
RESTARTED = tuple(
    name
    for name, attack in ATTACKS.items()
    if attack.gradients and attack.random_start and not attack.restricted and not attack.members
)


def of_each_kind(names: Iterable[str]) -> list[ParameterSet]:
    """The attacks, all but the first of each kind slow: the engine, which is what is tested, treats a kind alike."""
    seen, found = set(), []
    for name in names:
        one = ATTACKS[name]
        kind = (
            one.kind,
            one.norm,
            one.gradients,
            one.random_start,
            one.restricted,
            bool(one.targets),
            bool(one.members),
        )
        found.append(pytest.param(name, marks=pytest.mark.slow if kind in seen else ()))
        seen.add(kind)
    return found


models = st.tuples(st.sampled_from(sorted(MODELS)), st.sampled_from([(8, 8), (8, 12), (12, 8)]), st.integers(0, 50))
epsilons = st.one_of(st.sampled_from([0.0, 1e-4, 8 / 255, 1.0]), st.floats(0.0, 1.0))


pytestmark = pytest.mark.usefixtures("few_queries")


def perturbation_length(adversarial: torch.Tensor, images: torch.Tensor, norm: str) -> torch.Tensor:
    """The length of each perturbation, by NumPy's norms."""
    change = (adversarial.double() - images.double()).flatten(1).numpy()
    if norm == "patch":
        return torch.from_numpy(((adversarial != images).any(1).flatten(1).double().mean(1)).numpy())
    return torch.from_numpy(abs(change).max(1) if norm == "linf" else (change**2).sum(1) ** 0.5)


@pytest.mark.parametrize("name", ATTACKS)
@QUICK
@given(
    made=models,
    epsilon=epsilons,
    seed=st.integers(0, 2**31),
    count=st.integers(1, 4),
    restarts=st.integers(1, 2),
    steps=st.integers(1, 3),
    low=st.sampled_from([0.0, 0.4]),
)
def test_perturbations_are_within_bounds_and_successes_are_real(name, made, epsilon, seed, count, restarts, steps, low):
    (kind, size, number), entry = made, ATTACKS[name]
    model = MODELS[kind](size, seed=number)
    images = pictures(count, size, seed=seed % 1000, low=low, high=1 - low)
    before = images.clone()
    labels = predictions(model, images)
    labels[0] = (labels[0] + seed) % 5  # sometimes misclassified
    budget = None if entry.norm == "patch" else epsilon
    result = attack(model, images, labels, method=name, epsilon=budget, seed=seed, restarts=restarts, steps=steps)
    assert torch.equal(images, before)
    assert torch.isfinite(result.images).all()
    assert result.images.min() >= 0
    assert result.images.max() <= 1
    length = perturbation_length(result.images, images, entry.norm)
    allowed = 4 / (size[0] * size[1]) if entry.norm == "patch" else epsilon  # a quarter of the side is 2 px
    assert (length <= allowed + 1e-6).all()
    torch.testing.assert_close(result.distance.double(), length, atol=1e-6, rtol=1e-5)
    assert torch.equal(result.tried, predictions(model, images) == labels)
    assert not (result.success & ~result.tried).any()
    assert torch.equal(predictions(model, result.images) != labels, result.success | ~result.tried)  # evaluated again
    assert torch.equal(result.images[~result.success], images[~result.success])
    assert (result.images.flatten(1).amax(1) > 0).all()  # no black image
    assert ((result.forwards > 0) == (result.tried & (torch.tensor(epsilon > 0) | (entry.norm == "patch") |
            (entry.kind == "minimum")))).all()  # fmt: skip
    assert (result.backwards > 0).any() <= any(ATTACKS[part].gradients for part in entry.members or (name,))


@pytest.mark.parametrize("name", of_each_kind(ATTACKS))
@settings(QUICK, max_examples=2)
@given(seed=st.integers(0, 1000), batch_size=st.integers(1, 4), order=st.permutations(range(5)))
def test_batch_size_and_order_do_not_matter(name, seed, batch_size, order):
    """In double precision, in which the batch size changes only the last digits."""
    model, images = perceptron(seed=seed).double(), pictures(5, seed=seed).double()
    labels = predictions(model, images)
    epsilons = (0.1, 0.4) if ATTACKS[name].norm == "l2" else (0.02, 0.1)
    asked = {"attack": name, "epsilons": epsilons, "steps": 2, "seed": seed}
    one = swept(model, images, labels, batch_size=5, **asked)
    other = swept(model, images[order], labels[order], batch_size=batch_size, indices=order, **asked)
    assert torch.equal(one.clean[order], other.clean)
    assert torch.equal(one.broken_at[order], other.broken_at)
    torch.testing.assert_close(one.distance[order], other.distance, atol=1e-6, rtol=1e-6)
    assert one.forwards == other.forwards


@pytest.mark.parametrize("name", RESTARTED)
@settings(QUICK, max_examples=2)
@given(seed=st.integers(0, 1000))
def test_more_restarts_never_raise_robust_accuracy(name, seed):
    model, images = perceptron(seed=seed), pictures(8, seed=seed)
    labels = predictions(model, images)
    epsilons = (0.1, 0.2) if ATTACKS[name].norm == "l2" else (0.01, 0.04)
    asked = {"attack": name, "epsilons": epsilons, "steps": 2, "seed": seed}
    once, often = (swept(model, images, labels, restarts=restarts, **asked) for restarts in (1, 4))
    assert (often.broken_at <= once.broken_at).all()


@pytest.mark.parametrize("name", of_each_kind(BOUNDED))
@settings(QUICK, max_examples=2)
@given(made=models, seed=st.integers(0, 1000), restarts=st.integers(1, 2))
def test_downwards_an_image_is_attacked_down_to_the_first_epsilon_at_which_it_is_robust(name, made, seed, restarts):
    (kind, size, number), levels = made, (0.05, 0.15, 0.4)
    model = MODELS[kind](size, seed=number)
    images = pictures(3, size, seed=seed)
    labels = predictions(model, images)
    asked = {"steps": 2, "seed": seed, "restarts": restarts}
    curves = swept(model, images, labels, attack=name, epsilons=levels, downwards=True, **asked)
    falling = torch.ones(3, dtype=torch.bool)  # broken at this and every larger epsilon
    expected = torch.full((3,), torch.inf, dtype=torch.float64)
    for epsilon in reversed(levels):
        alone = attack(model, images, labels, method=name, epsilon=epsilon, **asked)
        falling = falling & alone.success
        expected[falling] = epsilon
    assert torch.equal(curves.broken_at, expected)
    rows, kept = adversarial(model, images, labels, name, epsilons=levels, downwards=True, **asked)
    assert rows.tolist() == expected.isfinite().nonzero()[:, 0].tolist()
    assert (predictions(model, kept) != labels[rows]).all()
    assert (perturbation_length(kept, images[rows], ATTACKS[name].norm) <= expected[rows] + 1e-6).all()


@pytest.mark.parametrize("name", of_each_kind(BOUNDED))
@settings(QUICK, max_examples=3)
@given(made=models, seed=st.integers(0, 1000))
def test_a_sweep_is_the_attack_at_each_epsilon_and_never_recovers(name, made, seed):
    (kind, size, number), levels = made, (0.0, 0.05, 0.15, 0.4)
    model = MODELS[kind](size, seed=number)
    images = pictures(3, size, seed=seed)
    labels = predictions(model, images)
    curves = swept(model, images, labels, attack=name, epsilons=levels, steps=2, seed=seed)
    robust = curves.clean
    for epsilon in levels:
        alone = attack(model, images, labels, method=name, epsilon=epsilon, steps=2, seed=seed)
        robust = robust & ~alone.success
        assert torch.equal(curves.robust(epsilon), robust)
    assert torch.equal(curves.robust(0.0), curves.clean)
    rows, kept = adversarial(model, images, labels, name, epsilons=levels, steps=2, seed=seed)
    assert torch.equal(predictions(model, kept) != labels[rows], torch.ones(len(rows), dtype=torch.bool))
    assert rows.tolist() == curves.broken_at.isfinite().nonzero()[:, 0].tolist()
