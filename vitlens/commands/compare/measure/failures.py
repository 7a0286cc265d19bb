"""Failures of both models by category, on the maps of the sample and of further misclassified images."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, Evaluation, fitting_batch_size
from vitlens.analysis.failures.causal import Subject, sample_of
from vitlens.analysis.failures.diagnosis import cells_for
from vitlens.analysis.failures.errors import Comparison
from vitlens.analysis.failures.rules import doubtful
from vitlens.analysis.faithfulness.resampled import AnyMaps
from vitlens.attribution.explain import explain
from vitlens.commands.compare.measure.maps import Maps
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.shared.failures.measure import write_failures
from vitlens.data.split import Split
from vitlens.models.model import Model

MAPPED_FAILURES: Final = 100  # misclassified images of each model with maps, where the sample holds fewer


def write_diagnoses(
    folder: RunFolder,
    models: Sequence[Model],
    splits: Sequence[Split],
    methods: Sequence[str],
    evaluated: Sequence[Evaluation],
    comparison: Comparison,
    maps: Maps,
    *,
    target: str,
    options: RunOptions,
) -> None:
    """Write the categories, causal tests and examples of both models.

    maps: those of the comparison, which are used where they explain the predicted class (`target`).
    """
    subjects, both = [], []
    for model, split, method, evaluation, values in zip(models, splits, methods, evaluated, (maps.first, maps.second)):
        sampled = maps.indices[maps.sampled]
        further = _further_failures(evaluation, sampled, seed=options.seed)
        if split.masks is None:  # only examples need maps then
            further = further[:0]
        indices = torch.cat([sampled, further])
        if target == "predicted":
            own = torch.cat([values[maps.sampled], *_maps(model, split, method, further, options)])
        else:
            own = torch.cat(_maps(model, split, method, indices, options))
        both.append((indices, own))
        subjects.append(
            Subject(
                model, split, evaluation, cells_for(model, split, own, indices),
                precision=options.precision, batch_size=options.batch_size, seed=options.seed,
            )
        )  # fmt: skip
    write_failures(folder, subjects, both, given={"doubtful label": doubtful(comparison)}, quiet=options.quiet)


def _further_failures(evaluation: Evaluation, sampled: Tensor, *, seed: int) -> Tensor:
    """Misclassified images outside the sample, at random, so that with it there are MAPPED_FAILURES."""
    wrong = ~evaluation.correct
    missing = MAPPED_FAILURES - int(wrong[sampled].sum())
    outside = wrong.clone()
    outside[sampled] = False
    return sample_of(outside, None, seed=seed, most=max(0, missing))


def _maps(model: Model, split: Split, method: str, indices: Tensor, options: RunOptions) -> list[AnyMaps]:
    """Maps of the predicted class of the images at these indices."""
    if not len(indices):
        return []
    size = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
    parts = []
    with progress(f"{method} of {model.alias} on failures", len(indices), quiet=options.quiet) as advance:
        for batch in split.pick(indices).batches(size, device=model.device):
            maps = explain(model, batch.images, method=method, seed=options.seed)
            parts.append(maps.detach().float().cpu())
            advance(len(maps))
    return parts
