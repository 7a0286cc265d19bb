"""`vitlens train`: a preset from scratch, in a folder that every other command takes as a MODEL."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitlens.analysis.answers.evaluate import Evaluation, accuracy, confusion, evaluate, per_class
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.expected import say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import say_data
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress import progress
from vitlens.commands.scaffold.trackers import require_trackers
from vitlens.commands.scaffold.tracking import TrackerWatcher
from vitlens.commands.scaffold.training_progress import training_progress
from vitlens.commands.scaffold.unseen import keep_training_images
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.models.assembly import Overrides
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.vit_config import VIT_PRESETS
from vitlens.names import TrackerName
from vitlens.runs.planned import train_parts
from vitlens.runs.report import publish
from vitlens.runs.train_compared import compare
from vitlens.runs.train_options import UNTAUGHT, WHOLE, Teaching, Tuning, require_together
from vitlens.runs.train_plan import Plan, as_begun
from vitlens.runs.train_report import draw, tell
from vitlens.runs.train_start import from_scratch, started_from, trained_start, usual_recipe
from vitlens.runs.train_taught import Lesson, keep_lesson, lesson_of, look_ahead, shape_with_token, taking_part
from vitlens.training.head import fit_head
from vitlens.training.kept import require_interval
from vitlens.training.loop import fit
from vitlens.training.metrics import TrainingResult
from vitlens.training.recipe import Recipe, fitted, override, recipe_for
from vitlens.uncertainty import Estimate

__all__ = ["draw", "tell", "train"]


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
    track: Sequence[TrackerName] = (),
    tuning: Tuning = WHOLE,
    teaching: Teaching = UNTAUGHT,
    options: RunOptions,
) -> Path | None:
    """Train a preset, or a trained model further, and write its folder: weights, checkpoint, metrics.jsonl, report.

    recipe, shape: fields that differ from the preset's; resume: the folder of a run to go on with; keep_every: epochs
    between copies of the weights that stay, in kept/; named: a recipe that serves any model; compiling, recompute: see
    training.loop.fit; track: trackers that are told how it goes; tuning: what of a trained model is trained further;
    teaching: who teaches it. Returns the report, or None in all processes but the
    first of several. Raises InputError, NonFiniteError and StorageError.
    """
    require_interval(keep_every)
    require_trackers(track)
    asked: dict[str, object] = {"model": model, "data": data, "recipe": recipe, "shape": shape}
    asked |= {"image_size": image_size, "keep_every": keep_every, "named": named}
    asked |= {"compiling": compiling, "recompute": recompute}
    asked |= {"tuning": tuning if tuning != WHOLE else None}
    asked |= {"teaching": teaching if teaching != UNTAUGHT else None}
    given = {name: value for name, value in asked.items() if value}
    if resume is not None:
        plan, options = as_begun(resume, given, options)
    elif model is None:
        raise InputError("expected a preset to train, found none; e.g. vitlens train vit-micro; see vitlens models")
    else:
        plan = Plan(**given)  # type: ignore[arg-type]
    plan.tuning.require_learned(plan.model)
    costs = {"--keep-every": plan.keep_every, "--recompute": plan.recompute, "--compile on": plan.compiling == "on"}
    require_together(plan.tuning, plan.teaching, costs)
    if plan.tuning.compare:
        return compare(train, plan, resume=resume, options=options)
    processes, options = join_run(options)
    with processes.first_ahead():
        loaded, splits, how = _prepare(plan, options, processes=processes.count)
        lesson = lesson_of(plan.teaching, loaded, how, splits[0], options)
    look_ahead(lesson, splits[0], quiet=options.quiet)
    going_on, fresh = resume is not None, from_scratch(plan.model, plan.tuning)
    if not processes.is_first:  # the first alone writes
        _fit(plan, loaded, splits, how, resume or Path("runs"), options, resume=going_on, lesson=lesson)
        return None
    say_data(splits[0], options)
    frozen, looks = plan.tuning.freeze, -(-how.epochs // how.evaluate_every)
    parts = train_parts(len(splits[0]), len(splits[1]), epochs=how.epochs, looks=looks, frozen=frozen)
    say_expected([(loaded, splits[0], parts)], options, processes=processes.count)
    with _folder(plan, resume, loaded, splits, how, options, lesson) as folder:
        keep_training_images(folder.path, splits[0], data=plan.data, start=None if fresh else loaded)
        result = _fit(plan, loaded, splits, how, folder.path, options, resume=going_on, track=track, lesson=lesson)
        answers = evaluate(loaded, splits[1], batch_size=options.batch_size)
        _keep(folder, result, answers, splits[1])
        if not fresh:
            folder.table("started", [{"how": started_from(loaded, plan.tuning)}])
        if lesson is not None:
            keep_lesson(folder, lesson, answers, plan.data, options)
        return publish(folder, draw, tell)


def _prepare(plan: Plan, options: RunOptions, *, processes: int) -> tuple[Model, tuple[Split, Split], Recipe]:
    """The model as training begins, on its device, training and test part, and the recipe."""
    device = resolve_device(options.device)
    changes = dict(plan.recipe) if options.batch_size is None else {**plan.recipe, "batch_size": options.batch_size}
    how = override(_usual(plan), changes)
    if not from_scratch(plan.model, plan.tuning):
        model, splits = trained_start(
            plan.model, plan.data, plan.tuning, how, plan.shape, plan.image_size, device, options
        )
        return model, splits, _for_images(how, changes, splits[0], processes)
    # the classes are not known before the data is, nor the data's size before the model's
    size = untrained(plan.model, classes=("0",), image_size=plan.image_size, overrides=plan.shape).preprocessing
    train_part, test_part = (
        load_data(plan.data, part=part, preprocessing=size, data_dir=options.data_dir, seed=options.seed).limit(
            options.limit, seed=options.seed
        )
        for part in ("train", "test")
    )
    how = _for_images(how, changes, train_part, processes)
    shape = {"drop_path": how.drop_path, **plan.shape} if how.drop_path and plan.model in VIT_PRESETS else plan.shape
    shape = shape_with_token(plan.model, shape, plan.teaching)
    model = untrained(
        plan.model, classes=train_part.classes, image_size=plan.image_size, seed=options.seed, overrides=shape
    )
    return model.to(device), (train_part, test_part), how


def _usual(plan: Plan) -> Recipe:
    """The recipe before anything of it was changed."""
    if from_scratch(plan.model, plan.tuning):
        return recipe_for(plan.model, plan.data, named=plan.named)
    return usual_recipe(plan.model, plan.data, plan.tuning, named=plan.named)


def _for_images(how: Recipe, changes: Mapping[str, object], split: Split, processes: int) -> Recipe:
    """The recipe with batches as small as few images ask for, unless their size was typed."""
    if "batch_size" in changes:
        return how
    return fitted(how, len(split), processes=processes, rate_given="learning_rate" in changes)


def _folder(
    plan: Plan,
    resume: Path | None,
    model: Model,
    splits: tuple[Split, Split],
    how: Recipe,
    options: RunOptions,
    lesson: Lesson | None,
) -> RunFolder:
    """The run's folder: a new one, or the one to go on in."""
    split, usual = splits[0], _usual(plan)
    config = {
        **described(options, models=[model, *taking_part(lesson)], split=split, choices=asdict(plan)),
        "test_images": len(splits[1]),
        "recipe": {**how.numbers(), "source": how.source},
        "usual": {"batch_size": usual.batch_size, "learning_rate": usual.learning_rate},
    }
    if resume is not None:
        needs = {"data": None, "recipe": json.loads(json.dumps(config["recipe"]))}
        return RunFolder.reopen(resume, needs=needs, config=config)
    return RunFolder.create(
        "train",
        name_parts=(model.alias, plan.data),
        title=f"Training {model.alias} on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )


def _fit(
    plan: Plan,
    model: Model,
    splits: tuple[Split, Split],
    how: Recipe,
    directory: Path,
    options: RunOptions,
    *,
    resume: bool,
    track: Sequence[TrackerName] = (),
    lesson: Lesson | None = None,
) -> TrainingResult:
    told = {**asdict(plan), "recipe": how.numbers(), "seed": options.seed}
    watchers = [TrackerWatcher(track, directory, splits[1], config=told, seed=options.seed)] if track else []
    with training_progress(f"training {model.alias}", quiet=options.quiet) as tell_progress:
        common: dict[str, Any] = {
            "recipe": how,
            "directory": directory,
            "seed": options.seed,
            "device": model.device,
            "precision": options.precision,
            "resume": resume,
            "watchers": watchers,
            "on_progress": tell_progress,
        }
        if plan.tuning.freeze:
            views = plan.tuning.views or 1
            images = views * len(splits[0]) + len(splits[1])
            reading = progress(f"{model.alias} looks at each image once", images, quiet=options.quiet)
            return fit_head(model, *splits, **common, views=views, reading=reading)
        return fit(
            model,
            *splits,
            **common,
            keep_every=plan.keep_every,
            objective=None if lesson is None else lesson.objective,
            train_last=plan.tuning.trained,
            compiling=plan.compiling,
            recompute=plan.recompute,
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
