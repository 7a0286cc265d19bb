"""Statistics of every head over any number of images, and over a training."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from vitlens.analysis.cost.flops import flops_by_part
from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.evaluation.intervals import Moments
from vitlens.analysis.heads.registry import FAULTY, STATISTICS, head_statistics, shown_in, token_statistics
from vitlens.analysis.heads.specialisation import Specialisation, specialise
from vitlens.analysis.heads.statistics import Statistics, Stream
from vitlens.analysis.naming.names import HeadNames
from vitlens.commands.run.run import Run
from vitlens.commands.shared.names import NoteRow, name_rows
from vitlens.commands.shared.naming import attributes_of, heads_named
from vitlens.commands.stats import record as rows
from vitlens.commands.stats.options import StatsOptions
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.lens.site import NO_PLACE
from vitlens.lens.trace import layers
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import parse_model
from vitlens.processes import share_of
from vitlens.training.checkpoint import KeptWeights, weights_over_training
from vitlens.uncertainty import Estimate, finite

IMAGES: Final = 200  # of names, and of --over-training, at most
QUICK: Final = 1e13  # multiply-adds for removing every head, above which --names must ask for it: minutes on two cores
CHECKPOINTS: Final = 50  # at most: more would not make the curves clearer
_LOCAL: Final = 0.5  # of uniform attention's distance: a head with at most this share is local


def measure(options: StatsOptions) -> Path | None:
    """Measure every head and write the report; returns its path, None in all processes but the first.

    Raises InputError for a run that kept no weights, and for attributes that match no image.
    """
    kept = kept_weights(options.model) if options.over_training else ()
    if options.attributes is not None and options.names is False:
        raise InputError("expected --attributes with names of heads, found --no-names; leave one out")
    run = Run("stats", options, scenes=1)
    attributes = attributes_of(options.attributes, _named_images(run))
    stream, (share,) = Stream(run.model, renormalise=options.renormalise, groups=run.split.groups), run.shares
    with run.folder("Attention heads of") as folder:
        for (batch,) in run.batches("Statistics of heads"):
            masks = None if share.masks is None else share.masks[batch.indices]
            stream.add(batch.images, numbers=run.numbers(batch), masks=masks)
        stream.join(run.processes.total)
        found = stream.result()
        named = _names(run, attributes, found) if options.names is not False else None
        learned = over_training(kept, run, renormalise=options.renormalise) if kept else {}

        def record() -> rows.StatsRecord:
            (alias,) = run.aliases
            roles = specialise(found)
            heads = tuple(head_rows(alias, found, roles))
            layers = tuple(layer_rows(alias, found))
            offsets = _offsets(found, roles)
            return rows.StatsRecord(
                heads=heads,
                names=() if named is None else tuple(name_rows(alias, named.heads)),
                notes=() if named is None else tuple(map(NoteRow, named.notes)),
                layers=layers,
                means=(heads_row(alias, found, roles, heads),),
                local=tuple(local_rows(heads, layers)),
                offsets={} if offsets is None else {alias: offsets},
                **learned,
            )

        return folder.publish(record)


def _names(run: Run[StatsOptions], attributes: Mapping[str, Tensor], known: Statistics) -> HeadNames:
    """Return the words for every head, on at most IMAGES images, in each process the same; known: the statistics of
    all."""
    split = _named_images(run)
    asked = run.options.names or run.options.attributes is not None
    slow = "" if asked or _removal(run.model, len(split)) <= QUICK else "removing every head takes long; add --names"
    return heads_named(run, split, attributes, slow=slow, known=known).names


def _named_images(run: Run[StatsOptions]) -> Split:
    return run.split.limit(IMAGES, seed=run.run.seed)


def _removal(model: Model, images: int) -> float:
    """About how many multiply-adds it takes to remove every head."""
    heads = sum(layer.heads for layer in layers(model))
    return heads * images * sum(flops_by_part(model).values()) / 2


def numbers_of(moments: Moments, layer: int, index: int, names: Sequence[str], keys: int) -> rows.Numbers:
    """Return the means over images of one head (or of all, in `Statistics.overall`), those that it has; keys: of its
    layer."""
    found = {}
    for name in names:
        if (name, layer) in moments.sums and index < len(moments.sums[name, layer]):
            statistic = STATISTICS[name]
            least, most = statistic.bounds(keys)
            estimate = moments.estimate((name, layer), index, statistic.unit, least=least, most=most)
            if np.isfinite(estimate.value):
                found[name] = estimate
    return found


def head_rows(alias: str, found: Statistics, roles: Specialisation) -> Iterator[rows.HeadRow]:
    """Yield every head with its statistics, its label, and what that rests on."""
    names = list(head_statistics())
    for site, place in zip(found.sites, found.geometries):
        for head in range(site.heads):
            values = numbers_of(found.moments, site.layer, head, names, site.keys)
            if place is None or head >= len(roles.given[site.layer]):
                yield rows.HeadRow(alias, site.layer, head, values)
                continue
            given = roles.given[site.layer][head]
            seen = roles.marks[site.layer][head]
            low = finite(given.low)
            high = finite(given.high)
            unsure = finite(given.score) is None
            yield rows.HeadRow(
                alias,
                site.layer,
                head,
                values,
                given.label,
                None if unsure else Estimate(float(given.score), low, high, found.images, ""),
                given.best,
                given.other or None,
                finite(given.other_score),
                finite(roles.explained[site.layer, head]),
                (seen.row, seen.column),
                place.map_grid,
                seen.mass,
                seen.chance,
                seen.output,
            )


def layer_rows(alias: str, found: Statistics) -> Iterator[rows.LayerRow]:
    """Yield every layer, with the statistics of the tokens after its block."""
    uniform = found.uniform_distance()
    names = list(token_statistics())
    for site in found.sites:
        place = found.geometries[site.layer]
        yield rows.LayerRow(
            alias,
            site.layer,
            site.module,
            site.kind,
            site.heads,
            site.keys,
            numbers_of(found.moments, site.layer, 0, names, site.keys),
            None if place is None else place.grid,
            NO_PLACE[site.kind] if place is None else None,
            finite(uniform[site.layer]),
        )


def heads_row(alias: str, found: Statistics, roles: Specialisation, heads: Sequence[rows.HeadRow]) -> rows.HeadsRow:
    """Return all heads of a model: labels, means of statistics, faults."""
    labels = [row.label for row in heads if row.label is not None]
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    faulty = sum(counts.get(label, 0) for label in FAULTY)
    return rows.HeadsRow(
        alias,
        len(labels),
        counts,
        numbers_of(found.overall, 0, 0, list(head_statistics()), found.keys),
        roles.sinks_off_object,
        Estimate(faulty / len(labels), n=len(labels)) if labels else None,
    )


def local_rows(heads: Sequence[rows.HeadRow], layers: Sequence[rows.LayerRow]) -> Iterator[rows.LocalHeadsRow]:
    """Yield the first and the last quarter of the layers that have a distance; none for a model without any."""
    uniform = {row.layer: row.uniform_distance for row in layers}
    shares: dict[int, list[float]] = {}
    for row in heads:
        distance = row.statistics.get("distance")
        of_uniform = uniform.get(row.layer)
        if distance is not None and of_uniform:
            shares.setdefault(row.layer, []).append(distance.value / of_uniform)
    placed = sorted(shares)
    quarter = max(1, len(placed) // 4)
    for part, chosen in (("first", placed[:quarter]), ("last", placed[-quarter:])):
        every = [share for layer in chosen for share in shares[layer]]
        if every:
            local = sum(share <= _LOCAL for share in every)
            yield rows.LocalHeadsRow(heads[0].model, part, tuple(chosen), len(every), local, sum(every) / len(every))


def _offsets(found: Statistics, roles: Specialisation) -> rows.OffsetArrays | None:
    mass, ratio = (
        {layer: tensor.numpy().astype(np.float32) for layer, tensor in enumerate(values) if tensor is not None}
        for values in (found.offset_mass, roles.ratios)
    )
    return rows.OffsetArrays(mass, ratio) if mass else None


def kept_weights(model: str) -> tuple[KeptWeights, ...]:
    """Return the weights that a run kept, and its final ones. Raises InputError where it kept none."""
    folder = Path(parse_model(model).name)
    checkpoints = weights_over_training(folder) if folder.is_dir() else ()
    if len(checkpoints) < 2:
        raise InputError(
            f"expected a run that kept its weights for --over-training, found {len(checkpoints) or 'none'} kept in "
            f"{model}; train one with vitlens train PRESET --keep-every N"
        )
    return checkpoints


def over_training(weights: Sequence[KeptWeights], run: Run[Any], *, renormalise: bool) -> dict[str, Any]:
    """Rows of all checkpoints, or of CHECKPOINTS evenly spaced ones with the first and last, on at most IMAGES images,
    as fields of the record."""
    limited = run.split.limit(IMAGES, seed=run.run.seed)
    images = share_of(limited, run.processes)
    chosen = np.linspace(0, len(weights) - 1, min(len(weights), CHECKPOINTS)).round().astype(int)
    epochs = []
    heads = []
    with run.progress("Statistics over training", len(chosen), "checkpoints") as advance:
        for kept in (weights[index] for index in chosen):
            model = load(f"epoch-{kept.epochs}={kept.file}", device=run.processes.device)
            stream = Stream(model, renormalise=renormalise, evidence=False, groups=limited.groups)
            for batch in images.batches(run.run.batch_size or fitting_batch_size(model), device=model.device):
                with autocast(model.device, run.run.precision):
                    stream.add(batch.images, numbers=run.numbers(batch))
            stream.join(run.processes.total)
            found = stream.result()
            names = [name for name in shown_in("training") if (name, 0) in found.overall.sums]
            epochs.append(
                rows.EpochRow(run.aliases[0], kept.epochs, numbers_of(found.overall, 0, 0, names, found.keys))
            )
            for place, head in ((site, head) for site in found.sites for head in range(site.heads)):
                values = numbers_of(found.moments, place.layer, head, names, place.keys)
                one = {name: each.value for name, each in values.items()}
                heads.append(rows.HeadEpochRow(kept.epochs, place.layer, head, one))
            advance(1)
    return {"learning": tuple(epochs), "learning_heads": tuple(heads)}
