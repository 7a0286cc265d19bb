"""One training of one variant ("trial"), whose result is a file in its folder."""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.arrays import (
    Flags,
    Form,
    Indices,
    Vector,
    arrays_of,
    as_arrays,
    read_arrays,
    write_arrays,
)
from vitlens.commands.run.progress import training_progress
from vitlens.commands.study.kinds.kinds import Variant
from vitlens.commands.study.kinds.pretraining.features import probe_frozen
from vitlens.commands.study.kinds.setup import Setup
from vitlens.commands.train.start import compute_outputs, objective_of
from vitlens.data.split import Split
from vitlens.errors import InputError, NonFiniteError
from vitlens.models.model import Model
from vitlens.training import checkpoint
from vitlens.training.distill import Distillation, StandardObjective, cacheable_views
from vitlens.training.head import fit_head
from vitlens.training.loop import BEST_FILE, train_on_images
from vitlens.training.objectives.pretraining import Pretraining
from vitlens.training.task import Task

# A teacher's predictions on the images that it was trained on are mostly their labels: its
# probabilities say more. Half of the loss is the teacher's.
_DISTILLATION: Final = Distillation(kind="soft", weight=0.5, token=False)
_WITHOUT_LABELS: Final = replace(_DISTILLATION, weight=1.0)


@dataclass(frozen=True)
class Trial:
    """The result of one training, which is complete once its file is written.

    All fields are arrays, as the file holds arrays; those without a shape are single numbers.

    correct: (n,) True where a test image is classified correctly; a training whose loss became
        infinite counts as guessing the first class.
    epochs, validation: (c,) the epochs after which the validation images were classified, and the
        accuracies.
    finite: False if the loss became infinite.
    seconds: the time in seconds of training, evaluations included.
    images_per_second: the speed of training without evaluations, the median over epochs.
    flops: the FLOPs of the forward pass of one image.
    """

    correct: Flags
    epochs: Indices
    validation: Vector
    finite: Annotated[NDArray[np.bool_], Form("b")]
    seconds: Annotated[NDArray[np.float64], Form("f")]
    images_per_second: Annotated[NDArray[np.float64], Form("f")]
    steps: Annotated[NDArray[np.int64], Form("iu")]
    parameters: Annotated[NDArray[np.int64], Form("iu")]
    flops: Annotated[NDArray[np.int64], Form("iu")]


def run_trial(setup: Setup, variant: Variant, seed: int) -> Trial:
    """Train a variant with a seed in its folder, or read the result that an earlier run left there.

    The weights stay in the folder; the checkpoint, the second copy of the weights and the rest of a
    killed run do not.
    """
    folder = setup.folder(variant.label, seed)
    file = folder / "result.npz"
    if setup.options.resume is not None and file.is_file():
        trial = _read_trial(file, setup.test)
    else:
        trial = _train(setup, variant, seed)
        write_arrays(file, as_arrays(trial))
    _remove_leftovers(folder)
    return trial


def _read_trial(file: Path, test: Split) -> Trial:
    """Return the result in a file. Raises InputError if it is about other test images."""
    trial = arrays_of(Trial, read_arrays(file), file)
    if len(trial.correct) != len(test):
        raise InputError(
            f"expected the {len(trial.correct)} test images of {file}, found {len(test)}; "
            "resume with the data that the study began with"
        )
    return trial


def _remove_leftovers(folder: Path) -> None:
    shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
    # temporary files of a process that was killed while it wrote
    unfinished = [*folder.glob(".*-*.safetensors"), *folder.glob(".result-*.npz")]
    for file in (folder / BEST_FILE, *unfinished):
        file.unlink(missing_ok=True)


def _train(setup: Setup, variant: Variant, seed: int) -> Trial:
    """Train a variant from its start, and test it."""
    model = setup.initial_model(variant, seed=seed).to(setup.device)
    folder = setup.folder(variant.label, seed)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = np.array(model.parameter_count())
    flops = np.array(int(sum(flops_by_part(model).values())))
    blank = Trial(
        correct=np.zeros(0, bool),
        epochs=np.zeros(0, int),
        validation=np.zeros(0),
        finite=np.array(True),
        seconds=np.array(0.0),
        images_per_second=np.array(0.0),
        steps=np.array(0),
        parameters=parameters,
        flops=flops,
    )
    if not variant.is_trained:
        return replace(blank, correct=probe_frozen(setup, model, seed=seed))
    images = setup.images(variant, seed=seed)
    objective = _objective(setup, variant, images, seed)
    train = fit_head if variant.trained == "head" else train_on_images
    start = time.monotonic()
    with training_progress(_title(setup, variant, seed), quiet=setup.run.quiet) as on_progress:
        task = Task(
            model=model,
            train=images,
            test=setup.validation or setup.test,
            recipe=setup.recipe(variant),
            directory=folder,
            seed=seed,
            device=setup.device,
            precision=setup.run.precision,
            resume=setup.options.resume is not None,
            objective=objective,
            train_last=setup.count_trained_blocks(variant),
            on_progress=on_progress,
        )
        try:
            result = train(task)
        except NonFiniteError:
            seconds = np.array(time.monotonic() - start)
            correct = _guesses(setup.test)
            return replace(blank, correct=correct, finite=np.array(False), seconds=seconds)
    speeds = [epoch.images_per_second for epoch in result.history]
    validated = []
    if setup.validation is not None:  # else the test images are in its place: see the task
        validated = [epoch for epoch in result.history if epoch.test_accuracy is not None]
    return replace(
        blank,
        correct=_correct_after_training(setup, variant, model, seed),
        epochs=np.array([epoch.epochs for epoch in validated], int),
        validation=np.array([epoch.test_accuracy for epoch in validated], float),
        seconds=np.array(float(result.seconds)),
        images_per_second=np.array(float(np.median(speeds))),
        steps=np.array(result.history[-1].step),
    )


def _guesses(test: Split) -> Flags:
    """Return which test images are of the first class: those that a constant answer gets right."""
    assert test.labels is not None
    first_class: Flags = (test.labels == 0).cpu().numpy()
    return first_class


def _title(setup: Setup, variant: Variant, seed: int) -> str:
    """Return the title of a training's progress."""
    number = setup.variants.index(variant) + 1
    seed_number = setup.seeds.index(seed) + 1
    return (
        f"variant {number} of {len(setup.variants)}, {variant.words}, seed {seed_number} of "
        f"{len(setup.seeds)}"
    )


def _objective(
    setup: Setup, variant: Variant, images: Split, seed: int
) -> StandardObjective | Pretraining:
    """Return the objective of a variant; a teacher computes its outputs on the images now."""
    if variant.teacher:
        teacher = setup.load_trained(variant.teacher, seed=seed)
        distillation = _DISTILLATION if variant.labels else _WITHOUT_LABELS
        objective = objective_of(teacher, distillation, images.classes, setup.run.precision)
        views = cacheable_views(setup.recipe(variant), images)
        compute_outputs(objective, images, views=views, quiet=setup.run.quiet)
        return objective
    pretraining = setup.pretraining(variant)
    return StandardObjective() if pretraining is None else pretraining


def _correct_after_training(setup: Setup, variant: Variant, model: Model, seed: int) -> Flags:
    """Return which test images are classified correctly, by a probe in a study of pretraining."""
    if setup.kind.extra == "pretraining":
        trained = setup.load_trained(variant.label, seed=seed)
        return probe_frozen(setup, trained, seed=seed)
    correct: Flags = evaluate(model, setup.test, batch_size=setup.run.batch_size).correct.numpy()
    return correct
