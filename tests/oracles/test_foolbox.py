"""Robust accuracy beside foolbox's on the bundled pair: same images, step, steps and start."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit import foolbox
from vitlens import Model

PIXELS = [epsilon / 255 for epsilon in (1, 2, 4, 8)]
LENGTHS = [0.1, 0.2, 0.4, 0.8, 1.6]
SEED = 5


@pytest.fixture(scope="module", params=["vit-digits", pytest.param("cnn-digits", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Model:
    return vitlens.load(request.param)


def pictures(model: Model, count: int) -> tuple[Tensor, Tensor]:
    split = vitlens.load_data("digits").pick(torch.arange(count))
    return vitlens.images(split, model), split.labels


def robust(model: Model, images: Tensor, labels: Tensor, epsilons: Sequence[float], **options: object) -> list[Tensor]:
    """Which images are right and stay so, at each epsilon."""
    found = vitlens.attack(model, images, labels, epsilons=epsilons, **options)
    return list(found.tried & ~found.success)


def no_weaker(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Within one image in 200, or lower; and not because nothing or everything breaks."""
    count = len(ours[0])
    for own, other in zip(ours, theirs, strict=True):
        assert own.sum() <= other.sum() + max(1, count // 200)
    assert any(0 < own.sum() < count for own in ours)


def compare(model: Model, count: int, name: str, *, steps: int) -> None:
    images, labels = pictures(model, count)
    if name == "cw":
        attack = foolbox.carlini_wagner(searches=9, steps=steps)
        theirs = foolbox.standing(model, images, labels, attack, LENGTHS)
        found = vitlens.attack(model, images, labels, method="cw", epsilon=100.0, steps=steps, batch_size=count)
        shortest = torch.where(found.success, found.distance, torch.inf)
        return no_weaker([found.tried & (shortest > length) for length in LENGTHS], theirs)
    attack = foolbox.fgsm() if name == "fgsm" else foolbox.pgd(images, steps=steps, seed=SEED)
    theirs = foolbox.standing(model, images, labels, attack, PIXELS)
    if name == "pgd":
        return no_weaker(robust(model, images, labels, PIXELS, method="pgd", steps=steps, seed=SEED), theirs)
    # a sweep keeps broken what was broken: so does the union of foolbox's
    kept = [torch.stack(theirs[: place + 1]).all(0) for place in range(len(PIXELS))]
    ours = robust(model, images, labels, PIXELS, method="fgsm")
    no_weaker(ours, kept)
    assert sum(int((own != other).sum()) for own, other in zip(ours, kept)) <= max(1, count // 200)
    return None


@pytest.mark.parametrize(("name", "count", "steps"), [("fgsm", 10, 1), ("pgd", 3, 8), ("cw", 2, 8)])
def test_robust_accuracy(model, name, count, steps):
    compare(model, count, name, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("fgsm", 1), ("pgd", 20), ("cw", 100)])
def test_on_two_hundred_images(model, name, steps):
    compare(model, 200, name, steps=steps)
