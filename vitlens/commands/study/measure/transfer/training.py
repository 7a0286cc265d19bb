"""The trainings of a transfer study: every regime on all images, some on fewer, each with several seeds."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitlens.analysis.answers.evaluate import evaluate
from vitlens.analysis.cost.flops import flops_by_part
from vitlens.commands.run.progress.training import training_progress
from vitlens.commands.study.measure.transfer.setup import TransferSetup, place_of, trainings
from vitlens.commands.study.measure.trial import RESULT, Trial, read_trial, remove_spare, write_trial
from vitlens.commands.study.transfer.regimes import DISTILLED, FROZEN, FULL, REGIMES, Regime
from vitlens.data.shares import share_of
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.training.distill import CachedTeacher, Distillation, DistillationObjective, Teacher, cacheable_views
from vitlens.training.head import fit_head
from vitlens.training.loop import fit
from vitlens.training.metrics import TrainingResult
from vitlens.training.recipe import Recipe
from vitlens.training.speed import choose

# Of a teacher trained on the same images, whose predictions on them are the labels: its probabilities say more.
HOW: Final = Distillation(kind="soft", weight=0.5, token=False)
Done = Mapping[tuple[Regime, float], tuple[Trial, ...]]  # by regime and share, one trial a seed


def train_all(setup: TransferSetup, path: Path, *, resume: bool) -> Done:
    """All trials; finished ones of an earlier attempt are read from the folder."""
    points = [*((regime, 1.0) for regime in REGIMES), *trainings(setup)]
    done = {}
    for number, (regime, share) in enumerate(points, start=1):
        what = regime.words if share == 1 else f"{regime.words} on {share:.0%} of the images"
        description = f"training {number} of {len(points)}, {what}"
        done[regime, share] = tuple(_trials(setup, regime, share, path, description, resume=resume))
    return done


def _trials(
    setup: TransferSetup, regime: Regime, share: float, path: Path, description: str, *, resume: bool
) -> Iterator[Trial]:
    for turn, seed in enumerate(setup.seeds, start=1):
        folder = place_of(path, regime, seed=seed, share=None if share == 1 else share)
        trial = read_trial(folder / RESULT, images=len(setup.test)) if resume else None
        if trial is None:
            folder.mkdir(parents=True, exist_ok=True)
            images = setup.train if share == 1 else share_of(setup.train, share, seed=seed)
            model = setup.begin(regime, seed=seed)
            told = f"{description}, seed {turn} of {len(setup.seeds)}"
            result = _fit(setup, regime, model, images, path, folder, told, seed=seed, resume=resume)
            trial = _trial(setup, model, result, images=round(share * len(setup.train)))
            write_trial(folder / RESULT, trial)
        remove_spare(folder)
        yield trial


def _fit(
    setup: TransferSetup,
    regime: Regime,
    model: Model,
    images: Split,
    path: Path,
    folder: Path,
    description: str,
    *,
    seed: int,
    resume: bool,
) -> TrainingResult:
    """Train a regime's model in its folder."""
    recipe = setup.recipe(regime)
    with training_progress(description, quiet=setup.options.quiet) as on_progress:
        common: dict[str, Any] = {
            "recipe": recipe,
            "directory": folder,
            "seed": seed,
            "device": setup.device,
            "precision": setup.options.precision,
            "resume": resume,
            "on_progress": on_progress,
        }
        if regime == FROZEN:
            return fit_head(model, images, setup.test, **common)
        objective = None
        if regime == DISTILLED:
            objective = _objective(setup, setup.trained(path, FULL, seed=seed), images, recipe)
        last = setup.trained_last(regime)
        return fit(model, images, setup.test, **common, objective=objective, train_last=last)


def _objective(setup: TransferSetup, full: Model, images: Split, recipe: Recipe) -> DistillationObjective:
    """Learning from the labels and from the fully trained model, whose outputs are computed once where possible."""
    precision = choose(setup.device, precision=setup.options.precision, compiling="off", steps=1).precision
    teacher = Teacher(full, classes=setup.train.classes, precision=precision)
    identity = {**asdict(HOW), "teacher": teacher.identity()}
    views = cacheable_views(recipe, images)
    if not views:
        return DistillationObjective(teacher, HOW, identity=identity)
    cached = CachedTeacher(teacher)
    cached.remember(images, mirrored=views == 2, device=setup.device)
    return DistillationObjective(cached, HOW, identity=identity)


def _trial(setup: TransferSetup, model: Model, result: TrainingResult, *, images: int) -> Trial:
    answers = evaluate(model, setup.test, batch_size=setup.options.batch_size)
    return Trial(
        correct=answers.correct.numpy(),
        seconds=result.seconds,
        images_per_second=float(np.median([epoch.images_per_second for epoch in result.history])),
        steps=result.history[-1].step,
        train_images=images,
        parameters=model.parameter_count(),
        flops=sum(flops_by_part(model).values()),
    )
