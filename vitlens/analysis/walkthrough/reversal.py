"""The sequence-reversal check: one attention layer learns to reverse a sequence only if it knows the positions.

Why 8/9 without them: attention alone is permutation-equivariant, so its output at i depends on x_i and on the other
n - 1 tokens as a set. Of independent tokens, the wanted one is any of the others with equal chance; the best guess is
their mean, which leaves (n - 2) / (n - 1) of the variance.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.models.attention import attention_weights, scaled_dot_product_attention
from vitlens.shapes import Tokens, Weights

BATCH, LENGTH, WIDTH, HEADS, STEPS = 32, 10, 64, 4, 1000
RATE: Final = 1e-3  # of Adam
FLOOR: Final = (LENGTH - 2) / (LENGTH - 1)  # of the data's variance: the least loss without positions
_FRESH: Final = 100  # batches on which the loss is measured


class ReversingAttention(nn.Module):
    """One attention layer whose values are the data; positions: whether vectors of its places, learned, are added to
    what queries and keys are made of."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH)) if positions else None
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def weights(self, data: Tokens) -> Weights:
        """The attention weights (batch, heads, query, key)."""
        return attention_weights(*self._queries_and_keys(data))

    def forward(self, data: Tokens) -> Tokens:
        """The sequences read by attention, the values being the data themselves."""
        read = scaled_dot_product_attention(*self._queries_and_keys(data), _split(data))
        return read.transpose(1, 2).flatten(2)

    def _queries_and_keys(self, data: Tokens) -> tuple[Tensor, Tensor]:
        placed = data if self.positions is None else data + self.positions
        return _split(self.query(placed)), _split(self.key(placed))


@dataclass(frozen=True)
class Reversal:
    """A layer after training. losses: mean squared error by step, one batch each; loss: on 3,200 fresh sequences;
    variance: of these; weights: mean over them and the heads; anti_diagonal: the mean weight on the wanted token."""

    positions: bool
    losses: tuple[float, ...]
    loss: float
    variance: float
    weights: Float[Tensor, "query key"]
    anti_diagonal: float
    seconds: float


@cache
def reversal(*, positions: bool, seed: int = 0, steps: int = STEPS) -> Reversal:
    """Train one attention layer to reverse sequences of LENGTH random vectors, and measure it on fresh ones.

    Takes seconds on one core, once a process: the same seed gives the same layer. torch's random numbers outside are
    left as they are.
    """
    start = time.monotonic()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(mode=False), torch.enable_grad():
        torch.manual_seed(seed)
        model = ReversingAttention(positions=positions)
        losses = tuple(learn_to_reverse(model, generator, steps=steps))
    with torch.no_grad():
        data = sequences(generator, batches=_FRESH)
        loss = F.mse_loss(model(data), data.flip(1)).item()
        weights = model.weights(data).mean((0, 1))
    hit = float(weights.flip(-1).diagonal().mean())
    return Reversal(positions, losses, loss, data.var().item(), weights, hit, time.monotonic() - start)


def sequences(generator: torch.Generator, batches: int = 1) -> Tokens:
    """Independent normal vectors (batches x BATCH, LENGTH, WIDTH)."""
    data: Tensor = torch.randn(BATCH * batches, LENGTH, WIDTH, generator=generator)
    return data


def learn_to_reverse(model: nn.Module, generator: torch.Generator, *, steps: int = STEPS) -> list[float]:
    """Train a layer to give each sequence in reverse; the loss of each step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    losses = []
    for _ in range(steps):
        data = sequences(generator)
        optimiser.zero_grad()
        loss = F.mse_loss(model(data), data.flip(1))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def _split(tokens: Tokens) -> Tensor:
    split: Tensor = tokens.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return split
