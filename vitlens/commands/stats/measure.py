"""Statistics of every head over any number of images, and over a training."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import Moments
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.registry import (
    FAULTY,
    STATISTICS,
    head_statistics,
    shown_in,
    token_statistics,
)
from vitlens.analysis.heads.specialisation import Specialisation, specialise
from vitlens.analysis.heads.statistics import Statistics, Stream, bounds_in
from vitlens.analysis.naming.labels import HeadNames
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.run import Run
from vitlens.commands.shared.kept import kept_weights, models_over_training, spaced
from vitlens.commands.shared.label_rows import NoteRow, name_rows
from vitlens.commands.shared.labelling import attributes_of, heads_named
from vitlens.commands.stats import record as rows
from vitlens.commands.stats.options import StatsOptions
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.lens.site import NO_PLACE
from vitlens.lens.trace import layers
from vitlens.models.model import Model
from vitlens.processes import share_of
from vitlens.training.checkpoint import KeptWeights
from vitlens.uncertainty import Estimate, finite

IMAGES: Final = 200  # of names, and of --over-training, at most
# multiply-adds for removing every head, above which --names must ask for it: minutes on two cores
QUICK: Final = 1e13
CHECKPOINTS: Final = 50  # at most: more would not make the curves clearer
_LOCAL: Final = 0.5  # of uniform attention's distance: a head with at most this share is local
# the rows of models, and of heads
TrainingRows: TypeAlias = tuple[tuple[rows.EpochRow, ...], tuple[rows.HeadEpochRow, ...]]


def measure(options: StatsOptions) -> Path | None:
    """Measure every head and write the report.

    Return its path, None in all processes but the first. Raises InputError for a run that kept
    no weights, and for attributes that match no image.
    """
    checkpoints = kept_weights(options.model) if options.over_training else ()
    if options.attributes is not None and options.names is False:
        raise InputError(
            "expected --attributes with names of heads, found --no-names; leave one out"
        )
    run = Run("stats", options, images=ImageRequest(scenes=1))
    attributes = attributes_of(options.attributes, _named_images(run))
    _ = run.shares  # fewer images than processes are refused before anything is written
    with run.folder("Attention heads of") as folder:
        statistics = _statistics(run)
        names = None
        if options.names is not False:
            names = _names(run, attributes, statistics)
        training: TrainingRows = ((), ())
        if checkpoints:
            training = over_training(checkpoints, run, renormalise=options.renormalise)
        return folder.publish(lambda: _record(run.model.alias, statistics, names, training))


def _statistics(run: Run[StatsOptions]) -> Statistics:
    """Return the statistics of every head over the images of all processes."""
    stream = Stream(run.model, renormalise=run.options.renormalise, groups=run.split.groups)
    (share,) = run.shares
    for (batch,) in run.batches("Statistics of heads"):
        masks = None if share.masks is None else share.masks[batch.indices]
        stream.add(batch.images, numbers=run.numbers(batch), masks=masks)
    stream.join(run.processes.total)
    return stream.result()


def _record(
    alias: str, statistics: Statistics, names: HeadNames | None, training: TrainingRows
) -> rows.StatsRecord:
    roles = specialise(statistics)
    heads = tuple(head_rows(alias, statistics, roles))
    layers = tuple(layer_rows(alias, statistics))
    offsets = _offsets(statistics, roles)
    epochs, epoch_heads = training
    record = rows.StatsRecord(
        heads=heads,
        layers=layers,
        means=(heads_row(alias, statistics, roles, heads),),
        local=tuple(local_rows(heads, layers)),
        learning=epochs,
        learning_heads=epoch_heads,
        offsets={} if offsets is None else {alias: offsets},
    )
    if names is None:
        return record
    notes = [NoteRow(note) for note in names.notes]
    return replace(record, names=tuple(name_rows(alias, names.heads)), notes=tuple(notes))


def _names(
    run: Run[StatsOptions], attributes: Mapping[str, Tensor], statistics: Statistics
) -> HeadNames:
    """Label every head on at most IMAGES images, in each process the same.

    statistics: the statistics of all images.
    """
    split = _named_images(run)
    is_requested = run.options.names or run.options.attributes is not None
    slow = ""
    if not is_requested and _removal_cost(run.model, len(split)) > QUICK:
        slow = "removing every head takes long; add --names"
    return heads_named(run, split, attributes, slow=slow, statistics=statistics).names


def _named_images(run: Run[StatsOptions]) -> Split:
    return run.split.limit(IMAGES, seed=run.run.seed)


def _removal_cost(model: Model, images: int) -> float:
    """Return about how many multiply-adds it takes to remove every head."""
    heads = sum(layer.heads for layer in layers(model))
    return heads * images * sum(flops_by_part(model).values()) / 2


def numbers_of(
    moments: Moments,
    layer: int,
    index: int,
    names: Sequence[str],
    keys: int,
    geometry: Geometry | None = None,
) -> rows.Numbers:
    """Return the means over images of the statistics that one head has.

    index: the index of the head in its layer, or 0 for the means over all heads
        (`Statistics.overall`).
    keys, geometry: of the layer.
    """
    numbers = {}
    for name in names:
        sums = moments.sums.get((name, layer))
        if sums is None or index >= len(sums):
            continue
        statistic = STATISTICS[name]
        least, most = bounds_in(statistic, keys, geometry)
        estimate = moments.estimate((name, layer), index, statistic.unit, least=least, most=most)
        if np.isfinite(estimate.value):
            numbers[name] = estimate
    return numbers


def head_rows(alias: str, statistics: Statistics, roles: Specialisation) -> Iterator[rows.HeadRow]:
    """Yield every head with its statistics, its label, and the evidence for the label."""
    names = list(head_statistics())
    for site in statistics.sites:
        geometry = statistics.geometries[site.layer]
        for head in range(site.heads):
            numbers = numbers_of(statistics.moments, site.layer, head, names, site.keys)
            row = rows.HeadRow(alias, site.layer, head, numbers)
            if geometry is not None and head < len(roles.head_labels[site.layer]):
                row = _labelled_row(row, roles, geometry.map_grid, statistics.images)
            yield row


def _labelled_row(
    row: rows.HeadRow, roles: Specialisation, grid: tuple[int, int], images: int
) -> rows.HeadRow:
    """Return the row of a head with its label.

    grid: rows and columns of patches; images: number of images.
    """
    role = roles.head_labels[row.layer][row.head]
    evidence = roles.evidence[row.layer][row.head]
    score = None
    if finite(role.score) is not None:
        score = Estimate(float(role.score), finite(role.low), finite(role.high), images, "")
    return replace(
        row,
        label=role.label,
        score=score,
        best=role.best,
        other=role.other or None,
        other_score=finite(role.other_score),
        explained_by_offset=finite(roles.explained[row.layer, row.head]),
        place=(evidence.row, evidence.column),
        place_grid=grid,
        place_mass=evidence.mass,
        place_chance=evidence.chance,
        output=evidence.output,
    )


def layer_rows(alias: str, statistics: Statistics) -> Iterator[rows.LayerRow]:
    """Yield every layer, with the statistics of the tokens after its block."""
    uniform = statistics.uniform_distance()
    names = list(token_statistics())
    for site in statistics.sites:
        geometry = statistics.geometries[site.layer]
        yield rows.LayerRow(
            alias,
            layer=site.layer,
            module=site.module,
            kind=site.kind,
            heads=site.heads,
            keys=site.keys,
            statistics=numbers_of(statistics.moments, site.layer, 0, names, site.keys, geometry),
            grid=None if geometry is None else geometry.grid,
            unplaced=NO_PLACE[site.kind] if geometry is None else None,
            uniform_distance=finite(uniform[site.layer]),
        )


def heads_row(
    alias: str, statistics: Statistics, roles: Specialisation, heads: Sequence[rows.HeadRow]
) -> rows.HeadsRow:
    """Summarize all heads of a model: counts of labels, means of statistics, faults."""
    labels = Counter(row.label for row in heads if row.label is not None)
    faulty = None
    if labels:
        count = sum(labels[label] for label in FAULTY)
        faulty = Estimate(count / labels.total(), n=labels.total())
    return rows.HeadsRow(
        alias,
        heads=labels.total(),
        labels=dict(labels),
        statistics=numbers_of(statistics.overall, 0, 0, list(head_statistics()), statistics.keys),
        sinks_off_object=roles.sinks_off_object,
        faulty=faulty,
    )


def local_rows(
    heads: Sequence[rows.HeadRow], layers: Sequence[rows.LayerRow]
) -> Iterator[rows.LocalHeadsRow]:
    """Yield the first and the last quarter of the layers that have a distance.

    Returns nothing for a model without any.
    """
    uniform = {row.layer: row.uniform_distance for row in layers}
    shares: dict[int, list[float]] = {}
    for row in heads:
        distance = row.statistics.get("distance")
        of_uniform = uniform.get(row.layer)
        if distance is not None and of_uniform:
            shares.setdefault(row.layer, []).append(distance.value / of_uniform)
    with_distance = sorted(shares)
    quarter = max(1, len(with_distance) // 4)
    for part, chosen in (("first", with_distance[:quarter]), ("last", with_distance[-quarter:])):
        shares_of_part = [share for layer in chosen for share in shares[layer]]
        if shares_of_part:
            yield rows.LocalHeadsRow(
                heads[0].model,
                part=part,
                layers=tuple(chosen),
                heads=len(shares_of_part),
                local=sum(share <= _LOCAL for share in shares_of_part),
                share=sum(shares_of_part) / len(shares_of_part),
            )


def _offsets(statistics: Statistics, roles: Specialisation) -> rows.OffsetArrays | None:
    mass = _as_stacks(statistics.offset_mass)
    return rows.OffsetArrays(mass, _as_stacks(roles.ratios)) if mass else None


def _as_stacks(by_layer: Sequence[Tensor | None]) -> dict[int, NDArray[np.float32]]:
    """Return the tensors of the layers that have one, by layer."""
    stacks = {}
    for layer, tensor in enumerate(by_layer):
        if tensor is not None:
            stacks[layer] = tensor.numpy().astype(np.float32)
    return stacks


def over_training(
    weights: Sequence[KeptWeights], run: Run[Any], *, renormalise: bool
) -> TrainingRows:
    """Return the means of each checkpoint, and of its heads, on at most IMAGES images.

    Of more than CHECKPOINTS checkpoints these are evenly spaced, with the first and the last.
    """
    split = run.split.limit(IMAGES, seed=run.run.seed)
    images = share_of(split, run.processes)
    chosen = spaced(weights, CHECKPOINTS)
    epochs = []
    heads: list[rows.HeadEpochRow] = []
    with run.progress("Statistics over training", len(chosen), "checkpoints") as advance:
        for epoch, model in models_over_training(chosen, run.processes.device):
            stream = Stream(model, renormalise=renormalise, evidence=False, groups=split.groups)
            for batch in images.batches(
                run.run.batch_size or fitting_batch_size(model), device=model.device
            ):
                with autocast(model.device, run.run.precision):
                    stream.add(batch.images, numbers=run.numbers(batch))
            stream.join(run.processes.total)
            statistics = stream.result()
            names = [name for name in shown_in("training") if (name, 0) in statistics.overall.sums]
            means = numbers_of(statistics.overall, 0, 0, names, statistics.keys)
            epochs.append(rows.EpochRow(run.aliases[0], epoch, means))
            heads += _head_epoch_rows(epoch, statistics, names)
            advance(1)
    return tuple(epochs), tuple(heads)


def _head_epoch_rows(
    epochs: int, statistics: Statistics, names: Sequence[str]
) -> Iterator[rows.HeadEpochRow]:
    """Yield every head with the weights of one checkpoint.

    names: the names of the statistics that are shown.
    """
    for site in statistics.sites:
        for head in range(site.heads):
            numbers = numbers_of(statistics.moments, site.layer, head, names, site.keys)
            values = {name: estimate.value for name, estimate in numbers.items()}
            yield rows.HeadEpochRow(epochs, site.layer, head, values)
