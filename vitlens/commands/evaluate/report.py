"""The report of `vitlens evaluate`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.evaluate.conclusions import findings, verdicts
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
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Side, beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENOUGH: Final = 5  # images of the largest class from which on accuracy by class is informative
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
    Side.UNDECIDED: "neither over- nor underconfidence is shown",
}
_HOW_PAIRED: Final = (
    "Both models classify the same images, so the test counts only images that one model alone classifies correctly. "
    "p: McNemar's exact test; p_holm: corrected for the number of pairs."
)
_LIMITS: Final = (
    "The intervals cover the choice of images of this kind. They do not cover other training runs or images of another "
    "kind.",
    "Binning biases the calibration error upwards for few images, and resampling increases that bias: its interval is "
    "conservative, with an upper end that is too high rather than too low.",
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
    return Document(
        record.config.title,
        tuple(sections),
        limits=sentences(*_LIMITS),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=(*data_sentences(record), *training_sentences(record)),
    )


def _suffix(record: Record, alias: str) -> str:
    """The suffix of the names of a model's own figures; empty for a single model."""
    return f"-{alias}" if len(record.aliases) > 1 else ""


def _summary(record: Record) -> Iterator[Sentence]:
    data = record.config.data
    where = f"the {data.part} images of {data.title}" if data else "the images"
    for alias in record.aliases:
        right = in_words(record.metric(ACCURACY(model=alias)))
        error = in_words(record.metric(CALIBRATION_ERROR(model=alias)), with_n=False)
        gap = record.metric(CONFIDENCE_GAP(model=alias))
        yield Sentence(
            f"**{alias}**: top-1 accuracy {right} on {where}; expected calibration error {error}; "
            f"mean confidence minus accuracy {in_words(gap, with_n=False)}: {_LEANS[beyond(gap, 0.0)]}."
        )
    for row in record.rows(PAIRS):
        gap = record.metric(DIFFERENCE(first=row.first, second=row.second))
        verdict = "a significant difference" if row.p_holm <= LEVEL else "no significant difference"
        yield Sentence(
            f"{row.first} minus {row.second}: {in_words(gap)}, {verdict} (McNemar's exact test, p = {row.p_holm:.2g}).",
            (row,),
        )
    yield Sentence("In parentheses: 95 % intervals and the number of images.")


def _numbers(record: Record) -> Table:
    measured = {title: metric for title, metric in _COLUMNS.items() if any(record.all(metric))}
    rows: list[tuple[Cell, ...]] = [
        (alias, *(in_words(record.metric(metric(model=alias)), with_n=False) for metric in measured.values()))
        for alias in record.aliases
    ]
    return Table("Numbers", ("model", *measured), tuple(rows))


def _pairs(record: Record) -> Iterator[Section]:
    if not record.rows(PAIRS):
        return
    yield Section("Which model is correct on which images", sentences(_HOW_PAIRED), (pair_table(record.rows(PAIRS)),))


def _grids(record: Record, arrays: dict[str, PredictionArrays]) -> Iterator[FigureSpec]:
    for alias, predictions in arrays.items():
        suffix = _suffix(record, alias)
        yield FigureSpec(
            f"predictions{suffix}",
            f"{len(predictions.random)} images drawn at random (not chosen) with {alias}'s prediction and its "
            "probability; below a wrong prediction, the true class. These are too few to judge the model by: the "
            "accuracy above is over all images.",
            partial(_grid, predictions, predictions.random, predictions.random_pixels),
        )
        if len(predictions.surest_errors):
            yield FigureSpec(
                f"surest_errors{suffix}",
                f"{_errors(len(predictions.surest_errors))} of {alias} with the highest confidence, highest first: its "
                "worst predictions, not typical ones. Some may come from wrong labels.",
                partial(_grid, predictions, predictions.surest_errors, predictions.surest_errors_pixels),
            )


def _errors(count: int) -> str:
    return "The error" if count == 1 else f"The {count} errors"


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
    """Accuracy by class where classes have enough images, and confusions."""
    confusions = [
        FigureSpec(
            f"confusion{_suffix(record, alias)}",
            f"Confusion matrix of {alias}: rows are true classes, columns predicted classes, colours fractions of the "
            "row. Classes that are neither the label nor the prediction of any image are left out. Rows of classes "
            "with few images are coarse.",
            partial(_confusion_matrix, predictions, alias),
        )
        for alias, predictions in arrays.items()
    ]
    title, rows = "Classes and confusions", record.rows(CLASSES)
    if max((row.n for row in rows), default=0) < ENOUGH:
        left_out = f"No class has {ENOUGH} images, so accuracy by class is in results.json only, with its intervals."
        return Section(title, sentences(left_out), (_confused(record),), tuple(confusions))
    bars = FigureSpec(
        "per_class",
        "Accuracy of each class with its 95 % interval. Classes whose intervals overlap widely are not shown to "
        "differ, and among many classes the lowest accuracy is low partly by chance.",
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
