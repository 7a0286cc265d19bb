"""Train a preset from scratch, fine-tune a trained model, or check what would be trained; write the
run's folder.

`start.prepare` makes a `Start`, what a training begins with; the functions here take it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import numpy as np

from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import print_data
from vitlens.commands.run.progress import phase, progress, training_progress
from vitlens.commands.run.publish import publish
from vitlens.commands.run.resume import resumed
from vitlens.commands.run.run import join_run
from vitlens.commands.run.tracking import TrackerWatcher, require_trackers
from vitlens.commands.run.unseen import keep_training_images
from vitlens.commands.shared.trainings import augmentation_words, budget_of, budget_of_run
from vitlens.commands.train.options import TrainOptions, require_compatible
from vitlens.commands.train.record import (
    FirstBatchArrays,
    ScheduleRow,
    SetupRow,
    TrainRecord,
)
from vitlens.commands.train.results import pretraining_results, training_results
from vitlens.commands.train.start import Start, base_recipe, compute_outputs, prepare, with_teacher
from vitlens.processes import Processes
from vitlens.training.check import check_training
from vitlens.training.checkpoint import require_interval
from vitlens.training.distill import StandardObjective, cacheable_views
from vitlens.training.head import fit_head
from vitlens.training.loop import train_on_images
from vitlens.training.metrics import TrainingResult
from vitlens.training.optimiser import learning_rate
from vitlens.training.recipe import Recipe
from vitlens.training.task import Task, first_batch

FAILED: Final = 1  # exit code of --check
SCHEDULED: Final = 50  # the largest number of updates in the table of learning rates


def measure(options: TrainOptions) -> Path | Conclusion | None:
    """Train a model and write the run's folder: weights, checkpoint, metrics.jsonl, report.

    With --check nothing is trained: a few images show whether a training can succeed. Returns the
    report's path, or the findings of --check; None in all processes but the first of several.
    Raises InputError, NonFiniteError and StorageError.
    """
    require_interval(options.keep_every)
    require_trackers(options.track)
    if options.resume is not None and not options.check:
        options = resumed(options, options.resume, "train", typed=("track", "model_file"))
    require_compatible(options)
    processes, run = join_run(options.run)
    options = replace(options, data=options.data or "digits", run=run)
    if options.check:
        return _check(options, processes)
    return _train(options, processes)


def _check(options: TrainOptions, processes: Processes) -> Conclusion | None:
    """Return the findings of a check as lines; nothing is written."""
    if not processes.is_first:
        return None
    start = prepare(options, processes.count)
    print_data(start.train, start.run)
    findings = check_training(
        start.model,
        start.train,
        start.test,
        recipe=start.recipe,
        seed=start.run.seed,
        train_last=options.tuning.trained,
        fresh=options.fresh,
        announce=phase,
    )
    lines = tuple(finding.line for finding in findings)
    failed = any(finding.state == "fail" for finding in findings)
    return Conclusion(lines, (), holds=not failed, code=FAILED)


def _train(options: TrainOptions, processes: Processes) -> Path | None:
    with processes.main_process_first():  # so that only one downloads
        start = with_teacher(prepare(options, processes.count))
    if start.objective is not None:
        views = cacheable_views(start.recipe, start.train)
        compute_outputs(start.objective, start.train, views=views, quiet=start.run.quiet)
    if not processes.is_first:  # the other processes train without writing
        untracked = replace(start, options=replace(options, track=()))
        # the folder is only read: the checkpoints of --resume
        _fit(untracked, options.resume or Path("runs"))
        return None
    print_data(start.train, start.run)
    with _folder(start) as folder:
        model_before = None if options.fresh else start.model
        keep_training_images(folder.path, start.train, data=str(options.data), start=model_before)
        folder.keep(TrainRecord())
        setup, batch_arrays = _setup(start)
        features_before = _features_before(start)
        result = _fit(start, folder.path)
        record = _results(start, result, features_before)
        setup = replace(setup, computed=result.notes)
        schedule = _schedule(start.recipe, steps=result.history[-1].step)
        record = replace(record, setup=(setup,), schedule=schedule, first_batch=batch_arrays)
        folder.keep(record)
        _keep_budgets(start, folder, record)
        return publish(folder)


def _folder(start: Start) -> RunFolder:
    """Return the run's folder: a new one, or that of --resume."""
    options = start.options
    split = start.train
    alias = start.model.alias
    numbers = {**start.recipe.numbers(), "source": start.recipe.source}
    recipe = json.loads(json.dumps(numbers))  # as it is read back from config.json
    config = settings(
        options,
        start.run,
        models=[start.model, *start.compared],
        split=split,
        others=[start.test],
        recipe=recipe,
    )
    return RunFolder.opened(
        "train",
        start.run,
        config,
        name_parts=(alias, str(options.data)),
        title=f"Training {alias} on {split.title or split.name}",
        resume=options.resume,
        needs={"data": None, "recipe": recipe},
    )


def _setup(start: Start) -> tuple[SetupRow, FirstBatchArrays | None]:
    """Return images, batch size and augmentation, and the first batch.

    The batch is None unless images are augmented in every step for a classifier.
    """
    options = start.options
    recipe = start.recipe
    unchanged = base_recipe(options)
    setup = SetupRow(
        training=len(start.train),
        test=len(start.test),
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        usual_batch_size=unchanged.batch_size,
        usual_learning_rate=unchanged.learning_rate,
        chosen=start.run.batch_size is not None or "batch_size" in options.changes,
        computed=(),  # known after the training
        keep_every=options.keep_every,
    )
    words = augmentation_words(recipe.numbers())
    # the features of a frozen model are computed once, not in every step
    if words == "none" or options.tuning.freeze:
        return setup, None
    setup = replace(setup, augmentation=words)
    if start.pretraining is not None:  # an objective without labels has no targets to show
        return setup, None
    return _with_first_batch(setup, start)


def _with_first_batch(setup: SetupRow, start: Start) -> tuple[SetupRow, FirstBatchArrays]:
    """Return the setup with the number of mixed images in the first batch, and that batch."""
    batch = first_batch(
        start.model, start.train, start.recipe, seed=start.run.seed, processes=start.processes
    )
    targets = batch.targets.numpy()
    classes_per_image = (targets > 0).sum(axis=1)
    mixed = int((classes_per_image > 1).sum())
    arrays = FirstBatchArrays(
        given=batch.given.numpy(),
        trained=(255 * batch.trained).round().byte().numpy(),
        labels=batch.labels.numpy(),
        targets=targets,
    )
    return replace(setup, shown=len(targets), mixed=mixed), arrays


def _features_before(start: Start) -> Mapping[str, float]:
    """Return measures of the features before a training without labels, empty for other
    trainings."""
    with phase("Features before training"):
        if start.pretraining is None:
            return {}
        return start.pretraining.features_of(start.model)


def _fit(start: Start, directory: Path) -> TrainingResult:
    """Train the model, or only its head."""
    tuning = start.options.tuning
    run = start.run
    alias = start.model.alias
    with training_progress(f"training {alias}", quiet=run.quiet) as on_progress:
        task = replace(_task(start, directory), on_progress=on_progress)
        if not tuning.freeze:
            return train_on_images(task)
        views = tuning.views or 1
        images = views * len(start.train) + len(start.test)
        reading = progress(f"{alias}: features of each image, once", images, quiet=run.quiet)
        return fit_head(task, views=views, reading=reading)


def _task(start: Start, directory: Path) -> Task:
    """Return the settings of the training with its trackers."""
    options = start.options
    run = start.run
    logged = {**asdict(options), "recipe": start.recipe.numbers(), "seed": run.seed}
    watchers = []
    for tracker in options.track:
        watchers.append(
            TrackerWatcher(tracker, directory, start.test, config=logged, seed=run.seed)
        )
    return Task(
        start.model,
        start.train,
        start.test,
        start.recipe,
        directory=directory,
        seed=run.seed,
        device=start.model.device,
        precision=run.precision,
        resume=options.resume is not None,
        keep_every=options.keep_every,
        objective=start.pretraining or start.objective or StandardObjective(),
        train_last=options.tuning.trained,
        compiling=options.compiling,
        recompute=options.recompute,
        watchers=watchers,
    )


def _schedule(recipe: Recipe, *, steps: int) -> tuple[ScheduleRow, ...]:
    """Return the learning rate of evenly spaced updates, the first and the last included."""
    updates = np.linspace(0, steps - 1, min(steps, SCHEDULED)).round().astype(int)
    rows = []
    for update in updates.tolist():
        epochs_done = recipe.epochs * (update + 1) / steps
        rows.append(ScheduleRow(epochs_done, learning_rate(update, recipe, total=steps)))
    return tuple(rows)


def _results(
    start: Start, result: TrainingResult, features_before: Mapping[str, float]
) -> TrainRecord:
    with phase("Evaluating on the test images"):
        if start.pretraining is None:
            return training_results(start, result)
        return pretraining_results(start.pretraining, features_before, start, result)


def _keep_budgets(start: Start, folder: RunFolder, record: TrainRecord) -> None:
    """Add to the record how a student and the model without a teacher were trained, if they are
    compared.

    folder: its record must be complete, because the student's budget is read from it.
    """
    if len(start.compared) < 2:
        return
    _teacher, plain = start.compared
    student_budget = budget_of_run(start.model.alias, folder.record())
    # with the alias that the record made unique
    plain_budget = replace(budget_of(plain), model=record.scores[-1].model)
    folder.keep(replace(record, training=(student_budget, plain_budget)))
