"""The most probable classes of every image."""

import sys
from typing import Final

import torch

from vitlens.analysis.evaluation.evaluate import predicted_logits
from vitlens.commands.predict.options import PredictOptions
from vitlens.commands.predict.record import FirstImages, PredictRecord
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.progress import progress
from vitlens.commands.run.run import Run
from vitlens.commands.shared.predictions import TOP, PredictionRow
from vitlens.errors import InputError

_SHOWN: Final = 18  # images of the prediction grid


def measure(options: PredictOptions) -> list[PredictionRow]:
    """Return the five most probable classes of every image, in order; --out also writes a report
    folder.
    """
    if options.run.html and options.run.out is None:
        raise InputError(
            "expected --out with --html, as predict writes a folder only there; e.g. --out "
            "predictions"
        )
    run = Run("predict", options, images=ImageRequest(scenes=1))
    if run.run_options.out is None:
        return _predict(run)
    with run.folder("Predictions of") as folder:
        predictions = _predict(run)
        pixels = run.split.source.read(torch.arange(min(_SHOWN, len(run.split))))
        images = FirstImages(pixels.numpy())
        path = folder.publish(
            lambda: PredictRecord(predictions=tuple(predictions), images_drawn=images)
        )
    if run.run_options.html and path:
        print(path, file=sys.stderr)  # noqa: T201
    return predictions


def _predict(run: Run[PredictOptions]) -> list[PredictionRow]:
    """Return the most probable classes of every image, in the order of the images."""
    model = run.model
    split = run.split
    with progress(
        f"predicting with {model.alias}", len(split), quiet=run.run_options.quiet
    ) as advance:
        logits = predicted_logits(model, split, **run.passes, advance=advance)
    top = logits.softmax(-1).topk(min(TOP, logits.shape[-1]), dim=-1)
    top_classes = top.indices.tolist()  # (images, TOP), the most probable first
    top_probabilities = top.values.tolist()
    predictions = []
    for index, (classes, probabilities) in enumerate(zip(top_classes, top_probabilities)):
        image = split.files[index] if split.files else f"image {index}"
        names = [model.classes[class_index] for class_index in classes]
        label = None
        if split.labels is not None:
            label = split.classes[int(split.labels[index])]
        predictions.append(PredictionRow.of(image, names, probabilities, label))
    return predictions
