"""`vitlens stats --over-training`: the statistics with the weights that a run kept, on one seeded sample of images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.attention.positions import position_similarity
from vitlens.analysis.heads.geometry import offset_counts, offset_sums
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.analysis.heads.statistics import Stream
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.run import Run
from vitlens.commands.stats.record import EpochRow, HeadEpochRow, PositionArrays
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import parse_model
from vitlens.processes import share_of
from vitlens.training.checkpoint import KeptWeights, weights_over_training
from vitlens.uncertainty import Estimate

IMAGES: Final = 200  # at most, the same for all checkpoints
CHECKPOINTS: Final = 50  # at most: more would not make the curves clearer


def kept_weights(models: Sequence[str]) -> tuple[KeptWeights, ...]:
    """The weights that one run kept, and its final ones. Raises InputError where it kept none."""
    if len(models) != 1:
        raise InputError(f"expected one run for --over-training, found {len(models)} models")
    folder = Path(parse_model(models[0]).name)
    checkpoints = weights_over_training(folder) if folder.is_dir() else ()
    if len(checkpoints) < 2:
        raise InputError(
            f"expected a run that kept its weights for --over-training, found {len(checkpoints) or 'none'} kept in "
            f"{models[0]}; train one with vitlens train PRESET --keep-every N"
        )
    return checkpoints


def over_training(
    weights: Sequence[KeptWeights], run: Run[Any], *, renormalise: bool
) -> tuple[tuple[EpochRow, ...], tuple[HeadEpochRow, ...], PositionArrays | None]:
    """Rows of all checkpoints, or of CHECKPOINTS evenly spaced ones with the first and last, on at most IMAGES images;
    and the similarity of their position embeddings, None where they are not learned."""
    if not weights:
        return (), (), None
    limited = run.split.limit(IMAGES, seed=run.run.seed)
    images = share_of(limited, run.processes)
    chosen = np.linspace(0, len(weights) - 1, min(len(weights), CHECKPOINTS)).round().astype(int)
    epochs, heads, maps = [], [], []
    with progress("Statistics over training", len(chosen), unit="checkpoints", quiet=run.run.quiet) as advance:
        for kept in (weights[place] for place in chosen):
            model = load(f"epoch-{kept.epochs}={kept.file}", device=run.processes.device)
            stream = Stream(model, renormalise=renormalise, evidence=False, groups=limited.groups)
            for batch in images.batches(run.run.batch_size or fitting_batch_size(model), device=model.device):
                with autocast(model.device, run.run.precision):
                    stream.add(batch.images, numbers=run.numbers(batch))
            stream.join(run.processes.total)
            found, similarity = stream.result(), similarity_by_offset(model)
            names = [name for name in shown_in("training") if (name, 0) in found.overall.sums]
            means = {}
            for name in names:
                value, half = (float(read((name, 0))[0]) for read in (found.overall.mean, found.overall.half_width))
                low, high = (value - half, value + half) if np.isfinite(half) else (None, None)
                means[name] = Estimate(value, low, high, found.overall.count, STATISTICS[name].unit)
            near = (None, None) if similarity is None else by_distance(similarity.numpy())
            epochs.append(EpochRow(run.aliases[0], kept.epochs, means, *near))
            values = {name: getattr(found, name) for name in names}
            for site in found.sites:
                for head in range(site.heads):
                    every = {name: float(table[site.layer, head]) for name, table in values.items()}
                    finite = {name: value for name, value in every.items() if np.isfinite(value)}
                    heads.append(HeadEpochRow(kept.epochs, site.layer, head, finite))
            maps += [] if similarity is None else [similarity]
            advance(1)
    positions = PositionArrays(torch.stack(maps).numpy()) if len(maps) == len(epochs) else None
    return tuple(epochs), tuple(heads), positions


def similarity_by_offset(model: Model) -> Float[Tensor, "down across"] | None:
    """Mean cosine similarity of all pairs of position embeddings by offset, (2 rows - 1, 2 columns - 1); None where
    they are not learned."""
    similarity = position_similarity(model)
    if similarity is None:
        return None
    grid = model.layout.grid
    return offset_sums(similarity.double().cpu(), grid) / offset_counts(grid)


def by_distance(similarity: NDArray[np.floating]) -> tuple[float | None, float | None]:
    """The similarity of neighbours and of other pairs: means over offsets, each weighted by its number of pairs."""
    down, across = (side // 2 for side in similarity.shape)
    counts = offset_counts((down + 1, across + 1)).numpy()
    rows, columns = np.indices(similarity.shape)
    apart = np.hypot(rows - down, columns - across)
    near, far = (
        float(np.average(similarity[which], weights=counts[which])) if which.any() else None
        for which in (apart == 1, apart > 1)
    )
    return near, far
