"""Measure why models fail: the fields of a `FailuresRecord`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.failures.changes import CHANGES, Pictures
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.diagnosis import Diagnosis, diagnose, predictions
from vitlens.analysis.failures.rows import CovariateRow, causes
from vitlens.commands.run.progress import phase, progress
from vitlens.commands.shared.failures_record import MendedArrays

EXAMPLES: Final = 3  # errors of each model that a change corrects, shown next to their control
_MOST_TRIED: Final = 100  # errors of each model that are changed to find examples


@phase("Why images are misclassified")
def failure_fields(subjects: Sequence[Subject], *, quiet: bool) -> dict[str, Any]:
    """Return the tables and arrays of one or two models' failures, as fields of a record."""
    diagnosis = diagnose(subjects, progress=partial(progress, "changing images", quiet=quiet))
    return {
        "covariates": diagnosis.covariates,
        "covariate_differences": diagnosis.differences,
        "quarters": diagnosis.quarters,
        "interventions": diagnosis.interventions,
        "failure_examples": _examples(subjects, diagnosis),
    }


def _examples(subjects: Sequence[Subject], diagnosis: Diagnosis) -> Mapping[str, MendedArrays]:
    """Return examples of each model that has a cause which a change tests, by alias."""
    examples_by_model = {}
    for subject in subjects:
        alias = subject.evaluation.alias
        model_causes = causes(alias, diagnosis.covariates, diagnosis.interventions)
        tested_rows = [cause.row for cause in model_causes if cause.test is not None]
        if tested_rows:
            examples = _examples_of_cause(subject, tested_rows[0])
            if examples is not None:
                examples_by_model[alias] = examples
    return examples_by_model


def _examples_of_cause(subject: Subject, cause: CovariateRow) -> MendedArrays | None:
    """Return errors that the change of a cause corrects and its control does not; None if none."""
    evaluation = subject.evaluation
    wrong = (~evaluation.correct).nonzero().flatten()[:_MOST_TRIED]  # indices of images
    labels = evaluation.labels[wrong]
    pictures = Pictures(subject, wrong)
    before = pictures.images
    changed, control = CHANGES[cause.covariate](pictures, cause.sign)
    after_change = predictions(subject, changed)
    after_control = predictions(subject, control)
    is_example = (after_change == labels) & (after_control != labels)
    chosen = is_example.nonzero().flatten()[:EXAMPLES]  # indices into `wrong`
    if not len(chosen):
        return None
    predicted = torch.stack([evaluation.predictions[wrong], after_change, after_control])
    names = np.array(evaluation.classes)
    return MendedArrays(
        image=wrong[chosen].numpy(),
        pixels=_bytes_of(before[chosen]),
        changed=_bytes_of(changed[chosen]),
        control=_bytes_of(control[chosen]),
        truth=names[labels[chosen].numpy()],
        predictions=names[predicted[:, chosen].numpy()],
    )


def _bytes_of(images: Tensor) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = (255 * images.clamp(0, 1)).round().byte().cpu().numpy()
    return pixels
