"""The most probable classes of every image."""

import sys
from typing import Final

import torch

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.predict.record import FirstImages, PredictRecord
from vitlens.commands.run.progress import progress
from vitlens.commands.run.run import Run
from vitlens.commands.shared.predictions import TOP, PredictionRow
from vitlens.errors import InputError

_SHOWN: Final = 18  # images of the prediction grid


def measure(options: PredictOptions) -> list[PredictionRow]:
    """Return the five most probable classes of every image, in order; with --out a report folder is written, too."""
    if options.run.html and options.run.out is None:
        raise InputError("expected --out with --html, as predict writes a folder only there; e.g. --out predictions")
    run = Run("predict", options, scenes=1)
    if run.run.out is None:
        return _rows(run)
    with run.folder("Predictions of") as folder:
        rows = _rows(run)
        pixels = run.split.source.read(torch.arange(min(_SHOWN, len(run.split))))
        path = folder.publish(lambda: PredictRecord(predictions=tuple(rows), images_drawn=FirstImages(pixels.numpy())))
    if run.run.html and path:
        print(path, file=sys.stderr)  # noqa: T201
    return rows


def _rows(run: Run[PredictOptions]) -> list[PredictionRow]:
    model = run.model
    split = run.split
    own = run.run
    with progress(f"predicting with {model.alias}", len(split), quiet=own.quiet) as advance:
        logits = predicted_logits(model, split, batch_size=own.batch_size, precision=own.precision, advance=advance)
    top = logits.softmax(-1).topk(min(TOP, logits.shape[-1]), dim=-1)
    return [
        PredictionRow.of(
            split.files[index] if split.files else f"image {index}",
            [model.classes[place] for place in places],
            shares,
            None if split.labels is None else split.classes[int(split.labels[index])],
        )
        for index, (places, shares) in enumerate(zip(top.indices.tolist(), top.values.tolist()))
    ]
