"""`vitlens study --kind`: every point of a kind trained with several seeds, compared, and told in one report."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.expected import say_expected, train_parts
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.training_progress import training_progress
from vitlens.commands.scaffold.unseen import keep_training_images
from vitlens.data.catalogue import load_data
from vitlens.data.shares import images_in
from vitlens.devices import resolve_device
from vitlens.errors import InputError, UnknownNameError
from vitlens.files import CONFIG, read_run
from vitlens.models.zoo import untrained
from vitlens.preprocessing import Side
from vitlens.runs.report import publish
from vitlens.runs.study_kept import KeptOptions
from vitlens.runs.study_kinds import KINDS, SEEDS, Kind, Point, epochs_for
from vitlens.runs.study_points_draw import draw_points
from vitlens.runs.study_points_keep import POINTS, keep
from vitlens.runs.study_points_tell import tell_points
from vitlens.runs.study_trial import Ground, Trial, run_trial
from vitlens.schema import Between, Text, read_as


@dataclass(frozen=True)
class Plan:
    """What decides the result besides the options; a study is resumed with the plan that it began with."""

    kind: str
    data: Text
    epochs: Annotated[int, Between(1, 1_000_000)]
    seeds: Annotated[int, Between(1, 1000)]
    image_size: tuple[Side, Side] | None


def study_points(
    kind: str | None,
    *,
    models: Sequence[str] = (),
    data: str | None = None,
    epochs: int | None = None,
    seeds: int | None = None,
    resume: Path | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Train and compare the points of a kind of study; returns the report's path.

    data: digits where nothing is said; epochs: for every point (None: a few, see study_kinds); seeds: trainings of each
    point (None: 3); resume: the folder of a study that was stopped. Raises InputError, and what training raises.
    """
    _refuse_models(kind, models, model_options)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError("expected one process for a study, found several; start vitlens study without a launcher")
    if seeds is not None and seeds < 1:
        raise InputError(f"expected --seeds of at least 1, found {seeds}; try --seeds {SEEDS}")
    given = {"kind": kind, "data": data, "epochs": epochs, "seeds": seeds, "image_size": model_options.image_size}
    if resume is not None:
        plan, options = _as_begun(resume, {name: value for name, value in given.items() if value is not None}, options)
    else:
        plan = _planned(given)
    ground = _ground(plan, options)
    points = KINDS[plan.kind].points
    for point in points:  # what cannot be built, or trained so, is refused before anything is written
        ground.model(point, seed=0)
        ground.recipe(point)
        if point.share is not None:
            images_in(ground.train, point.share)
    epochs = plan.epochs * plan.seeds
    parts = train_parts(len(ground.train), len(ground.test), epochs=epochs, looks=plan.seeds, frozen=False)
    works = [(ground.model(point, seed=0).to(ground.device), ground.train, parts) for point in points]
    say_expected(works, options)
    with _folder(plan, resume, ground, options) as folder:
        keep_training_images(folder.path, ground.train, data=plan.data)
        trials = dict(_trials(folder.path, points, ground, plan, resume=resume is not None))
        keep(folder, KINDS[plan.kind], trials, seed=options.seed)
        return publish(folder, draw_points, tell_points)


def _refuse_models(kind: str | None, models: Sequence[str], model_options: ModelOptions) -> None:
    """The points are fixed: nothing that names a model or its weights means anything."""
    said = f"--kind {kind}" if kind else "--resume"
    if models:
        raise InputError(f"expected no MODEL with {said}, whose points are fixed, found {', '.join(models)}")
    for name, value in asdict(model_options).items():
        if value and name != "image_size":
            raise InputError(f"expected no --{name.replace('_', '-')} with {said}, which trains its points itself")


def _planned(given: Mapping[str, Any]) -> Plan:
    kind, data = given["kind"], given["data"] or "digits"
    if kind not in KINDS:
        raise UnknownNameError("kind of study", str(kind), KINDS, hint="vitlens study --help")
    epochs = epochs_for(data) if given["epochs"] is None else given["epochs"]
    return Plan(kind, data, epochs, given["seeds"] or SEEDS, given["image_size"])


def _as_begun(resume: Path, given: Mapping[str, object], options: RunOptions) -> tuple[Plan, RunOptions]:
    """The plan and the options that a study began with. Raises InputError when something else is asked for now."""
    if options.out is not None:
        raise InputError(
            f"expected --resume {resume} or --out {options.out}, found both; a resumed study keeps its folder"
        )
    record = read_run(resume)
    asked = record.config.get("options")
    if record.command != "study" or not isinstance(asked, dict) or str(asked.get("kind")) not in KINDS:
        raise InputError(f"expected the folder of vitlens study --kind to resume, found another run in {resume}")
    source = f"the options in {resume / CONFIG}"
    plan = read_as(Plan, asked, source=source, unknown="ignore", hint="study anew")
    for name, value in given.items():
        if value != getattr(plan, name):
            raise InputError(
                f"expected to resume {resume} with its {name}, {getattr(plan, name)}, found {value}; leave it out"
            )
    if record.config.get("points") != _described_points(KINDS[plan.kind]):
        raise InputError(f"expected the points that {resume} began with, found others in this vitlens; study anew")
    kept = read_as(KeptOptions, asked, source=source, unknown="ignore", hint="study anew")
    return plan, kept.given_to(options)


def _ground(plan: Plan, options: RunOptions) -> Ground:
    """The images, loaded once for all points, and the device."""
    # the input's size decides how photographs are cropped; it is the same for all points
    first = KINDS[plan.kind].points[0]
    size = untrained(first.preset, classes=("0",), image_size=plan.image_size).preprocessing
    train, test = (
        load_data(plan.data, part=part, preprocessing=size, data_dir=options.data_dir, seed=options.seed).limit(
            options.limit, seed=options.seed
        )
        for part in ("train", "test")
    )
    device = resolve_device(options.device)
    return Ground(plan.data, train, test, plan.epochs, plan.image_size, device, options)


def _folder(plan: Plan, resume: Path | None, ground: Ground, options: RunOptions) -> RunFolder:
    """The study's folder: a new one, or the one to go on in."""
    kind = KINDS[plan.kind]
    recipes = {point.preset: ground.recipe(point) for point in kind.points}
    config = {
        **described(options, split=ground.test, choices=asdict(plan)),
        "device": str(ground.device),
        "train_images": len(ground.train),
        "points": _described_points(kind),
        "recipes": {preset: {**recipe.numbers(), "source": recipe.source} for preset, recipe in recipes.items()},
    }
    if resume is not None:
        needs = dict.fromkeys(("data", "points", "recipes", "train_images"))
        return RunFolder.reopen(resume, needs=needs, config=config)
    return RunFolder.create(
        "study",
        name_parts=(plan.kind, plan.data),
        title=f"{kind.title}, on {ground.test.title or ground.test.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=config,
        formats=options.formats,
    )


def _described_points(kind: Kind) -> list[dict[str, object]]:
    """The points as JSON holds them."""
    return [
        {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(point).items()}
        for point in kind.points
    ]


def _trials(
    path: Path, points: Sequence[Point], ground: Ground, plan: Plan, *, resume: bool
) -> Iterator[tuple[str, list[Trial]]]:
    """The trials of each point, seed by seed, by the point's label."""
    for number, point in enumerate(points, start=1):
        trials = []
        for turn in range(plan.seeds):
            seed = ground.options.seed + turn
            what = f"point {number} of {len(points)}, {point.words}, seed {turn + 1} of {plan.seeds}"
            telling = training_progress(what, quiet=ground.options.quiet)
            folder = path / POINTS / point.label / f"seed-{seed}"
            trials.append(run_trial(ground, point, folder, seed=seed, resume=resume, telling=telling))
        yield point.label, trials
