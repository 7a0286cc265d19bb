"""The most probable classes of every image."""

import sys
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import answers
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.predict.record import FirstImages, PredictRecord
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import load_models, load_split
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.publish import publish
from vitlens.commands.shared.predictions import TOP, PredictionRow
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model

_SHOWN: Final = 18  # images of the prediction grid


def measure(options: PredictOptions) -> list[PredictionRow]:
    """The five most probable classes of every image, in order; with --out a report folder is written, too."""
    run = options.run
    if run.html and run.out is None:
        raise InputError("expected --out with --html, as predict writes a folder only there; e.g. --out predictions")
    (model,) = load_models((options.model,), command="predict", model_options=options.model_options, options=run)
    split = load_split(model, data=options.data, images=options.images, options=run)
    if run.out is None:
        return _rows(model, split, _probabilities(model, split, run))
    with RunFolder.create(
        "predict",
        title=f"Predictions of {model.alias} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=(model,), split=split),
        formats=run.formats,
    ) as folder:
        rows = _rows(model, split, _probabilities(model, split, run))
        pixels = split.source.read(torch.arange(min(_SHOWN, len(split))))
        folder.keep(PredictRecord(predictions=tuple(rows), images_drawn=FirstImages(pixels.numpy())))
        path = publish(folder)
    if run.html:
        print(path, file=sys.stderr)  # noqa: T201
    return rows


def _probabilities(model: Model, split: Split, run: RunOptions) -> Tensor:
    """(n, classes)."""
    with progress(f"predicting with {model.alias}", len(split), quiet=run.quiet) as advance:
        logits = answers(model, split, batch_size=run.batch_size, precision=run.precision, advance=advance)
    return logits.softmax(-1)


def _rows(model: Model, split: Split, probabilities: Tensor) -> list[PredictionRow]:
    top = probabilities.topk(min(TOP, probabilities.shape[-1]), dim=-1)
    return [
        PredictionRow.of(
            split.files[index] if split.files else f"image {index}",
            [model.classes[place] for place in places],
            shares,
            None if split.labels is None else split.classes[int(split.labels[index])],
        )
        for index, (places, shares) in enumerate(zip(top.indices.tolist(), top.values.tolist()))
    ]
