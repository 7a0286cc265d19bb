"""Records of models with planted answers: the correct images of each, and its confidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.compare import compare_evaluations
from vitlens.commands.compare.predictions import prediction_record
from vitlens.commands.compare.record import AgreementRow, CompareRecord, MapRow
from vitlens.commands.evaluate.measure import build_record
from vitlens.commands.evaluate.record import EvaluateRecord
from vitlens.commands.shared.choice import NEEDS, Need
from vitlens.record import Config, Data, ModelEntry
from vitlens.uncertainty import Estimate

NAMES = ("ant", "<b>*bee*</b>", "`cat`", "dog", "eel")


@dataclass(frozen=True)
class Answers:
    """Image i is predicted as predicted[i] with confidence[i].

    labels: of the images, the same for all models.
    groups: of images that share a source, or None.
    """

    confidence: NDArray[np.floating]
    predicted: NDArray[np.integer]
    labels: NDArray[np.integer]
    groups: NDArray[np.integer] | None = None


def needs() -> tuple[Need, ...]:
    """Return the needs for which a model is chosen."""
    return NEEDS


def answers(
    right: NDArray[np.bool_], confidence: NDArray[np.floating] | float = 0.9, *, classes: int = 5
) -> Answers:
    """Return predictions of images, image i of class i modulo `classes`.

    right: which are correct; the others predict the next class.
    """
    labels = np.arange(len(right)) % classes
    predicted = (labels + ~right) % classes
    return Answers(np.broadcast_to(confidence, labels.shape), predicted, labels)


def evaluations(
    models: Mapping[str, Answers], names: Sequence[str]
) -> tuple[list[Evaluation], Config]:
    """Return the evaluation of each model, and the settings of a command on all of them."""
    results = []
    for alias, planted in models.items():
        # all other classes are equally probable
        other_probability = (1 - planted.confidence) / (len(names) - 1)
        probabilities = np.repeat(other_probability[:, None], len(names), axis=1)
        predicted = np.asarray(planted.predicted)[:, None]
        np.put_along_axis(probabilities, predicted, planted.confidence[:, None], axis=1)
        logits = torch.from_numpy(np.log(probabilities)).float()
        labels = torch.from_numpy(np.asarray(planted.labels)).long()
        groups = None if planted.groups is None else torch.from_numpy(np.asarray(planted.groups))
        results.append(Evaluation(alias, tuple(names), logits, labels, groups))
    data = Data("planted", "test", len(results[0].labels), len(names))
    return results, Config(models=tuple(map(ModelEntry, models)), data=data)


def evaluate_record(
    models: Mapping[str, Answers], *, seed: int = 0, names: Sequence[str] = NAMES
) -> EvaluateRecord:
    """Return the record of `vitlens evaluate` for such models."""
    results, config = evaluations(models, names)
    return replace(build_record(results, classes=len(names), seed=seed), config=config)


def compare_record(
    models: Mapping[str, Answers],
    *,
    methods: Sequence[str] = ("relevance", "gradcam"),
    seed: int = 0,
) -> CompareRecord:
    """Return the record of `vitlens compare` for two such models, with maps that agree partly."""
    results, config = evaluations(models, NAMES)
    maps = []
    for alias, method in zip(models, methods):
        maps.append(MapRow(alias, method, around(1.0), around(0.2)))
    agreement = AgreementRow(*models, around(0.3, unit=""), around(0.4), around(0.5), around(-0.2))
    return replace(
        prediction_record(compare_evaluations(*results), seed),
        config=config,
        methods=tuple(maps),
        agreement=(agreement,),
    )


def around(value: float, *, unit: str = "fraction") -> Estimate:
    """Return an estimate with an interval of 0.02."""
    return Estimate(value, value - 0.01, value + 0.01, 200, unit)
