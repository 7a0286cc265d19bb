"""Measuring why models fail: the rows and arrays of shared/failures.py, as fields of a record."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from vitlens.analysis.failures.changes import CHANGES, Pictures
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.diagnosis import Diagnosis, diagnose, predictions
from vitlens.analysis.failures.rows import causes
from vitlens.commands.run.progress import phase, progress
from vitlens.commands.shared.failures import MendedArrays

EXAMPLES: Final = 3  # errors that a change mends, shown beside their control
_TRIED: Final = 100  # errors among which examples are looked for


@phase("Why images are misclassified")
def failure_fields(subjects: Sequence[Subject], *, quiet: bool) -> dict[str, Any]:
    """Return the tables and arrays of one or of two models' failures, as keyword arguments of a
    record.
    """
    found = diagnose(subjects, progress=partial(progress, "changing images", quiet=quiet))
    return {
        "covariates": found.covariates,
        "covariate_differences": found.differences,
        "quarters": found.quarters,
        "interventions": found.interventions,
        "failure_examples": _examples(subjects, found),
    }


def _examples(subjects: Sequence[Subject], found: Diagnosis) -> Mapping[str, MendedArrays]:
    """Errors that the change of each model's first cause mends and its control does not."""
    examples = {}
    for subject in subjects:
        evaluation = subject.evaluation
        named = causes(evaluation.alias, found.covariates, found.interventions)
        for row in [cause.row for cause in named if cause.test is not None][:1]:
            wrong = (~evaluation.correct).nonzero().flatten()[:_TRIED]
            labels = evaluation.labels[wrong]
            pictures = Pictures(subject, wrong)
            shown = (pictures.images, *CHANGES[row.covariate](pictures, row.sign))
            told = torch.stack(
                [evaluation.predictions[wrong], *(predictions(subject, each) for each in shown[1:])]
            )
            chosen = ((told[1] == labels) & (told[2] != labels)).nonzero().flatten()[:EXAMPLES]
            if len(chosen):
                names = np.array(evaluation.classes)
                before, changed, control = (
                    (255 * each[chosen].clamp(0, 1)).round().byte().cpu().numpy() for each in shown
                )
                examples[evaluation.alias] = MendedArrays(
                    wrong[chosen].numpy(),
                    before,
                    changed,
                    control,
                    names[labels[chosen].numpy()],
                    names[told[:, chosen].numpy()],
                )
    return examples
