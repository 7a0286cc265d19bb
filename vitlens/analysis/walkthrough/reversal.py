"""`vitlens.reversal`: one attention layer trained on the spot to reverse, copy or sort vectors.

The values of the layer are the vectors themselves, so its output is a weighted mean of them. The
layer solves the task if it attends to the right token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vitlens.devices import as_device
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.positions import fixed_positions
from vitlens.names import (
    SEQUENCE_POSITIONS,
    SEQUENCE_TASKS,
    SequencePositions,
    SequenceTask,
    SequenceView,
)
from vitlens.shapes import Heads, Tokens, Weights
from vitlens.summary import Line, Summary

WIDTH: Final = 64  # numbers in a vector
BATCH: Final = 32  # sequences in a training step
TEST: Final = 512  # new sequences on which the trained layer is measured
LEARNING_RATE: Final = 3e-3
# Vectors to sort hold an angle as a point on a circle, in their first two numbers. With a radius of
# 1, the random values of the other 62 numbers would drown it.
_RADIUS: Final = 4.0
# what queries and keys may be computed from; the first is what the layer was trained with
_VIEWS: Final[Mapping[SequencePositions, tuple[SequenceView, ...]]] = MappingProxyType(
    {
        "none": ("vectors",),
        "fixed": ("vectors and positions", "positions", "vectors"),
        "learned": ("vectors and positions", "positions", "vectors"),
    }
)


@dataclass(frozen=True)
class ViewResult:
    """The trained layer with queries and keys computed from a part of its input.

    view: the part of the input.
    losses: the mean squared error of each test sequence.
    shares: the attention weight on the right token in each test sequence, mean over heads and
        queries.
    """

    view: SequenceView
    losses: Float[Tensor, " sequences"]
    shares: Float[Tensor, " sequences"]


@dataclass(frozen=True, repr=False)
class Reversal(Summary):
    """One attention layer trained on a task; tensors on the CPU.

    losses: the loss of every training step.
    weights: the mean attention weights over the test sequences. For the task "sort", keys are in
        the order of the answer.
    shares: the attention weight on the right token, by head and test sequence.
    views: the trained layer as it is, then with queries and keys from a part of its input.
    uniform: the loss of uniform attention on the test sequences.
    without_positions: the lowest possible loss of a layer without positions on these sequences.
    place_distance: the mean distance between the positions of two places.
    vector_distance: the mean distance between two vectors of a sequence.
    """

    task: SequenceTask
    length: int
    heads: int
    positions: SequencePositions
    parameters: int
    losses: Float[Tensor, " steps"]
    weights: Float[Tensor, "heads length length"]
    shares: Float[Tensor, "heads sequences"]
    views: tuple[ViewResult, ...]
    uniform: float
    without_positions: float
    place_distance: float
    vector_distance: float

    @property
    def loss(self) -> float:
        """Return the mean squared error on the test sequences."""
        return float(self.views[0].losses.mean())

    @property
    def share(self) -> float:
        """Return the share of attention on the right token; 1 / length for uniform attention."""
        return float(self.shares.mean())

    def summary(self) -> Iterator[Line]:
        """Yield the loss and the share of attention on the right token, each with its reference."""
        yield Line("task", self.task)
        yield Line("loss", self.loss)
        yield Line("loss of uniform attention", self.uniform)
        yield Line("least loss without positions", self.without_positions)
        yield Line("attention on the right token", self.share, "fraction")
        yield Line("uniform attention", 1 / self.length, "fraction")
        yield Line("weights", self.weights)
        yield Line("losses", self.losses)


class _Layer(nn.Module):
    """Attention with its input as values.

    positions (length, dim): vectors that are added to the input before queries and keys are
        computed from it.
    """

    def __init__(self, length: int, heads: int, positions: SequencePositions) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        if positions == "learned":
            self.positions = nn.Parameter(torch.randn(length, WIDTH))
        elif positions == "fixed":
            sines = fixed_positions("sine", grid=(1, length), prefix=0, dim=WIDTH)[0]
            self.register_buffer("positions", sines)
        else:
            self.register_buffer("positions", torch.zeros(length, WIDTH))

    def split(self, tokens: Tokens) -> Heads:
        """Return tokens as (batch, heads, tokens, head_dim)."""
        parts: Tensor = tokens.unflatten(-1, (self.heads, -1))
        return parts.transpose(1, 2)

    def forward(
        self, vectors: Tokens, view: SequenceView = "vectors and positions"
    ) -> tuple[Tokens, Weights]:
        """Return the output and the attention weights."""
        if view == "positions":
            placed = self.positions.expand_as(vectors)
        elif view == "vectors":
            placed = vectors
        else:
            placed = vectors + self.positions
        queries = self.split(self.query(placed))
        keys = self.split(self.key(placed))
        scale = queries.shape[-1] ** -0.5
        weights = (queries @ keys.transpose(-1, -2) * scale).softmax(-1)
        output = weights @ self.split(vectors)
        return output.transpose(1, 2).flatten(2), weights


def reversal(
    task: SequenceTask = "reverse",
    *,
    length: int = 10,
    heads: int = 4,
    positions: SequencePositions = "learned",
    steps: int = 1000,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Reversal:
    """Train one attention layer to reverse, copy or sort random vectors, and measure its attention.

    task: "reverse", "copy" or "sort". Vectors are sorted by an angle that they hold as two numbers.
    positions: "none", "fixed" (sines) or "learned". They are added to the vectors before queries
        and keys are computed.

    Raises UnknownNameError for another task or kind of positions. Raises InputError for fewer than
    two vectors, no step, and heads that do not divide the 64 numbers of a vector.

    >>> import vitlens
    >>> vitlens.reversal(length=5, heads=1, steps=300).share > 0.9
    True
    """
    require_exercise(task, length=length, heads=heads, positions=positions, steps=steps)
    device = as_device(device)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = _Layer(length, heads, positions).to(device)
    losses = _train(layer, task, length, steps, generator)
    vectors, source = _draw(task, length, TEST, generator)
    return _measure_layer(layer, task, positions, vectors.to(device), source.to(device), losses)


def require_exercise(task: str, *, length: int, heads: int, positions: str, steps: int) -> None:
    """Raise UnknownNameError or InputError for arguments with which no layer can be trained."""
    if task not in SEQUENCE_TASKS:
        raise UnknownNameError("task", task, SEQUENCE_TASKS)
    if positions not in SEQUENCE_POSITIONS:
        raise UnknownNameError("kind of positions", positions, SEQUENCE_POSITIONS)
    if length < 2:
        raise InputError(f"expected a length of at least 2 vectors, found {length}")
    if steps < 1:
        raise InputError(f"expected at least 1 step, found {steps}")
    if heads < 1 or WIDTH % heads:
        raise InputError(f"expected a number of heads that divides {WIDTH}, found {heads}")


def _draw(
    task: SequenceTask, length: int, count: int, generator: torch.Generator
) -> tuple[Float[Tensor, "count length 64"], Int[Tensor, "count length"]]:
    """Return random vectors, and for each place of the answer the index of its token."""
    vectors = torch.randn(count, length, WIDTH, generator=generator)
    places = torch.arange(length)
    if task == "copy":
        return vectors, places.expand(count, length)
    if task == "reverse":
        return vectors, places.flip(0).expand(count, length)
    angles = torch.pi * torch.rand(count, length, generator=generator)
    vectors[..., 0] = _RADIUS * angles.cos()
    vectors[..., 1] = _RADIUS * angles.sin()
    return vectors, angles.argsort(1)


def _answer(vectors: Tokens, source: Int[Tensor, "batch length"]) -> Tokens:
    """Return the right output: at each place, the vector at the index in `source`."""
    return vectors.gather(1, source[..., None].expand_as(vectors))


def _train(
    layer: _Layer, task: SequenceTask, length: int, steps: int, generator: torch.Generator
) -> Float[Tensor, " steps"]:
    """Train the layer with Adam and return the loss of every step."""
    optimiser = torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE)
    device = layer.query.weight.device
    losses = []
    for _ in range(steps):
        vectors, source = _draw(task, length, BATCH, generator)
        vectors = vectors.to(device)
        output, _ = layer(vectors)
        loss = F.mse_loss(output, _answer(vectors, source.to(device)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@torch.no_grad()
def _measure_layer(
    layer: _Layer,
    task: SequenceTask,
    positions: SequencePositions,
    vectors: Tokens,
    source: Int[Tensor, "batch length"],
    losses: Float[Tensor, " steps"],
) -> Reversal:
    """Return what the trained layer does on new sequences.

    source: for each place of the answer, the index of its token.
    losses: the loss of every training step.
    """
    answer = _answer(vectors, source)
    output, weights = layer(vectors)
    shares = _on_source(weights, source)
    trained_view, *other_views = _VIEWS[positions]
    views = [ViewResult(trained_view, losses=_errors(output, answer), shares=shares.mean(0).cpu())]
    for view in other_views:
        view_output, view_weights = layer(vectors, view)
        view_shares = _on_source(view_weights, source).mean(0)
        views.append(
            ViewResult(view, losses=_errors(view_output, answer), shares=view_shares.cpu())
        )
    if task == "sort":
        weights = _with_keys_in_order(weights, source)
    length = vectors.shape[1]
    uniform_output = vectors.mean(1, keepdim=True).expand_as(answer)
    best_weights = _best_weights_without_positions(task, length).to(vectors)
    return Reversal(
        task=task,
        length=length,
        heads=layer.heads,
        positions=positions,
        parameters=sum(parameter.numel() for parameter in layer.parameters()),
        losses=losses,
        weights=weights.mean(0).cpu(),
        shares=shares.cpu(),
        views=tuple(views),
        uniform=float(F.mse_loss(uniform_output, answer)),
        without_positions=float(F.mse_loss(best_weights @ vectors, answer)),
        place_distance=_mean_distance(layer.positions),
        vector_distance=_mean_distance(vectors),
    )


def _errors(output: Tokens, answer: Tokens) -> Float[Tensor, " batch"]:
    """Return the mean squared error of each sequence."""
    return (output - answer).square().mean((1, 2)).cpu()


def _on_source(
    weights: Weights, source: Int[Tensor, "batch query"]
) -> Float[Tensor, "heads batch"]:
    """Return the weight on the token that is the answer, mean over queries."""
    index = source[:, None, :, None].expand(*weights.shape[:3], 1)  # (batch, heads, query, 1)
    on_source = weights.gather(3, index)[..., 0]  # (batch, heads, query)
    return on_source.mean(2).T


def _with_keys_in_order(weights: Weights, source: Int[Tensor, "batch key"]) -> Weights:
    """Return the weights with keys in the order of the answer, so that its path is the diagonal."""
    return weights.gather(-1, source[:, None, None, :].expand_as(weights))


def _best_weights_without_positions(
    task: SequenceTask, length: int
) -> Float[Tensor, "length length"]:
    """Return the best weights of a layer that has no positions.

    Such a layer can tell a token from the others, but not where it is. So it can copy. For other
    tasks, it can only attend equally to all tokens that may be the answer.
    """
    if task == "copy":
        return torch.eye(length)
    if task == "reverse" and length % 2 == 0:
        # without a token in the middle, no token is its own answer
        return (1 - torch.eye(length)) / (length - 1)
    return torch.full((length, length), 1 / length)


def _mean_distance(vectors: Float[Tensor, "*batch length dim"]) -> float:
    """Return the mean distance of two vectors of a sequence."""
    length = vectors.shape[-2]
    distances = torch.cdist(vectors, vectors).sum((-2, -1)) / (length * (length - 1))
    return float(distances.mean())
