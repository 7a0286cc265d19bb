"""What `vitlens compare` writes down: metrics, tables and arrays, from which figures and words are made."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import Evaluation, accuracy, calibration
from vitlens.analysis.answers.separation import Separation, corrected, separations
from vitlens.analysis.failures.errors import CELLS, Comparison, Slice, by_class, by_number, confusions
from vitlens.analysis.failures.image_traits import MEASURES, OBJECT_SIZE
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.runs.compare_keep_maps import LOOKS
from vitlens.runs.compare_maps import Looks, Maps
from vitlens.uncertainty import Estimate

TRAITS = {**{name: measure.title for name, measure in MEASURES.items()}, OBJECT_SIZE: "object size"}


def keep_answers(folder: RunFolder, comparison: Comparison, evaluations: Sequence[Evaluation], *, seed: int) -> None:
    """Accuracy, difference, McNemar, calibration; the cells, by class; the confusions."""
    first, second = comparison.first.alias, comparison.second.alias
    for alias, estimate in zip((first, second), comparison.accuracies(seed=seed)):
        folder.metric(f"accuracy/{alias}", estimate)
    n = len(comparison.labels)
    folder.metric(f"accuracy_difference/{first}/{second}", comparison.difference(seed=seed))
    folder.metric(f"mcnemar_p/{first}/{second}", Estimate(comparison.p, n=n, unit=""))
    rows = []
    for evaluation in evaluations:
        bins = calibration(evaluation.probabilities, evaluation.labels)
        folder.metric(f"calibration_error/{evaluation.alias}", Estimate(bins.error, n=n))
        for confidence, right, count in zip(bins.confidence.tolist(), bins.accuracy.tolist(), bins.count.tolist()):
            rows.append({"model": evaluation.alias, "confidence": confidence, "accuracy": right, "count": count})
    folder.table("calibration", rows)
    for index, cell in enumerate(CELLS):
        share = accuracy(comparison.cells == index, groups=comparison.groups, seed=seed)
        folder.metric(f"cell/{word_of(cell)}", share)
    folder.table("by_class", [_row(part) for part in by_class(comparison, seed=seed)])
    folder.table("confusions", [asdict(pair) for pair in confusions(comparison)])


def keep_numbers(folder: RunFolder, comparison: Comparison, traits: Mapping[str, Tensor], *, seed: int) -> None:
    """Cells and accuracies in quarters of every number that images have: traits, confidences and margins."""
    numbers = {TRAITS[name]: values for name, values in traits.items()}
    for model in (comparison.first, comparison.second):
        numbers[f"confidence of {model.alias}"] = model.confidence
        numbers[f"margin of {model.alias}"] = model.margin
    folder.table(
        "by_number",
        [
            {"number": name, **_row(part)}
            for name, values in numbers.items()
            for part in by_number(comparison, values, seed=seed)
        ],
    )


def keep_separations(
    folder: RunFolder,
    comparison: Comparison,
    traits: Mapping[str, Tensor],
    attention: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
    maps: Maps,
    found: Looks,
) -> None:
    """What tells each model's failures from its successes; all tests together are corrected (Holm).

    attention: for each model the indices of the images measured, and the statistics of those.
    """
    tests: list[tuple[str, str, Separation]] = []
    models = (comparison.first, comparison.second)
    for model, (indices, statistics), looking in zip(models, attention, (found.first, found.second)):
        usable = looking.usable & maps.sampled
        shown = maps.indices[usable]
        of_maps = {LOOKS[name]: getattr(looking, name) for name in LOOKS if getattr(looking, name) is not None}
        kinds = (
            ("image", torch.arange(len(model.correct)), {TRAITS[name]: values for name, values in traits.items()}),
            ("attention", indices, statistics),
            ("map", shown, {name: values[usable] for name, values in of_maps.items()}),
        )
        for kind, members, numbers in kinds:
            groups = None if comparison.groups is None else comparison.groups[members]
            tests += [(model.alias, kind, one) for one in separations(numbers, model.correct[members], groups=groups)]
    adjusted = corrected([one for *_, one in tests])
    folder.table(
        "separations",
        [
            {
                "model": alias,
                "kind": kind,
                "number": one.name,
                "area": one.area.value,
                "low": one.area.low,
                "high": one.area.high,
                "failures": one.failures,
                "successes": one.successes,
                "median_failure": one.median_failure,
                "median_success": one.median_success,
                "p": one.p,
                "p_holm": one.p_holm,
            }
            for (alias, kind, _), one in zip(tests, adjusted)
        ],
    )


def _row(part: Slice) -> dict[str, object]:
    ends = {
        f"{name}_{key}": value
        for name, found in (("first", part.first), ("second", part.second))
        for key, value in (("accuracy", found.value), ("low", found.low), ("high", found.high))
    }
    bounds = {} if part.low is None else {"from": round(part.low, 6), "to": round(float(part.high or 0), 6)}
    return {"name": part.name, "n": part.n, **bounds, **part.counts, **ends}


def word_of(cell: str) -> str:
    """A cell's name as a part of a metric's: "both-wrong-alike"."""
    return cell.replace(",", "").replace(" ", "-")
