"""The report of `vitlens evaluate`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.evaluate.record import (
    ACCURACY,
    CLASSES,
    CONFIDENCE_GAP,
    CONFUSIONS,
    CROSS_ENTROPY,
    DIFFERENCE,
    PREDICTIONS,
    TOP5,
    ClassRow,
    PredictionArrays,
)
from vitlens.commands.scaffold.calibration import CALIBRATION_ERROR, reliability
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.pairs import PAIRS, pair_table
from vitlens.commands.scaffold.trainings import training_sentences
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import LEVEL, Side, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENOUGH: Final = 5  # images of the largest class from which accuracy by class says anything
_ROWS: Final = 30  # of a table in the report; results.json has them all
_COLUMNS: Final = {
    "accuracy": ACCURACY,
    "top-5 accuracy": TOP5,
    "cross-entropy": CROSS_ENTROPY,
    "calibration error": CALIBRATION_ERROR,
}
_LEANS: Final = {
    Side.ABOVE: "overconfident",
    Side.BELOW: "underconfident",
    Side.UNDECIDED: "neither over- nor underconfidence shown",
}
_HOW_PAIRED: Final = (
    "Both models predict the same images, so only those count on which one is correct and the other is not. p is "
    "McNemar's exact test, p_holm corrects it for the number of pairs."
)
_LIMITS: Final = (
    "The intervals say how much the numbers would change with other images of the same kind; not how much with another "
    "training run, and nothing about images of another kind.",
    "The calibration error has no interval: binning makes it too large for few images, and resampling more so.",
)


def report(record: Record) -> Document:
    """Summary, pairs of models, predictions, classes, calibration."""
    arrays = {alias: record.arrays(PREDICTIONS, model=alias) for alias in record.aliases}
    sections = [
        Section("Summary", tuple(_summary(record)), (_numbers(record),), leading=True),
        *_pairs(record),
        Section("Predictions", figures=tuple(_grids(record, arrays))),
        _classes(record, arrays),
        Section("Calibration", figures=(reliability(record),)),
    ]
    return Document(record.config.title, tuple(sections), limits=sentences(*_LIMITS))


def _ending(record: Record, alias: str) -> str:
    """What the names of a model's own figures end with: nothing where there is one model."""
    return f"-{alias}" if len(record.aliases) > 1 else ""


def _summary(record: Record) -> Iterator[Sentence]:
    data = record.config.data
    where = f"the {data.part} images of {data.title}" if data else "the images"
    yield from data_sentences(record)
    yield from training_sentences(record)
    for alias in record.aliases:
        right = in_words(record.metric(ACCURACY(model=alias)))
        error = number(100 * record.metric(CALIBRATION_ERROR(model=alias)).value, 1)
        gap = record.metric(CONFIDENCE_GAP(model=alias))
        yield Sentence(
            f"**{alias}**: top-1 accuracy {right} on {where}; expected calibration error {error} %; "
            f"mean confidence minus accuracy {in_words(gap, with_n=False)}: {_LEANS[beyond(gap, 0.0)]}."
        )
    for row in record.rows(PAIRS):
        gap = record.metric(DIFFERENCE(first=row.first, second=row.second))
        verdict = "a significant difference" if row.p_holm <= LEVEL else "no significant difference"
        yield Sentence(
            f"{row.first} minus {row.second}: {in_words(gap)}, {verdict} (McNemar's exact test, p = {row.p_holm:.2g}).",
            (row,),
        )
    yield Sentence("Brackets hold 95 % intervals and the number of images.")


def _numbers(record: Record) -> Table:
    kept = {title: metric for title, metric in _COLUMNS.items() if any(record.all(metric))}
    rows: list[tuple[Cell, ...]] = [
        (alias, *(in_words(record.metric(metric(model=alias)), with_n=False) for metric in kept.values()))
        for alias in record.aliases
    ]
    return Table("Numbers", ("model", *kept), tuple(rows))


def _pairs(record: Record) -> Iterator[Section]:
    if not record.rows(PAIRS):
        return
    yield Section("Which model is correct on which images", sentences(_HOW_PAIRED), (pair_table(record.rows(PAIRS)),))


def _grids(record: Record, arrays: dict[str, PredictionArrays]) -> Iterator[FigureSpec]:
    for alias, predictions in arrays.items():
        ending = _ending(record, alias)
        yield FigureSpec(
            f"predictions{ending}",
            f"{len(predictions.random)} images drawn at random (not chosen) with {alias}'s prediction and its "
            "probability; the true class stands below a wrong one. Too few to judge the model by: the accuracy above "
            "is over all images.",
            partial(_grid, predictions, predictions.random, predictions.random_pixels),
        )
        if len(predictions.surest_errors):
            yield FigureSpec(
                f"surest_errors{ending}",
                f"{len(predictions.surest_errors)} errors of {alias} with the highest confidence, highest first. They "
                "show which classes it confuses and which labels are doubtful; they are its worst, not its typical "
                "predictions.",
                partial(_grid, predictions, predictions.surest_errors, predictions.surest_errors_pixels),
            )


def _grid(predictions: PredictionArrays, chosen: NDArray[np.integer], pixels: NDArray[np.uint8]) -> "Figure":
    from vitlens.figures.evaluate import prediction_grid

    return prediction_grid(
        images=pixels.astype(np.float32) / 255,
        predicted=predictions.prediction[chosen],
        probability=predictions.probability[chosen],
        truth=predictions.label[chosen],
        classes=[str(name) for name in predictions.classes],
    )


def _classes(record: Record, arrays: dict[str, PredictionArrays]) -> Section:
    """Accuracy by class where there are images enough for it, and confusions."""
    confusions = [
        FigureSpec(
            f"confusion{_ending(record, alias)}",
            f"What {alias} takes each class for: rows are the truth, columns the prediction, colour the share of the "
            "row; of the classes, those that are the truth or the prediction of some image. Off the diagonal are "
            "errors; a class with few images has a coarse row.",
            partial(_confusion_matrix, predictions, alias),
        )
        for alias, predictions in arrays.items()
    ]
    title, rows = "Classes and confusions", record.rows(CLASSES)
    if max((row.n for row in rows), default=0) < ENOUGH:
        few = f"Accuracy by class is left out: no class has {ENOUGH} images. It is in results.json, with its intervals."
        return Section(title, sentences(few), (_confused(record),), tuple(confusions))
    bars = FigureSpec(
        "per_class",
        "Accuracy of each class with its 95 % interval. Classes whose intervals overlap widely are not told apart by "
        "these images, and among many classes the lowest is low partly by chance.",
        partial(_bars, record),
    )
    return Section(title, (), (_class_table(rows), _confused(record)), (bars, *confusions))


def _bars(record: Record) -> "Figure":
    from vitlens.figures.evaluate import per_class_bars

    rows = [row for row in record.rows(CLASSES) if row.n]
    by_model = [[row for row in rows if row.model == alias] for alias in record.aliases]
    return per_class_bars(
        accuracy=np.array([[row.accuracy for row in group] for group in by_model], float),
        low=np.array([[row.low for row in group] for group in by_model], float),
        high=np.array([[row.high for row in group] for group in by_model], float),
        n=np.array([row.n for row in by_model[0]]),
        classes=[row.class_name for row in by_model[0]],
        models=list(record.aliases),
    )


def _class_table(rows: Sequence[ClassRow]) -> Table:
    known = [row for row in rows if row.n]
    caption = "Accuracy by class"
    if len(known) > _ROWS:
        caption += f" (the {_ROWS} lowest of {len(known)})"
        known = sorted(known, key=lambda row: row.accuracy or 0.0)[:_ROWS]
    return Table.of(
        caption,
        known,
        {
            "model": lambda row: row.model,
            "class": lambda row: row.class_name,
            "n": lambda row: row.n,
            "accuracy": lambda row: in_words(row.estimate),
        },
    )


def _confused(record: Record) -> Table:
    wrong = [row for row in record.rows(CONFUSIONS) if row.truth != row.prediction]
    return Table.of(
        "Most frequent confusions",
        sorted(wrong, key=lambda row: -row.count)[:10],
        {
            "model": lambda row: row.model,
            "truth": lambda row: row.truth,
            "prediction": lambda row: row.prediction,
            "count": lambda row: row.count,
        },
    )


def _confusion_matrix(predictions: PredictionArrays, alias: str) -> "Figure":
    """The counts among classes that are a label or a prediction of at least one image."""
    from vitlens.figures.confusion import confusion_matrix

    label, prediction = predictions.label.astype(np.int64), predictions.prediction.astype(np.int64)
    present, places = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    size = len(present)
    flat = places[: len(label)] * size + places[len(label) :]
    counts = np.bincount(flat, minlength=size * size).reshape(size, size)
    classes = [str(predictions.classes[index]) for index in present]
    return confusion_matrix(counts=counts, classes=classes, model=alias)
