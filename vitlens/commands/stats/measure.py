"""Statistics of every head over any number of images, and over a training."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import Moments
from vitlens.analysis.heads.geometry import Geometry
from vitlens.analysis.heads.registry import (
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

IMAGES: Final = 200  # the largest number of images for names of heads, and for --over-training
# multiply-adds for removing every head, above which --names must ask for it: minutes on two cores
QUICK: Final = 1e13
CHECKPOINTS: Final = 50  # the largest number; more would not make the curves clearer
_LOCAL: Final = 0.5  # of uniform attention's distance: a head with at most this share is local


class TrainingRows(NamedTuple):
    """Statistics over a training: means over heads, and of each head, by checkpoint."""

    epochs: tuple[rows.EpochRow, ...] = ()
    heads: tuple[rows.HeadEpochRow, ...] = ()


def measure(options: StatsOptions) -> Path | None:
    """Measure every head and write the report.

    Returns the path of the report, None in all processes but the first. Raises InputError for a run
    that kept no weights, and for attributes that match no image.
    """
    checkpoints = kept_weights(options.model) if options.over_training else ()
    if options.attributes is not None and options.names is False:
        raise InputError(
            "expected --attributes with names of heads, found --no-names; leave one out"
        )
    run = Run("stats", options, images=ImageRequest(scenes=1))
    attributes = attributes_of(options.attributes, _named_images(run))
    _ = run.shares  # raises for fewer images than processes, before anything is written
    with run.folder("Attention heads of") as folder:
        statistics = _statistics(run)
        names = None
        if options.names is not False:
            names = _names(run, attributes, statistics)
        training = TrainingRows()
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
    """Return the record. names: the labels of all heads, None if they were not asked for."""
    roles = specialise(statistics)
    heads = tuple(head_rows(alias, statistics, roles))
    rows_of_layers = tuple(layer_rows(alias, statistics))
    offsets = {}
    offset_arrays = _offset_arrays(statistics, roles)
    if offset_arrays is not None:
        offsets[alias] = offset_arrays
    record = rows.StatsRecord(
        heads=heads,
        layers=rows_of_layers,
        means=(heads_row(alias, statistics, roles, heads),),
        local=tuple(local_rows(heads, rows_of_layers)),
        learning=training.epochs,
        learning_heads=training.heads,
        offsets=offsets,
    )
    if names is None:
        return record
    notes = [NoteRow(note) for note in names.notes]
    return replace(record, names=tuple(name_rows(alias, names.heads)), notes=tuple(notes))


def _names(
    run: Run[StatsOptions], attributes: Mapping[str, Tensor], statistics: Statistics
) -> HeadNames:
    """Label every head on at most IMAGES images; every process does the same.

    statistics: the statistics of all images.
    """
    split = _named_images(run)
    is_requested = run.options.names or run.options.attributes is not None
    slow = ""
    if not is_requested and _removal_cost(run.model, len(split)) > QUICK:
        slow = "removing every head takes long; add --names"
    return heads_named(run, split, attributes, slow=slow, statistics=statistics).names


def _named_images(run: Run[StatsOptions]) -> Split:
    """Return the images on which heads are labelled."""
    return run.split.limit(IMAGES, seed=run.run_options.seed)


def _removal_cost(model: Model, images: int) -> float:
    """Return about how many multiply-adds it takes to remove every head."""
    heads = sum(layer.heads for layer in layers(model))
    multiply_adds = sum(flops_by_part(model).values()) / 2  # of a pass over one image
    return heads * images * multiply_adds


def numbers_of(
    moments: Moments,
    layer: int,
    index: int,
    names: Sequence[str],
    keys: int,
    geometry: Geometry | None = None,
) -> rows.Numbers:
    """Return the means over images of the statistics that one head has.

    moments: of heads (`Statistics.moments`), or of means over all heads (`Statistics.overall`).
    layer: the layer, 0 for `overall`.
    index: the index of the head in its layer, 0 for `overall`.
    names: the names of statistics; those that the head does not have are left out.
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
            # a layer without labels has an empty list of them
            if geometry is not None and head < len(roles.head_labels[site.layer]):
                row = _labelled_row(row, roles, geometry.map_grid, statistics.images)
            yield row


def _labelled_row(
    row: rows.HeadRow, roles: Specialisation, grid: tuple[int, int], images: int
) -> rows.HeadRow:
    """Return the row of a head with its label.

    grid: rows and columns of patches.
    images: the number of images.
    """
    role = roles.head_labels[row.layer][row.head]
    evidence = roles.evidence[row.layer][row.head]
    score = None
    if finite(role.score) is not None:
        score = Estimate(float(role.score), finite(role.low), finite(role.high), n=images, unit="")
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
        # statistics of tokens are those of index 0
        numbers = numbers_of(statistics.moments, site.layer, 0, names, site.keys, geometry)
        yield rows.LayerRow(
            alias,
            layer=site.layer,
            module=site.module,
            kind=site.kind,
            heads=site.heads,
            keys=site.keys,
            statistics=numbers,
            grid=None if geometry is None else geometry.grid,
            unplaced=NO_PLACE[site.kind] if geometry is None else None,
            uniform_distance=finite(uniform[site.layer]),
        )


def heads_row(
    alias: str, statistics: Statistics, roles: Specialisation, heads: Sequence[rows.HeadRow]
) -> rows.HeadsRow:
    """Return a summary of all heads: counts of labels, means of statistics, faults."""
    labels = Counter(row.label for row in heads if row.label is not None)
    return rows.HeadsRow(
        alias,
        heads=labels.total(),
        labels=dict(labels),
        statistics=_means_over_heads(statistics, list(head_statistics())),
        sinks_off_object=roles.sinks_off_object,
        faulty=rows.faulty_share(heads, images=statistics.images),
    )


def _means_over_heads(statistics: Statistics, names: Sequence[str]) -> rows.Numbers:
    return numbers_of(statistics.overall, layer=0, index=0, names=names, keys=statistics.keys)


def local_rows(
    heads: Sequence[rows.HeadRow], layers: Sequence[rows.LayerRow]
) -> Iterator[rows.LocalHeadsRow]:
    """Yield the first and the last quarter of the layers that have a distance.

    Yields nothing for a model without such layers.
    """
    uniform_distances = {row.layer: row.uniform_distance for row in layers}
    # the distance of each head, divided by that of uniform attention, by layer
    shares: dict[int, list[float]] = {}
    for row in heads:
        distance = row.statistics.get("distance")
        uniform_distance = uniform_distances.get(row.layer)
        if distance is not None and uniform_distance:
            shares.setdefault(row.layer, []).append(distance.value / uniform_distance)
    with_distance = sorted(shares)
    if not with_distance:
        return
    quarter = max(1, len(with_distance) // 4)
    layers_by_part = {"first": with_distance[:quarter], "last": with_distance[-quarter:]}
    for part, layers_of_part in layers_by_part.items():
        shares_of_part: list[float] = []
        for layer in layers_of_part:
            shares_of_part += shares[layer]
        yield rows.LocalHeadsRow(
            heads[0].model,
            part=part,
            layers=tuple(layers_of_part),
            heads=len(shares_of_part),
            local=sum(share <= _LOCAL for share in shares_of_part),
            share=sum(shares_of_part) / len(shares_of_part),
        )


def _offset_arrays(statistics: Statistics, roles: Specialisation) -> rows.OffsetArrays | None:
    """Return attention by offset, None for a model without layers that have offsets."""
    mass = _as_stacks(statistics.offset_mass)
    if not mass:
        return None
    return rows.OffsetArrays(layer=mass, ratio=_as_stacks(roles.ratios))


def _as_stacks(by_layer: Sequence[Tensor | None]) -> dict[int, NDArray[np.float32]]:
    """Return the tensors of the layers that have one, by layer."""
    stacks = {}
    for layer, tensor in enumerate(by_layer):
        if tensor is not None:
            stacks[layer] = tensor.numpy().astype(np.float32)
    return stacks


def over_training(
    checkpoints: Sequence[KeptWeights], run: Run[Any], *, renormalise: bool
) -> TrainingRows:
    """Return the statistics of checkpoints on at most IMAGES images.

    At most CHECKPOINTS are measured: evenly spaced ones, with the first and the last.
    """
    split = run.split.limit(IMAGES, seed=run.run_options.seed)
    share = share_of(split, run.processes)
    chosen = spaced(checkpoints, CHECKPOINTS)
    epoch_rows = []
    head_epoch_rows: list[rows.HeadEpochRow] = []
    with run.progress("Statistics over training", len(chosen), "checkpoints") as advance:
        for epochs, model in models_over_training(chosen, run.processes.device):
            stream = Stream(model, renormalise=renormalise, evidence=False, groups=split.groups)
            batch_size = run.run_options.batch_size or fitting_batch_size(model)
            for batch in share.batches(batch_size, device=model.device):
                with autocast(model.device, run.run_options.precision):
                    stream.add(batch.images, numbers=run.numbers(batch))
            stream.join(run.processes.total)
            statistics = stream.result()
            names = [name for name in shown_in("training") if (name, 0) in statistics.overall.sums]
            means = _means_over_heads(statistics, names)
            epoch_rows.append(rows.EpochRow(run.aliases[0], epochs, means))
            head_epoch_rows += _head_epoch_rows(epochs, statistics, names)
            advance(1)
    return TrainingRows(tuple(epoch_rows), tuple(head_epoch_rows))


def _head_epoch_rows(
    epochs: int, statistics: Statistics, names: Sequence[str]
) -> Iterator[rows.HeadEpochRow]:
    """Yield every head with the weights of one checkpoint.

    epochs: the number of epochs that it was trained.
    names: the names of the statistics that are shown.
    """
    for site in statistics.sites:
        for head in range(site.heads):
            numbers = numbers_of(statistics.moments, site.layer, head, names, site.keys)
            values = {name: estimate.value for name, estimate in numbers.items()}
            yield rows.HeadEpochRow(epochs, site.layer, head, values)
