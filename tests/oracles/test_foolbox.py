"""Robust accuracy beside foolbox's on the bundled pair: same images, step, steps and start."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vitlens
from tests.oracles import peer_foolbox
from vitlens.attacks.engine import worst_case
from vitlens.attacks.plan import AttackPlan, clean_images
from vitlens.attacks.registry import ATTACKS
from vitlens.data.digits import digits
from vitlens.models import loading
from vitlens.models.model import Model

PIXELS = [epsilon / 255 for epsilon in (1, 2, 4, 8)]
LENGTHS = [0.1, 0.2, 0.4, 0.8, 1.6]
SEED = 5


@pytest.fixture(scope="module", params=["vit-digits", pytest.param("cnn-digits", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Model:
    return loading.load(request.param)


def pictures(count: int) -> tuple[Tensor, Tensor]:
    batch = next(iter(digits("test").limit(count).batches(count)))
    assert batch.labels is not None
    return batch.images, batch.labels


def no_weaker(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Within one image in 200, or lower; and not because nothing or everything breaks."""
    count = len(ours[0])
    for own, other in zip(ours, theirs, strict=True):
        assert own.sum() <= other.sum() + max(1, count // 200)
    assert any(0 < own.sum() < count for own in ours)


def compare_fgsm(model: Model, count: int) -> None:
    images, labels = pictures(count)
    theirs = peer_foolbox.standing(model, images, labels, peer_foolbox.fgsm(), PIXELS)
    found = vitlens.attack(model, images, labels, method="fgsm", epsilons=PIXELS)
    # a sweep keeps broken what was broken: so does the union of foolbox's
    kept = [torch.stack(theirs[: place + 1]).all(0) for place in range(len(PIXELS))]
    ours = list(found.tried & ~found.success)
    no_weaker(ours, kept)
    assert sum(int((own != other).sum()) for own, other in zip(ours, kept)) <= max(1, count // 200)


def compare_pgd(model: Model, count: int) -> None:
    images, labels = pictures(count)
    theirs = peer_foolbox.standing(model, images, labels, peer_foolbox.pgd(images, steps=20, seed=SEED), PIXELS)
    found = vitlens.attack(model, images, labels, method="pgd", epsilons=PIXELS, steps=20, seed=SEED)
    no_weaker(list(found.tried & ~found.success), theirs)


def compare_carlini_wagner(model: Model, count: int, *, searches: int, steps: int) -> None:
    images, labels = pictures(count)
    attack = peer_foolbox.carlini_wagner(searches=searches, steps=steps)
    theirs = peer_foolbox.standing(model, images, labels, attack, LENGTHS)
    clean = clean_images(model, images, labels)
    entry = replace(ATTACKS["cw"], options={"searches": searches})
    distance = worst_case(model, clean, entry, AttackPlan((1.0,), steps=steps, batch_size=count)).distance
    no_weaker([clean.correct & (distance > length) for length in LENGTHS], theirs)


def test_fgsm(model):
    compare_fgsm(model, 20)


def test_pgd(model):
    compare_pgd(model, 4)


def test_carlini_wagner(model):
    compare_carlini_wagner(model, 4, searches=5, steps=12)


@pytest.mark.slow
def test_on_two_hundred_images(model):
    compare_fgsm(model, 200)
    compare_pgd(model, 200)
    compare_carlini_wagner(model, 200, searches=9, steps=100)
