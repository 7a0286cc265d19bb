"""Tiny models to attack: linear, with one hidden layer, a ViT, a CNN; planted outcomes; and what a model was asked."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.kit.tiny import bare
from vitlens.attacks.robustness import Outcome
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.resnet import CifarResNet

Size = tuple[int, int]
INF = float("inf")


class Flat(nn.Module):
    """Layers on the flattened pixels."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Wave(nn.Module):
    """A nonlinearity with many maxima."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (4 * tokens).sin()


def made(module: nn.Module, size: Size, *, classes: int | tuple[str, ...] = 5) -> Model:
    """A model around any module, without normalisation."""
    return bare(module, size, classes=tuple("abcdefghij"[:classes]) if isinstance(classes, int) else classes)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def linear(size: Size = (8, 8), *, classes: int = 5, seed: int = 0) -> Model:
    return made(seeded(lambda: Flat(nn.Linear(3 * size[0] * size[1], classes)), seed), size, classes=classes)


def perceptron(size: Size = (8, 8), *, classes: int = 5, seed: int = 0) -> Model:
    def build() -> nn.Module:
        return Flat(nn.Linear(3 * size[0] * size[1], 16), nn.GELU(), nn.Linear(16, classes))

    return made(seeded(build, seed), size, classes=classes)


def robust(size: Size = (8, 8), *, seed: int = 0) -> Model:
    """Losses with many maxima, and always the prediction 0: no attack ends early. In double precision."""

    def build() -> nn.Module:
        last = nn.Linear(16, 5)
        with torch.no_grad():
            last.bias[0] = 4
        return Flat(nn.Linear(3 * size[0] * size[1], 16), Wave(), last)

    return made(seeded(build, seed), size).double()


def tiny_vit(size: Size = (8, 8), *, seed: int = 0) -> Model:
    shape = {"dim": 16, "depth": 1, "heads": 2, "patch_size": [4, 4]}
    model = untrained("vit-mini", classes=tuple("abcde"), image_size=size, seed=seed, overrides=shape)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)


def tiny_cnn(size: Size = (8, 8), *, seed: int = 0) -> Model:
    return made(seeded(lambda: CifarResNet(blocks=1, classes=5), seed), size)


MODELS: dict[str, Callable[..., Model]] = {"linear": linear, "perceptron": perceptron, "vit": tiny_vit, "cnn": tiny_cnn}


def pictures(count: int = 4, size: Size = (8, 8), *, seed: int = 0, low: float = 0.0, high: float = 1.0) -> Tensor:
    draws = torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    return low + (high - low) * draws


def predictions(model: Model, images: Tensor) -> Tensor:
    """The predictions, one image at a time."""
    with torch.no_grad():
        return torch.cat([model(image).argmax(1) for image in images.split(1)])


@contextmanager
def asked(model: Model) -> Iterator[list[Tensor]]:
    """The images of each pass inside."""
    seen: list[Tensor] = []
    handle = model.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].clone()))
    try:
        yield seen
    finally:
        handle.remove()


def outcome(
    name: str,
    broken_at: Sequence[float],
    *,
    alias: str = "m",
    epsilons: Sequence[float] = (0.1, 0.2),
    groups: Tensor | None = None,
) -> Outcome:
    """An attack that broke images at these epsilons; 0: wrong before."""
    at = torch.tensor(broken_at)
    return Outcome(name, alias, tuple(epsilons), at > 0, at, at, at < 0, 0, 0, 0.0, groups=groups)
