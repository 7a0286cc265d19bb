"""The accuracies of the regimes, their differences, convergence, and how training from scratch catches up."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.answers.seeds import accuracy_over_seeds, difference_over_seeds
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.study.measure.points import write_comparisons
from vitlens.commands.study.measure.transfer.setup import TransferSetup, place_of
from vitlens.commands.study.measure.transfer.training import Done
from vitlens.commands.study.record import (
    ACCURACY,
    CORRECT,
    DIFFERENCE,
    DIFFERENCES,
    RECIPES,
    TRIALS,
    CorrectArrays,
    PointSettingRow,
    TrialRow,
)
from vitlens.commands.study.transfer.record import (
    CURVES,
    REACHED_ROWS,
    REGIME_ROWS,
    SHARE_GAPS,
    SHARE_ROWS,
    CurveRow,
    ReachedRow,
    RegimeRow,
    ShareGapRow,
    ShareRow,
)
from vitlens.commands.study.transfer.regimes import (
    BY_SHARE,
    DISTILLED,
    FROZEN,
    FULL,
    LAST,
    REACHED,
    REGIMES,
    SCRATCH,
    Regime,
)
from vitlens.training.finetune import trained_share
from vitlens.training.metrics import read_metrics
from vitlens.uncertainty import holm

PAIRS: Final = (
    (FULL, SCRATCH), (FROZEN, SCRATCH), (LAST, SCRATCH), (DISTILLED, SCRATCH), (FULL, FROZEN), (FULL, LAST),
)  # fmt: skip


def write_results(folder: RunFolder, setup: TransferSetup, done: Done) -> None:
    """Write all that the predictions on the test images and the training logs say."""
    correct = {key: np.stack([trial.correct for trial in trials]) for key, trials in done.items()}
    whole = {regime.label: correct[regime, 1.0] for regime in REGIMES}
    for label, table in whole.items():
        folder.metric(ACCURACY(model=label), accuracy_over_seeds(table))
    folder.save(CORRECT, CorrectArrays(dict(enumerate(whole.values()))))
    folder.write(TRIALS, [row for regime in REGIMES for row in _trial_rows(setup, regime, done)])
    pairs = [(first.label, second.label) for first, second in PAIRS]
    write_comparisons(folder, DIFFERENCES, DIFFERENCE, pairs, whole)
    folder.write(REGIME_ROWS, [_regime_row(setup, regime, done) for regime in REGIMES])
    folder.write(RECIPES, [row for regime in REGIMES for row in _recipe_rows(setup, regime)])
    curves = [row for regime in REGIMES for row in _curve(setup, regime, folder.path)]
    folder.write(CURVES, curves)
    folder.write(REACHED_ROWS, list(reached(curves)))
    folder.write(SHARE_ROWS, list(_share_rows(setup, correct)))
    folder.write(SHARE_GAPS, [row for regime in (FULL, FROZEN) for row in _share_gaps(setup, regime, correct)])


def _trial_rows(setup: TransferSetup, regime: Regime, done: Done) -> Iterator[TrialRow]:
    for seed, trial in zip(setup.seeds, done[regime, 1.0], strict=True):
        yield TrialRow(regime.label, seed, float(trial.correct.mean()), trial.seconds, trial.images_per_second)


def _regime_row(setup: TransferSetup, regime: Regime, done: Done) -> RegimeRow:
    """Size, settings and time of a regime; seconds are medians over seeds, robust to a busy machine."""
    trials, recipe = done[regime, 1.0], setup.recipe(regime)
    trained, whole = trained_share(setup.start(), last=setup.trained_last(regime))
    before = float(np.median([trial.seconds for trial in done[FULL, 1.0]])) if regime == DISTILLED else 0.0
    words = f"{recipe.optimiser}, learning rate {recipe.learning_rate:g}, batches of {recipe.batch_size}"
    seconds = float(np.median([trial.seconds for trial in trials]))
    return RegimeRow(regime.label, trained, whole, recipe.epochs, trials[0].steps, words, seconds, before)


def _recipe_rows(setup: TransferSetup, regime: Regime) -> list[PointSettingRow]:
    recipe = setup.recipe(regime)
    numbers = {**recipe.numbers(), "source": recipe.source}
    return [PointSettingRow(regime.label, setting, str(value)) for setting, value in numbers.items()]


def _curve(setup: TransferSetup, regime: Regime, path: Path) -> Iterator[CurveRow]:
    """The epochs of a regime's trainings, from their metrics.jsonl."""
    for seed in setup.seeds:
        for epoch in read_metrics(place_of(path, regime, seed=seed)):
            assert epoch.test_accuracy is not None  # tested after every epoch
            yield CurveRow(
                regime.label, seed, epoch.epoch + 1, epoch.seconds, epoch.train_loss, float(epoch.test_accuracy)
            )


def reached(curves: Sequence[CurveRow]) -> Iterator[ReachedRow]:
    """When each regime's mean accuracy over seeds first reached REACHED times the best mean of all regimes."""
    means = {label: _means([row for row in curves if row.label == label]) for label in _labels(curves)}
    wanted = REACHED * max(accuracy for points in means.values() for _, _, accuracy in points)
    for label, points in means.items():
        first = next(((epochs, seconds) for epochs, seconds, accuracy in points if accuracy >= wanted), (None, None))
        yield ReachedRow(label, wanted, *first)


def _labels(curves: Sequence[CurveRow]) -> list[str]:
    return list(dict.fromkeys(row.label for row in curves))


def _means(rows: Sequence[CurveRow]) -> list[tuple[int, float, float]]:
    """Epochs done, mean seconds and mean accuracy over seeds."""
    by_epoch: dict[int, list[CurveRow]] = {}
    for row in rows:
        by_epoch.setdefault(row.epochs, []).append(row)
    return [
        (epochs, float(np.mean([row.seconds for row in same])), float(np.mean([row.accuracy for row in same])))
        for epochs, same in sorted(by_epoch.items())
    ]


Correct = Mapping[tuple[Regime, float], NDArray[np.bool_]]


def _share_rows(setup: TransferSetup, correct: Correct) -> Iterator[ShareRow]:
    """Accuracy of each regime that was trained on several shares, by share."""
    for regime in BY_SHARE:
        for share in shares_in(correct):
            own = accuracy_over_seeds(correct[regime, share])
            images = round(share * len(setup.train))
            yield ShareRow(regime.label, share, images, own.value, own.low, own.high)


def shares_in(correct: Correct) -> list[float]:
    """The shares that were measured, in order."""
    return sorted({share for _, share in correct})


def _share_gaps(setup: TransferSetup, regime: Regime, correct: Correct) -> Iterator[ShareGapRow]:
    """How much better a regime is than training from scratch on the same images, by share."""
    shares = shares_in(correct)
    gaps = [difference_over_seeds(correct[regime, share], correct[SCRATCH, share]) for share in shares]
    for share, gap, corrected in zip(shares, gaps, holm([gap.p for gap in gaps]), strict=True):
        own, images = gap.estimate, round(share * len(setup.train))
        yield ShareGapRow(regime.label, share, images, own.value, own.low, own.high, gap.p, corrected)
