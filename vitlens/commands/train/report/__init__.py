"""The report of `vitlens train`, from its record."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.scaffold.pairs import PAIRS, pair_table
from vitlens.commands.train.plan import TrainPlan
from vitlens.commands.train.record import (
    ACCURACY,
    CLASSES,
    COMPUTED,
    CONFUSION,
    DIFFERENCE,
    EPOCH_SECONDS,
    FINE_TUNED,
    HISTORY,
    IMAGES,
    IMAGES_PER_SECOND,
    RECIPE,
    SECONDS,
    STUDENT_AND_TEACHER,
    TEST_ACCURACIES,
    TIMES_TO_ACCURACY,
    WAYS,
    ConfusionArrays,
    FineTunedRow,
    ImagesRow,
)
from vitlens.commands.train.report.distillation import distillation_section
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, percent
from vitlens.training.defaults import KEPT_FOLDER, LEAST_STEPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["report"]

_LIMIT: Final = (
    "This is one run with one seed. The interval covers the choice of test images, not the variation between seeds."
)
_COMPARISON_LIMIT: Final = (
    "One run of each with one seed: the intervals cover the choice of test images, not other seeds. Each has its own "
    "recipe (see `frozen/report.md` and `full/report.md`); neither was tuned on these data. This folder is "
    "not a MODEL; `frozen/` and `full/` are."
)
_TRACKED: Final = (("tensorboard", "tensorboard --logdir FOLDER"), ("wandb", "wandb sync FOLDER/wandb/*"))


def report(record: Record) -> Document:
    """The result, the accuracy by class, and the recipe; or the comparison of two ways of training."""
    if record.rows(TEST_ACCURACIES):
        return _comparison(record)
    result = (
        *_images(record),
        _accuracy(record),
        *(_fine_tuned(row) for row in record.rows(FINE_TUNED)),
        *_kept_weights(record),
        *_tracker_logs(record),
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
        Section("By class", figures=tuple(_by_class(record))),
        Section("Recipe", sentences(f"Computed with {computed}." if computed else None), (settings,)),
    ]
    return Document(record.config.title, tuple(sections), limits=sentences(_LIMIT))


def _accuracy(record: Record) -> Sentence:
    alias = record.aliases[0]
    accuracy, seconds, speed = (record.metric(metric(model=alias)) for metric in (ACCURACY, SECONDS, IMAGES_PER_SECOND))
    return Sentence(
        f"`{alias}`: top-1 accuracy {in_words(accuracy)} on the test images after {_epochs(record)}, "
        f"which took {in_words(seconds)} ({in_words(speed)} in the last one). Its weights are in `model.safetensors`; "
        "every command takes this folder as a MODEL."
    )


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
        yield Sentence(" ".join([words, *([] if row.chosen else fitted_words(row))]), (row,))


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
        f"precision{'' if record.models[0].family == 'cnn' else commands}."
    )


def _tracker_logs(record: Record) -> Iterator[Sentence]:
    for place, command in _TRACKED:
        if (record.folder / place).is_dir():
            yield Sentence(f"The log of the training is in `{place}/`; show it with `{command}`.")


def _curves(record: Record) -> FigureSpec:
    return FigureSpec(
        "training",
        "Loss, accuracy and learning rate by epoch. The best epoch is selected on the test images, so its accuracy is "
        "optimistic; the report gives that of the last epoch.",
        partial(_draw_curves, record),
    )


def _draw_curves(record: Record) -> "Figure":
    from vitlens.figures.train import training_curves

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
        "Predictions (columns) for the test images of each class (rows), in % of the row.",
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


def _comparison(record: Record) -> Document:
    """The accuracy and the time of training with a frozen backbone and of training all weights."""
    figure = FigureSpec(
        "compared",
        "Accuracy on the test images at each evaluation, by epoch and by time since the start (with the backbone "
        "frozen, one pass of it over all images comes first). One run of each with one seed, each with its own recipe.",
        partial(_draw_comparison, record),
    )
    times = Table.of(
        "First evaluation at which each reached a share of the best accuracy",
        record.rows(TIMES_TO_ACCURACY),
        {
            "way": lambda row: WAYS[row.way],
            "share of the best": lambda row: percent(row.share_of_best),
            "accuracy": lambda row: percent(row.accuracy, 1),
            "epochs": lambda row: row.epochs,
            "seconds": lambda row: row.seconds,
        },
    )
    note = "A dash: not reached. The best is the highest accuracy of either at any evaluation."
    sections = (
        Section("Frozen against full", _comparison_summary(record), figures=(figure,), leading=True),
        Section("Time to accuracy", sentences(note), (times, pair_table(record.rows(PAIRS)))),
    )
    return Document(record.config.title, sections, limits=sentences(_COMPARISON_LIMIT))


def _comparison_summary(record: Record) -> tuple[Sentence, ...]:
    seconds = {way: record.metric(EPOCH_SECONDS(model=way)).value for way in WAYS}
    ways = sentences(
        *(
            f"With {words} (`{way}/`): top-1 accuracy {in_words(record.metric(ACCURACY(model=way)))}, after "
            f"{in_words(record.metric(SECONDS(model=way)))} in all."
            for way, words in WAYS.items()
        )
    )
    (pair,) = record.rows(PAIRS)
    difference = in_words(record.metric(DIFFERENCE(first="full", second="frozen")))
    return (
        *ways,
        Sentence(
            f"Training all weights instead of the head changes accuracy by {difference}; McNemar's exact p on the "
            f"images that only one predicts correctly is {pair.p:.2g}. An epoch of the head alone takes "
            f"{seconds['frozen']:.2g} s, an epoch of all weights {seconds['full']:.2g} s: "
            f"{seconds['full'] / seconds['frozen']:,.0f} times as long.",
            (pair,),
        ),
    )


def _draw_comparison(record: Record) -> "Figure":
    from vitlens.figures.train_compared import learning_compared

    ways = {
        words: [(row.epochs, row.seconds, row.accuracy) for row in record.rows(TEST_ACCURACIES) if row.way == way]
        for way, words in WAYS.items()
    }
    return learning_compared(ways=ways, title=record.config.title)
