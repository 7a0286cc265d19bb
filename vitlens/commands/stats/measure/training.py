"""`vitlens stats --over-training`: the statistics with the weights that a run kept, on one seeded sample of images, and
their animation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.attention.positions import position_similarity
from vitlens.analysis.heads.geometry import offset_counts, offset_sums
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.analysis.heads.statistics import Statistics, Stream
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.stats.measure.estimates import estimate_of, finite
from vitlens.commands.stats.record import (
    ANIMATION,
    MEAN_IN_TRAINING,
    POSITIONS,
    TRAINING,
    TRAINING_ARRAYS,
    HeadCheckpointRow,
    PositionCheckpointRow,
    TrainingArrays,
)
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.figures.stats.animation import training_animation
from vitlens.figures.stats.training import near_offsets
from vitlens.files import write_atomically
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import parse_model
from vitlens.names import AnimationFormat
from vitlens.processes import Processes, share_of
from vitlens.training.checkpoint import KeptWeights, weights_over_training

IMAGES: Final = 200  # at most, the same for all checkpoints
CHECKPOINTS: Final = 50  # at most: more would not make the curves clearer, and the animation would take long to write
_PANELS: Final = 2  # of statistics, in the animation
_DOTS_PER_INCH: Final = 110
_SECONDS: Final = 12.0  # duration of the animation, within _RATES
_RATES: Final = (2, 8)  # frames per second, lowest and highest


@dataclass(frozen=True)
class CheckpointStatistics:
    """Statistics of every head with the weights of one checkpoint. epochs: those done at it; similarity: of the
    position embeddings by offset, None where they are not learned."""

    epochs: int
    table: Statistics
    similarity: Float[Tensor, "down across"] | None


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


def statistics_over_training(
    weights: Sequence[KeptWeights], split: Split, processes: Processes, run: RunOptions, *, renormalise: bool
) -> tuple[CheckpointStatistics, ...]:
    """The statistics of all checkpoints, or of CHECKPOINTS evenly spaced ones with the first and last, on IMAGES images
    at most."""
    limited = split.limit(IMAGES, seed=run.seed)
    images = share_of(limited, processes)
    places = np.linspace(0, len(weights) - 1, min(len(weights), CHECKPOINTS)).round().astype(int)
    checkpoints = []
    with progress("Statistics over training", len(places), unit="checkpoints", quiet=run.quiet) as advance:
        for kept in (weights[place] for place in places):
            model = load(f"epoch-{kept.epochs}={kept.file}", device=processes.device)
            stream = Stream(model, renormalise=renormalise, evidence=False, groups=limited.groups)
            for batch in images.batches(run.batch_size or fitting_batch_size(model), device=model.device):
                with autocast(model.device, run.precision):
                    stream.add(batch.images, numbers=processes.index + batch.indices * processes.count)
            stream.join(processes.total)
            checkpoints.append(CheckpointStatistics(kept.epochs, stream.result(), similarity_by_offset(model)))
            advance(1)
    return tuple(checkpoints)


def similarity_by_offset(model: Model) -> Float[Tensor, "down across"] | None:
    """Mean cosine similarity of all pairs of position embeddings by offset, (2 rows - 1, 2 columns - 1); None where
    they are not learned."""
    similarity = position_similarity(model)
    if similarity is None:
        return None
    grid = model.layout.grid
    return offset_sums(similarity.double().cpu(), grid) / offset_counts(grid)


def as_training_arrays(checkpoints: Sequence[CheckpointStatistics]) -> TrainingArrays | None:
    """The arrays from which figures and animation are drawn; None without checkpoints."""
    if not checkpoints:
        return None
    tables, names = [checkpoint.table for checkpoint in checkpoints], _statistics_shown(checkpoints)
    maps = [checkpoint.similarity for checkpoint in checkpoints if checkpoint.similarity is not None]
    return TrainingArrays(
        epochs=np.array([checkpoint.epochs for checkpoint in checkpoints]),
        mean={name: torch.stack([getattr(table, name) for table in tables]).numpy() for name in names},
        low={name: torch.stack([table.low(name) for table in tables]).numpy() for name in names},
        high={name: torch.stack([table.high(name) for table in tables]).numpy() for name in names},
        uniform_distance=tables[-1].uniform_distance().numpy(),
        similarity=torch.stack(maps).numpy() if len(maps) == len(checkpoints) else None,
    )


def write_training(
    folder: RunFolder, alias: str, checkpoints: Sequence[CheckpointStatistics], arrays: TrainingArrays | None
) -> None:
    """Means over heads as metrics, every head in a table, and the arrays; empty tables without checkpoints."""
    names = _statistics_shown(checkpoints)
    for checkpoint in checkpoints:
        for name in names:
            estimate = estimate_of(checkpoint.table.overall, (name, 0), 0, STATISTICS[name].unit)
            folder.metric(MEAN_IN_TRAINING(model=alias, statistic=name, epochs=checkpoint.epochs), estimate)
    folder.write(TRAINING, [row for checkpoint in checkpoints for row in _rows(checkpoint, names)])
    similarity = None if arrays is None else arrays.similarity
    maps = () if similarity is None else similarity
    folder.write(POSITIONS, [_by_distance(checkpoint.epochs, values) for checkpoint, values in zip(checkpoints, maps)])
    if arrays is not None:
        folder.save(TRAINING_ARRAYS, arrays)


def _statistics_shown(checkpoints: Sequence[CheckpointStatistics]) -> list[str]:
    """The statistics shown over training that the model has."""
    measured = {name for checkpoint in checkpoints[-1:] for name, _ in checkpoint.table.moments.sums}
    return [name for name in shown_in("training") if name in measured]


def _rows(checkpoint: CheckpointStatistics, names: Sequence[str]) -> Iterator[HeadCheckpointRow]:
    values = {name: getattr(checkpoint.table, name) for name in names}
    for site in checkpoint.table.sites:
        for head in range(site.heads):
            numbers = {name: finite(table[site.layer, head]) for name, table in values.items()}
            yield HeadCheckpointRow(checkpoint.epochs, site.layer, head, numbers)


def _by_distance(epochs: int, similarity: NDArray[np.floating]) -> PositionCheckpointRow:
    """The similarity of neighbours and of other pairs: means over offsets, each weighted by its number of
    pairs."""
    down, across = (side // 2 for side in similarity.shape)
    counts = offset_counts((down + 1, across + 1)).numpy()
    rows, columns = np.indices(similarity.shape)
    apart = np.hypot(rows - down, columns - across)
    means = [
        float(np.average(similarity[which], weights=counts[which])) if which.any() else None
        for which in (apart == 1, apart > 1)
    ]
    return PositionCheckpointRow(epochs, *means)


def require_writer(form: AnimationFormat | None) -> None:
    """Raise InputError, which says what to install, where the animation cannot be written."""
    if form == "mp4" and not FFMpegWriter.isAvailable():
        raise InputError("expected ffmpeg for --animate mp4, found none on the PATH; install it, or --animate gif")


def write_film(folder: RunFolder, arrays: TrainingArrays, *, name: str, form: AnimationFormat) -> None:
    """Write the animation of a training, one frame per checkpoint; name: of the model."""
    shown = [statistic for statistic in shown_in("training") if statistic in arrays.mean][:_PANELS]
    animation = training_animation(
        epochs=[int(epoch) for epoch in arrays.epochs],
        values={STATISTICS[statistic].label: arrays.mean[statistic] for statistic in shown},
        similarity=None if arrays.similarity is None else near_offsets(arrays.similarity),
        name=name,
    )
    rate = int(min(max(animation.frames / _SECONDS, _RATES[0]), _RATES[1]))
    path = folder.place(*ANIMATION.format(form=form).split("/"))
    with write_atomically(path) as temporary, matplotlib.rc_context({"savefig.bbox": None}):
        writer = _writer(form, rate)
        with writer.saving(animation.figure, str(temporary), _DOTS_PER_INCH):
            # the last checkpoint is shown for a second
            for frame in [*range(animation.frames), *[animation.frames - 1] * (rate - 1)]:
                animation.show(frame)
                writer.grab_frame()


def _writer(form: AnimationFormat, rate: int) -> AbstractMovieWriter:
    return PillowWriter(fps=rate) if form == "gif" else FFMpegWriter(fps=rate, codec="h264")
