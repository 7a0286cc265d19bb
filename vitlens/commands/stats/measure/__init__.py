"""Statistics of every head over any number of images, for one model or two, and over a training."""

import sys
from collections.abc import Sequence
from pathlib import Path

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.heads.statistics import Stream
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.publish import publish
from vitlens.commands.stats.measure.differences import write_differences
from vitlens.commands.stats.measure.heads import write_heads
from vitlens.commands.stats.measure.streams import MOST_MODELS, Streams
from vitlens.commands.stats.measure.training import (
    as_training_arrays,
    kept_weights,
    require_writer,
    statistics_over_training,
    write_film,
    write_training,
)
from vitlens.commands.stats.options import NO_LABELS, StatsOptions
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.processes import Processes, share_of

__all__ = ["measure"]


def measure(options: StatsOptions) -> Path | None:
    """Measure every head of one model, or of two on the same images, and write the report; returns its path.

    Of several processes each takes its share of the images; all but the first return None. Raises InputError for more
    than two models, and for a run that kept no weights.
    """
    if options.animate is not None and not options.over_training:
        raise InputError(f"expected --over-training with --animate {options.animate}, found --animate alone; add it")
    require_writer(options.animate)
    checkpoints = kept_weights(options.models) if options.over_training else ()
    if len(options.models) > MOST_MODELS:
        raise InputError(
            f"expected one model, or two to compare, found {len(options.models)}; run vitlens stats for each pair"
        )
    processes, run = join_run(options.run)
    with processes.main_process_first():
        models = load_models(options.models, command="stats", model_options=options.model_options, options=run)
        splits = load_splits(models, options=run, data=options.data, images=options.images)
    if len({len(split) for split in splits}) > 1:
        raise InputError(f"expected the same images for both models, found {[len(split) for split in splits]}")
    streams = Streams(
        [Stream(model, renormalise=options.renormalise, groups=own.groups) for model, own in zip(models, splits)]
    )
    shares, split = [share_of(whole, processes) for whole in splits], splits[0]
    if not processes.is_first:
        _measure_images(streams, shares, processes, run)
        statistics_over_training(checkpoints, split, processes, run, renormalise=options.renormalise)
        return None
    if options.predicted and not run.quiet:
        print(NO_LABELS, file=sys.stderr)  # noqa: T201
    with _folder(options, run, streams, split) as folder:
        _measure_images(streams, shares, processes, run)
        write_heads(folder, {model.alias: stream.result() for model, stream in zip(models, streams.streams)})
        write_differences(folder, streams)
        over_training = statistics_over_training(checkpoints, split, processes, run, renormalise=options.renormalise)
        arrays = as_training_arrays(over_training)
        write_training(folder, models[0].alias, over_training, arrays)
        if options.animate is not None and arrays is not None:
            write_film(folder, arrays, name=models[0].alias, form=options.animate)
        return publish(folder)


def _folder(options: StatsOptions, run: RunOptions, streams: Streams, split: Split) -> RunFolder:
    models = [stream.model for stream in streams.streams]
    aliases = [model.alias for model in models]
    return RunFolder.create(
        "stats",
        name_parts=(*aliases, split.name),
        title=f"Attention heads of {' and '.join(aliases)} on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=models, split=split),
        formats=run.formats,
    )


def _measure_images(streams: Streams, splits: Sequence[Split], processes: Processes, run: RunOptions) -> None:
    """Measure this process's images, and add up the statistics of all processes."""
    models = [stream.model for stream in streams.streams]
    size = run.batch_size or min(fitting_batch_size(model) for model in models)
    device = models[0].device
    with progress("Statistics of heads", len(splits[0]), quiet=run.quiet) as advance:
        for batches in zip(*(split.batches(size, device=device) for split in splits)):
            own = batches[0].indices
            masks = [None if split.masks is None else split.masks[own] for split in splits]
            with autocast(device, run.precision):
                numbers = processes.index + own * processes.count  # of the images of all processes
                streams.add([batch.images for batch in batches], numbers=numbers, masks=masks)
            advance(len(batches[0].images))
    streams.join(processes.total)
