"""Run folders of tiny models, their files with another description, and refusals in one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.saved import WEIGHTS_FILE, save

OVERRIDES: dict[str, Any] = {
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "registers": 2,
    "patch_size": [8, 16],
}


def small(name: str = "vit-micro", *, seed: int = 1, **shape: Any) -> Model:
    """Return an untrained preset of three classes; a ViT has registers and a grid of 4 x 3."""
    vit = name.startswith("vit")
    size, overrides = ((32, 48), OVERRIDES | shape) if vit else ((32, 32), shape)
    return untrained(
        name, classes=("cat", "dog", "newt"), image_size=size, overrides=overrides, seed=seed
    ).eval()


def written(
    model: Model, folder: Path, *, half: bool = False, state: dict[str, torch.Tensor] | None = None
) -> Path:
    """Return a run folder with the model."""
    save(model, folder / WEIGHTS_FILE, half=half, state=state)
    return folder


def description(folder: Path) -> dict[str, Any]:
    """Return the description of the model in the file of a run folder."""
    with safe_open(str(folder / WEIGHTS_FILE), framework="pt") as stored:
        return json.loads(stored.metadata()["vitlens"])


def rewrite(folder: Path, change: dict[str, Any] | str, **tensors: torch.Tensor | None) -> None:
    """Change the description or some tensors of a run folder's file; None leaves a tensor out."""
    path = folder / WEIGHTS_FILE
    text = change if isinstance(change, str) else json.dumps(description(folder) | change)
    state = {**load_file(path), **tensors}
    save_file(
        {key: value for key, value in state.items() if value is not None},
        path,
        metadata={"vitlens": text},
    )


class Malicious:
    """A pickle that makes a file as soon as it is read without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.target,)


@contextmanager
def one_line(
    error: type[Exception] | tuple[type[Exception], ...], words: str = ""
) -> Iterator[None]:
    """Expect an error with these words (a pattern) in one line."""
    with pytest.raises(error, match=words or None) as raised:
        yield
    assert "\n" not in str(raised.value)
