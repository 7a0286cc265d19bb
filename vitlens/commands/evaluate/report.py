"""The report of `vitlens evaluate`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.evaluate.conclusions import findings, verdicts
from vitlens.commands.evaluate.limits import calibration_section, limits
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
from vitlens.commands.scaffold.calibration import CALIBRATION_ERROR
from vitlens.commands.scaffold.calibration import ENOUGH as ENOUGH_CONFIDENCES
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.pairs import PAIRS, PairRow, pair_table
from vitlens.commands.scaffold.trainings import training_sentences
from vitlens.commands.scaffold.worst_class import NAMED
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import SMALLEST, ranked
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, beyond

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
_WHOLE: Final = "In parentheses: 95 % intervals and the number of images."
_SMALL: Final = (
    f"Differences of less than {SMALLEST} points are no findings, whatever their p: enough images make any difference "
    "significant."
)


def report(record: Record) -> Document:
    """Summary, pairs of models, predictions, classes, calibration."""
    arrays = {alias: record.arrays(PREDICTIONS, model=alias) for alias in record.aliases}
    sections = [
        Section("Summary", tuple(_summary(record)), (_numbers(record),), leading=True),
        *_pairs(record),
        _classes(record, arrays),
        calibration_section(record),
        Section("Predictions", figures=tuple(_grids(record, arrays))),
    ]
    return Document(
        record.config.title,
        tuple(sections),
        limits=tuple(limits(record)),
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
        right, error = (in_words(each) for each in _own_estimates(record, alias))
        gap = record.metric(CONFIDENCE_GAP(model=alias))
        yield Sentence(
            f"**{alias}**: top-1 accuracy {right} on {where}; expected calibration error {error}; "
            f"mean confidence minus accuracy {in_words(gap, with_n=False)}: {_leans(gap)}.",
            (*_own_estimates(record, alias), gap, ENOUGH_CONFIDENCES),
        )
    for row in record.rows(PAIRS):
        gap = record.metric(DIFFERENCE(first=row.first, second=row.second))
        yield Sentence(
            f"{row.first} minus {row.second}: {in_words(gap)}, {_significance(row, gap)} (McNemar's exact test, "
            f"p = {row.p_holm:.2g}).",
            (row, gap),
        )
    yield from sentences(_WHOLE, _SMALL, says="method")


def _own_estimates(record: Record, alias: str) -> tuple[Estimate, Estimate]:
    return record.metric(ACCURACY(model=alias)), record.metric(CALIBRATION_ERROR(model=alias))


def _leans(gap: Estimate) -> str:
    if (gap.n or 0) < ENOUGH_CONFIDENCES:
        return f"of fewer than {ENOUGH_CONFIDENCES} images, too few to judge confidence"
    return _LEANS[beyond(gap, 0.0)]


def _significance(row: PairRow, gap: Estimate) -> str:
    if row.only_first_right == row.only_second_right == 0:
        return "no image on which only one of them is correct: there is nothing to test"
    if row.p_holm > LEVEL:
        return "no significant difference"
    return "significant, but too small to matter" if abs(gap.value) < SMALLEST else "a significant difference"


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
    rows = record.rows(PAIRS)
    lines = [
        Sentence(
            f"{row.first} alone is correct on {row.only_first_right:,} images, {row.second} alone on "
            f"{row.only_second_right:,}, both on {row.both_right:,}.",
            (row,),
        )
        for row in rows
    ]
    how = sentences(_HOW_PAIRED, says="method")
    yield Section("Which model is correct on which images", (*lines, *how), (pair_table(rows),), leading=True)


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
            f"Confusion matrix of {alias}: rows are true classes, columns predicted classes, numbers images, "
            "colours the share of the row. Classes that are neither the label nor the prediction of any image are left "
            "out. Rows of classes with few images are coarse.",
            partial(_confusion_matrix, predictions, alias),
        )
        for alias, predictions in arrays.items()
    ]
    title, rows = "Classes and confusions", record.rows(CLASSES)
    if max((row.n for row in rows), default=0) < ENOUGH:
        left_out = f"No class has {ENOUGH} images, so accuracy by class is in results.json only, with its intervals."
        lines = sentences(left_out, rows=(*rows, ENOUGH))
        return Section(title, lines, (_confused(record),), tuple(confusions), leading=True)
    bars = FigureSpec(
        "per_class",
        "Accuracy of each class with its 95 % interval. Classes whose intervals overlap widely are not shown to "
        "differ, and among many classes the lowest accuracy is low partly by chance.",
        partial(_bars, record),
    )
    lines = tuple(_class_sentences(record))
    return Section(title, lines, (_class_table(rows), _confused(record)), (bars, *confusions), leading=True)


def _class_sentences(record: Record) -> Iterator[Sentence]:
    """The lowest and the highest accuracy of a class, and how many classes have too few images to be judged."""
    for alias in record.aliases:
        rows = [row for row in record.rows(CLASSES) if row.model == alias and row.accuracy is not None]
        if len(rows) < 2:
            continue
        low, high = (choose(rows, key=lambda row: row.accuracy or 0.0) for choose in (min, max))
        few = sum(row.n < NAMED for row in rows)
        notes = ""
        if low.estimate and high.estimate and apart(low.estimate, high.estimate) is not Side.BELOW:
            notes = "; their intervals overlap, so the classes are not shown to differ"
        if few:
            notes += f"; {few} of {len(rows)} classes have fewer than {NAMED} images and show nothing by themselves"
        yield Sentence(
            f"{alias}: accuracy is lowest on class {low.class_name}, {in_words(low.estimate)} of {low.n:,} images, and "
            f"highest on class {high.class_name}, {in_words(high.estimate)} of {high.n:,}{notes}.",
            (*rows, NAMED),
        )


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
