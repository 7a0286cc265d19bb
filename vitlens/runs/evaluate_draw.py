"""What `vitlens evaluate` draws, from its folder alone."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlens.figures.calibration import Calibration, reliability_diagram
from vitlens.figures.confusion import confusion_matrix
from vitlens.figures.evaluate import per_class_bars, prediction_grid
from vitlens.files import RunRecord
from vitlens.runs.evaluate_rows import ending_of, enough_by_class, metric_of, models_of
from vitlens.runs.report import Drawn
from vitlens.runs.sections import metrics

_GRIDS = {
    "random": (
        "predictions",
        "images drawn at random (not chosen) with {alias}'s prediction and its probability; a wrong one says the truth "
        "below. Too few to judge the model by: the accuracy above is over all images.",
    ),
    "surest_errors": (
        "surest_errors",
        "errors of {alias} of which it is surest, surest first. They show what it mixes up and which labels are "
        "doubtful; they are its worst, not its typical answers.",
    ),
}


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Prediction grids, accuracy by class, confusions and the reliability diagram."""
    aliases = models_of(record)
    for alias in aliases:
        yield from _grids(record, alias, ending_of(alias, aliases))
    if enough_by_class(record):
        yield _bars(record, aliases)
    yield _reliability(record, aliases)
    for alias in aliases:
        yield Drawn(
            f"confusion{ending_of(alias, aliases)}",
            confusion_matrix(**_confusion(record.arrays(f"predictions-{alias}")), model=alias),
            f"What {alias} takes each class for: rows are the truth, columns the prediction, colour the share of the "
            "row; of the classes, those that are the truth or the prediction of some image. Off the diagonal are "
            "errors; a class with few images has a coarse row.",
        )


def _grids(record: RunRecord, alias: str, ending: str) -> Iterator[Drawn]:
    arrays = record.arrays(f"predictions-{alias}")
    for key, (name, caption) in _GRIDS.items():
        chosen = arrays[key]
        if len(chosen):
            figure = prediction_grid(
                images=arrays[f"{key}_pixels"].astype(np.float32) / 255,
                predicted=arrays["prediction"][chosen],
                probability=arrays["probability"][chosen],
                truth=arrays["label"][chosen],
                classes=[str(name) for name in arrays["classes"]],
            )
            yield Drawn(f"{name}{ending}", figure, f"{len(chosen)} {caption.format(alias=alias)}")


def _bars(record: RunRecord, aliases: list[str]) -> Drawn:
    rows = [row for row in record.table("per_class") if row["n"]]
    by_model = [[row for row in rows if row["model"] == alias] for alias in aliases]
    figure = per_class_bars(
        **{
            key: np.array([[row[key] for row in group] for group in by_model], float)
            for key in ("accuracy", "low", "high")
        },
        n=np.array([row["n"] for row in by_model[0]]),
        classes=[str(row["class"]) for row in by_model[0]],
        models=aliases,
    )
    caption = (
        "Accuracy of each class with its 95 % interval. Classes whose intervals overlap widely are not told apart by "
        "these images, and among many classes the lowest is low partly by chance."
    )
    return Drawn("per_class", figure, caption)


def _reliability(record: RunRecord, aliases: list[str]) -> Drawn:
    found, models = metrics(record), []
    for alias in aliases:
        rows = [row for row in record.table("calibration") if row["model"] == alias]
        columns = {key: np.array([row[key] for row in rows], float) for key in ("confidence", "accuracy", "count")}
        models.append(Calibration(alias, **columns, error=metric_of("calibration_error", alias, aliases, found).value))
    caption = (
        "Accuracy of the images of each confidence, in 15 equal bins: on the dashes the model is right as often as it "
        "says. Bins with few images (below) scatter by chance."
    )
    return Drawn("calibration", reliability_diagram(models=models), caption)


def _confusion(arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Any]:
    """The counts among classes that are a label or a prediction of at least one image, and their names."""
    label, prediction = arrays["label"].astype(np.int64), arrays["prediction"].astype(np.int64)
    present, places = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    size = len(present)
    flat = places[: len(label)] * size + places[len(label) :]
    counts = np.bincount(flat, minlength=size * size).reshape(size, size)
    return {"counts": counts, "classes": [str(arrays["classes"][index]) for index in present]}
