"""The contract of every attack: bounds, real successes, batches, restarts, registry entries."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.attacked import asked, linear, perceptron, pictures, predictions, robust
from tests.kit.select import values_of
from tests.kit.tiny import ours
from vitlens.attacks.registry import ATTACKS, comparisons

ALONE = [name for name, attack in ATTACKS.items() if not attack.members]
# model, height and width, epsilon, restarts, steps, and how far pixels are from black and white
CASES = [
    (linear(), (8, 8), 0.0, 1, 1, 0.0),
    (perceptron((8, 12), seed=1), (8, 12), 0.05, 2, 2, 0.0),
    (ours(size=(12, 8), patch_size=(4, 4), depth=1), (12, 8), 1.0, 1, 3, 0.4),
]
# the attacks that are also run with more steps, and the others; an added one may be of either kind
LONGER = {"bim", "pgd", "pgd-l2", "pgd-dlr", "apgd-ce", "apgd-dlr", "cw", "deepfool"}
OTHERS = {
    "noise",
    "fgsm",
    "pgd-targeted",
    "apgd-targeted",
    "square",
    "patch",
    "low-frequency",
    "high-frequency",
    "auto",
}
SHIPPED = LONGER | OTHERS
DOCS = Path(__file__).parents[3] / "docs" / "attacks.md"


def scaled(name: str, *epsilons: float) -> list[float]:
    """Return epsilons of L∞, larger for L2 and for noise."""
    factor = 8 if ATTACKS[name].norm == "l2" or name == "noise" else 1
    return [factor * epsilon for epsilon in epsilons]


def lengths(adversarial: Tensor, images: Tensor, norm: str) -> np.ndarray:
    change = (adversarial.double() - images.double()).flatten(1).numpy()
    if norm == "patch":
        return (adversarial != images).any(1).flatten(1).double().mean(1).numpy()
    return abs(change).max(1) if norm == "linf" else (change**2).sum(1) ** 0.5


@pytest.mark.parametrize("name", ATTACKS)
def test_perturbations_are_within_bounds_and_successes_are_real(name):
    entry = ATTACKS[name]
    fooled = 0
    for number, (model, size, typed, restarts, steps, margin) in enumerate(CASES):
        images = pictures(4, size, seed=number, low=margin, high=1 - margin)
        # black and white
        images[:, :, :2] = images[:, :, :2].round() if margin == 0 else images[:, :, :2]
        before = images.clone()
        labels = predictions(model, images)
        labels[0] = (labels[0] + 1) % 5  # misclassified
        epsilon = min(1.0, scaled(name, typed)[0])
        budget = epsilon if entry.takes_epsilon else None
        how = {
            "epsilon": budget,
            "seed": number,
            "restarts": restarts,
            "steps": 6 if name == "cw" else steps,
        }
        result = vitlens.attack(model, images, labels, method=name, **how)
        assert torch.equal(images, before)
        assert 0 <= result.images.min() <= result.images.max() <= 1
        distances = lengths(result.images, images, entry.norm)
        # a quarter of the side is 2 px
        allowed = 4 / (size[0] * size[1]) if entry.norm == "patch" else epsilon
        assert (distances <= allowed + 1e-6).all()
        assert result.distance.numpy() == pytest.approx(distances, abs=1e-6, rel=1e-5)
        assert result.tried.tolist() == [False, True, True, True]
        assert torch.equal(
            predictions(model, result.images) != labels, result.success | ~result.tried
        )
        assert torch.equal(result.images[~result.success], images[~result.success])
        assert result.robust_accuracy == (3 - int(result.success.sum())) / 4
        attacked = (
            result.tried
            if entry.kind == "minimum" or allowed > 0
            else torch.zeros(4, dtype=torch.bool)
        )
        assert torch.equal(result.forwards > 0, attacked)
        fooled += int(result.success.sum())
    assert fooled > 0


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", ATTACKS)
def test_budgets_hold_on_the_returned_pixels_of_a_model_in_16_bits(name, dtype):
    model = perceptron((8, 12), seed=1).to(dtype)
    images = pictures(6, (8, 12), seed=4)
    (epsilon,) = scaled(name, 5.3 / 255)
    budget = epsilon if ATTACKS[name].takes_epsilon else None
    result = vitlens.attack(model, images, "predicted", method=name, epsilon=budget, steps=6)
    distances = lengths(result.images, images, ATTACKS[name].norm)
    allowed = epsilon if budget else 1.0
    assert (distances <= allowed + 1e-6).all()
    assert result.distance.numpy() == pytest.approx(distances, abs=1e-6, rel=1e-5)
    assert torch.equal(result.images[~result.success], images[~result.success])
    assert torch.equal(
        predictions(model, result.images) != predictions(model, images), result.success
    )


@pytest.mark.parametrize("name", ["pgd", "pgd-l2"])
def test_curves_of_a_model_in_16_bits_count_what_lies_within_each_epsilon(name):
    model = perceptron((8, 12), seed=1).to(torch.bfloat16)
    images = pictures(6, (8, 12), seed=4)
    curve = vitlens.attack(
        model, images, "predicted", method=name, epsilons=scaled(name, 1.3 / 255, 5.3 / 255)
    )
    broken = curve.broken_at.isfinite()
    assert broken.any()
    assert (curve.distance[broken] <= curve.broken_at[broken] + 1e-6).all()


@pytest.mark.parametrize("name", ["noise", "fgsm", "pgd-l2", "apgd-targeted", "cw"])
def test_a_sweep_is_the_attack_at_each_epsilon_and_never_recovers(name):
    model = perceptron(seed=3)
    images = pictures(12, seed=3)
    levels = [0.0, *scaled(name, 0.005, 0.02, 0.08)]
    how = {"method": name, "steps": 6 if name == "cw" else 3, "seed": 3}
    labels = predictions(model, images)
    labels[5] = (labels[5] + 1) % 5
    curve = vitlens.attack(model, images, labels, epsilons=levels, **how)
    robust = curve.tried
    broken_at = torch.where(curve.tried, torch.inf, 0.0).double()
    for row, epsilon in enumerate(levels):
        alone = vitlens.attack(model, images, labels, epsilon=epsilon, **how)
        broken_at[robust & alone.success] = epsilon
        robust = robust & ~alone.success
        assert torch.equal(curve.success[row], curve.tried & ~robust)
        assert curve.robust_accuracy[row] == robust.double().mean()
    assert torch.equal(curve.broken_at, broken_at)
    assert len(broken_at.unique()) > 2
    assert (curve.distance <= broken_at + 1e-6).all()
    assert (curve.distance[broken_at.isinf()] > levels[-1]).all()
    assert (curve.distance[~curve.tried] == 0).all()


@pytest.mark.parametrize("name", ["pgd-l2", "cw", "auto"])
def test_the_batch_size_does_not_matter(name):
    """In double precision, in which it changes only the last digits; each image by itself:
    tests/contracts.
    """
    model = perceptron(seed=1).double()
    images = pictures(5, seed=1).double()
    by_size = {}
    how = {"method": name, "epsilon": scaled(name, 0.03)[0], "steps": 2}
    for size in (5, 2, 1):
        with asked(model) as seen:
            by_size[size] = vitlens.attack(model, images, "predicted", batch_size=size, **how)
        assert max(map(len, seen)) <= max(size, 8 * (size == 5))  # five are padded to eight
    assert sum(map(len, seen)) == 5 + by_size[1].forwards.sum()  # every pass is counted
    one = by_size.pop(5)
    for other in by_size.values():
        assert torch.equal(one.success, other.success)
        assert torch.equal(one.forwards, other.forwards)
        assert torch.equal(one.backwards, other.backwards)
        torch.testing.assert_close(one.images, other.images, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["noise", "pgd", "apgd-ce", "square", "patch"])
def test_more_restarts_break_more(name):
    model, images, (epsilon,) = perceptron(seed=4), pictures(40, seed=4), scaled(name, 0.03)
    how = {"method": name, "epsilon": epsilon if ATTACKS[name].takes_epsilon else None, "steps": 1}
    once = vitlens.attack(model, images, "predicted", restarts=1, **how).success
    often = vitlens.attack(model, images, "predicted", restarts=4, **how).success
    assert (once <= often).all()
    assert once.sum() < often.sum()


@pytest.mark.parametrize("name", ALONE)
def test_an_image_that_withstands_costs_what_the_registry_says(name):
    entry = ATTACKS[name]
    model = robust()
    images = pictures(3).double()
    how = {"method": name, "epsilon": 1e-6 if entry.takes_epsilon else None, "restarts": 2}
    few = vitlens.attack(model, images, "predicted", steps=1, **how)
    more = vitlens.attack(model, images, "predicted", steps=2, **how)
    assert not more.success.any()
    assert torch.equal(few.forwards < more.forwards, torch.full((3,), bool(entry.steps)))
    assert (more.backwards > 0).all() == entry.gradients
    classes = 4  # other than the label: fewer than a targeted attack takes of many
    steps = max(1, min(2, entry.steps)) * (1 if name == "deepfool" else entry.passes_a_step)
    jobs = (2 if entry.random_start else 1) * (min(entry.targets, classes) or 1)
    if name == "cw":  # whose searches end where the loss stays
        assert (more.forwards <= steps).all()
        return
    own_start = entry.gradients  # the last step's image is looked at, too
    assert more.forwards.tolist() == [(steps + own_start) * jobs] * 3
    if entry.gradients:
        assert (
            more.backwards.tolist() == [steps * jobs * (classes if name == "deepfool" else 1)] * 3
        )


def test_names_and_members_are_known_and_costs_and_checks_follow_from_the_entries():
    assert [ATTACKS[name].slug for name in ("pgd", "pgd-l2", "cw")] == [
        "pgd-linf",
        "pgd-l2",
        "cw-l2",
    ]
    assert len(set(values_of(ATTACKS.values(), "slug"))) == len(ATTACKS)  # in names of metrics
    for name, entry in ATTACKS.items():
        assert (name, bool(entry.function)) == (entry.name, not entry.members)
        assert {*entry.members, *entry.stronger_than} <= ATTACKS.keys() - {name}
    ranks = sorted(entry.examples for entry in ATTACKS.values() if entry.examples)
    assert ranks == list(range(1, len(ranks) + 1))
    assert [part.passes() for part in ATTACKS["auto"].parts] == [100, 9 * 100, 50 * 100]
    assert [ATTACKS[name].passes(restarts=3) for name in ("pgd", "fgsm", "cw")] == [60, 1, 900]
    assert {name for name in SHIPPED if ATTACKS[name].slow} == {"square", "auto"}
    longer = {name for name in SHIPPED if ATTACKS[name].takes_more_steps}
    assert longer == LONGER
    single_step = "one step against many"
    score_based = "without gradients against with"
    strong = ("bim", "pgd", "apgd-ce", "apgd-dlr", "auto")
    assert list(comparisons(list(SHIPPED))) == [
        *((weak, name, single_step) for weak in ("fgsm", "noise") for name in strong),
        *(("square", name, score_based) for name in strong),
        ("pgd", "apgd-ce", "fixed step against adaptive"),
        ("pgd", "auto", "one attack against the worst case of three"),
    ]
    assert list(comparisons(["cw", "pgd-l2", "patch", "fgsm"])) == []


def test_the_table_of_the_docs_is_that_of_the_registry():
    rows = re.findall(
        r"^\| `([a-z][a-z0-9-]*)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", DOCS.read_text(), re.M
    )
    norms = {"linf": "L∞", "l2": "L2", "patch": "patch"}
    assert rows == [
        (name, norms[entry.norm], entry.description, entry.paper) for name, entry in ATTACKS.items()
    ]
