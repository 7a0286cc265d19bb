"""Directions that are planted in the tokens of a model are the latents of its dictionary."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import vitlens
from tests.kit.planted_dictionary import ACTIVE, DIM, DIRECTIONS, PLACE, planted, sparse_images

MATCHED = 0.95  # cosine of a latent with its direction
FALSE = 0.05  # of the active latents, those without a direction
SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10)]


class Recovery(NamedTuple):
    """The cosine of each planted direction with its latent, and the share of false latents."""

    cosines: Tensor
    false: float


def recover(seed: int, **settings: Any) -> Recovery:
    model, directions = planted(seed)
    images = sparse_images(200, seed)
    plan = vitlens.DictionaryPlan(ACTIVE, expansion=DIRECTIONS // DIM, tokens=400_000)
    sae = vitlens.fit_sae(model, images, PLACE, replace(plan, **settings), seed=seed)
    cosines = sae.autoencoder.decoder @ directions.T
    rows, columns = linear_sum_assignment(cosines.numpy(), maximize=True)
    captured = vitlens.capture(model, images[:50], sae.patches)
    is_active = (sae.encode(captured[sae.patches]) > 0).flatten(0, 1).any(0)
    is_false = cosines.amax(1)[is_active] < MATCHED
    return Recovery(cosines[rows, columns], float(is_false.double().mean()))


@pytest.mark.parametrize("seed", [0, 1, *SLOW_SEEDS])
def test_every_planted_direction_is_a_latent(seed):
    recovery = recover(seed)
    assert float(recovery.cosines.mean()) > MATCHED
    assert recovery.false < FALSE


@pytest.mark.parametrize(
    "options",
    [{"kind": "batch-topk"}, pytest.param({"prefixes": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_every_kind_recovers_the_directions(options):
    assert float(recover(0, **options).cosines.mean()) > MATCHED


def test_two_trainings_with_one_seed_are_equal():
    model = planted(0).model
    images = sparse_images(20, 0)
    plan = vitlens.DictionaryPlan(k=3, expansion=1, tokens=9000)
    first = vitlens.fit_sae(model, images, PLACE, plan)
    second = vitlens.fit_sae(model, images, PLACE, plan)
    assert torch.equal(first.autoencoder.decoder, second.autoencoder.decoder)
    assert torch.equal(first.autoencoder.encoder, second.autoencoder.encoder)


def test_the_tokens_of_many_images_are_read_in_parts(monkeypatch):
    """Their sums are in float64, which takes twice the memory of the tokens."""
    counts = []
    double = Tensor.double

    def counted(values: Tensor) -> Tensor:
        if values.ndim == 2 and values.shape[1] == DIM:
            counts.append(len(values))
        return double(values)

    plan = vitlens.DictionaryPlan(k=3, expansion=1, tokens=3000)
    sae = vitlens.fit_sae(planted(0).model, sparse_images(40, 0), PLACE, plan)
    images = sparse_images(200, 1)
    monkeypatch.setattr(Tensor, "double", counted)
    vitlens.name_latents(sae, images, torch.arange(200) % 2, tested=1)
    assert sum(counts) > 0.9 * 200 * 64
    assert max(counts) <= 8192
