"""The report of `vitlens train`, from its record."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.shared.trainings import training_sentences
from vitlens.commands.train.conclusions import findings, gain_of, gap_of, verdicts
from vitlens.commands.train.plan import TrainPlan
from vitlens.commands.train.record import (
    ACCURACY,
    CHECKS,
    CLASSES,
    COMPUTED,
    CONFUSION,
    FINE_TUNED,
    HISTORY,
    IMAGES,
    IMAGES_PER_SECOND,
    RECIPE,
    SECONDS,
    STUDENT_AND_TEACHER,
    TEST_ACCURACIES,
    ConfusionArrays,
    FineTunedRow,
    ImagesRow,
)
from vitlens.commands.train.report.check import check_report
from vitlens.commands.train.report.comparison import comparison
from vitlens.commands.train.report.distillation import distillation_section
from vitlens.commands.train.report.first_batch import augmentation
from vitlens.commands.train.report.limits import limits
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import in_words
from vitlens.training.defaults import KEPT_FOLDER, LEAST_STEPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["report"]

_HELD: Final = (
    "The accuracy on training images is a mean over the epoch, in which the weights still improve, and of augmented "
    "images: their difference from the test accuracy is a lower bound of overfitting."
)
_TRACKED: Final = (("tensorboard", "tensorboard --logdir FOLDER"), ("wandb", "wandb sync FOLDER/wandb/*"))


def report(record: Record) -> Document:
    """The result, the accuracy by class, and the recipe; or the comparison of two ways of training; or the checks."""
    if record.rows(CHECKS):
        return check_report(record)
    if record.rows(TEST_ACCURACIES):
        return comparison(record)
    result = (
        *_accuracy(record),
        *(_fine_tuned(row) for row in record.rows(FINE_TUNED)),
        *_kept_weights(record),
        *_tracker_logs(record),
        *sentences(_HELD, says="method"),
    )
    computed = ", ".join(row.how for row in record.rows(COMPUTED))
    settings = Table.of(
        "Settings of the training",
        record.rows(RECIPE),
        {"setting": lambda row: row.setting, "value": lambda row: row.value},
    )
    sections = [
        Section("Result", result, figures=(_curves(record),), leading=True),
        *([distillation_section(record)] if record.rows(STUDENT_AND_TEACHER) else []),
        Section(
            "By class", tuple(_class_sentences(record)), (_class_table(record),), tuple(_by_class(record)), "", True
        ),
        *augmentation(record),
        Section("Recipe", sentences(f"Computed with {computed}." if computed else None, says="setting"), (settings,)),
    ]
    return Document(
        record.config.title,
        tuple(sections),
        limits=tuple(limits(record)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
        preface=(*_images(record), *training_sentences(record)),
    )


def _class_sentences(record: Record) -> Iterator[Sentence]:
    """The classes of lowest and highest accuracy."""
    rows = [row for row in record.rows(CLASSES) if row.estimate is not None]
    if len(rows) > 1:
        low, high = (choose(rows, key=lambda row: row.accuracy or 0.0) for choose in (min, max))
        yield Sentence(
            f"Accuracy is lowest on class {low.class_name}, {in_words(low.estimate)} of {low.n:,} images, and highest "
            f"on class {high.class_name}, {in_words(high.estimate)} of {high.n:,}.",
            tuple(rows),
        )


def _class_table(record: Record) -> Table:
    return Table.of(
        "Accuracy by class, lowest first",
        sorted((row for row in record.rows(CLASSES) if row.n), key=lambda row: row.accuracy or 0.0),
        {
            "class": lambda row: row.class_name,
            "images": lambda row: row.n,
            "accuracy": lambda row: in_words(row.estimate),
        },
    )


def _accuracy(record: Record) -> Iterator[Sentence]:
    alias = record.aliases[0]
    accuracy, seconds, speed = (record.metric(metric(model=alias)) for metric in (ACCURACY, SECONDS, IMAGES_PER_SECOND))
    yield Sentence(
        f"`{alias}`: top-1 accuracy {in_words(accuracy)} on the test images after {_epochs(record)}, "
        f"which took {in_words(seconds)} ({in_words(speed)} in the last one). Its weights are in `model.safetensors`; "
        "every command takes this folder as a MODEL.",
        (accuracy, seconds, speed, len(record.rows(HISTORY))),
    )
    gap, rise = gap_of(record, alias), gain_of(record, alias)
    parts = [
        "" if gap is None else f"accuracy on training images in the last epoch minus test accuracy: {in_words(gap)}",
        "" if rise is None else f"rise of test accuracy over the last tenth of the epochs: {in_words(rise)}",
    ]
    if any(parts):
        text = "; ".join(filter(None, parts))
        yield Sentence(f"{text[:1].upper()}{text[1:]}.", tuple(each for each in (gap, rise) if each is not None))


def _epochs(record: Record) -> str:
    count = len(record.rows(HISTORY))
    return f"{count} epoch{'' if count == 1 else 's'}"


def _images(record: Record) -> Iterator[Sentence]:
    """The training and test images, and the batch size where it was reduced for few images."""
    data = record.config.data
    for row in record.rows(IMAGES) if data else ():
        notes = "".join(f" {note[:1].upper()}{note[1:].rstrip('.')}." for note in data.notes) if data else ""
        title = data.title if data else ""
        words = f"Trained on {row.training:,} images of {title}, tested on {row.test:,} others.{notes}"
        yield Sentence(" ".join([words, *([] if row.chosen else fitted_words(row))]), (row,), "setting")


def fitted_words(row: ImagesRow) -> Iterator[str]:
    """The reason for batches smaller than the recipe's; nothing where they are not."""
    size, before = row.batch_size, row.usual_batch_size
    if size < before:
        yield (
            f"{row.training:,} images make fewer than {LEAST_STEPS} batches of {before}, the recipe's batch size, so "
            f"batches of {size} are used: {max(1, row.training // size)} steps an epoch; the learning rate is "
            f"{row.learning_rate:.3g} in place of {row.usual_learning_rate:.3g}, scaled by the square root of the "
            "batch size. --batch-size and --learning-rate set other values."
        )


def _fine_tuned(row: FineTunedRow) -> Sentence:
    """The model that was fine-tuned, and which part of it."""
    blocks = f"its last {row.last} blocks and its head"
    part = {None: "all weights", 0: "its head alone", 1: "its last block and its head"}.get(row.last, blocks)
    notes = f"; {row.notes}" if row.notes else ""
    return Sentence(
        f"`{row.model}` (weights: {row.weights}) was fine-tuned, {part}: {row.trained:,} of {row.parameters:,} "
        f"parameters{notes}.",
        (row,),
    )


def _kept_weights(record: Record) -> Iterator[Sentence]:
    every = record.section("plan", TrainPlan).keep_every
    if every is None:
        return
    epochs = "epoch" if every == 1 else f"{every} epochs"
    commands = (
        "; `vitlens attention FOLDER --head 0,0` draws one head over training, `vitlens stats FOLDER --over-training` "
        "the statistics of all"
    )
    yield Sentence(
        f"A copy of the weights from before training and after every {epochs} is in `{KEPT_FOLDER}/`, in half "
        f"precision{'' if record.models[0].family == 'cnn' else commands}.",
        says="setting",
    )


def _tracker_logs(record: Record) -> Iterator[Sentence]:
    for place, command in _TRACKED:
        if (record.folder / place).is_dir():
            yield Sentence(f"The log of the training is in `{place}/`; show it with `{command}`.", says="setting")


def _curves(record: Record) -> FigureSpec:
    return FigureSpec(
        "training",
        "Loss, accuracy and learning rate by epoch. The best epoch is selected on the test images, so its accuracy is "
        "optimistic; the report gives that of the last epoch.",
        partial(_draw_curves, record),
    )


def _draw_curves(record: Record) -> "Figure":
    from vitlens.figures.train.curves import training_curves

    history = [{**asdict(row), "epoch": row.epoch + 1} for row in record.rows(HISTORY)]
    return training_curves(history=history, title=record.config.title)


def _by_class(record: Record) -> Iterator[FigureSpec]:
    yield FigureSpec(
        "per_class",
        "Accuracy of each class on the test images with its 95 % interval. Overlapping intervals give no "
        "evidence that one class is harder than another.",
        partial(_draw_classes, record),
    )
    yield FigureSpec(
        "confusion",
        "Predictions (columns) for the test images of each class (rows): numbers are images, colours the share of the "
        "row.",
        partial(_draw_confusion, record, record.arrays(CONFUSION)),
    )


def _draw_classes(record: Record) -> "Figure":
    from vitlens.figures.evaluate import per_class_bars

    rows = [row for row in record.rows(CLASSES) if row.accuracy is not None]
    return per_class_bars(
        accuracy=[[row.accuracy or 0.0 for row in rows]],
        low=[[row.low if row.low is not None else row.accuracy or 0.0 for row in rows]],
        high=[[row.high if row.high is not None else row.accuracy or 0.0 for row in rows]],
        n=[row.n for row in rows],
        classes=[row.class_name for row in rows],
        models=[record.aliases[0]],
    )


def _draw_confusion(record: Record, arrays: ConfusionArrays) -> "Figure":
    from vitlens.figures.confusion import confusion_matrix

    classes = [row.class_name for row in record.rows(CLASSES)]
    return confusion_matrix(counts=arrays.counts, classes=classes, model=record.aliases[0])
