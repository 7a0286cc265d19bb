"""The checkpoints that a run of `vitlens train --keep-every` kept, as models."""

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
    """Return the checkpoints that a run kept, and its final weights.

    model: the folder of the run, as a model is named.

    Raises InputError if it kept none.
    """
    folder = Path(parse_model(model).name)
    checkpoints = weights_over_training(folder) if folder.is_dir() else ()
    if len(checkpoints) < 2:  # every run has its final weights
        raise InputError(
            "expected a run that kept its weights for --over-training, found "
            f"{len(checkpoints) or 'none'} kept in {model}; train one with vitlens train PRESET "
            "--keep-every N"
        )
    return checkpoints


def spaced(checkpoints: Sequence[KeptWeights], most: int) -> list[KeptWeights]:
    """Return at most `most` checkpoints, evenly spaced, with the first and the last."""
    count = min(len(checkpoints), most)
    indices = np.linspace(0, len(checkpoints) - 1, count).round().astype(int)
    return [checkpoints[index] for index in indices]


def models_over_training(
    checkpoints: Sequence[KeptWeights], device: torch.device
) -> Iterator[tuple[int, Model]]:
    """Yield the number of epochs of each checkpoint, and its model."""
    for checkpoint in checkpoints:
        epochs = checkpoint.epochs
        model = load(f"epoch-{epochs}={checkpoint.file}", device=device)  # named ALIAS=FILE
        yield epochs, model
