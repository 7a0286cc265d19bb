"""Measuring why models fail: the rows and arrays of shared/failures.py, as fields of a record."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.failures.covariates import Subject, covariate_rows, covariates
from vitlens.analysis.failures.diagnosis import EXAMPLES, Diagnosis, diagnose, planned, predictions
from vitlens.analysis.failures.interventions import CHANGES, Pictures
from vitlens.analysis.failures.properties import causes
from vitlens.commands.run.progress import progress
from vitlens.commands.shared.failures import CovariateArrays, MendedArrays

_TRIED = 100  # errors among which examples are looked for


def failure_fields(subjects: Sequence[Subject], *, quiet: bool) -> dict[str, Any]:
    """The tables and arrays of one or of two models' failures, as keyword arguments of a record."""
    values = [covariates(subject) for subject in subjects]
    changes = list(planned(subjects, covariate_rows(list(zip(subjects, values)))))
    passes = 2 * sum(len(subject.split) for subject, *_ in changes)
    with progress("changing images", passes, quiet=quiet or not passes) as advance:
        found = diagnose(subjects, values=values, advance=advance)
    return {
        "covariates": found.covariates,
        "covariate_differences": found.differences,
        "quarters": found.quarters,
        "interventions": found.interventions,
        "covariate_values": {
            subject.evaluation.alias: CovariateArrays(
                {name: own.cpu().float().numpy() for name, own in values_of.items()},
                subject.evaluation.correct.cpu().numpy(),
            )
            for subject, values_of in zip(subjects, values)
        },
        "failure_examples": _examples(subjects, found),
    }


def _examples(subjects: Sequence[Subject], found: Diagnosis) -> Mapping[str, MendedArrays]:
    """Errors that the change of each model's first cause mends and its control does not."""
    examples = {}
    for subject in subjects:
        evaluation = subject.evaluation
        for row, _ in causes(evaluation.alias, found.covariates, found.interventions)[:1]:
            wrong = (~evaluation.correct).nonzero().flatten()[:_TRIED]
            after = CHANGES[row.covariate](Pictures(subject, wrong), -1 if row.area.value > 0.5 else 1)
            answers = [predictions(subject, images) for images in after]
            labels = evaluation.labels[wrong]
            chosen = ((answers[0] == labels) & (answers[1] != labels)).nonzero().flatten()[:EXAMPLES]
            if not len(chosen):
                continue
            before = next(iter(subject.split.pick(wrong[chosen]).batches(len(chosen)))).images
            told = [evaluation.predictions[wrong], *answers]
            examples[evaluation.alias] = MendedArrays(
                wrong[chosen].numpy(), _pixels(before), _pixels(after.changed[chosen]), _pixels(after.control[chosen]),
                np.array([evaluation.classes[label] for label in labels[chosen].tolist()]),
                np.array([[evaluation.classes[label] for label in each[chosen].tolist()] for each in told]),
            )  # fmt: skip
    return examples


def _pixels(images: Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.asarray((255 * images.clamp(0, 1)).round().to(torch.uint8).cpu().numpy())
