"""`vitlens stats --over-training`: the statistics with the weights that a run kept, on one seeded choice of images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import parse_model
from vitlens.processes import Processes, share_of
from vitlens.training.checkpoint import Kept, weights_over_training
from vitlens.uncertainty import Estimate

IMAGES = 200  # of those asked for, with the weights of each moment
MOMENTS = 50  # of those kept; more make no clearer curve, and a film that is long to wait for
ARRAYS = "learning"


@dataclass(frozen=True)
class Moment:
    """After so many epochs: statistics of every head, and how alike positions are by offset (None: none learned)."""

    epochs: int
    table: Statistics
    similarity: Float[Tensor, "down across"] | None


def kept_of(models: Sequence[str]) -> tuple[Kept, ...]:
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


def over_training(
    kept: Sequence[Kept], split: Split, processes: Processes, options: RunOptions, *, renormalise: bool
) -> tuple[Moment, ...]:
    """Every moment's statistics, or MOMENTS evenly spaced ones with the first and last, on at most IMAGES images."""
    images = share_of(split.limit(IMAGES, seed=options.seed), processes)
    places = np.linspace(0, len(kept) - 1, min(len(kept), MOMENTS)).round().astype(int)
    found = []
    with progress("Watching heads over training", len(places), unit="moments", quiet=options.quiet) as advance:
        for one in (kept[place] for place in places):
            model = load(f"epoch-{one.epochs}={one.file}", device=processes.device)
            stream = Stream(model, renormalise=renormalise)
            for batch in images.batches(options.batch_size or fitting_batch_size(model), device=model.device):
                with autocast(model.device, options.precision):
                    stream.add(batch.images)
            stream.join(processes.total)
            found.append(Moment(one.epochs, stream.result(), similarity_by_offset(model)))
            advance(1)
    return tuple(found)


def similarity_by_offset(model: Model) -> Float[Tensor, "down across"] | None:
    """Mean cosine similarity of all pairs of position embeddings by offset, (2 rows - 1, 2 columns - 1); None where
    none are learned."""
    similarity = position_similarity(model)
    if similarity is None:
        return None
    grid = model.layout.grid
    return offset_sums(similarity.double().cpu(), grid) / offset_counts(grid)


def keep_learning(folder: RunFolder, moments: Sequence[Moment]) -> None:
    """Means over heads as metrics, every head in a table, and the arrays that figures are drawn from."""
    measured = {name for name, _ in moments[-1].table.moments.sums}
    chosen = [name for name in shown_in("training") if name in measured]
    for moment in moments:
        for name in chosen:
            folder.metric(f"learning/{name}/{moment.epochs}", _mean_of_heads(moment.table, name))
    folder.table("learning", [row for moment in moments for row in _rows(moment, chosen)])
    arrays: dict[str, Any] = {"epochs": np.array([moment.epochs for moment in moments])}
    for name in chosen:
        for end, read in (("", Statistics.__getattr__), ("_low", Statistics.low), ("_high", Statistics.high)):
            arrays[name + end] = torch.stack([read(moment.table, name) for moment in moments]).numpy()
    arrays["uniform_distance"] = moments[-1].table.uniform_distance().numpy()
    maps = [moment.similarity for moment in moments if moment.similarity is not None]
    if len(maps) == len(moments):
        arrays["similarity"] = torch.stack(maps).numpy()
        folder.table("positions", [_order(moment.epochs, one) for moment, one in zip(moments, arrays["similarity"])])
    folder.arrays(ARRAYS, **arrays)


def near(similarity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of maps (moments, 2 rows - 1, 2 columns - 1) by offset the offsets within half the grid: beyond, pairs are few
    and their mean is noise."""
    rows, columns = ((side + 1) // 2 for side in similarity.shape[1:])
    down, across = rows // 2, columns // 2
    return similarity[:, rows - 1 - down : rows + down, columns - 1 - across : columns + across]


def _mean_of_heads(table: Statistics, name: str) -> Estimate:
    key, unit = (name, 0), STATISTICS[name].unit
    value, half = float(table.overall.mean(key)[0]), float(table.overall.half_width(key)[0])
    if not np.isfinite(half):
        return Estimate(value, n=table.images, unit=unit)
    return Estimate(value, value - half, value + half, table.images, unit)


def _rows(moment: Moment, chosen: Sequence[str]) -> Iterator[Mapping[str, object]]:
    for site in moment.table.sites:
        for head in range(site.heads):
            values = {name: float(getattr(moment.table, name)[site.layer, head]) for name in chosen}
            known = {name: round(value, 6) if np.isfinite(value) else None for name, value in values.items()}
            yield {"epochs": moment.epochs, "layer": site.layer, "head": head, **known}


def _order(epochs: int, similarity: Any) -> dict[str, object]:
    """How much more alike neighbours are than other pairs: means over offsets, each weighed by its pairs."""
    down, across = (side // 2 for side in similarity.shape)
    counts = offset_counts((down + 1, across + 1)).numpy()
    rows, columns = np.indices(similarity.shape)
    apart = np.hypot(rows - down, columns - across)
    found: dict[str, object] = {"epochs": epochs}
    for name, which in (("neighbours", apart == 1), ("others", apart > 1)):
        found[name] = float(np.average(similarity[which], weights=counts[which])) if which.any() else None
    return found
