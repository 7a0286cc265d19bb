"""`vitlens study --kind`: every point of a kind trained with several seeds, compared, and looked into."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens.analysis.attention.positions import position_similarity, rank_correlation
from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.cost.passes import saved_for_training
from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.evaluation.intervals import accuracy_over_seeds, difference_over_seeds
from vitlens.analysis.features.receptive_field import receptive_field
from vitlens.arrays import Flags, Form, arrays_of, as_arrays, read_arrays, write_arrays
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import print_data
from vitlens.commands.run.progress import training_progress
from vitlens.commands.run.publish import publish
from vitlens.commands.run.resume import resumed
from vitlens.commands.run.unseen import keep_training_images
from vitlens.commands.shared.receptive import field_rows
from vitlens.commands.shared.trainings import augmentation_words
from vitlens.commands.study import record as rows
from vitlens.commands.study.kinds.kinds import ADAPTING_EPOCHS, EPOCHS, KINDS, OTHER_EPOCHS, SEEDS, Point
from vitlens.commands.study.kinds.pretraining import pretrained, probed
from vitlens.commands.study.kinds.setup import Setup, prepare
from vitlens.commands.study.kinds.transfer import inside
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.train.start import compute_outputs, objective_of
from vitlens.errors import InputError
from vitlens.lens.trace import probe_images
from vitlens.models.model import Model
from vitlens.training import checkpoint
from vitlens.training.distill import Distillation, StandardObjective, cacheable_views
from vitlens.training.finetune import trained_share
from vitlens.training.head import fit_head
from vitlens.training.loop import BEST_FILE, train_on_images
from vitlens.training.objectives.pretraining import Pretraining
from vitlens.training.recipe import Recipe
from vitlens.training.task import Task
from vitlens.uncertainty import LEVEL, Estimate, holm, student_mean

_STEP: Final = 2  # images in the training step whose memory is measured: batch norm needs more than one
_FIELD_IMAGES: Final = 16  # test images of the receptive fields
# Of a teacher trained on the same images, whose predictions on them are the labels: its probabilities say more.
_TAUGHT: Final = Distillation(kind="soft", weight=0.5, token=False)


@dataclass(frozen=True)
class Trial:
    """The result of one training, in a file of its own: it is done once that is written.

    correct: (n,) whether each test image is classified correctly; seconds: of training, evaluations included;
    images_per_second: of training alone, the median over epochs; flops: of one image's forward pass.
    """

    correct: Flags
    seconds: Annotated[NDArray[np.float64], Form("f")]
    images_per_second: Annotated[NDArray[np.float64], Form("f")]
    steps: Annotated[NDArray[np.int64], Form("iu")]
    parameters: Annotated[NDArray[np.int64], Form("iu")]
    flops: Annotated[NDArray[np.int64], Form("iu")]


Trials = Mapping[str, Sequence[Trial]]  # of each point by its label, one a seed


def measure_kind(options: StudyOptions) -> Path:
    """Train and compare the points of a kind of study; returns the report's path.

    Raises InputError, and what training raises.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError("expected one process for a study, found several; start vitlens study without a launcher")
    setup = prepare(_planned(options) if options.resume is None else _begun(options.resume, options))
    print_data(setup.train, setup.run)
    with _folder(setup) as folder:
        setup = replace(setup, path=folder.path)
        keep_training_images(folder.path, setup.train, data=setup.data, start=setup.model)
        trials = {
            point.label: [run_trial(setup, point, number, seed=seed) for seed in setup.seeds]
            for number, point in enumerate(setup.points, start=1)
        }
        folder.keep(_record(setup, trials))
        return publish(folder)


def _planned(options: StudyOptions) -> StudyOptions:
    """Return the options with their defaults filled in, as a resumed study reads them."""
    kind = KINDS[str(options.kind)]
    data = options.data or ("" if kind.adapts else kind.data)
    usual = kind.epochs or (ADAPTING_EPOCHS if kind.adapts else EPOCHS.get(data, OTHER_EPOCHS))
    epochs = usual if options.epochs is None else options.epochs
    return replace(options, data=data, epochs=epochs, seeds=options.seeds or SEEDS)


def _begun(resume: Path, options: StudyOptions) -> StudyOptions:
    """Return the options that a study began with. Raises InputError for those of another study, and of a whole one."""
    begun: StudyOptions = resumed(options, resume, "study", typed=("model_file", "cache", "full"))
    if begun.kind not in KINDS:
        raise InputError(f"expected the folder of vitlens study --kind to resume, found another run in {resume}")
    return begun


def _folder(setup: Setup) -> RunFolder:
    """Return the study's folder: new, or that of --resume."""
    models = [] if setup.model is None else [setup.model]
    recipes = {point.label: setup.recipe(point) for point in setup.points}
    own = {
        "points": json.loads(json.dumps([asdict(point) for point in setup.points])),
        "recipes": {label: {**recipe.numbers(), "source": recipe.source} for label, recipe in recipes.items()},
    }
    title = setup.kind.title if setup.model is None else f"{setup.model.alias}, adapted"
    return RunFolder.opened(
        "study",
        setup.run,
        settings(
            setup.options,
            setup.run,
            models=models,
            split=setup.test,
            others=[setup.train],
            device=str(setup.device),
            **own,
        ),
        name_parts=(str(setup.options.kind), *(model.alias for model in models), setup.data),
        title=f"{title}, on {setup.test.title or setup.test.name}",
        resume=setup.options.resume,
        needs={"data": None, **own},
    )


def run_trial(setup: Setup, point: Point, number: int, *, seed: int) -> Trial:
    """Train a point with a seed in its folder, or read the result that an earlier run finished there.

    The weights stay in the folder; the checkpoint, the second copy of the weights and what a killed run left do not.
    """
    folder = setup.place(point.label, seed)
    file = folder / "result.npz"
    if setup.options.resume is not None and file.is_file():
        trial = arrays_of(Trial, read_arrays(file), file)
        if len(trial.correct) != len(setup.test):
            raise InputError(
                f"expected the {len(trial.correct)} test images of {file}, found {len(setup.test)}; "
                "resume with the data that the study began with"
            )
    else:
        told = f"variant {number} of {len(setup.points)}, {point.words}, seed {setup.seeds.index(seed) + 1} of "
        trial = _trained(setup, point, f"{told}{len(setup.seeds)}", seed=seed)
        write_arrays(file, as_arrays(trial))
    shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
    for spare in (folder / BEST_FILE, *folder.glob(".*-*.safetensors"), *folder.glob(".result-*.npz")):
        spare.unlink(missing_ok=True)
    return trial


def _trained(setup: Setup, point: Point, told: str, *, seed: int) -> Trial:
    model = setup.begin(point, seed=seed).to(setup.device)
    images = setup.images(point, seed=seed)
    recipe = setup.recipe(point)
    folder = setup.place(point.label, seed)
    folder.mkdir(parents=True, exist_ok=True)
    cost = (np.array(model.parameter_count()), np.array(int(sum(flops_by_part(model).values()))))
    if not point.is_trained:
        return Trial(probed(setup, model, seed=seed), np.array(0.0), np.array(0.0), np.array(0), *cost)
    objective: StandardObjective | Pretraining = setup.pretraining(point) or StandardObjective()
    if point.teacher:
        teacher = setup.trained(point.teacher, seed=seed)
        objective = objective_of(teacher, _TAUGHT, images.classes, setup.run.precision)
        compute_outputs(objective, images, views=cacheable_views(recipe, images), quiet=setup.run.quiet)
    with training_progress(told, quiet=setup.run.quiet) as on_progress:
        task = Task(
            model,
            images,
            setup.test,
            recipe,
            folder,
            seed,
            setup.device,
            setup.run.precision,
            resume=setup.options.resume is not None,
            objective=objective,
            train_last=setup.trained_last(point),
            on_progress=on_progress,
        )
        result = (fit_head if point.trained == "head" else train_on_images)(task)
    if setup.kind.also == "pretraining":
        correct = probed(setup, setup.trained(point.label, seed=seed), seed=seed)
    else:
        correct = evaluate(model, setup.test, batch_size=setup.run.batch_size).correct.numpy()
    return Trial(
        correct=correct,
        seconds=np.array(float(result.seconds)),
        images_per_second=np.array(float(np.median([epoch.images_per_second for epoch in result.history]))),
        steps=np.array(result.history[-1].step),
        parameters=cost[0],
        flops=cost[1],
    )


def _record(setup: Setup, trials: Trials) -> rows.StudyRecord:
    """Accuracies over seeds, differences, sizes, costs and speeds, and what the kind measures beside them."""
    correct = {label: np.stack([trial.correct for trial in own]) for label, own in trials.items()}
    points = {point.label: _point_row(setup, point, trials, correct) for point in setup.points}
    groups = None if setup.test.groups is None else setup.test.groups.cpu().numpy()
    compare = partial(compared, points, correct, groups)
    asked = [pair for pair in setup.kind.pairs if pair[0] in points]
    candidates = {label: row.accuracy.value for label, row in points.items() if row.candidate}
    best = max(candidates, key=lambda label: candidates[label])
    also: dict[str, Callable[[Setup], dict[str, Any]]] = {
        "fields": _fields,
        "cut": _cut,
        "positions": _positions,
        "inside": partial(inside, points=points),
        "pretraining": pretrained,
    }
    found = also[setup.kind.also](setup) if setup.kind.also else {}
    comparisons = (
        *compare("difference", [pair for pair in asked if pair[0] in candidates]),
        *compare("share", [pair for pair in asked if pair[0] not in candidates]),
        *compare("step", setup.kind.steps),
        *compare("best", [(label, best) for label in candidates if label != best]),
        *found.pop("gains", ()),
    )
    sizes = len(setup.train), len(setup.test), len(setup.test.classes), setup.test.size
    adapted = (setup.model.alias, len(setup.model.anatomy.blocks), setup.last) if setup.model else ()
    return rows.StudyRecord(
        design=(rows.DesignRow(str(setup.options.kind), setup.epochs, len(setup.seeds), *sizes, *adapted),),
        points=tuple(points.values()),
        trials=tuple(
            rows.TrialRow(
                label, seed, float(trial.correct.mean()), float(trial.seconds), float(trial.images_per_second)
            )
            for label, own in trials.items()
            for seed, trial in zip(setup.seeds, own, strict=True)
        ),
        comparisons=comparisons,
        recipes=tuple(_recipe_rows(setup)),
        correct=rows.CorrectArrays(dict(enumerate(correct.values()))),
        **found,
    )


def _point_row(setup: Setup, point: Point, trials: Trials, correct: Mapping[str, NDArray[np.bool_]]) -> rows.PointRow:
    """Return a point's accuracy, size, cost and speed; speeds are medians over seeds, robust to a busy machine."""
    own = trials[point.label]
    model = setup.begin(point, seed=0).to(setup.device)
    layout = model.anatomy.layout

    def median(name: str, label: str = point.label) -> float:
        return float(np.median([getattr(trial, name) for trial in trials[label]]))

    return rows.PointRow(
        label=point.label,
        words=point.words,
        preset=point.preset,
        line=point.line,
        candidate=point.candidate,
        accuracy=accuracy_over_seeds(
            correct[point.label], groups=None if setup.test.groups is None else setup.test.groups.cpu().numpy()
        ),
        chance=1 / len(setup.test.classes),
        train_images=setup.images_of(point),
        parameters=int(own[0].parameters),
        trained=trained_share(model, last=setup.trained_last(point))[0] if point.is_trained else 0,
        flops=int(own[0].flops),
        epochs=setup.recipe(point).epochs if point.is_trained else 0,
        steps=int(own[0].steps),
        images_per_second=median("images_per_second"),
        seconds=median("seconds"),
        before=median("seconds", point.teacher) if point.teacher else 0.0,
        training_bytes=None
        if setup.model or setup.kind.also == "pretraining"
        else saved_for_training(model, probe_images(model, _STEP)) // _STEP,
        tokens=None if layout is None else layout.tokens,
        patch=None if layout is None else layout.patch_size,
        grid=None if layout is None else layout.grid,
    )


def compared(
    points: Mapping[str, rows.PointRow],
    correct: Mapping[str, NDArray[np.bool_]],
    groups: NDArray[Any] | None,
    family: str,
    pairs: Sequence[tuple[str, str]],
) -> Iterator[rows.ComparisonRow]:
    """Yield the paired differences of these points, their p-values corrected for their number."""
    found = [difference_over_seeds(correct[label], correct[other], groups=groups) for label, other in pairs]
    for (label, other), each, p_holm in zip(pairs, found, holm([each.p for each in found]), strict=True):
        own = points[label]
        against = points[other]
        lines = own.line and against.line and own.line != against.line and own.train_images == against.train_images
        yield rows.ComparisonRow(
            family,
            label,
            other,
            own.words,
            against.words,
            each.estimate,
            each.p,
            p_holm,
            each.detectable(LEVEL / len(pairs)),
            (own if each.estimate.value > 0 else against).words if p_holm <= LEVEL else None,
            own.train_images if lines else None,
        )


def _recipe_rows(setup: Setup) -> Iterator[rows.RecipeRow]:
    """Yield the recipes of the points, those that share one together; points with fewer images have those of all."""
    shared: dict[Recipe, list[str]] = {}
    for point in setup.points:
        if point.candidate and point.is_trained:
            shared.setdefault(setup.recipe(point), []).append(point.words)
    for recipe, points in shared.items():
        yield rows.RecipeRow(
            "; ".join(points) if len(shared) > 1 else "all variants",
            recipe.optimiser,
            recipe.learning_rate,
            recipe.batch_size,
            recipe.epochs,
            augmentation_words(recipe.numbers()),
            recipe.source,
        )


def _fields(setup: Setup) -> dict[str, Any]:
    """Return the receptive field of every layer of every point, of the first seed's trainings."""
    images = setup.test.pick(torch.arange(min(_FIELD_IMAGES, len(setup.test))))
    (batch,) = images.batches(len(images), device=setup.device)
    fields = {
        (point.label, point.words): receptive_field(setup.trained(point.label), batch.images, groups=images.groups)
        for point in setup.points
    }
    found, maps = field_rows(fields)
    return {"receptive_fields": found, "field_maps": maps}


def _cut(setup: Setup) -> dict[str, Any]:
    """Return the first test image, which the report shows as the patches of each point."""
    return {"cut": rows.CutArrays(setup.test.source.read(torch.arange(1)).numpy())}


def _positions(setup: Setup) -> dict[str, Any]:
    """Return how well the position embeddings of each point follow the places of the patches, after every training."""
    found = []
    maps = {}
    for index, point in enumerate(setup.points):
        trained = [setup.trained(point.label, seed=seed) for seed in setup.seeds]
        first = position_similarity(trained[0])
        if first is None:
            continue
        maps[index] = first.float().numpy()
        after = [_order(model) for model in trained]
        before = [_order(setup.begin(point, seed=seed))[0] for seed in setup.seeds]
        known = [each for each in before if each is not None]
        every, in_rows, in_columns = map(_over_seeds, zip(*after))
        mean = sum(known) / len(known) if known else None
        found.append(rows.PositionRow(point.label, point.words, len(after), every, in_rows, in_columns, mean))
    return {"position_order": tuple(found), "position_similarity": rows.OrderArrays(maps) if maps else None}


def _order(model: Model) -> tuple[float | None, float | None, float | None]:
    similarity = position_similarity(model)
    assert similarity is not None  # of all seeds, as of the first
    return rank_correlation(similarity, model.layout)


def _over_seeds(values: Sequence[float | None]) -> Estimate | None:
    """Return the mean over seeds with Student's interval; fixed embeddings are those of every seed and have none."""
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return Estimate(known[0], unit="") if known else None
    return student_mean(known, unit="", least=-1.0, most=1.0)
