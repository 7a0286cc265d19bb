"""Tiny models to attack: linear, with one hidden layer, a ViT, a CNN; random weights, few pixels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.attribution.models import cnn
from tests.lens.tiny import ours
from vitlens.attacks.algorithm import Setting
from vitlens.attacks.attack import sweep
from vitlens.attacks.engine import worst_case
from vitlens.attacks.plan import AttackPlan, clean_images
from vitlens.attacks.registry import ATTACKS
from vitlens.attacks.robustness import Outcome
from vitlens.models.anatomy import Anatomy
from vitlens.models.model import Model, Provenance
from vitlens.preprocessing import Preprocessing

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


def made(module: nn.Module, size: Size, *, classes: int | tuple[str, ...] = 5) -> Model:
    """A model around any module, without normalisation."""
    model = Model(
        module,
        alias="made",
        anatomy=Anatomy("other", ()),
        preprocessing=Preprocessing(size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
        classes=tuple("abcdefghij"[:classes]) if isinstance(classes, int) else classes,
        provenance=Provenance("made", "random"),
        architecture={},
    )
    return model.eval().requires_grad_(False)


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


def tiny_vit(size: Size = (8, 8), *, seed: int = 0) -> Model:
    return ours(size=size, patch_size=(4, 4), depth=1)


def tiny_cnn(size: Size = (8, 8), *, seed: int = 0) -> Model:
    return cnn(size)


MODELS: dict[str, Callable[..., Model]] = {
    "linear": linear,
    "perceptron": perceptron,
    "vit": tiny_vit,
    "cnn": tiny_cnn,
}


def pictures(count: int = 4, size: Size = (8, 8), *, seed: int = 0, low: float = 0.0, high: float = 1.0) -> Tensor:
    draws = torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    return low + (high - low) * draws


def setting(steps: int, size: Size = (8, 8), *, classes: int = 5) -> Setting:
    """The setting of an algorithm for one of these models."""
    return Setting(steps, classes, size)


def predictions(model: Model, images: Tensor) -> Tensor:
    """The predictions, one image at a time."""
    with torch.no_grad():
        return torch.cat([model(image).argmax(1) for image in images.split(1)])


def adversarial(
    model: Model, images: Tensor, labels: Tensor | str, attack: str, *, epsilons: Sequence[float], **given: Any
) -> tuple[Tensor, Tensor]:
    """The rows of the images on which an attack succeeds at one of these epsilons, and its images."""
    levels = tuple(epsilon for epsilon in epsilons if epsilon > 0) if ATTACKS[attack].kind == "budget" else (1.0,)
    clean = clean_images(model, images, labels)
    found = worst_case(model, clean, ATTACKS[attack], AttackPlan(levels, keep=True, **given)).adversarial
    rows = sorted(found)
    images = torch.stack([found[row] for row in rows]) if rows else images[:0]
    return torch.tensor(rows, dtype=torch.int64), images


def swept(model: Model, images: Tensor, labels: Tensor | str, attack: str, **given: Any) -> Outcome:
    """A sweep of one attack; given: its options, and fields of its plan."""
    own = {name: given.pop(name) for name in ("epsilons", "indices", "on_progress") if name in given}
    return sweep(model, images, labels, AttackPlan(**given), attack=attack, **own)


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
