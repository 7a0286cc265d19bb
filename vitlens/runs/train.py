"""`vitlens train`: a preset from scratch, in a folder that every other command takes as a MODEL."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vitlens.analysis.evaluate import Evaluation, accuracy, confusion, evaluate, per_class
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.figures.confusion import confusion_matrix
from vitlens.figures.evaluate import per_class_bars
from vitlens.figures.train import training_curves
from vitlens.files import RunRecord, read_run
from vitlens.models.build import Overrides
from vitlens.models.specimen import Specimen
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.models.zoo import untrained
from vitlens.report import Section, Table, in_words, metrics
from vitlens.runs.describe import described
from vitlens.runs.folder import RunFolder
from vitlens.runs.options import RunOptions
from vitlens.runs.report import Drawn, publish
from vitlens.runs.training_progress import training_progress
from vitlens.training.kept import FOLDER, require_interval
from vitlens.training.loop import fit
from vitlens.training.metrics import TrainingResult
from vitlens.training.recipe import Recipe, override, recipe_for
from vitlens.uncertainty import Estimate

_KEPT = ("seed", "limit", "batch_size", "precision", "data_dir")  # options that a resumed run takes from its beginning


@dataclass(frozen=True)
class Plan:
    """What decides the result besides the options: a run is resumed with the plan that it began with.

    recipe, shape: what differs from the preset's; image_size: (height, width) in pixels, None for the preset's;
    keep_every: epochs between copies of the weights that stay, None for none; named: a recipe that serves any model,
    None for the preset's own; compiling, recompute: see training.loop.fit.
    """

    model: str
    data: str = "digits"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    shape: Overrides = field(default_factory=dict)
    image_size: tuple[int, int] | None = None
    keep_every: int | None = None
    named: str | None = None
    compiling: str = "auto"
    recompute: bool = False


def train(
    model: str | None,
    *,
    data: str | None = None,
    resume: Path | None = None,
    recipe: Mapping[str, object] | None = None,
    shape: Overrides | None = None,
    image_size: tuple[int, int] | None = None,
    keep_every: int | None = None,
    named: str | None = None,
    compiling: str | None = None,
    recompute: bool = False,
    options: RunOptions,
) -> Path | None:
    """Train a preset and write its folder: weights, checkpoint, metrics.jsonl, figures and report.

    recipe, shape: fields that differ from the preset's; resume: the folder of a run to go on with; keep_every: epochs
    between copies of the weights that stay, in kept/; named: a recipe that serves any model; compiling, recompute: see
    training.loop.fit. Returns the report, or None in all processes but the first of
    several. Raises InputError, NonFiniteError and StorageError.
    """
    require_interval(keep_every)
    asked: dict[str, object] = {"model": model, "data": data, "recipe": recipe, "shape": shape}
    asked |= {"image_size": image_size, "keep_every": keep_every, "named": named}
    asked |= {"compiling": compiling, "recompute": recompute}
    given = {name: value for name, value in asked.items() if value}
    if resume is not None:
        plan, options = _as_begun(resume, given, options)
    elif model is None:
        raise InputError("expected a preset to train, found none; e.g. vitlens train vit-micro; see vitlens models")
    else:
        plan = Plan(**given)  # type: ignore[arg-type]
    specimen, splits, how = _prepare(plan, options)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and int(os.environ.get("RANK") or 0) > 0:  # the first alone writes
        _fit(plan, specimen, splits, how, resume or Path("runs"), options, resume=resume is not None)
        return None
    with _folder(plan, resume, specimen, splits[0], how, options) as folder:
        result = _fit(plan, specimen, splits, how, folder.path, options, resume=resume is not None)
        answers = evaluate(specimen, splits[1], batch_size=options.batch_size)
        _keep(folder, result, answers, splits[1])
        return publish(folder, draw, tell)


def _as_begun(resume: Path, given: Mapping[str, object], options: RunOptions) -> tuple[Plan, RunOptions]:
    """The plan and the options that a run began with. Raises InputError when something else was asked for now."""
    if options.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.out}, found both; a resumed run keeps its folder"
        )
    record = read_run(resume)
    asked = record.config.get("options")
    if record.command != "train" or not isinstance(asked, dict):
        raise InputError(f"expected the folder of vitlens train to resume, found one of vitlens {record.command}")
    size = asked["image_size"]
    size, every = tuple(size) if size else None, asked.get("keep_every")
    plan = Plan(asked["model"], asked["data"], asked["recipe"], asked["shape"], size, every)
    plan = replace(plan, **{name: asked[name] for name in ("named", "compiling", "recompute") if name in asked})
    for name, value in given.items():
        if value != getattr(plan, name):
            raise InputError(
                f"expected to resume {resume} with its {name}, {getattr(plan, name)}, found {value}; leave it out"
            )
    kept = {name: asked[name] for name in _KEPT}
    return plan, replace(options, **{**kept, "data_dir": Path(kept["data_dir"])})


def _prepare(plan: Plan, options: RunOptions) -> tuple[Specimen, tuple[Split, Split], Recipe]:
    """The untrained specimen on its device, training and test part, and the recipe."""
    device = resolve_device(options.device)
    changes = dict(plan.recipe) if options.batch_size is None else {**plan.recipe, "batch_size": options.batch_size}
    how = override(recipe_for(plan.model, plan.data, named=plan.named), changes)
    # the classes are not known before the data is, nor the data's size before the model's
    size = untrained(plan.model, classes=("0",), image_size=plan.image_size, overrides=plan.shape).preprocessing
    train_part, test_part = (
        load_data(plan.data, part=part, preprocessing=size, data_dir=options.data_dir, seed=options.seed).limit(
            options.limit, seed=options.seed
        )
        for part in ("train", "test")
    )
    shape = {"drop_path": how.drop_path, **plan.shape} if how.drop_path and plan.model in VIT_PRESETS else plan.shape
    specimen = untrained(
        plan.model, classes=train_part.classes, image_size=plan.image_size, seed=options.seed, overrides=shape
    )
    return specimen.to(device), (train_part, test_part), how


def _folder(
    plan: Plan, resume: Path | None, specimen: Specimen, split: Split, how: Recipe, options: RunOptions
) -> RunFolder:
    """The run's folder: a new one, or the one to go on in."""
    if resume is not None:
        return RunFolder.reopen(resume)
    return RunFolder.create(
        "train",
        name_parts=(specimen.alias, plan.data),
        title=f"Training {specimen.alias} on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config={
            **described(options, specimens=[specimen], split=split, choices=asdict(plan)),
            "recipe": {**how.numbers(), "source": how.source},
        },
        formats=options.formats,
    )


def _fit(
    plan: Plan,
    specimen: Specimen,
    splits: tuple[Split, Split],
    how: Recipe,
    directory: Path,
    options: RunOptions,
    *,
    resume: bool,
) -> TrainingResult:
    with training_progress(f"training {specimen.alias}", quiet=options.quiet) as tell_progress:
        return fit(
            specimen,
            *splits,
            recipe=how,
            directory=directory,
            seed=options.seed,
            device=specimen.device,
            precision=options.precision,
            resume=resume,
            keep_every=plan.keep_every,
            compiling=plan.compiling,
            recompute=plan.recompute,
            on_progress=tell_progress,
        )


def _keep(folder: RunFolder, result: TrainingResult, answers: Evaluation, split: Split) -> None:
    """Write down what the report is made of."""
    count = len(split.classes)
    folder.metric("accuracy", accuracy(answers.correct, groups=answers.groups))
    folder.metric("best_accuracy", Estimate(result.best_accuracy, n=len(split)))
    folder.metric("training_seconds", Estimate(result.seconds, unit="s"))
    folder.metric("images_per_second", Estimate(result.history[-1].images_per_second, unit="images/s"))
    folder.table("computed", [{"how": note} for note in result.notes])
    folder.table("history", [asdict(epoch) for epoch in result.history])
    scores = per_class(answers, count=count)
    rows = [
        {"class": score.name, "n": score.n, **({} if score.accuracy is None else asdict(score.accuracy))}
        for score in scores
    ]
    folder.table("per_class", [{key: value for key, value in row.items() if key != "unit"} for row in rows])
    folder.arrays(
        "confusion", counts=confusion(answers.labels, answers.predictions, count=len(answers.classes)).numpy()
    )


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Curves, accuracy of each class, and the confusion matrix."""
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
        Section("What came out", (reached, *_kept_words(record)), figures=("training",)),
        Section("By class", figures=("per_class", "confusion")),
        Section("Recipe", _computed_words(record), tables=(Table("Settings of the training", rows),)),
        Section("Limits", (limits,)),
    ]


def _computed_words(record: RunRecord) -> tuple[str, ...]:
    """How it was computed; runs of before it was kept have nothing to say."""
    tables: Any = record.results["tables"]
    notes = [str(row["how"]) for row in tables.get("computed", [])]
    return (f"Computed with {', '.join(notes)}.",) if notes else ()


def _kept_words(record: RunRecord) -> Iterator[str]:
    asked, models = record.config["options"], record.config["models"]
    assert isinstance(asked, dict)
    assert isinstance(models, list)
    every = asked.get("keep_every")
    if every is None:
        return
    epochs = "epoch" if every == 1 else f"{every} epochs"
    said = f"A copy of the weights from before training and after every {epochs} is in `{FOLDER}/`, in half precision"
    used = "; `vitlens attention FOLDER --head 0,0` draws one head over training"
    yield f"{said}{'' if models[0]['family'] == 'cnn' else used}."


def _model(record: RunRecord) -> str:
    models = record.config["models"]
    assert isinstance(models, list)
    return str(models[0]["alias"])
