"""What a study of points writes down: accuracies over seeds, differences, sizes, costs and paces."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.answers.seeds import accuracy_over_seeds, difference_over_seeds
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.runs.study_kinds import Kind, Point
from vitlens.runs.study_trial import Trial
from vitlens.uncertainty import holm

POINTS = "points"


def keep(folder: RunFolder, kind: Kind, trials: Mapping[str, Sequence[Trial]], *, seed: int) -> None:
    """Write what was found; trials: of each point by its label, one a seed from `seed` on."""
    correct = {label: np.stack([trial.correct for trial in found]) for label, found in trials.items()}
    for label, table in correct.items():
        folder.metric(f"accuracy/{label}", accuracy_over_seeds(table))
    folder.table(POINTS, [_row(point, trials[point.label]) for point in kind.points])
    folder.table("trials", [row for label, found in trials.items() for row in _rows(label, found, seed)])
    first, *others = kind.points
    _compare(folder, "differences", [(point.label, point.against or first.label) for point in others], correct)
    if kind.steps:
        labels = [point.label for point in kind.points]
        _compare(folder, "steps", list(zip(labels[1:], labels[:-1])), correct)
    folder.arrays("correct", **correct)


def _row(point: Point, trials: Sequence[Trial]) -> dict[str, object]:
    """A point's size, cost and pace; paces are medians over seeds, which a busy machine moves less than means."""
    one = trials[0]
    return {
        "label": point.label,
        "words": point.words,
        "preset": point.preset,
        "place": point.place,
        "parameters": one.parameters,
        "flops": one.flops,
        "steps": one.steps,
        "train_images": one.train_images,
        "images_per_second": float(np.median([trial.images_per_second for trial in trials])),
        "seconds": float(np.median([trial.seconds for trial in trials])),
    }


def _rows(label: str, trials: Sequence[Trial], seed: int) -> list[dict[str, object]]:
    """Each training of a point by itself."""
    return [
        {
            "label": label,
            "seed": seed + turn,
            "accuracy": float(trial.correct.mean()),
            "seconds": trial.seconds,
            "images_per_second": trial.images_per_second,
        }
        for turn, trial in enumerate(trials)
    ]


def _compare(
    folder: RunFolder, name: str, pairs: Sequence[tuple[str, str]], correct: Mapping[str, NDArray[np.bool_]]
) -> None:
    """Keep the paired differences of these points, their p-values corrected for their number."""
    found = [difference_over_seeds(correct[label], correct[other]) for label, other in pairs]
    corrected = holm([difference.p for difference in found])
    rows = []
    for (label, other), difference, p_holm in zip(pairs, found, corrected):
        folder.metric(f"{name.removesuffix('s')}/{label}", difference.estimate)
        rows.append({"label": label, "against": other, "p": difference.p, "p_holm": p_holm})
    folder.table(name, rows)
