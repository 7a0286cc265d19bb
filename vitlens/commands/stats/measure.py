"""Statistics of every head over any number of images, for one model or two on the same images, and over a training."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.analysis.answers.moments import Key, Moments
from vitlens.analysis.heads.labels import FAULTY
from vitlens.analysis.heads.marks import marks, sinks_off_object
from vitlens.analysis.heads.registry import STATISTICS, head_statistics, shown_in, token_statistics
from vitlens.analysis.heads.specialisation import Specialisation, specialise
from vitlens.analysis.heads.statistics import Statistics, Stream, over_heads
from vitlens.commands.run.run import Run
from vitlens.commands.stats import record as rows
from vitlens.commands.stats.options import StatsOptions
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.lens.site import NO_PLACE
from vitlens.models.identity import backbone, same_anatomy, same_backbone
from vitlens.models.loading import load
from vitlens.models.naming import parse_model
from vitlens.processes import share_of
from vitlens.training.checkpoint import KeptWeights, weights_over_training
from vitlens.uncertainty import LEVEL, Estimate, finite, holm

IMAGES: Final = 200  # of --over-training at most, the same for all checkpoints
CHECKPOINTS: Final = 50  # at most: more would not make the curves clearer
MOST_MODELS: Final = 2  # differences are those of one pair
_LOCAL: Final = 0.5  # of uniform attention's distance: a head with at most this share is local


def measure(options: StatsOptions) -> Path | None:
    """Measure every head and write the report; returns its path, None in all processes but the first.

    Raises InputError for more than two models, and for a run that kept no weights.
    """
    kept = kept_weights(options.models) if options.over_training else ()
    run = Run("stats", options, most=MOST_MODELS)
    streams = [
        Stream(model, renormalise=options.renormalise, groups=split.groups)
        for model, split in zip(run.models, run.splits)
    ]
    pair = len(streams) == MOST_MODELS
    comparable = pair and same_anatomy(*run.models)
    differences, overall = (Moments(clusters=streams[0].moments.clusters) for _ in range(2))
    with run.folder("Attention heads of") as folder:
        for batches in run.batches("Statistics of heads"):
            own, numbers = batches[0].indices, run.numbers(batches[0])
            measured = [
                stream.add(batch.images, numbers=numbers, masks=None if split.masks is None else split.masks[own])
                for stream, batch, split in zip(streams, batches, run.shares)
            ]
            if pair:
                (first, second), of = measured, streams[0].groups
                groups = None if of is None else of[numbers.cpu()]
                if comparable and first.sites == second.sites:
                    differences.add(_apart(first.values, second.values), first.images, groups=groups)
                means = _apart(over_heads(first.values), over_heads(second.values))
                overall.add(means, first.images, groups=groups)
        for stream in streams:
            stream.join(run.processes.total)
        for moments in (differences, overall):
            moments.join(run.processes.total)
        learned = over_training(kept, run, renormalise=options.renormalise) if kept else {}

        def record() -> rows.StatsRecord:
            results = {model.alias: stream.result() for model, stream in zip(run.models, streams)}
            roles = {alias: specialise(found) for alias, found in results.items()}
            heads = [row for alias, found in results.items() for row in head_rows(alias, found, roles[alias])]
            layers = [row for alias, found in results.items() for row in layer_rows(alias, found)]
            changes = tuple(change_rows(differences)) if pair else ()
            return rows.StatsRecord(
                heads=tuple(heads),
                layers=tuple(layers),
                means=tuple(heads_row(alias, found, heads) for alias, found in results.items()),
                local=tuple(row for alias in results for row in local_rows(alias, heads, layers)),
                pair=(pair_row(run, comparable, overall, changes),) if pair else (),
                changes=changes,
                offsets={alias: own for alias, found in results.items() if (own := _offsets(found, roles[alias]))},
                **learned,
            )

        return folder.publish(record)


def _apart(first: Mapping[Key, torch.Tensor], second: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """First minus second, of what both have."""
    return {key: each - second[key] for key, each in first.items() if key in second}


def numbers_of(moments: Moments, layer: int, index: int, names: Sequence[str]) -> rows.Numbers:
    """The means over images of one head (or of all, in `Statistics.overall`), those that it has."""
    found = {}
    for name in names:
        if (name, layer) in moments.sums and index < len(moments.sums[name, layer]):
            estimate = moments.estimate((name, layer), index, STATISTICS[name].unit)
            if np.isfinite(estimate.value):
                found[name] = estimate
    return found


def head_rows(alias: str, found: Statistics, roles: Specialisation) -> Iterator[rows.HeadRow]:
    """Every head with its statistics, its label, and what that rests on."""
    known, names = marks(found), list(head_statistics())
    for site in found.sites:
        for head in range(site.heads):
            values = numbers_of(found.moments, site.layer, head, names)
            if head >= len(roles.given[site.layer]):
                yield rows.HeadRow(alias, site.layer, head, values)
                continue
            given, seen = roles.given[site.layer][head], known[site.layer][head]
            low, high = finite(given.low), finite(given.high)
            unsure = finite(given.score) is None
            yield rows.HeadRow(
                alias, site.layer, head, values, given.label,
                None if unsure else Estimate(float(given.score), low, high, found.images, ""), given.best,
                given.other or None, finite(given.other_score), finite(roles.explained[site.layer, head]),
                (seen.row, seen.column), seen.grid, seen.mass, seen.chance, seen.output,
            )  # fmt: skip


def layer_rows(alias: str, found: Statistics) -> Iterator[rows.LayerRow]:
    """Every layer, with the statistics of the tokens after its block."""
    uniform, names = found.uniform_distance(), list(token_statistics())
    for site in found.sites:
        place = found.geometries[site.layer]
        yield rows.LayerRow(
            alias, site.layer, site.module, site.kind, site.heads, site.keys,
            numbers_of(found.moments, site.layer, 0, names),
            None if place is None else place.grid,
            NO_PLACE[site.kind] if place is None else None,
            finite(uniform[site.layer]),
        )  # fmt: skip


def heads_row(alias: str, found: Statistics, heads: Sequence[rows.HeadRow]) -> rows.HeadsRow:
    """All heads of a model: labels, means of statistics, faults."""
    labels = [row.label for row in heads if row.model == alias and row.label is not None]
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    faulty = sum(counts.get(label, 0) for label in FAULTY)
    return rows.HeadsRow(
        alias,
        len(labels),
        counts,
        numbers_of(found.overall, 0, 0, list(head_statistics())),
        sinks_off_object(found),
        Estimate(faulty / len(labels), n=len(labels)) if labels else None,
    )


def local_rows(
    alias: str, heads: Sequence[rows.HeadRow], layers: Sequence[rows.LayerRow]
) -> Iterator[rows.LocalHeadsRow]:
    """The first and the last quarter of the layers that have a distance; none for a model without any."""
    uniform = {row.layer: row.uniform_distance for row in layers if row.model == alias}
    shares: dict[int, list[float]] = {}
    for row in heads:
        distance, of_uniform = row.statistics.get("distance"), uniform.get(row.layer)
        if row.model == alias and distance is not None and of_uniform:
            shares.setdefault(row.layer, []).append(distance.value / of_uniform)
    placed = sorted(shares)
    quarter = max(1, len(placed) // 4)
    for part, chosen in (("first", placed[:quarter]), ("last", placed[-quarter:])):
        every = [share for layer in chosen for share in shares[layer]]
        if every:
            local = sum(share <= _LOCAL for share in every)
            yield rows.LocalHeadsRow(alias, part, tuple(chosen), len(every), local, sum(every) / len(every))


def pair_row(run: Run[Any], comparable: bool, overall: Moments, changes: Sequence[rows.ChangeRow]) -> rows.PairRow:
    """What two models have in common, and how they differ over all heads."""
    first, second = run.models
    heads = {row.name for row in changes if row.p_all is not None}
    differ = {row.name for row in changes if row.p_all is not None and row.p_all <= LEVEL}
    return rows.PairRow(
        first.alias, second.alias, comparable, same_backbone(first, second),
        sum(value.numel() for value in backbone(first).values()), numbers_of(overall, 0, 0, list(head_statistics())),
        Estimate(len(differ) / len(heads), n=len(heads)) if heads else None,
    )  # fmt: skip


def change_rows(moments: Moments) -> Iterator[rows.ChangeRow]:
    """Every head's difference in every statistic, by paired t tests; nothing for a single image (or group)."""
    if moments.independent < 2:
        return
    by_name = {name: sorted(key for key in moments.sums if key[0] == name) for name in head_statistics()}
    shown = [key for name in shown_in("differences") for key in by_name[name]]
    together = iter(holm([p for key in shown for p in moments.p_values(key)]))
    everywhere = {(key, head): next(together) for key in shown for head in range(len(moments.sums[key]))}
    for name, keys in by_name.items():
        corrected = iter(holm([p for key in keys for p in moments.p_values(key)]))
        for key in keys:
            for head in range(len(moments.sums[key])):
                difference = moments.estimate(key, head, STATISTICS[name].unit)
                yield rows.ChangeRow(name, key[1], head, difference, next(corrected), everywhere.get((key, head)))


def _offsets(found: Statistics, roles: Specialisation) -> rows.OffsetArrays | None:
    mass, ratio = (
        {layer: tensor.numpy().astype(np.float32) for layer, tensor in enumerate(values) if tensor is not None}
        for values in (found.offset_mass, roles.ratios)
    )
    return rows.OffsetArrays(mass, ratio) if mass else None


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


def over_training(weights: Sequence[KeptWeights], run: Run[Any], *, renormalise: bool) -> dict[str, Any]:
    """Rows of all checkpoints, or of CHECKPOINTS evenly spaced ones with the first and last, on at most IMAGES images,
    as fields of the record."""
    limited = run.split.limit(IMAGES, seed=run.run.seed)
    images = share_of(limited, run.processes)
    chosen = np.linspace(0, len(weights) - 1, min(len(weights), CHECKPOINTS)).round().astype(int)
    epochs, heads = [], []
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
            epochs.append(rows.EpochRow(run.aliases[0], kept.epochs, numbers_of(found.overall, 0, 0, names)))
            for place, head in ((site, head) for site in found.sites for head in range(site.heads)):
                values = numbers_of(found.moments, place.layer, head, names)
                one = {name: each.value for name, each in values.items()}
                heads.append(rows.HeadEpochRow(kept.epochs, place.layer, head, one))
            advance(1)
    return {"learning": tuple(epochs), "learning_heads": tuple(heads)}
