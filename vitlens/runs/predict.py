"""`vitlens predict`: the likeliest classes of every image."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import answers
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.display import shortened, visible
from vitlens.figures.evaluate import prediction_grid
from vitlens.files import RunRecord
from vitlens.models.model import Model
from vitlens.runs.report import Drawn, publish
from vitlens.runs.sections import Section, Table

LIKELIEST = 5
SHOWN = 18  # images of the prediction grid
ROWS = 50  # of the report's table; results.json has them all


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one image, likeliest first; as text it is one line.

    image: its file, or its number from 0; probabilities: fractions; label: the true class where it is known.
    """

    image: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    label: str | None = None

    def __str__(self) -> str:
        named = (f"{_shown(name)} {100 * share:.1f} %" for name, share in zip(self.classes, self.probabilities))
        truth = "" if self.label is None else f" (label: {_shown(self.label)})"
        return f"{_shown(self.image)}: {', '.join(named)}{truth}"


def _shown(name: str) -> str:
    return shortened(visible(name))


def predict(
    model: str,
    *,
    images: Sequence[str] | None = None,
    data: str | None = None,
    model_options: ModelOptions | None = None,
    options: RunOptions | None = None,
) -> list[Prediction]:
    """The five likeliest classes of every image, in order; with options.out a report folder is written too."""
    options = options or RunOptions()
    (loaded,) = load_models([model], command="predict", model_options=model_options or ModelOptions(), options=options)
    split = load_split(loaded, data=data, images=images, options=options)
    if options.out is None:
        return _predictions(loaded, split, _answer(loaded, split, options))
    with RunFolder.create(
        "predict",
        title=f"Predictions of {loaded.alias} on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, models=[loaded], split=split),
        formats=options.formats,
    ) as folder:
        probabilities = _answer(loaded, split, options)
        predictions = _predictions(loaded, split, probabilities)
        folder.table("predictions", [_row(prediction) for prediction in predictions])
        pixels = split.source.read(torch.arange(min(SHOWN, len(split))))
        folder.arrays("images", pixels=pixels.numpy())
        publish(folder, draw, tell)
    return predictions


def draw(record: RunRecord) -> Iterator[Drawn]:
    """The first images with their prediction, where the truth is known."""
    pixels = record.arrays("images")["pixels"]
    rows = record.table("predictions")[: len(pixels)]
    if any(row["label"] is None for row in rows):
        return  # the grid marks right and wrong
    names = sorted({str(row[key]) for row in rows for key in ("class_1", "label")})
    figure = prediction_grid(
        images=pixels.astype(np.float32) / 255,
        predicted=[names.index(str(row["class_1"])) for row in rows],
        probability=[float(str(row["probability_1"])) for row in rows],
        truth=[names.index(str(row["label"])) for row in rows],
        classes=names,
    )
    yield Drawn(
        "predictions",
        figure,
        f"The first {len(rows)} images with their likeliest class and its probability. Too few to judge the model by: "
        "see vitlens evaluate.",
    )


def tell(record: RunRecord) -> list[Section]:
    """The likeliest classes of each image, and what not to conclude."""
    rows = record.table("predictions")
    cells: list[dict[str, str]] = []
    for row in rows[:ROWS]:
        likely = [
            f"{row[f'class_{rank}']} {100 * float(str(row[f'probability_{rank}'])):.1f} %"
            for rank in range(1, LIKELIEST + 1)
            if f"class_{rank}" in row
        ]
        cells.append(
            {"image": str(row["image"]), "likeliest classes": ", ".join(likely), "label": str(row["label"] or "–")}
        )
    some = f" (the first {ROWS} of {len(rows)})" if len(rows) > ROWS else ""
    limit = "A probability is what the model says, not how often it is right: vitlens evaluate shows its calibration."
    return [
        Section("Summary", (f"{len(rows)} images.",), (Table(f"Predictions{some}", cells),)),
        Section("Limits", (limit,)),
    ]


def _answer(model: Model, split: Split, options: RunOptions) -> Tensor:
    """Probabilities (n, classes)."""
    with progress(f"predicting with {model.alias}", len(split), quiet=options.quiet) as advance:
        logits = answers(model, split, batch_size=options.batch_size, precision=options.precision, advance=advance)
    return logits.softmax(-1)


def _predictions(model: Model, split: Split, probabilities: Tensor) -> list[Prediction]:
    likely = probabilities.topk(min(LIKELIEST, probabilities.shape[-1]), dim=-1)
    return [
        Prediction(
            image=split.files[index] if split.files else f"image {index}",
            classes=tuple(model.classes[place] for place in places),
            probabilities=tuple(shares),
            label=None if split.labels is None else split.classes[int(split.labels[index])],
        )
        for index, (places, shares) in enumerate(zip(likely.indices.tolist(), likely.values.tolist()))
    ]


def _row(prediction: Prediction) -> dict[str, object]:
    row: dict[str, object] = {"image": prediction.image, "label": prediction.label}
    for rank, (name, share) in enumerate(zip(prediction.classes, prediction.probabilities), start=1):
        row |= {f"class_{rank}": name, f"probability_{rank}": share}
    return row
