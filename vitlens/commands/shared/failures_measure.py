"""Measuring why models fail: the rows and arrays of shared/failures.py, as fields of a record."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from vitlens.analysis.failures.covariates import Subject, covariate_rows
from vitlens.analysis.failures.diagnosis import Diagnosis, diagnose, planned, predictions
from vitlens.analysis.failures.interventions import CHANGES, Pictures
from vitlens.analysis.failures.properties import causes
from vitlens.commands.run.progress import progress
from vitlens.commands.shared.failures import CovariateArrays, MendedArrays

EXAMPLES: Final = 3  # errors that a change mends, shown beside their control
_TRIED: Final = 100  # errors among which examples are looked for


def failure_fields(subjects: Sequence[Subject], *, quiet: bool) -> dict[str, Any]:
    """The tables and arrays of one or of two models' failures, as keyword arguments of a record."""
    rows = covariate_rows(subjects)
    passes = sum(2 * len(subject.split) * len(planned(subject, rows)) for subject in subjects)
    with progress("changing images", passes, quiet=quiet or not passes) as advance:
        found = diagnose(subjects, advance=advance)
    values = {
        subject.evaluation.alias: CovariateArrays(
            {name: own.cpu().float().numpy() for name, own in subject.values.items()},
            subject.evaluation.correct.cpu().numpy(),
        )
        for subject in subjects
    }
    examples = {subject.evaluation.alias: own for subject in subjects if (own := _examples(subject, found)) is not None}
    return {
        "covariates": found.covariates,
        "covariate_differences": found.differences,
        "quarters": found.quarters,
        "interventions": found.interventions,
        "covariate_values": values,
        "failure_examples": examples,
    }


def _examples(subject: Subject, found: Diagnosis) -> MendedArrays | None:
    """Errors that the change of the model's first cause mends and its control does not."""
    evaluation = subject.evaluation
    first = causes(evaluation.alias, found.covariates, found.interventions)[:1]
    for row, _ in first:
        wrong = (~evaluation.correct).nonzero().flatten()[:_TRIED]
        after = CHANGES[row.covariate](Pictures(subject, wrong), planned(subject, found.covariates)[row.covariate])
        told = torch.stack([evaluation.predictions[wrong], *(predictions(subject, images) for images in after)])
        right = told == evaluation.labels[wrong]
        chosen = (right[1] & ~right[2]).nonzero().flatten()[:EXAMPLES]
        if len(chosen):
            names, pictures = np.array(evaluation.classes), Pictures(subject, wrong[chosen])
            before, changed, control = (
                (255 * each.clamp(0, 1)).round().byte().cpu().numpy()
                for each in (pictures.images, after.changed[chosen], after.control[chosen])
            )
            return MendedArrays(
                wrong[chosen].numpy(), before, changed, control,
                names[evaluation.labels[wrong[chosen]].numpy()], names[told[:, chosen].numpy()],
            )  # fmt: skip
    return None
