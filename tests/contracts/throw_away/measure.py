"""The brightness of every image."""

from pathlib import Path

import torch

from tests.contracts.throw_away.options import BrightnessOptions
from tests.contracts.throw_away.record import BRIGHTNESS, IMAGES, ROWS, BrightnessArrays, BrightnessRow
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.publish import publish
from vitlens.uncertainty import Estimate


def measure(options: BrightnessOptions) -> Path:
    """Load, compute, write; returns the report's path."""
    run = options.run
    (model,) = load_models((options.model,), command="brightness", model_options=options.model_options, options=run)
    split = load_split(model, data=options.data, images=options.images, options=run)
    rows = options.scale * torch.cat([batch.images.mean((1, 3)) for batch in split.batches(8)])
    names = split.files or [f"image {index}" for index in range(len(split))]
    with RunFolder.create(
        "brightness",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=(model,), split=split),
        formats=run.formats,
    ) as folder:
        folder.write(IMAGES, [BrightnessRow(name, row.mean().item()) for name, row in zip(names, rows)])
        folder.metric(BRIGHTNESS(model=model.alias), Estimate(rows.mean().item(), n=len(rows)))
        folder.save(ROWS, BrightnessArrays(rows.numpy()), model=model.alias)
        return publish(folder)
