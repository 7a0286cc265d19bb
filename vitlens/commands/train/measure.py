"""Train a preset from scratch, fine-tune a trained model, or check what would be trained;
and write the run's folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Final

from vitlens.analysis.evaluation.evaluate import Evaluation, accuracy, confusion, evaluate, per_class
from vitlens.commands.run.conclusion import Conclusion
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import print_data
from vitlens.commands.run.progress import phase, progress, training_progress
from vitlens.commands.run.publish import publish
from vitlens.commands.run.resume import resumed
from vitlens.commands.run.run import join_run
from vitlens.commands.run.tracking import TrackerWatcher, require_trackers
from vitlens.commands.run.unseen import keep_training_images
from vitlens.commands.shared.comparison import PairRow, in_pairs
from vitlens.commands.shared.trainings import augmentation_words, budget_of, budget_of_run
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow
from vitlens.commands.train import record as rows
from vitlens.commands.train.options import TrainOptions, require_compatible
from vitlens.commands.train.record import TrainRecord, last_tenth
from vitlens.commands.train.start import Start, base_recipe, compute_outputs, part_of, prepare, taught
from vitlens.data.split import Split
from vitlens.processes import Processes
from vitlens.training.check import check_training
from vitlens.training.checkpoint import require_interval
from vitlens.training.distill import Distillation, StandardObjective, cacheable_views
from vitlens.training.finetune import trained_share
from vitlens.training.head import fit_head
from vitlens.training.loop import train_on_images
from vitlens.training.metrics import EpochMetrics, TrainingResult
from vitlens.training.objectives.pretraining import BANK, MAPS, NEIGHBOURS, QUERIES, Pretraining
from vitlens.training.task import Task, first_batch
from vitlens.uncertainty import Estimate, bootstrap_mean, difference_of, wilson

FAILED: Final = 1  # exit code of --check
_RECONSTRUCTED: Final = 6  # test images in a picture


def measure(options: TrainOptions) -> Path | Conclusion | None:
    """Train and write the run's folder: weights, checkpoint, metrics.jsonl, report; with --check only look whether that
    can succeed.

    Returns the report's path, or the findings of --check; None in all processes but the first of several. Raises
    InputError, NonFiniteError and StorageError.
    """
    require_interval(options.keep_every)
    require_trackers(options.track)
    if options.resume is not None and not options.check:
        options = resumed(options, options.resume, "train", typed=("track", "model_file"))
    require_compatible(options)
    processes, run = join_run(options.run)
    options = replace(options, data=options.data or "digits", run=run)
    return _check(options, processes) if options.check else _train(options, processes)


def _train(options: TrainOptions, processes: Processes) -> Path | None:
    with processes.main_process_first():
        start = taught(prepare(options, processes.count))
    if start.objective is not None:
        views = cacheable_views(start.recipe, start.train)
        compute_outputs(start.objective, start.train, views=views, quiet=start.run.quiet)
    if not processes.is_first:  # the others train without writing
        _fit(replace(start, options=replace(options, track=())), options.resume or Path("runs"))
        return None
    print_data(start.train, start.run)
    with _folder(start) as folder:
        before = None if options.fresh else start.model
        keep_training_images(folder.path, start.train, data=str(options.data), start=before)
        folder.keep(TrainRecord())
        setup, arrays = _setup(start)
        with phase("Features before training"):
            untrained = {} if start.pretraining is None else start.pretraining.features_of(start.model)
        result = _fit(start, folder.path)
        recorded = _recorded if start.pretraining is None else partial(_pretrained, start.pretraining, untrained)
        with phase("Evaluating on the test images"):
            scored = recorded(start, result)
        record = replace(scored, setup=(replace(setup, computed=result.notes),), first_batch=arrays)
        folder.keep(record)
        for plain in start.others[1:]:
            budgets = budget_of_run(start.model.alias, folder.record()), budget_of(plain)
            folder.keep(replace(record, training=(budgets[0], replace(budgets[1], model=record.scores[-1].model))))
        return publish(folder)


def _folder(start: Start) -> RunFolder:
    """Return the run's folder: new, or that of --resume."""
    options = start.options
    split = start.train
    alias = start.model.alias
    recipe = json.loads(json.dumps({**start.recipe.numbers(), "source": start.recipe.source}))
    models = [start.model, *start.others]
    config = settings(options, start.run, models=models, split=split, others=[start.test], recipe=recipe)
    return RunFolder.opened(
        "train",
        start.run,
        config,
        name_parts=(alias, str(options.data)),
        title=f"Training {alias} on {split.title or split.name}",
        resume=options.resume,
        needs={"data": None, "recipe": recipe},
    )


def _setup(start: Start) -> tuple[rows.SetupRow, rows.FirstBatchArrays | None]:
    """Images, batch size and augmentation, with the first batch where the recipe augments images in every step."""
    options = start.options
    recipe = start.recipe
    usual = base_recipe(start.options)
    chosen = start.run.batch_size is not None or "batch_size" in options.changes
    setup = rows.SetupRow(
        len(start.train),
        len(start.test),
        recipe.batch_size,
        recipe.learning_rate,
        usual.batch_size,
        usual.learning_rate,
        chosen,
        (),
        options.keep_every,
    )
    words = augmentation_words(recipe.numbers())
    if options.tuning.freeze or words == "none" or start.pretraining is not None:
        return replace(setup, augmentation="" if words == "none" else words), None
    batch = first_batch(start.model, start.train, recipe, seed=start.run.seed, processes=start.processes)
    trained = (255 * batch.trained).round().byte().numpy()
    targets = batch.targets.numpy()
    mixed = int(((targets > 0).sum(axis=1) > 1).sum())
    arrays = rows.FirstBatchArrays(batch.given.numpy(), trained, batch.labels.numpy(), targets)
    return replace(setup, augmentation=words, shown=len(targets), mixed=mixed), arrays


def _fit(start: Start, directory: Path) -> TrainingResult:
    """Train the model, or its head."""
    options = start.options
    run = start.run
    model = start.model
    recipe = start.recipe
    logged = {**asdict(options), "recipe": recipe.numbers(), "seed": run.seed}
    watchers = [TrackerWatcher(each, directory, start.test, config=logged, seed=run.seed) for each in options.track]
    with training_progress(f"training {model.alias}", quiet=run.quiet) as on_progress:
        task = Task(
            model,
            start.train,
            start.test,
            recipe,
            directory,
            run.seed,
            model.device,
            run.precision,
            resume=options.resume is not None,
            keep_every=options.keep_every,
            objective=start.pretraining or start.objective or StandardObjective(),
            train_last=options.tuning.trained,
            compiling=options.compiling,
            recompute=options.recompute,
            watchers=watchers,
            on_progress=on_progress,
        )
        if not options.tuning.freeze:
            return train_on_images(task)
        views = options.tuning.views or 1
        images = views * len(start.train) + len(start.test)
        reading = progress(f"{model.alias}: features of each image, once", images, quiet=run.quiet)
        return fit_head(task, views=views, reading=reading)


def _recorded(start: Start, result: TrainingResult) -> TrainRecord:
    """Return what a training came to, on the test images."""
    split = start.test
    recipe = start.recipe
    own = evaluate(start.model, split, batch_size=start.run.batch_size)
    alias = own.alias
    numbers = {**recipe.numbers(), "source": recipe.source}
    names = own.classes
    score = _score(own, None)
    gap = generalisation_gap(result.history, score.accuracy, images=len(start.train), sources=_sources(start.train))
    score = replace(
        score,
        gap=None if recipe.mixup or recipe.cutmix else gap,  # accuracy on mixed images is not that on one class
        gain=gain(result.history, tested=len(split), sources=_sources(split)),
        confidence=bootstrap_mean(
            own.confidence.double().numpy(),
            groups=None if own.groups is None else own.groups.numpy(),
            seed=start.run.seed,
        ),
        best=None if result.best_accuracy is None else Estimate(result.best_accuracy, n=len(split)),
        seconds=Estimate(result.seconds, unit="s"),
        images_per_second=Estimate(result.history[-1].images_per_second, unit="images/s"),
    )
    counts = confusion(own.labels, own.predictions, count=len(names))
    record = TrainRecord(
        scores=(score,),
        history=result.history,
        per_class=tuple(ClassRow(alias, *each) for each in per_class(own, count=len(split.classes))),
        confusion=tuple(
            ConfusionRow(alias, names[truth], names[prediction], int(counts[truth, prediction]))
            for truth, prediction in counts.nonzero().tolist()
        ),
        recipe=tuple(rows.SettingRow(name, str(value)) for name, value in numbers.items()),
        started=() if start.options.fresh else (_fine_tuned(start),),
    )
    return record if start.objective is None else _taught(record, own, start.objective.how, start)


def _pretrained(
    pretraining: Pretraining, untrained: Mapping[str, float], start: Start, result: TrainingResult
) -> TrainRecord:
    """Return what a training without labels came to: its features, and the accuracy of the classifier where it made
    one."""
    model = pretraining.exported(start.model)
    alias = start.model.alias
    entry = pretraining.entry
    steps = [(0, untrained), *((row.epochs, row.measures) for row in result.history if row.measures)]
    names = {each.name for each in fields(rows.FeatureRow)}
    last = steps[-1][1]
    tested = min(QUERIES, len(start.test))
    sources = min(tested, _sources(start.test))

    def share(found: Mapping[str, float], name: str) -> Estimate | None:
        return wilson(round(found[name] * tested), tested, independent=sources) if name in found else None

    knn = share(last, "knn")
    random = share(untrained, "knn")
    row = rows.PretrainingRow(
        alias,
        entry.name,
        entry.title,
        entry.meaning,
        entry.source,
        entry.needs or "images alone",
        pretraining.settings,
        result.history[-1].test_loss or 0.0,
        knn,
        random,
        difference_of(knn, random) if knn and random else None,
        NEIGHBOURS,
        min(BANK, len(start.train)),
        Estimate(last["teacher_information"], n=tested, unit="nats") if "teacher_information" in last else None,
        Estimate(last["objectness"], n=min(MAPS, tested) // 2) if "objectness" in last else None,
    )
    by_epoch = [
        rows.FeatureRow(alias, epochs, **{name: value for name, value in own.items() if name in names})
        for epochs, own in steps
    ]
    shown = pretraining.pictures(_RECONSTRUCTED)
    pictures = [(255 * each).round().byte().cpu().numpy() for each in shown]
    record = TrainRecord(
        history=result.history,
        pretraining=(row,),
        by_epoch=tuple(by_epoch),
        reconstructions=rows.ReconstructionArrays(*pictures) if pictures else None,
        recipe=tuple(rows.SettingRow(name, str(value)) for name, value in start.recipe.numbers().items()),
    )
    if not model.has_classifier or start.test.labels is None:
        return record
    classified = _recorded(replace(start, model=model), result)
    scores = (replace(classified.scores[0], role="zero-shot"),)
    return replace(record, scores=scores, per_class=classified.per_class, confusion=classified.confusion)


def _score(evaluation: Evaluation, role: str | None, **more: Estimate | None) -> rows.ScoreRow:
    own = accuracy(evaluation.correct, groups=evaluation.groups)
    return rows.ScoreRow(evaluation.alias, own, role, **more)


def _fine_tuned(start: Start) -> rows.FineTunedRow:
    """Return the model that is fine-tuned, and which part of it."""
    last = start.options.tuning.trained
    origin = start.model.provenance
    trained, whole = trained_share(start.model, last=last)
    notes = "; ".join(origin.notes)
    return rows.FineTunedRow(Path(origin.name).name, Path(origin.weights).name, last, trained, whole, notes)


def _sources(split: Split) -> int:
    """Return the number of independent images: of groups where several images show one source."""
    return len(split) if split.groups is None else len(split.groups.unique())


def generalisation_gap(
    history: Sequence[EpochMetrics], tested: Estimate, *, images: int, sources: int | None = None
) -> Estimate | None:
    """Return the accuracy on the training images of the last epoch minus `tested`, in points; None without epochs.

    Both have Wilson intervals, their difference Newcombe's. sources: as `independent` of `wilson`.
    """
    if not history or not images or (last := history[-1].train_accuracy) is None:
        return None
    return difference_of(wilson(round(last * images), images, independent=sources), tested)


def gain(history: Sequence[EpochMetrics], *, tested: int, sources: int | None = None) -> Estimate | None:
    """Return the rise of test accuracy over the last tenth of the epochs, in points; None without two evaluations.

    Both are of the same images: the interval is too wide rather than too narrow. sources: as `independent` of `wilson`.
    """
    pair = last_tenth(history)
    if pair is None:
        return None
    before, last = (wilson(round((row.test_accuracy or 0.0) * tested), tested, independent=sources) for row in pair)
    return difference_of(last, before)


def _taught(record: TrainRecord, own: Evaluation, how: Distillation, start: Start) -> TrainRecord:
    """Return the record of a student with its distillation, compared with its teacher and the model trained without
    one."""
    seed = start.run.seed
    data = str(start.options.data)
    run = start.options.run
    others = [
        evaluate(each, part_of(data, "test", each.preprocessing, run), batch_size=run.batch_size)
        for each in start.others
    ]
    roles = ("teacher", "without a teacher")[: len(others)]
    aliases = [own.alias, *(each.alias for each in others)]
    others = [
        replace(each, alias=f"{each.alias}-{role.partition(' ')[0]}") if aliases.count(each.alias) > 1 else each
        for each, role in zip(others, roles)
    ]

    def agreement(each: Evaluation) -> Estimate | None:
        # the data's classes come first in both, in the same order
        same = each.predictions == others[0].predictions
        return None if each is others[0] else accuracy(same, groups=each.groups)

    student = replace(record.scores[0], role="student", agreement=agreement(own))
    beside = (_score(each, role, agreement=agreement(each)) for each, role in zip(others, roles))
    forms = cacheable_views(start.recipe, start.train)
    row = rows.DistillationRow(start.others[0].alias, how.kind, how.weight, how.temperature, how.token, forms)
    return replace(record, scores=(student, *beside), taught=(row,), pairs=_pairs([own, *others], seed))


def _pairs(evaluations: Sequence[Evaluation], seed: int) -> tuple[PairRow, ...]:
    groups = None if evaluations[0].groups is None else evaluations[0].groups.numpy()
    return in_pairs({each.alias: each.correct.numpy() for each in evaluations}, groups=groups, seed=seed)


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
    failed = any(each.state == "fail" for each in findings)
    return Conclusion(tuple(each.line for each in findings), (), not failed, FAILED)
