"""Attention without positions cannot reverse a sequence; with positions in queries and keys it learns to."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.walkthrough.reversal import (
    FLOOR,
    HEADS,
    LENGTH,
    WIDTH,
    ReversingAttention,
    learn_to_reverse,
    reversal,
    sequences,
)
from vitlens.models.attention import MultiHeadSelfAttention


@torch.no_grad()
def fresh_error(model: Callable[[Tensor], Tensor], generator: torch.Generator) -> tuple[float, float]:
    """Mean squared error on 100 fresh batches, and the variance of their data."""
    data = sequences(generator, batches=100)
    return F.mse_loss(model(data), data.flip(1)).item(), data.var().item()


def mean_of_the_others(data: Tensor) -> Tensor:
    return (data.sum(1, keepdim=True) - data) / (LENGTH - 1)


# Why 8/9. Attention alone is permutation-equivariant: its output at i depends on x_i and on the other n - 1 tokens as a
# set. The order of independent tokens is a coin toss, so given x_i and that set the wanted token x_{n+1-i} (never x_i
# itself, n being even) is any of the n - 1 others with equal chance. The best guess is then their mean, and what is
# left is their variance around their own mean: (1 - 1/(n - 1)) of the data's, (n - 2)/(n - 1) = 8/9 for n = 10.
@pytest.mark.slow  # test_the_check_as_the_command_runs_it trains both, too
def test_attention_alone_cannot_reverse() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = MultiHeadSelfAttention(WIDTH, HEADS)
    before, _ = fresh_error(model, generator)
    learn_to_reverse(model, generator)
    error, variance = fresh_error(model, generator)
    assert error >= 8 / 9 * variance
    assert error < before  # it did learn: what can be learned is the mean of the others
    assert error < 0.91 * variance


def test_the_mean_of_the_others_leaves_eight_ninths() -> None:
    error, variance = fresh_error(mean_of_the_others, torch.Generator().manual_seed(2))
    assert abs(error / variance - 8 / 9) < 0.005  # 2 million numbers: sampling moves it by about 0.001


@pytest.mark.slow
def test_positions_in_queries_and_keys_reverse() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = ReversingAttention(positions=True)
    learn_to_reverse(model, generator)
    error, _ = fresh_error(model, generator)
    assert error < 0.01
    weights = model.weights(sequences(generator))  # (batch, heads, query, key)
    anti_diagonal = torch.arange(LENGTH - 1, -1, -1)
    assert (weights.mean(0).argmax(-1) == anti_diagonal).all()
    assert weights.flip(-1).diagonal(dim1=-2, dim2=-1).mean() > 0.95


@pytest.mark.slow
def test_the_check_as_the_command_runs_it():
    state = torch.get_rng_state()
    placed, without = (reversal(positions=positions) for positions in (True, False))
    assert torch.equal(torch.get_rng_state(), state)
    assert placed.loss < 0.01
    assert placed.anti_diagonal > 0.95
    assert placed.weights.argmax(-1).tolist() == list(range(LENGTH - 1, -1, -1))
    assert FLOOR == 8 / 9
    assert FLOOR * without.variance <= without.loss < 0.91 * without.variance
    assert abs(without.anti_diagonal - 1 / (LENGTH - 1)) < 0.03  # near uniform over the others
    assert len(placed.losses) == 1000
    few = reversal.__wrapped__(positions=True, steps=20)  # seeded: the same steps again
    assert few.losses == placed.losses[:20]


def test_without_positions_a_permuted_sequence_gives_the_permuted_output():
    torch.manual_seed(0)
    data, order = sequences(torch.Generator().manual_seed(1)), torch.randperm(LENGTH)
    for positions in (True, False):
        with torch.no_grad():
            model = ReversingAttention(positions=positions)
            equal = torch.allclose(model(data[:, order]), model(data)[:, order], atol=1e-5)
        assert equal is not positions
