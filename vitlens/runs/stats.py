"""`vitlens stats`: how every head looks, over any number of images, and what it specialises in."""

import sys
from collections.abc import Sequence
from pathlib import Path

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.heads.statistics import Stream
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.expected import say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.names import AnimationFormat
from vitlens.processes import Processes, share_of
from vitlens.runs.planned import stats_parts
from vitlens.runs.report import publish
from vitlens.runs.stats_draw import draw
from vitlens.runs.stats_film import require_writer, write_film
from vitlens.runs.stats_keep import keep
from vitlens.runs.stats_learning import keep_learning, kept_of, over_training
from vitlens.runs.stats_streams import MOST, Streams
from vitlens.runs.stats_tell import NO_LABELS, tell

__all__ = ["draw", "stats", "tell"]


def stats(
    models: Sequence[str],
    *,
    data: str | None = None,
    images: Sequence[str] | None = None,
    predicted: bool = False,
    renormalise: bool = True,
    learning: bool = False,
    animate: AnimationFormat | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path | None:
    """Statistics of every head of one model, or of two on the same images, and the report; returns its path.

    predicted: taken, as by the commands that need labels, and said to change nothing; renormalise: distances are of the
    attention on patches alone; learning: with the weights that the model's run kept over its training, too; animate:
    these as a film. Of several processes each takes its share of the images; all but the first return None. Raises
    InputError for more than two models, and for a run that kept no weights.
    """
    if animate is not None and not learning:
        raise InputError(f"expected --over-training with --animate {animate}, found --animate alone; add it")
    require_writer(animate)
    kept = kept_of(models) if learning else ()
    if len(models) > MOST:
        raise InputError(f"expected one model, or two to compare, found {len(models)}; run vitlens stats for each pair")
    processes, options = join_run(options)
    with processes.first_ahead():
        loaded = load_models(models, command="stats", model_options=model_options, options=options)
        splits = load_splits(loaded, options=options, data=data, images=images)
    if len({len(split) for split in splits}) > 1:
        raise InputError(f"expected the same images for both models, found {[len(split) for split in splits]}")
    streams = Streams([Stream(model, renormalise=renormalise) for model in loaded])
    shares = [share_of(split, processes) for split in splits]
    if not processes.is_first:
        _stream(streams, shares, processes, options)
        over_training(kept, splits[0], processes, options, renormalise=renormalise)
        return None
    aliases, split = [model.alias for model in loaded], splits[0]
    works = [(model, own, stats_parts(len(own), moments=len(kept))) for model, own in zip(loaded, splits)]
    say_expected(works, options, processes=processes.count)
    choices = {"predicted": predicted, "renormalise": renormalise, "learning": learning, "animate": animate}
    if predicted and not options.quiet:
        print(NO_LABELS, file=sys.stderr)  # noqa: T201
    with RunFolder.create(
        "stats",
        name_parts=(*aliases, split.name),
        title=f"How the heads of {' and '.join(aliases)} look, on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, models=loaded, split=split, choices=choices),
        formats=options.formats,
    ) as folder:
        _stream(streams, shares, processes, options)
        keep(folder, streams, aliases)
        moments = over_training(kept, split, processes, options, renormalise=renormalise)
        if moments:
            keep_learning(folder, moments)
        if animate is not None:
            write_film(folder.record(), animate)
        return publish(folder, draw, tell)


def _stream(streams: Streams, splits: Sequence[Split], processes: Processes, options: RunOptions) -> None:
    """Watch this process's images, and add up with the others."""
    models = [stream.model for stream in streams.streams]
    size = options.batch_size or min(fitting_batch_size(model) for model in models)
    device = models[0].device
    with progress("Watching heads", len(splits[0]), quiet=options.quiet) as advance:
        for batches in zip(*(split.batches(size, device=device) for split in splits)):
            with autocast(device, options.precision):
                streams.add([batch.images for batch in batches])
            advance(len(batches[0].images))
    streams.join(processes.total)
