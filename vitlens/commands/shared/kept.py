"""The weights that a run of `vitlens train --keep-every` kept, as models."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.model_names import parse_model
from vitlens.training.checkpoint import KeptWeights, weights_over_training


def kept_weights(model: str) -> tuple[KeptWeights, ...]:
    """Return the weights that a run kept, and its final ones. Raises InputError where it kept
    none."""
    folder = Path(parse_model(model).name)
    checkpoints = weights_over_training(folder) if folder.is_dir() else ()
    if len(checkpoints) < 2:
        raise InputError(
            "expected a run that kept its weights for --over-training, found "
            f"{len(checkpoints) or 'none'} kept in {model}; train one with vitlens train PRESET "
            "--keep-every N"
        )
    return checkpoints


def spaced(weights: Sequence[KeptWeights], most: int) -> list[KeptWeights]:
    """Return at most so many checkpoints, evenly spaced, with the first and the last."""
    chosen = np.linspace(0, len(weights) - 1, min(len(weights), most)).round().astype(int)
    return [weights[index] for index in chosen]


def models_over_training(
    weights: Sequence[KeptWeights], device: torch.device
) -> Iterator[tuple[int, Model]]:
    """Yield the number of epochs of each checkpoint, and its model."""
    for checkpoint in weights:
        yield (
            checkpoint.epochs,
            load(f"epoch-{checkpoint.epochs}={checkpoint.file}", device=device),
        )
