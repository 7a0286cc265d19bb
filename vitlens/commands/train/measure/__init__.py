"""Train a preset from scratch, or fine-tune a trained model, and write the run's folder."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitlens.analysis.answers.evaluate import Evaluation, accuracy, confusion, evaluate, per_class
from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import print_data
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.processes import join_run
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.progress.training import training_progress
from vitlens.commands.run.publish import publish
from vitlens.commands.run.tracking.trackers import require_trackers
from vitlens.commands.run.tracking.watcher import TrackerWatcher
from vitlens.commands.run.unseen import keep_training_images
from vitlens.commands.shared.budgets import augmentation_words
from vitlens.commands.train.gaps import gain, generalisation_gap, is_mixed
from vitlens.commands.train.measure.check import check
from vitlens.commands.train.measure.compared import compare_ways
from vitlens.commands.train.measure.distillation import (
    DistillationSetup,
    compute_teacher_outputs,
    distillation_of,
    other_models,
    write_distillation,
)
from vitlens.commands.train.measure.start import Start, base_recipe, fine_tuned_row, prepare
from vitlens.commands.train.options import TrainOptions, require_together
from vitlens.commands.train.plan import TrainPlan, plan_of, resumed
from vitlens.commands.train.record import (
    ACCURACY,
    AUGMENTATION,
    BEST_ACCURACY,
    CLASSES,
    COMPUTED,
    CONFUSION,
    FINE_TUNED,
    FIRST_BATCH,
    GAIN,
    GAP,
    HISTORY,
    IMAGES,
    IMAGES_PER_SECOND,
    RECIPE,
    SECONDS,
    TABLES,
    AugmentationRow,
    ComputedRow,
    ConfusionArrays,
    FirstBatchArrays,
    ImagesRow,
    SettingRow,
    TrainedClassRow,
)
from vitlens.data.split import Split
from vitlens.training.checkpoint import require_interval
from vitlens.training.first_batch import first_batch
from vitlens.training.head import fit_head
from vitlens.training.loop import fit
from vitlens.training.metrics import EpochMetrics, TrainingResult
from vitlens.uncertainty import Estimate

__all__ = ["measure"]


def measure(options: TrainOptions) -> Path | Conclusion | None:
    """Train (`train`), or with --check only look whether that can succeed (`check`)."""
    return check(options) if options.check else train(options)


def train(options: TrainOptions) -> Path | None:
    """Train, and write the run's folder: weights, checkpoint, metrics.jsonl, report.

    Returns the report's path, or None in all processes but the first of several. Raises InputError, NonFiniteError and
    StorageError.
    """
    require_interval(options.keep_every)
    require_trackers(options.track)
    plan, run = (plan_of(options), options.run) if options.resume is None else resumed(options.resume, options)
    plan.tuning.require_learned(plan.model)
    costs = {"--keep-every": plan.keep_every, "--recompute": plan.recompute, "--compile on": plan.compiling == "on"}
    require_together(plan.tuning, plan.teaching, costs)
    if plan.tuning.compare:
        return compare_ways(train, plan, options, run)
    processes, run = join_run(run)
    with processes.main_process_first():
        start = prepare(plan, run, code_files=options.model_file, processes=processes.count)
        distillation = distillation_of(plan.teaching, start, run, code_files=options.model_file)
    compute_teacher_outputs(distillation, start.train, quiet=run.quiet)
    if not processes.is_first:  # the others train without writing
        silent = replace(options, track=())
        _fit(plan, start, options.resume or Path("runs"), silent, run, distillation)
        return None
    print_data(start.train, run)
    with _folder(plan, start, options, run, distillation) as folder:
        keep_training_images(folder.path, start.train, data=plan.data, start=None if start.fresh else start.model)
        for table in TABLES:
            folder.write(table, [])
        _write_first_batch(folder, plan, start, run, processes=processes.count)
        result = _fit(plan, start, folder.path, options, run, distillation)
        answers = evaluate(start.model, start.test, batch_size=run.batch_size)
        _write(folder, plan, start, run, result, answers)
        if distillation is not None:
            write_distillation(folder, distillation, answers, plan.data, run)
        return publish(folder)


def _write_first_batch(folder: RunFolder, plan: TrainPlan, start: Start, run: RunOptions, *, processes: int) -> None:
    """Write the first training batch beside its originals, where the recipe augments images in every step."""
    words = augmentation_words(start.recipe.numbers())
    if plan.tuning.freeze or words == "none":
        return
    batch = first_batch(start.model, start.train, start.recipe, seed=run.seed, processes=processes)
    trained, targets = (255 * batch.trained).round().byte().numpy(), batch.targets.numpy()
    folder.save(FIRST_BATCH, FirstBatchArrays(batch.given.numpy(), trained, batch.labels.numpy(), targets))
    mixed = int(((targets > 0).sum(axis=1) > 1).sum())
    folder.write(AUGMENTATION, [AugmentationRow(words, len(targets), mixed)])


def _folder(
    plan: TrainPlan, start: Start, options: TrainOptions, run: RunOptions, distillation: DistillationSetup | None
) -> RunFolder:
    """The run's folder: new, or that of --resume."""
    split, recipe = start.train, start.recipe
    config = {
        # of a resumed run the run options that it began with, so that it can be resumed again
        **settings(replace(options, run=run), run, models=[start.model, *other_models(distillation)], split=split),
        "plan": asdict(plan),
        "recipe": {**recipe.numbers(), "source": recipe.source},
    }
    if options.resume is not None:
        needs = {"data": None, "recipe": json.loads(json.dumps(config["recipe"]))}
        return RunFolder.reopen(options.resume, needs=needs, config=config)
    return RunFolder.create(
        "train",
        name_parts=(start.model.alias, plan.data),
        title=f"Training {start.model.alias} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=config,
        formats=run.formats,
    )


def _fit(
    plan: TrainPlan,
    start: Start,
    directory: Path,
    options: TrainOptions,
    run: RunOptions,
    distillation: DistillationSetup | None,
) -> TrainingResult:
    """Train the model, or its head."""
    model, recipe = start.model, start.recipe
    logged = {**asdict(plan), "recipe": recipe.numbers(), "seed": run.seed}
    trackers = [options.track] if options.track else []
    watchers = [TrackerWatcher(names, directory, start.test, config=logged, seed=run.seed) for names in trackers]
    with training_progress(f"training {model.alias}", quiet=run.quiet) as on_progress:
        common: dict[str, Any] = {
            "recipe": recipe,
            "directory": directory,
            "seed": run.seed,
            "device": model.device,
            "precision": run.precision,
            "resume": options.resume is not None,
            "watchers": watchers,
            "on_progress": on_progress,
        }
        if plan.tuning.freeze:
            views = plan.tuning.views or 1
            images = views * len(start.train) + len(start.test)
            reading = progress(f"{model.alias}: features of each image, once", images, quiet=run.quiet)
            return fit_head(model, start.train, start.test, **common, views=views, reading=reading)
        return fit(
            model,
            start.train,
            start.test,
            **common,
            keep_every=plan.keep_every,
            objective=None if distillation is None else distillation.objective,
            train_last=plan.tuning.trained,
            compiling=plan.compiling,
            recompute=plan.recompute,
        )


def _write(
    folder: RunFolder, plan: TrainPlan, start: Start, run: RunOptions, result: TrainingResult, answers: Evaluation
) -> None:
    """Write the metrics, tables and arrays of the report."""
    alias, split, recipe, base = start.model.alias, start.test, start.recipe, base_recipe(plan)
    folder.metric(ACCURACY(model=alias), accuracy(answers.correct, groups=answers.groups))
    folder.metric(BEST_ACCURACY(model=alias), Estimate(result.best_accuracy, n=len(split)))
    folder.metric(SECONDS(model=alias), Estimate(result.seconds, unit="s"))
    folder.metric(IMAGES_PER_SECOND(model=alias), Estimate(result.history[-1].images_per_second, unit="images/s"))
    write_gaps(folder, alias, result.history, images=len(start.train), tested=answers, mixed=is_mixed(recipe.numbers()))
    folder.write(COMPUTED, [ComputedRow(note) for note in result.notes])
    folder.write(HISTORY, result.history)
    folder.write(CLASSES, _class_rows(answers, split))
    chosen = run.batch_size is not None or "batch_size" in plan.recipe
    images = ImagesRow(
        len(start.train), len(split), recipe.batch_size, recipe.learning_rate, base.batch_size, base.learning_rate,
        chosen,
    )  # fmt: skip
    folder.write(IMAGES, [images])
    numbers = {**recipe.numbers(), "source": recipe.source}
    folder.write(RECIPE, [SettingRow(name, str(value)) for name, value in numbers.items()])
    folder.write(FINE_TUNED, [] if start.fresh else [fine_tuned_row(start.model, plan.tuning)])
    counts = confusion(answers.labels, answers.predictions, count=len(answers.classes)).numpy()
    folder.save(CONFUSION, ConfusionArrays(counts))


def write_gaps(
    folder: RunFolder,
    alias: str,
    history: Sequence[EpochMetrics],
    *,
    images: int,
    tested: Evaluation,
    mixed: bool,
) -> None:
    """Write how much lower the accuracy is on test images, and how much it still rose at the end, where known."""
    own = accuracy(tested.correct, groups=tested.groups)
    gap = None if mixed else generalisation_gap(history, own, images=images)
    rise = gain(history, tested=len(tested.labels))
    for metric, estimate in ((GAP, gap), (GAIN, rise)):
        if estimate is not None:
            folder.metric(metric(model=alias), estimate)


def _class_rows(answers: Evaluation, split: Split) -> list[TrainedClassRow]:
    rows = []
    for score in per_class(answers, count=len(split.classes)):
        share = score.accuracy
        values = (None, None, None) if share is None else (share.value, share.low, share.high)
        rows.append(TrainedClassRow(score.name, score.n, *values))
    return rows
