"""The failures of the audited model by category, with their causal tests."""

import time
from typing import Final

import torch

from vitlens.analysis.answers.evaluate import evaluate
from vitlens.analysis.failures.causal import Subject, sample_of
from vitlens.analysis.failures.diagnosis import cells_for
from vitlens.attribution.explain import explain, preferred_method
from vitlens.commands.audit.record import FAILURE_MAPS, FailureMapRow
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.shared.failures.measure import write_failures
from vitlens.data.split import Split
from vitlens.models.model import Model

MAPPED: Final = 200  # images with maps: half of them misclassified, where there are so many


def write_own_failures(folder: RunFolder, model: Model, split: Split, run: RunOptions) -> float:
    """Write the categories, the causal tests and the examples; returns the seconds that this took."""
    start = time.monotonic()
    evaluation = evaluate(model, split, batch_size=run.batch_size, precision=run.precision)
    wrong = sample_of(~evaluation.correct, None, seed=run.seed, most=MAPPED // 2)
    right = sample_of(evaluation.correct, None, seed=run.seed, most=MAPPED - len(wrong))
    indices, method = torch.cat([wrong, right]), preferred_method(model)
    maps = explain(model, split.pick(indices), method=method, batch_size=run.batch_size, seed=run.seed)
    values = maps.detach().float().cpu()
    subject = Subject(
        model, split, evaluation, cells_for(model, split, values, indices),
        precision=run.precision, batch_size=run.batch_size, seed=run.seed,
    )  # fmt: skip
    write_failures(folder, [subject], [(indices, values)], given={}, quiet=run.quiet)
    folder.write(FAILURE_MAPS, [FailureMapRow(model.alias, method)])
    return time.monotonic() - start
