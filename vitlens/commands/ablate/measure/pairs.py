"""Which heads have similar outputs, and what the most important heads cost two by two."""

from collections.abc import Iterator

import numpy as np
import torch

from vitlens.analysis.ablation.importance import Importance
from vitlens.analysis.ablation.pairs import Pairs, Redundancy, RedundancyStream, Synergy, pairwise, synergy
from vitlens.analysis.ablation.replacements import MeanOutputs
from vitlens.commands.ablate.measure.removal import CURVED
from vitlens.commands.ablate.measure.work import AblationRun, finite
from vitlens.commands.ablate.record import PAIRS, REDUNDANCY, REDUNDANCY_ARRAYS
from vitlens.commands.ablate.record.arrays import RedundancyArrays
from vitlens.commands.ablate.record.rows import HeadPairRow, RedundancyRow
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress import progress


def head_redundancy(ablation: AblationRun) -> Redundancy:
    """The similarity of the outputs of any two heads."""
    stream = RedundancyStream(ablation.model)
    for batch in ablation.batches(torch.arange(len(ablation.split))[:CURVED]):
        stream.add(batch.images)
    stream.join(ablation.processes.total)
    return stream.result()


def head_synergy(ablation: AblationRun, importance: Importance, means: MeanOutputs | None) -> Synergy:
    """The most important heads removed two by two."""
    top = importance.ranking("head")[: max(2, ablation.options.pairs)]
    chosen = torch.arange(len(ablation.split))[:CURVED]
    total = len(ablation.share(chosen)) * len(top) * (len(top) + 1) // 2
    parts = []
    with progress("Removing pairs of heads", total, unit="removals", quiet=ablation.run.quiet) as advance:
        for batch in ablation.batches(chosen):
            parts.append(
                pairwise(
                    ablation.model, batch.images, batch.labels, top, replace=ablation.replacement, means=means,
                    donors=batch.donors, seed=ablation.run.seed, offset=batch.offset,
                    advance=lambda pairs: advance(pairs * len(batch.images)),  # noqa: B023
                )
            )  # fmt: skip
    pairs = Pairs.join(parts)
    gathered = Pairs(pairs.units, pairs.pairs, pairs.outcomes.gathered(ablation.processes))
    return synergy(gathered, groups=ablation.groups(chosen), seed=ablation.run.seed)


def write_pairs(folder: RunFolder, redundancy: Redundancy | None, pairs: Synergy | None) -> None:
    """Write similarities and synergies; no rows of what was not measured."""
    folder.write(REDUNDANCY, [] if redundancy is None else [RedundancyRow(redundancy.images, len(redundancy.units))])
    if redundancy is not None:
        units = np.array([unit.name for unit in redundancy.units])
        layers = np.array([unit.layer for unit in redundancy.units])
        folder.save(REDUNDANCY_ARRAYS, RedundancyArrays(units, layers, redundancy.matrix.numpy()))
    folder.write(PAIRS, [] if pairs is None else _rows(pairs))


def _rows(pairs: Synergy) -> Iterator[HeadPairRow]:
    change = pairs.change
    for index, (one, two) in enumerate(pairs.pairs):
        yield HeadPairRow(
            first=pairs.units[one].name,
            second=pairs.units[two].name,
            both=float(pairs.both[index]),
            synergy=float(change.mean[index]),
            low=finite(change.low[index]),
            high=finite(change.high[index]),
            p_holm=finite(change.p_holm[index]),
            n=pairs.n,
        )
