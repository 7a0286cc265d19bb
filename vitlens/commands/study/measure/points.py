"""`vitlens study --kind`: every point of a kind trained with several seeds, and compared."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.answers.seeds import accuracy_over_seeds, difference_over_seeds
from vitlens.analysis.cost.memory import saved_for_training
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions, begun_with
from vitlens.commands.run.progress.training import training_progress
from vitlens.commands.run.publish import publish
from vitlens.commands.run.unseen import keep_training_images
from vitlens.commands.study.kinds import KINDS, SEEDS, Kind, Point, epochs_for
from vitlens.commands.study.measure.fields import write_cut_image, write_point_fields
from vitlens.commands.study.measure.positions import write_point_positions
from vitlens.commands.study.measure.trial import StudySetup, Trial, run_trial
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import (
    ACCURACY,
    AGAINST_BEST,
    BEST,
    CORRECT,
    DESIGN,
    DIFFERENCE,
    DIFFERENCES,
    POINTS,
    POINTS_FOLDER,
    RECIPES,
    STEP,
    STEPS,
    TABLES,
    TRIALS,
    ComparisonRow,
    CorrectArrays,
    DesignRow,
    PointRow,
    PointSettingRow,
    TrialRow,
)
from vitlens.data.catalogue import load_data
from vitlens.data.shares import images_in
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.files import CONFIG, read_run
from vitlens.lens.layers import probe_images
from vitlens.models.loading import untrained
from vitlens.names import Part
from vitlens.preprocessing import Side
from vitlens.records import MetricName, TableOf
from vitlens.schema import Between, Text, read_as
from vitlens.uncertainty import LEVEL, holm

_PARTS: tuple[Part, ...] = ("train", "test")
_STEP: Final = 2  # images in the training step whose memory is measured: batch norm needs more than one
_HINT = "begin anew without --resume"


@dataclass(frozen=True)
class PointsPlan:
    """The settings that decide the result besides the run options; a resumed study continues with its first plan."""

    kind: str
    data: Text
    epochs: Annotated[int, Between(1, 1_000_000)]
    seeds: Annotated[int, Between(1, 1000)]
    image_size: tuple[Side, Side] | None


def measure_points(options: StudyOptions) -> Path:
    """Train and compare the points of a kind of study; returns the report's path.

    Raises InputError, and what training raises.
    """
    _refuse_models(options)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError("expected one process for a study, found several; start vitlens study without a launcher")
    if options.seeds is not None and options.seeds < 1:
        raise InputError(f"expected --seeds of at least 1, found {options.seeds}; try --seeds {SEEDS}")
    plan, run = (_planned(options), options.run) if options.resume is None else _resumed(options.resume, options)
    setup = _setup(plan, run)
    points = KINDS[plan.kind].points
    for point in points:  # refuses points that cannot be built or trained before anything is written
        setup.model(point, seed=0)
        setup.recipe(point)
        if point.share is not None:
            images_in(setup.train, point.share)
    with _folder(plan, options, setup, run) as folder:
        keep_training_images(folder.path, setup.train, data=plan.data)
        for table in TABLES:
            folder.write(table, [])
        trials = dict(_trials(folder.path, points, setup, plan, resume=options.resume is not None))
        _write(folder, plan, setup, trials)
        return publish(folder)


def _refuse_models(options: StudyOptions) -> None:
    """Refuse MODEL arguments and options of weights, as the points are fixed."""
    option = f"--kind {options.kind}" if options.kind else "--resume"
    if options.models:
        raise InputError(f"expected no MODEL with {option}, whose points are fixed, found {', '.join(options.models)}")
    for name, value in asdict(options.model_options).items():
        if value and name != "image_size":
            raise InputError(f"expected no --{name.replace('_', '-')} with {option}, which trains its points itself")


def _planned(options: StudyOptions) -> PointsPlan:
    data = options.data or "digits"
    epochs = epochs_for(data) if options.epochs is None else options.epochs
    return PointsPlan(str(options.kind), data, epochs, options.seeds or SEEDS, options.model_options.image_size)


def _resumed(resume: Path, options: StudyOptions) -> tuple[PointsPlan, RunOptions]:
    """The plan and the run options that a study began with. Raises InputError when the options name another."""
    if options.run.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.run.out}, found both; a resumed study keeps its folder"
        )
    record, source = read_run(resume), str(resume / CONFIG)
    written = record.config.get("plan")
    if record.command != "study" or not isinstance(written, dict) or str(written.get("kind")) not in KINDS:
        raise InputError(f"expected the folder of vitlens study --kind to resume, found another run in {resume}")
    plan = read_as(PointsPlan, written, source=source, hint=_HINT)
    requested = {
        "kind": options.kind,
        "data": options.data,
        "epochs": options.epochs,
        "seeds": options.seeds,
        "image_size": options.model_options.image_size,
    }
    for name, value in requested.items():
        if value is not None and value != getattr(plan, name):
            raise InputError(
                f"expected to resume {resume} with its {name}, {getattr(plan, name)}, found {value}; leave it out"
            )
    if record.config.get("points") != _described_points(KINDS[plan.kind]):
        raise InputError(f"expected the points that {resume} began with, found others in this vitlens; {_HINT}")
    return plan, begun_with(record.config, options.run, source, hint=_HINT)


def _setup(plan: PointsPlan, run: RunOptions) -> StudySetup:
    """The images, loaded once for all points, and the device."""
    # the input's size decides how photographs are cropped; it is the same for all points
    points = KINDS[plan.kind].points
    size = untrained(points[0].preset, classes=("0",), image_size=plan.image_size).preprocessing
    train, test = (
        load_data(plan.data, part=part, preprocessing=size, data_dir=run.data_dir, seed=run.seed).limit(
            run.limit, seed=run.seed
        )
        for part in _PARTS
    )
    return StudySetup(points, plan.data, train, test, plan.epochs, plan.image_size, resolve_device(run.device), run)


def _folder(plan: PointsPlan, options: StudyOptions, setup: StudySetup, run: RunOptions) -> RunFolder:
    """The study's folder: new, or that of --resume."""
    kind = KINDS[plan.kind]
    config = {
        # of a resumed study the run options that it began with, so that it can be resumed again
        **settings(replace(options, run=run), run, split=setup.test),
        "device": str(setup.device),
        "plan": asdict(plan),
        "points": _described_points(kind),
        "recipes": _recipes(kind, setup),
    }
    if options.resume is not None:
        needs = {**dict.fromkeys(("data", "points", "plan")), "recipes": config["recipes"]}
        return RunFolder.reopen(options.resume, needs=needs, config=config)
    return RunFolder.create(
        "study",
        name_parts=(plan.kind, plan.data),
        title=f"{kind.title}, on {setup.test.title or setup.test.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=config,
        formats=run.formats,
    )


def _recipes(kind: Kind, setup: StudySetup) -> dict[str, dict[str, object]]:
    """The settings of each preset's recipe."""
    recipes = {point.preset: setup.recipe(point) for point in kind.points}
    return {preset: {**recipe.numbers(), "source": recipe.source} for preset, recipe in recipes.items()}


def _described_points(kind: Kind) -> list[dict[str, object]]:
    """The points in the form of config.json."""
    return [
        {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(point).items()}
        for point in kind.points
    ]


def _trials(
    path: Path, points: Sequence[Point], setup: StudySetup, plan: PointsPlan, *, resume: bool
) -> Iterator[tuple[str, list[Trial]]]:
    """The trials of each point, seed by seed, by the point's label."""
    for number, point in enumerate(points, start=1):
        trials = []
        for turn in range(plan.seeds):
            seed = setup.options.seed + turn
            description = f"point {number} of {len(points)}, {point.words}, seed {turn + 1} of {plan.seeds}"
            progress = training_progress(description, quiet=setup.options.quiet)
            folder = path / POINTS_FOLDER / point.label / f"seed-{seed}"
            trials.append(run_trial(setup, point, folder, seed=seed, resume=resume, progress=progress))
        yield point.label, trials


def _write(folder: RunFolder, plan: PointsPlan, setup: StudySetup, trials: Mapping[str, Sequence[Trial]]) -> None:
    """Accuracies over seeds, differences, sizes, costs and speeds; trials: of each point by its label, one a seed."""
    kind, seed = KINDS[plan.kind], setup.options.seed
    correct = {label: np.stack([trial.correct for trial in of_point]) for label, of_point in trials.items()}
    for label, table in correct.items():
        folder.metric(ACCURACY(model=label), accuracy_over_seeds(table))
    sizes = len(setup.train), len(setup.test.classes), setup.test.size
    folder.write(DESIGN, [DesignRow(plan.kind, plan.epochs, plan.seeds, *sizes)])
    folder.write(POINTS, [_point_row(point, trials[point.label], setup) for point in kind.points])
    folder.write(TRIALS, [row for label, of_point in trials.items() for row in _trial_rows(label, of_point, seed)])
    folder.write(
        RECIPES,
        [
            PointSettingRow(preset, setting, str(value))
            for preset, numbers in _recipes(kind, setup).items()
            for setting, value in numbers.items()
        ],
    )
    first, *others = kind.points
    pairs = [(point.label, point.against or first.label) for point in others]
    write_comparisons(folder, DIFFERENCES, DIFFERENCE, pairs, correct)
    if kind.steps:
        write_comparisons(folder, STEPS, STEP, kind.changes, correct)
    best = max(correct, key=lambda label: float(correct[label].mean()))
    write_comparisons(folder, AGAINST_BEST, BEST, [(label, best) for label in correct if label != best], correct)
    write_point_fields(folder, kind, setup)
    write_cut_image(folder, kind, setup)
    write_point_positions(folder, kind, setup, seeds=plan.seeds)
    folder.save(CORRECT, CorrectArrays(dict(enumerate(correct.values()))))


def _point_row(point: Point, trials: Sequence[Trial], setup: StudySetup) -> PointRow:
    """A point's size, cost and training speed; speeds are medians over seeds, robust to a busy machine."""
    first = trials[0]
    model = setup.model(point, seed=0).to(setup.device)
    layout = model.anatomy.layout
    return PointRow(
        label=point.label,
        words=point.words,
        preset=point.preset,
        place=point.place,
        parameters=first.parameters,
        flops=first.flops,
        steps=first.steps,
        train_images=first.train_images,
        images_per_second=float(np.median([trial.images_per_second for trial in trials])),
        seconds=float(np.median([trial.seconds for trial in trials])),
        training_bytes=saved_for_training(model, probe_images(model, _STEP)) // _STEP,
        tokens=None if layout is None else layout.tokens,
        patch=None if layout is None else layout.patch_size,
        grid=None if layout is None else layout.grid,
    )


def _trial_rows(label: str, trials: Sequence[Trial], seed: int) -> list[TrialRow]:
    """One row for each training of a point."""
    return [
        TrialRow(label, seed + turn, float(trial.correct.mean()), trial.seconds, trial.images_per_second)
        for turn, trial in enumerate(trials)
    ]


def write_comparisons(
    folder: RunFolder,
    table: TableOf[ComparisonRow],
    metric: MetricName,
    pairs: Sequence[tuple[str, str]],
    correct: Mapping[str, NDArray[np.bool_]],
) -> None:
    """Write the paired differences of these points, their p-values corrected for their number."""
    differences = [difference_over_seeds(correct[label], correct[other]) for label, other in pairs]
    corrected = holm([difference.p for difference in differences])
    rows = []
    for (label, other), difference, p_holm in zip(pairs, differences, corrected):
        folder.metric(metric(model=label, against=other), difference.estimate)
        detectable = difference.detectable(LEVEL / len(pairs))
        rows.append(ComparisonRow(label, other, difference.p, p_holm, detectable))
    folder.write(table, rows)
