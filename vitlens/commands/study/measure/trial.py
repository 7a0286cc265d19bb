"""One point of a study trained with one seed in its own folder; it is done once its result is written."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens.analysis.answers.evaluate import evaluate
from vitlens.analysis.cost.flops import flops_by_part
from vitlens.archives import Form, require_forms
from vitlens.commands.run.options import RunOptions
from vitlens.commands.study.kinds import Point
from vitlens.data.shares import images_in, share_of
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.files import read_arrays, write_arrays
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.schema import Between, Count, read_as
from vitlens.training import checkpoint
from vitlens.training.bookkeeping import BEST_FILE
from vitlens.training.loop import fit
from vitlens.training.metrics import Progress
from vitlens.training.recipe import Recipe, fitted, override, recipe_for, with_batch_size

RESULT = "result.npz"
_FIELDS = ("seconds", "images_per_second", "steps", "train_images", "parameters", "flops")

ShownProgress = AbstractContextManager[Callable[[Progress], None]]


@dataclass(frozen=True)
class Trial:
    """The result of one training.

    correct: (n,) whether each test image is classified correctly; seconds: of training, evaluations included;
    images_per_second: of training alone, the median over epochs; train_images: number of distinct ones; flops: of one
    image's forward pass.
    """

    correct: NDArray[np.bool_]
    seconds: float
    images_per_second: float
    steps: int
    train_images: int
    parameters: int
    flops: int


@dataclass(frozen=True)
class _TrialNumbers:
    """The numbers of a trial, as read from its file."""

    seconds: Annotated[float, Between(0, 1e10)]
    images_per_second: Annotated[float, Between(0, 1e12)]
    steps: Count
    train_images: Count
    parameters: Count
    flops: Count


@dataclass(frozen=True)
class StudySetup:
    """The settings of all trainings of a study: the points, the images, the epochs, the size of the input, and the
    options."""

    points: tuple[Point, ...]
    data: str
    train: Split
    test: Split
    epochs: int
    image_size: tuple[int, int] | None
    device: torch.device
    options: RunOptions

    def model(self, point: Point, *, seed: int) -> Model:
        """The point's untrained model. Raises InputError, naming the point, for one that cannot be built."""
        try:
            return untrained(
                point.preset,
                classes=self.train.classes,
                image_size=self.image_size,
                seed=seed,
                alias=point.label,
                overrides=point.shape,
            )
        except InputError as error:
            raise InputError(f"the point {point.words!r} cannot be built: {error}") from error

    def recipe(self, point: Point) -> Recipe:
        """The point's recipe: the preset's for this data, with the study's epochs and one evaluation at the end.

        Without stochastic depth, which would confound the number of blocks. All points have the smallest batch size
        that any of their recipes has for so many images, so that all are trained for as many steps; --batch-size sets
        another.
        """
        own = self._own_recipe(point)
        if self.options.batch_size is not None:
            return override(own, {"batch_size": self.options.batch_size})
        sizes = [fitted(self._own_recipe(other), len(self.train)).batch_size for other in self.points]
        return with_batch_size(own, min(sizes))

    def _own_recipe(self, point: Point) -> Recipe:
        changes = {"epochs": self.epochs, "evaluate_every": self.epochs, "drop_path": 0.0, **point.recipe}
        return override(recipe_for(point.preset, self.data), changes)

    def images(self, point: Point, *, seed: int) -> Split:
        """The training images of the point."""
        return self.train if point.share is None else share_of(self.train, point.share, seed=seed)


def run_trial(
    setup: StudySetup, point: Point, folder: Path, *, seed: int, resume: bool, progress: ShownProgress
) -> Trial:
    """Train a point with a seed in its folder, or read the result that an earlier run finished there.

    resume: use a finished result, or continue from a checkpoint. The weights stay in the folder, the checkpoint does
    not.
    """
    trial = read_trial(folder / RESULT, images=len(setup.test)) if resume else None
    if trial is None:
        trial = _trained(setup, point, folder, seed=seed, resume=resume, progress=progress)
        write_trial(folder / RESULT, trial)
    remove_spare(folder)
    return trial


def remove_spare(folder: Path) -> None:
    """Remove what a finished training no longer needs; where a run was killed before this, the next run does it."""
    shutil.rmtree(folder / checkpoint.FOLDER, ignore_errors=True)
    for spare in (folder / BEST_FILE, *folder.glob(".*-*.safetensors"), *folder.glob(".result-*.npz")):
        spare.unlink(missing_ok=True)  # the second copy of the weights, and unfinished files of a killed run


def _trained(
    setup: StudySetup, point: Point, folder: Path, *, seed: int, resume: bool, progress: ShownProgress
) -> Trial:
    model = setup.model(point, seed=seed).to(setup.device)
    images = setup.images(point, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    with progress as on_progress:
        result = fit(
            model,
            images,
            setup.test,
            recipe=setup.recipe(point),
            directory=folder,
            seed=seed,
            device=setup.device,
            precision=setup.options.precision,
            resume=resume,
            on_progress=on_progress,
        )
    answers = evaluate(model, setup.test, batch_size=setup.options.batch_size)
    return Trial(
        correct=answers.correct.numpy(),
        seconds=result.seconds,
        images_per_second=float(np.median([epoch.images_per_second for epoch in result.history])),
        steps=result.history[-1].step,
        train_images=len(setup.train) if point.share is None else images_in(setup.train, point.share),
        parameters=model.parameter_count(),
        flops=sum(flops_by_part(model).values()),
    )


def write_trial(path: Path, trial: Trial) -> None:
    """Write a finished result."""
    write_arrays(path, {"correct": trial.correct, **{name: np.array(getattr(trial, name)) for name in _FIELDS}})


def read_trial(path: Path, *, images: int) -> Trial | None:
    """A finished result, or None where there is none. Raises InputError where it is of other images."""
    if not path.is_file():
        return None
    arrays = read_arrays(path)
    require_forms(arrays, {"correct": Form("b", (None,)), **dict.fromkeys(_FIELDS, Form("iuf"))}, path)
    if len(arrays["correct"]) != images:
        raise InputError(
            f"expected the {len(arrays['correct'])} test images of {path}, found {images}; "
            "resume with the data that the study began with"
        )
    numbers = read_as(
        _TrialNumbers,
        {name: arrays[name].item() for name in _FIELDS},
        source=str(path),
        hint="begin anew without --resume",
    )
    return Trial(correct=arrays["correct"].astype(bool), **vars(numbers))
