"""The figures and the words of a training, from its folder alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitlens.figures.confusion import confusion_matrix
from vitlens.figures.evaluate import per_class_bars
from vitlens.figures.train import training_curves
from vitlens.files import RunRecord
from vitlens.report import Section, Table, in_words, metrics
from vitlens.runs.report import Drawn
from vitlens.runs.train_beside import draw_beside, has_beside, tell_beside
from vitlens.runs.train_compared import draw as draw_comparison
from vitlens.runs.train_compared import is_comparison
from vitlens.runs.train_compared import tell as tell_comparison
from vitlens.training.checkpoint import KEPT_FOLDER
from vitlens.training.recipe import LEAST_STEPS


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Curves, accuracy of each class, and the confusion matrix; of a comparison its own figures."""
    if is_comparison(record):
        yield from draw_comparison(record)
        return
    if has_beside(record):
        yield from draw_beside(record)
    history = [{**row, "epoch": int(str(row["epoch"])) + 1} for row in record.table("history")]
    yield Drawn(
        "training",
        training_curves(history=history, title=str(record.config["title"])),
        "Loss, accuracy and learning rate by epoch. The test images were looked at, not trained on; the best epoch was "
        "chosen on them, so its accuracy flatters, and the last one is what is reported.",
    )
    rows = [row for row in record.table("per_class") if row["n"]]
    value, low, high, n = ([float(str(row[key])) for row in rows] for key in ("value", "low", "high", "n"))
    yield Drawn(
        "per_class",
        per_class_bars(
            accuracy=[value],
            low=[low],
            high=[high],
            n=n,
            classes=[str(row["class"]) for row in rows],
            models=[_model(record)],
        ),
        "Accuracy of each class on the test images with its 95 % interval. Where intervals overlap, do not conclude "
        "that one class is harder.",
    )
    yield Drawn(
        "confusion",
        confusion_matrix(
            counts=record.arrays("confusion")["counts"],
            classes=[str(row["class"]) for row in record.table("per_class")],
            model=_model(record),
        ),
        "What the test images of each class (rows) were taken for (columns), in % of the row.",
    )


def tell(record: RunRecord) -> list[Section]:
    """The report: what was reached, how, and what it does not show."""
    if is_comparison(record):
        return tell_comparison(record)
    found, recipe = metrics(record), record.config["recipe"]
    assert isinstance(recipe, dict)
    reached = (
        f"`{_model(record)}` gets {in_words(found['accuracy'])} of the test images right after "
        f"{len(record.table('history'))} epochs, which took {in_words(found['training_seconds'])} "
        f"({in_words(found['images_per_second'])} in the last one). Its weights are in `model.safetensors`; "
        f"any command takes this folder as a MODEL."
    )
    rows = [{"setting": name, "value": str(value)} for name, value in recipe.items()]
    limits = (
        "One run with one seed. Another seed gives another accuracy, which the interval does not cover: it stands for "
        "the choice of test images alone."
    )
    return [
        Section(
            "What came out",
            (
                " ".join(_images_words(record)),
                reached,
                *_noted(record, "started"),
                *_kept_words(record),
                *_tracked_words(record),
            ),
            figures=("training",),
        ),
        *([tell_beside(record)] if has_beside(record) else []),
        Section("By class", figures=("per_class", "confusion")),
        Section("Recipe", _computed_words(record), tables=(Table("Settings of the training", rows),)),
        Section("Limits", (limits,)),
    ]


def _images_words(record: RunRecord) -> Iterator[str]:
    """On what was trained and tested and why, and how the batches were fitted to few images."""
    data, recipe, usual = (record.config.get(name) for name in ("data", "recipe", "usual"))
    if not isinstance(data, Mapping) or "test_images" not in record.config:  # a run of before it was kept
        return
    count = int(data["images"])
    yield f"Trained on {count:,} images of {data['title']}, tested on {record.config['test_images']:,} others."
    for note in data["notes"]:
        yield f"{note[:1].upper()}{note[1:].rstrip('.')}."
    if isinstance(recipe, Mapping) and isinstance(usual, Mapping) and not _batch_was_typed(record):
        yield from fitted_words(count, recipe, usual)


def fitted_words(images: int, recipe: Mapping[str, Any], usual: Mapping[str, Any]) -> Iterator[str]:
    """That smaller batches than the recipe's were used, and why; nothing where they were not."""
    size, before = int(recipe["batch_size"]), int(usual["batch_size"])
    if size < before:
        yield (
            f"{images:,} images make fewer than {LEAST_STEPS} batches of {before}, the recipe's batch size, so batches "
            f"of {size} are used: {max(1, images // size)} steps an epoch; the learning rate is "
            f"{recipe['learning_rate']:.3g} in place of {usual['learning_rate']:.3g}, as the square root of the batch "
            "size asks. --batch-size and --learning-rate choose others."
        )


def _batch_was_typed(record: RunRecord) -> bool:
    asked: Any = record.config["options"]
    return asked["batch_size"] is not None or "batch_size" in asked["recipe"]


def _computed_words(record: RunRecord) -> tuple[str, ...]:
    """How it was computed; runs of before it was kept have nothing to say."""
    notes = _noted(record, "computed")
    return (f"Computed with {', '.join(notes)}.",) if notes else ()


def _noted(record: RunRecord, table: str) -> list[str]:
    """The sentences that a run kept in a table of its own, if any."""
    tables: Any = record.results["tables"]
    return [str(row["how"]) for row in tables.get(table, [])]


def _kept_words(record: RunRecord) -> Iterator[str]:
    asked, models = record.config["options"], record.config["models"]
    assert isinstance(asked, dict)
    assert isinstance(models, list)
    every = asked.get("keep_every")
    if every is None:
        return
    epochs = "epoch" if every == 1 else f"{every} epochs"
    said = (
        f"A copy of the weights from before training and after every {epochs} is in `{KEPT_FOLDER}/`, in half precision"
    )
    used = (
        "; `vitlens attention FOLDER --head 0,0` draws one head over training, `vitlens stats FOLDER --over-training` "
        "the statistics of all"
    )
    yield f"{said}{'' if models[0]['family'] == 'cnn' else used}."


def _tracked_words(record: RunRecord) -> Iterator[str]:
    for place, command in (("tensorboard", "tensorboard --logdir FOLDER"), ("wandb", "wandb sync FOLDER/wandb/*")):
        if (record.folder / place).is_dir():
            yield f"What it told on its way is in `{place}/`; see it with `{command}`."


def _model(record: RunRecord) -> str:
    models = record.config["models"]
    assert isinstance(models, list)
    return str(models[0]["alias"])
