"""Tiny models to attack, on the flattened pixels; planted outcomes; and what a model was asked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.kit.tiny import bare
from vitlens.attacks.robustness import Outcome
from vitlens.models.model import Model

Size = tuple[int, int]
INF = float("inf")


class Wave(nn.Module):
    """A nonlinearity with many maxima."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (4 * tokens).sin()


def made(module: nn.Module, size: Size, *, classes: int | tuple[str, ...] = 5) -> Model:
    """Return a model around any module, without normalisation."""
    return bare(
        module, size, classes=tuple("abcdefghij"[:classes]) if isinstance(classes, int) else classes
    )


def _layers(size: Size, seed: int, classes: int, *between: nn.Module) -> Model:
    """Build linear layers, with 16 hidden units where something stands between them."""
    pixels = 3 * size[0] * size[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Linear(pixels, 16 if between else classes)
        last = [nn.Linear(16, classes)] if between else []
    return made(nn.Sequential(nn.Flatten(), first, *between, *last), size, classes=classes)


def linear(size: Size = (8, 8), *, classes: int = 5, seed: int = 0) -> Model:
    return _layers(size, seed, classes)


def perceptron(size: Size = (8, 8), *, classes: int = 5, seed: int = 0) -> Model:
    return _layers(size, seed, classes, nn.GELU())


def robust(size: Size = (8, 8), *, seed: int = 0) -> Model:
    """Build a model in double precision whose loss has many maxima and that always predicts 0.

    No attack on it ends early.
    """
    model = _layers(size, seed, 5, Wave())
    model.module[3].bias.data[0] = 4  # type: ignore[index]
    return model.double()


def pictures(
    count: int = 4, size: Size = (8, 8), *, seed: int = 0, low: float = 0.0, high: float = 1.0
) -> Tensor:
    draws = torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    return low + (high - low) * draws


def predictions(model: Model, images: Tensor) -> Tensor:
    """Return the predictions, one image at a time."""
    with torch.no_grad():
        return torch.cat([model(image).argmax(1) for image in images.split(1)])


@contextmanager
def asked(model: Model) -> Iterator[list[Tensor]]:
    """Record the images of each pass inside the context."""
    seen: list[Tensor] = []
    handle = model.module.register_forward_pre_hook(
        lambda _module, inputs: seen.append(inputs[0].clone())
    )
    try:
        yield seen
    finally:
        handle.remove()


def outcome(
    name: str,
    broken_at: Sequence[float],
    *,
    epsilons: Sequence[float] = (0.1, 0.2),
    groups: Tensor | None = None,
) -> Outcome:
    """Return an attack that broke images at these epsilons; 0: wrong before."""
    at = torch.tensor(broken_at)
    return Outcome(name, "m", tuple(epsilons), at > 0, at, at, at < 0, 0, 0, 0.0, groups=groups)
