"""All models on common corruptions, and mean corruption errors."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitlens.analysis.failures.common_corruptions import Corrupted, on_corrupted
from vitlens.analysis.failures.corruptions import CORRUPTIONS, SEVERITIES
from vitlens.commands.attack.measure.sweep import ModelAttack
from vitlens.commands.attack.record import (
    CORRUPTED,
    CORRUPTION_ACCURACY,
    CORRUPTION_KINDS,
    MEAN_CORRUPTION_ERROR,
    MEAN_ERROR,
    RELATIVE_ERROR,
)
from vitlens.commands.attack.record.rows import CorruptionKindRow, CorruptionRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.errors import UnknownNameError
from vitlens.models.model import Model
from vitlens.processes import share_of


def baseline_of(models: Sequence[Model], alias: str | None) -> str:
    """The alias of the model that mean corruption errors are relative to: as given, else the first CNN, else the first.

    Raises UnknownNameError for a model that is not among them.
    """
    aliases = [model.alias for model in models]
    if alias is not None:
        if alias not in aliases:
            raise UnknownNameError("model for --baseline", alias, aliases)
        return alias
    return next((model.alias for model in models if model.anatomy.family == "cnn"), aliases[0])


def on_corruptions(works: Sequence[ModelAttack]) -> list[Corrupted]:
    """Each model on all kinds at all severities, each process on its share of the images; nothing with
    --no-corruptions. With --predicted, an image counts as correct where its prediction stays the same."""
    if not works[0].options.corruptions:
        return []
    return [_on_corruptions(work) for work in works]


def _on_corruptions(work: ModelAttack) -> Corrupted:
    split, processes = work.split, work.processes
    if work.options.predicted:
        split = replace(split, labels=work.labels.cpu(), classes=work.model.classes)
    share = share_of(split, processes)
    keys = torch.arange(processes.index, len(work.split), processes.count) + (work.run.seed << 20)
    total = len(share) * len(CORRUPTIONS) * len(SEVERITIES)
    with progress(f"{work.model.alias} on corruptions", total, quiet=work.run.quiet) as advance:
        part = on_corrupted(
            work.model, share, keys=keys, batch_size=work.run.batch_size, precision=work.run.precision, advance=advance
        )
    whole = processes.gathered(part).permute(1, 2, 0).contiguous()
    return Corrupted(work.model.alias, whole, work.split.groups)


def write_corruptions(
    folder: RunFolder, corrupted: Sequence[Corrupted], clean: Sequence[Tensor], *, baseline: str, seed: int
) -> None:
    """Accuracy by kind and severity, mean errors, and for several models mean corruption errors.

    clean: of each model, which clean images it classifies correctly.
    """
    rows = []
    for of_model, right in zip(corrupted, clean):
        for kind in CORRUPTIONS:
            for severity in SEVERITIES:
                estimate = of_model.accuracy(kind, severity, seed=seed)
                folder.metric(CORRUPTION_ACCURACY(model=of_model.alias, kind=kind, severity=severity), estimate)
                count = of_model.correct.shape[-1]
                rows.append(
                    CorruptionRow(of_model.alias, kind, severity, estimate.value, estimate.low, estimate.high, count)
                )
        folder.metric(MEAN_ERROR(model=of_model.alias), of_model.mean_error(seed=seed))
        over_clean = of_model.over_clean(right, seed=seed)
        if over_clean is not None:
            folder.metric(RELATIVE_ERROR(model=of_model.alias), over_clean)
    if len(corrupted) > 1:
        _write_relative_errors(folder, corrupted, baseline=baseline, seed=seed)
    folder.write(CORRUPTED, rows)
    kinds = [
        CorruptionKindRow(name, kind.title, kind.description, kind.strengths) for name, kind in CORRUPTIONS.items()
    ]
    folder.write(CORRUPTION_KINDS, kinds if corrupted else [])


def _write_relative_errors(folder: RunFolder, corrupted: Sequence[Corrupted], *, baseline: str, seed: int) -> None:
    """Mean corruption errors, where the baseline makes errors of every kind."""
    (reference,) = (of_model for of_model in corrupted if of_model.alias == baseline)
    for of_model in corrupted:
        relative = of_model.relative_error(reference, seed=seed)
        if relative is not None:
            folder.metric(MEAN_CORRUPTION_ERROR(model=of_model.alias, baseline=baseline), relative)
