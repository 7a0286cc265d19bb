"""The brightness of every image."""

from pathlib import Path

import torch

from tests.contracts.throw_away.options import BrightnessOptions
from tests.contracts.throw_away.record import (
    BrightnessArrays,
    BrightnessRecord,
    BrightnessRow,
    MeanRow,
)
from vitlens.commands.run.run import Run
from vitlens.uncertainty import Estimate


def measure(options: BrightnessOptions) -> Path | None:
    """Load, compute, write; returns the report's path."""
    run = Run("brightness", options)
    with run.folder("Brightness of the images of") as folder:
        rows = options.scale * torch.cat(
            [batch.images.mean((1, 3)) for (batch,) in run.batches("Brightness")]
        )
        names = run.split.files or [f"image {index}" for index in range(len(rows))]
        return folder.publish(
            lambda: BrightnessRecord(
                images_shown=tuple(
                    BrightnessRow(name, row.mean().item()) for name, row in zip(names, rows)
                ),
                means=(
                    MeanRow(run.model.alias, Estimate(rows.mean().item(), n=len(rows), unit="")),
                ),
                rows={run.model.alias: BrightnessArrays(rows.numpy())},
            )
        )
