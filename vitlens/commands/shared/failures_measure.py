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

EXAMPLES: Final = 3  # errors that a change corrects, shown next to their control
_TRIED: Final = 100  # errors among which examples are looked for


@phase("Why images are misclassified")
def failure_fields(subjects: Sequence[Subject], *, quiet: bool) -> dict[str, Any]:
    """Return the tables and arrays of one or of two models' failures, as keyword arguments of a
    record.
    """
    diagnosis = diagnose(subjects, progress=partial(progress, "changing images", quiet=quiet))
    return {
        "covariates": diagnosis.covariates,
        "covariate_differences": diagnosis.differences,
        "quarters": diagnosis.quarters,
        "interventions": diagnosis.interventions,
        "failure_examples": _examples(subjects, diagnosis),
    }


def _examples(subjects: Sequence[Subject], diagnosis: Diagnosis) -> Mapping[str, MendedArrays]:
    """Return errors that a change of each model's first cause corrects, and its control not."""
    examples = {}
    for subject in subjects:
        evaluation = subject.evaluation
        model_causes = causes(evaluation.alias, diagnosis.covariates, diagnosis.interventions)
        for row in [cause.row for cause in model_causes if cause.test is not None][:1]:
            wrong = (~evaluation.correct).nonzero().flatten()[:_TRIED]
            labels = evaluation.labels[wrong]
            pictures = Pictures(subject, wrong)
            variants = (pictures.images, *CHANGES[row.covariate](pictures, row.sign))
            predictions_of_changed = [predictions(subject, variant) for variant in variants[1:]]
            predicted = torch.stack([evaluation.predictions[wrong], *predictions_of_changed])
            is_example = (predicted[1] == labels) & (predicted[2] != labels)
            chosen = is_example.nonzero().flatten()[:EXAMPLES]
            if len(chosen):
                names = np.array(evaluation.classes)
                before, changed, control = (
                    (255 * variant[chosen].clamp(0, 1)).round().byte().cpu().numpy()
                    for variant in variants
                )
                examples[evaluation.alias] = MendedArrays(
                    wrong[chosen].numpy(),
                    before,
                    changed,
                    control,
                    names[labels[chosen].numpy()],
                    names[predicted[:, chosen].numpy()],
                )
    return examples
