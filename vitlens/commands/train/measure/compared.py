"""`vitlens train MODEL --compare-frozen`: the head alone on cached features, then all weights; one report of both."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.answers.evaluate import Evaluation, accuracy
from vitlens.analysis.answers.pairs import pairs
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.processes import join_run
from vitlens.commands.run.publish import publish, read
from vitlens.commands.shared.budgets import budget_of_run
from vitlens.commands.shared.pairs import PAIRS, PairRow
from vitlens.commands.train.measure.distillation import predictions_of
from vitlens.commands.train.options import RecipeChanges, Shape, TrainOptions
from vitlens.commands.train.plan import TrainPlan
from vitlens.commands.train.record import (
    ACCURACY,
    DIFFERENCE,
    EPOCH_SECONDS,
    HISTORY,
    SECONDS,
    TABLES,
    TEST_ACCURACIES,
    TIMES_TO_ACCURACY,
    TRAININGS,
    WAYS,
    TestAccuracyRow,
    TimeToAccuracyRow,
)
from vitlens.errors import InputError
from vitlens.files import read_run
from vitlens.models.loading import load
from vitlens.models.naming import parse_model
from vitlens.processes import Processes
from vitlens.training.metrics import EpochMetrics
from vitlens.uncertainty import Estimate, accuracy_difference

SHARES: Final = (0.9, 0.95, 0.99)  # of the highest accuracy of the two
Train = Callable[[TrainOptions], Path | None]
_NEW, _BEGUN, _DONE = range(3)


@dataclass(frozen=True)
class WayTrained:
    """One way of training: its epochs, and its predictions on the test images."""

    way: str
    history: tuple[EpochMetrics, ...]
    answers: Evaluation

    @property
    def evaluations(self) -> list[TestAccuracyRow]:
        """The test accuracy at each evaluation."""
        return [
            TestAccuracyRow(self.way, row.epoch + 1, row.seconds, row.test_accuracy)
            for row in self.history
            if row.test_accuracy
        ]


def compare_ways(train: Train, plan: TrainPlan, options: TrainOptions, run: RunOptions) -> Path | None:
    """Train a model's head alone, then all its weights, each with its own folder, and one report of both.

    train: the command's measure. The recipe's settings of the plan are those of the full training; the head alone keeps
    its own. Returns the report, or None in all processes but the first of several.
    """
    processes, run = join_run(run)
    if not processes.is_first:
        for way in WAYS:
            _train_one_way(train, way, options.resume or run.out or Path("runs"), plan, options, run, processes)
        return None
    with _folder(plan, options, run) as folder:
        for way in WAYS:
            _train_one_way(train, way, folder.path, plan, options, run, processes)
        ways = [_read(folder.path / way, way, plan.data, options, run) for way in WAYS]
        for table in TABLES:
            folder.write(table, [])
        folder.write(TRAININGS, [budget_of_run(way, read_run(folder.path / way)) for way in WAYS])
        _write(folder, ways, seed=run.seed)
        return publish(folder)


def _folder(plan: TrainPlan, options: TrainOptions, run: RunOptions) -> RunFolder:
    """The folder of both: new, or that of --resume."""
    if options.resume is not None:
        return RunFolder.reopen(options.resume, needs={})
    alias = parse_model(plan.model).alias
    return RunFolder.create(
        "train",
        name_parts=(alias, plan.data, "compared"),
        title=f"{alias} on {Path(plan.data).name}: frozen against full",
        out=run.out,
        overwrite=run.overwrite,
        config={**settings(replace(options, run=run), run), "plan": asdict(plan)},
        formats=run.formats,
    )


def _train_one_way(
    train: Train,
    way: str,
    parent: Path,
    plan: TrainPlan,
    typed: TrainOptions,
    run: RunOptions,
    processes: Processes,
) -> None:
    """Train in one way: resume it if it has begun, skip it if it is done. The first process decides for all."""
    place = parent / way
    status = _status(place) if processes.is_first and typed.resume is not None else _NEW
    status = int(processes.total(torch.tensor(status)).item())
    if status == _DONE:
        return
    if status == _BEGUN:
        train(TrainOptions(resume=place, model_file=typed.model_file, run=replace(run, out=None)))
        return
    frozen = way == "frozen"
    line = f"vitlens train {plan.model} --data {plan.data}" + (" --freeze-backbone" if frozen else "")
    options = TrainOptions(
        plan.model,
        plan.data,
        tuning=replace(plan.tuning, compare=False, freeze=frozen, views=plan.tuning.views if frozen else None),
        shape=Shape(image_size=plan.image_size, other=plan.shape),
        model_file=typed.model_file,
        run=replace(run, out=place, command=line),
    )
    if not frozen:
        options = replace(
            options,
            recipe=RecipeChanges(plan.named, other=plan.recipe),
            keep_every=plan.keep_every,
            compiling=plan.compiling,
            recompute=plan.recompute,
        )
    train(options)


def _status(place: Path) -> int:
    """Whether one way of training is new, begun or done."""
    if not (place / "results.json").is_file():
        return _NEW
    return _DONE if read_run(place).status == "done" else _BEGUN


def _read(place: Path, way: str, data: str, typed: TrainOptions, run: RunOptions) -> WayTrained:
    """The history of one way, and its model's predictions on the test images. Raises InputError for no epochs."""
    history = read(read_run(place)).rows(HISTORY)
    if not history or not history[-1].images_per_second or not any(row.test_accuracy for row in history):
        raise InputError(f"expected epochs with a test accuracy in {place}, found none; begin anew without --resume")
    model = load(f"{way}={place}", code_files=typed.model_file)
    return WayTrained(way, history, predictions_of(model, data, run))


def _write(folder: RunFolder, ways: Sequence[WayTrained], *, seed: int) -> None:
    """Write accuracies, their paired difference, times, and the time to shares of the best accuracy."""
    best = max(row.accuracy for trained in ways for row in trained.evaluations)
    for trained in ways:
        answers = trained.answers
        folder.metric(ACCURACY(model=trained.way), accuracy(answers.correct, groups=answers.groups, seed=seed))
        folder.metric(SECONDS(model=trained.way), Estimate(trained.evaluations[-1].seconds, unit="s"))
        folder.metric(EPOCH_SECONDS(model=trained.way), Estimate(_seconds_an_epoch(trained.history), unit="s"))
    frozen, full = ways
    both = (trained.answers.correct for trained in (full, frozen))
    difference = accuracy_difference(*both, groups=full.answers.groups, seed=seed)
    folder.metric(DIFFERENCE(first="full", second="frozen"), difference)
    folder.write(PAIRS, [PairRow(**asdict(pair)) for pair in pairs([trained.answers for trained in ways])])
    folder.write(TIMES_TO_ACCURACY, [row for trained in ways for row in _times_to_accuracy(trained, best)])
    folder.write(TEST_ACCURACIES, [row for trained in ways for row in trained.evaluations])


def _seconds_an_epoch(history: Sequence[EpochMetrics]) -> float:
    """The time of the last epoch's training, without evaluations and files."""
    images = history[-1].images - (history[-2].images if len(history) > 1 else 0)
    return float(images / history[-1].images_per_second)


def _times_to_accuracy(trained: WayTrained, best: float) -> Iterator[TimeToAccuracyRow]:
    """When a way first reached each share of the best accuracy of both; None where it never did."""
    for share in SHARES:
        first = next((row for row in trained.evaluations if row.accuracy >= share * best), None)
        epochs, seconds = (None, None) if first is None else (first.epochs, first.seconds)
        yield TimeToAccuracyRow(trained.way, share, share * best, epochs, seconds)
