"""A model put together around a model, and what it records of its making."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version

import torch
from torch import nn

from vitlens.devices import evaluating
from vitlens.labels import imagenet_classes
from vitlens.models.anatomy import read_anatomy
from vitlens.models.build import Architecture
from vitlens.models.model import Model, Provenance
from vitlens.preprocessing import Preprocessing
from vitlens.version import __version__


def assemble(
    model: nn.Module,
    architecture: Architecture,
    preprocessing: Preprocessing,
    classes: tuple[str, ...],
    alias: str,
    provenance: Provenance,
) -> Model:
    """A model around a model whose anatomy is read from its modules."""
    return Model(
        model,
        alias=alias,
        anatomy=read_anatomy(model, image_size=preprocessing.size),
        preprocessing=preprocessing,
        classes=classes,
        provenance=provenance,
        architecture=asdict(architecture),
    )


def versions() -> dict[str, str]:
    """The versions that decide what a model computes."""
    return {"vitlens": __version__} | {name: version(name) for name in ("torch", "torchvision", "timm")}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A random state of its own for initialisation; the caller's comes back on exit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def default_classes(count: int) -> tuple[str, ...]:
    """ImageNet's names for 1000 logits, numbers for any other count."""
    return imagenet_classes() if count == 1000 else tuple(str(index) for index in range(count))


def count_classes(model: nn.Module, size: tuple[int, int]) -> int:
    """Width of the logits, measured: no two libraries keep it in the same place."""
    with evaluating(model), torch.no_grad():
        logits = model(torch.zeros(1, 3, *size))
    return int(logits.shape[-1])
