"""`vitlens stats --over-training`: the statistics with the weights that a run kept, on one seeded choice of images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.attention.weights import position_similarity
from vitlens.analysis.heads.geometry import offset_counts, offset_sums
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.analysis.heads.statistics import Statistics, Stream
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.commands.stats.measure.estimates import estimate_of, finite
from vitlens.commands.stats.record import (
    MEAN_IN_TRAINING,
    POSITIONS,
    TRAINING,
    TRAINING_ARRAYS,
    HeadMomentRow,
    PositionMomentRow,
    TrainingArrays,
)
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import parse_model
from vitlens.processes import Processes, share_of
from vitlens.training.checkpoint import KeptWeights, weights_over_training

IMAGES: Final = 200  # of those asked for, with the weights of each moment
MOMENTS: Final = 50  # of those kept; more make no clearer curve, and a film that is long to wait for


@dataclass(frozen=True)
class Moment:
    """After so many epochs: statistics of every head, and the similarity of positions by offset (None where none are
    learned)."""

    epochs: int
    table: Statistics
    similarity: Float[Tensor, "down across"] | None


def kept_weights(models: Sequence[str]) -> tuple[KeptWeights, ...]:
    """The weights that one run kept, and its last ones. Raises InputError where there are none."""
    if len(models) != 1:
        raise InputError(f"expected one run for --over-training, found {len(models)} models")
    folder = Path(parse_model(models[0]).name)
    kept = weights_over_training(folder) if folder.is_dir() else ()
    if len(kept) < 2:
        raise InputError(
            f"expected a run that kept its weights for --over-training, found {len(kept) or 'none'} kept in "
            f"{models[0]}; train one with vitlens train PRESET --keep-every N"
        )
    return kept


def statistics_over_training(
    kept: Sequence[KeptWeights], split: Split, processes: Processes, run: RunOptions, *, renormalise: bool
) -> tuple[Moment, ...]:
    """Every moment's statistics, or MOMENTS evenly spaced ones with the first and last, on at most IMAGES images."""
    images = share_of(split.limit(IMAGES, seed=run.seed), processes)
    places = np.linspace(0, len(kept) - 1, min(len(kept), MOMENTS)).round().astype(int)
    moments = []
    with progress("Statistics over training", len(places), unit="moments", quiet=run.quiet) as advance:
        for one in (kept[place] for place in places):
            model = load(f"epoch-{one.epochs}={one.file}", device=processes.device)
            stream = Stream(model, renormalise=renormalise)
            for batch in images.batches(run.batch_size or fitting_batch_size(model), device=model.device):
                with autocast(model.device, run.precision):
                    stream.add(batch.images)
            stream.join(processes.total)
            moments.append(Moment(one.epochs, stream.result(), similarity_by_offset(model)))
            advance(1)
    return tuple(moments)


def similarity_by_offset(model: Model) -> Float[Tensor, "down across"] | None:
    """Mean cosine similarity of all pairs of position embeddings by offset, (2 rows - 1, 2 columns - 1); None where
    none are learned."""
    similarity = position_similarity(model)
    if similarity is None:
        return None
    grid = model.layout.grid
    return offset_sums(similarity.double().cpu(), grid) / offset_counts(grid)


def as_training_arrays(moments: Sequence[Moment]) -> TrainingArrays | None:
    """What figures and film are drawn from; None without moments."""
    if not moments:
        return None
    tables, names = [moment.table for moment in moments], _statistics_shown(moments)
    maps = [moment.similarity for moment in moments if moment.similarity is not None]
    return TrainingArrays(
        epochs=np.array([moment.epochs for moment in moments]),
        mean={name: torch.stack([getattr(table, name) for table in tables]).numpy() for name in names},
        low={name: torch.stack([table.low(name) for table in tables]).numpy() for name in names},
        high={name: torch.stack([table.high(name) for table in tables]).numpy() for name in names},
        uniform_distance=tables[-1].uniform_distance().numpy(),
        similarity=torch.stack(maps).numpy() if len(maps) == len(moments) else None,
    )


def write_training(folder: RunFolder, alias: str, moments: Sequence[Moment], arrays: TrainingArrays | None) -> None:
    """Means over heads as metrics, every head in a table, and the arrays; empty tables without moments."""
    names = _statistics_shown(moments)
    for moment in moments:
        for name in names:
            estimate = estimate_of(moment.table.overall, (name, 0), 0, STATISTICS[name].unit)
            folder.metric(MEAN_IN_TRAINING(model=alias, statistic=name, epochs=moment.epochs), estimate)
    folder.write(TRAINING, [row for moment in moments for row in _rows(moment, names)])
    similarity = None if arrays is None else arrays.similarity
    maps = () if similarity is None else similarity
    folder.write(POSITIONS, [_by_distance(moment.epochs, one) for moment, one in zip(moments, maps)])
    if arrays is not None:
        folder.save(TRAINING_ARRAYS, arrays)


def _statistics_shown(moments: Sequence[Moment]) -> list[str]:
    """Of the statistics that are shown over training, those that the model has."""
    measured = {name for moment in moments[-1:] for name, _ in moment.table.moments.sums}
    return [name for name in shown_in("training") if name in measured]


def _rows(moment: Moment, names: Sequence[str]) -> Iterator[HeadMomentRow]:
    values = {name: getattr(moment.table, name) for name in names}
    for site in moment.table.sites:
        for head in range(site.heads):
            numbers = {name: finite(one[site.layer, head]) for name, one in values.items()}
            yield HeadMomentRow(moment.epochs, site.layer, head, numbers)


def _by_distance(epochs: int, similarity: NDArray[np.floating]) -> PositionMomentRow:
    """Similarity of neighbours and of other pairs: means over offsets, each weighted by its number of pairs."""
    down, across = (side // 2 for side in similarity.shape)
    counts = offset_counts((down + 1, across + 1)).numpy()
    rows, columns = np.indices(similarity.shape)
    apart = np.hypot(rows - down, columns - across)
    means = [
        float(np.average(similarity[which], weights=counts[which])) if which.any() else None
        for which in (apart == 1, apart > 1)
    ]
    return PositionMomentRow(epochs, *means)
