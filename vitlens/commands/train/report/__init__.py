"""The report of `vitlens train`, from its record."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.train.plan import TrainPlan
from vitlens.commands.train.record import (
    ACCURACY,
    BESIDE,
    CLASSES,
    COMPUTED,
    CONFUSION,
    HISTORY,
    IMAGES,
    LOOKS,
    PACE,
    RECIPE,
    SECONDS,
    STARTED,
    ConfusionArrays,
    ImagesRow,
    StartRow,
)
from vitlens.commands.train.report.beside import beside
from vitlens.commands.train.report.compared import compared
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words
from vitlens.training.defaults import KEPT_FOLDER, LEAST_STEPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["report"]

_LIMIT: Final = (
    "One run with one seed. Another seed gives another accuracy, which the interval does not cover: it stands for the "
    "choice of test images alone."
)
_TRACKED: Final = (("tensorboard", "tensorboard --logdir FOLDER"), ("wandb", "wandb sync FOLDER/wandb/*"))


def report(record: Record) -> Document:
    """The result, the accuracy by class, and the recipe; of a comparison of two ways, the comparison."""
    if record.rows(LOOKS):
        return compared(record)
    result = (
        *_images(record),
        _accuracy(record),
        *(_started(row) for row in record.rows(STARTED)),
        *_kept(record),
        *_tracked(record),
    )
    computed = ", ".join(row.how for row in record.rows(COMPUTED))
    settings = Table.of(
        "Settings of the training",
        record.rows(RECIPE),
        {"setting": lambda row: row.setting, "value": lambda row: row.value},
    )
    sections = [
        Section("Result", result, figures=(_curves(record),), leading=True),
        *([beside(record)] if record.rows(BESIDE) else []),
        Section("By class", figures=tuple(_by_class(record))),
        Section("Recipe", sentences(f"Computed with {computed}." if computed else None), (settings,)),
    ]
    return Document(record.config.title, tuple(sections), limits=sentences(_LIMIT))


def _accuracy(record: Record) -> Sentence:
    alias = record.aliases[0]
    accuracy, seconds, pace = (record.metric(metric(model=alias)) for metric in (ACCURACY, SECONDS, PACE))
    return Sentence(
        f"`{alias}`: top-1 accuracy {in_words(accuracy)} on the test images after {len(record.rows(HISTORY))} epochs, "
        f"which took {in_words(seconds)} ({in_words(pace)} in the last one). Its weights are in `model.safetensors`; "
        "any command takes this folder as a MODEL."
    )


def _images(record: Record) -> Iterator[Sentence]:
    """On what was trained and tested and why, and how the batches were fitted to few images."""
    data = record.config.data
    for row in record.rows(IMAGES) if data else ():
        notes = "".join(f" {note[:1].upper()}{note[1:].rstrip('.')}." for note in data.notes) if data else ""
        title = data.title if data else ""
        words = f"Trained on {row.training:,} images of {title}, tested on {row.test:,} others.{notes}"
        yield Sentence(" ".join([words, *([] if row.chosen else fitted_words(row))]), (row,))


def fitted_words(row: ImagesRow) -> Iterator[str]:
    """That smaller batches than the recipe's were used, and why; nothing where they were not."""
    size, before = row.batch_size, row.usual_batch_size
    if size < before:
        yield (
            f"{row.training:,} images make fewer than {LEAST_STEPS} batches of {before}, the recipe's batch size, so "
            f"batches of {size} are used: {max(1, row.training // size)} steps an epoch; the learning rate is "
            f"{row.learning_rate:.3g} in place of {row.usual_learning_rate:.3g}, scaled by the square root of the "
            "batch size. --batch-size and --learning-rate choose others."
        )


def _started(row: StartRow) -> Sentence:
    """What was trained further, and what of it."""
    some = f"its last {row.last} blocks and its head"
    part = {None: "all of it", 0: "its head alone", 1: "its last block and its head"}.get(row.last, some)
    notes = f"; {row.notes}" if row.notes else ""
    return Sentence(
        f"`{row.model}` (weights: {row.weights}) was trained further, {part}: {row.trained:,} of {row.parameters:,} "
        f"parameters{notes}.",
        (row,),
    )


def _kept(record: Record) -> Iterator[Sentence]:
    every = record.section("plan", TrainPlan).keep_every
    if every is None:
        return
    epochs = "epoch" if every == 1 else f"{every} epochs"
    used = (
        "; `vitlens attention FOLDER --head 0,0` draws one head over training, `vitlens stats FOLDER --over-training` "
        "the statistics of all"
    )
    yield Sentence(
        f"A copy of the weights from before training and after every {epochs} is in `{KEPT_FOLDER}/`, in half "
        f"precision{'' if record.models[0].family == 'cnn' else used}."
    )


def _tracked(record: Record) -> Iterator[Sentence]:
    for place, command in _TRACKED:
        if (record.folder / place).is_dir():
            yield Sentence(f"The log of the training is in `{place}/`; see it with `{command}`.")


def _curves(record: Record) -> FigureSpec:
    return FigureSpec(
        "training",
        "Loss, accuracy and learning rate by epoch. The test images were evaluated, not trained on; the best epoch was "
        "chosen on them, so its accuracy is too high, and the last one is what is reported.",
        partial(_draw_curves, record),
    )


def _draw_curves(record: Record) -> "Figure":
    from vitlens.figures.train import training_curves

    history = [{**asdict(row), "epoch": row.epoch + 1} for row in record.rows(HISTORY)]
    return training_curves(history=history, title=record.config.title)


def _by_class(record: Record) -> Iterator[FigureSpec]:
    yield FigureSpec(
        "per_class",
        "Accuracy of each class on the test images with its 95 % interval. Where intervals overlap, do not conclude "
        "that one class is harder.",
        partial(_draw_classes, record),
    )
    yield FigureSpec(
        "confusion",
        "What the test images of each class (rows) were taken for (columns), in % of the row.",
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
