"""`vitlens stats`: how every head looks, over any number of images, and what it specialises in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitlens.analysis.evaluate import fitting_batch_size
from vitlens.analysis.measure import Measured
from vitlens.analysis.moments import Key, Moments
from vitlens.analysis.specialisation import RULES, Specialisation, specialise
from vitlens.analysis.stats import STATISTICS, TOKEN_STATISTICS, Statistics, Stream, over_heads, per_head
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.lens.observe import survey
from vitlens.names import AnimationFormat
from vitlens.processes import Processes, share_of
from vitlens.runs.describe import described
from vitlens.runs.folder import RunFolder
from vitlens.runs.load import load_specimens, load_splits
from vitlens.runs.options import ModelOptions, RunOptions
from vitlens.runs.processes import join_run
from vitlens.runs.progress import progress
from vitlens.runs.report import publish
from vitlens.runs.stats_draw import draw
from vitlens.runs.stats_film import require_writer, write_film
from vitlens.runs.stats_learning import keep_learning, kept_of, over_training
from vitlens.runs.stats_tell import tell
from vitlens.uncertainty import Estimate, holm

__all__ = ["draw", "stats", "tell"]

MOST = 2  # models: a figure of differences has two sides


def stats(
    models: Sequence[str],
    *,
    data: str | None = None,
    images: Sequence[str] | None = None,
    renormalise: bool = True,
    learning: bool = False,
    animate: AnimationFormat | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path | None:
    """Statistics of every head of one model, or of two on the same images, and the report; returns its path.

    renormalise: distances are of the attention on patches alone; learning: with the weights that the model's run kept
    over its training, too; animate: these as a film. Of several processes each takes its share of the images; all but
    the first return None. Raises InputError for more than two models, and for a run that kept no weights.
    """
    if animate is not None and not learning:
        raise InputError(f"expected --over-training with --animate {animate}, found --animate alone; add it")
    require_writer(animate)
    kept = kept_of(models) if learning else ()
    if len(models) > MOST:
        raise InputError(f"expected one model, or two to compare, found {len(models)}; run vitlens stats for each pair")
    processes, options = join_run(options)
    with processes.first_ahead():
        specimens = load_specimens(models, model_options=model_options, options=options)
        splits = load_splits(specimens, options=options, data=data, images=images)
    if len({len(split) for split in splits}) > 1:
        raise InputError(f"expected the same images for both models, found {[len(split) for split in splits]}")
    for specimen, split in zip(specimens, splits):
        (first,) = split.pick(torch.arange(1)).batches(1, device=specimen.device)
        survey(specimen, first.images)  # a model that cannot be watched is refused before a folder is made
    streams = Streams([Stream(specimen, renormalise=renormalise) for specimen in specimens])
    shares = [share_of(split, processes) for split in splits]
    if not processes.is_first:
        _stream(streams, shares, processes, options)
        over_training(kept, splits[0], processes, options, renormalise=renormalise)
        return None
    aliases, split = [specimen.alias for specimen in specimens], splits[0]
    choices = {"renormalise": renormalise, "learning": learning, "animate": animate}
    with RunFolder.create(
        "stats",
        name_parts=(*aliases, split.name),
        title=f"How the heads of {' and '.join(aliases)} look, on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, specimens=specimens, split=split, choices=choices),
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


@dataclass
class Streams:
    """The statistics of one model, or of two on the same images with their differences, first minus second.

    differences: of each head, where both models have it; overall: of the means over heads.
    """

    streams: Sequence[Stream]
    differences: Moments = field(default_factory=Moments)
    overall: Moments = field(default_factory=Moments)

    def add(self, images: Sequence[torch.Tensor]) -> None:
        """Take in a batch, for each model as it takes it."""
        found = [stream.add(batch) for stream, batch in zip(self.streams, images)]
        if len(found) == MOST:
            first, second = found
            self.differences.add(_differences(first, second), first.images)
            one, two = over_heads(first.values), over_heads(second.values)
            self.overall.add({key: one[key] - two[key] for key in one.keys() & two.keys()}, first.images)

    def join(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add up what several processes took in; total: the sum of a tensor over all of them."""
        for stream in self.streams:
            stream.join(total)
        self.differences.join(total)
        self.overall.join(total)


def _differences(first: Measured, second: Measured) -> dict[Key, torch.Tensor]:
    """First minus second of every head that both have; nothing where the models are not of one shape."""
    if [site.heads for site in first.sites] != [site.heads for site in second.sites]:
        return {}
    return {key: first.values[key] - second.values[key] for key in first.values if key in second.values}


def _stream(streams: Streams, splits: Sequence[Split], processes: Processes, options: RunOptions) -> None:
    """Watch this process's images, and add up with the others."""
    specimens = [stream.specimen for stream in streams.streams]
    size = options.batch_size or min(fitting_batch_size(specimen) for specimen in specimens)
    device = specimens[0].device
    with progress("Watching heads", len(splits[0]), quiet=options.quiet) as advance:
        for batches in zip(*(split.batches(size, device=device) for split in splits)):
            with autocast(device, options.precision):
                streams.add([batch.images for batch in batches])
            advance(len(batches[0].images))
    streams.join(processes.total)


def keep(folder: RunFolder, streams: Streams, aliases: Sequence[str]) -> None:
    """Write metrics, tables and arrays of each model, and the differences where there are two."""
    heads: list[dict[str, object]] = []
    layers: list[dict[str, object]] = []
    for stream, alias in zip(streams.streams, aliases):
        table = stream.result()
        roles = specialise(table)
        for name, estimate in _metrics(table, alias if len(aliases) > 1 else ""):
            folder.metric(name, estimate)
        heads += [{"model": alias, **row} for row in _heads(table, roles)]
        layers += [{"model": alias, **row} for row in _layers(table)]
        _keep_arrays(folder, alias, table, roles)
    folder.table("heads", heads)
    folder.table("layers", layers)
    folder.table("rules", [{"label": name, "rule": rule.says} for name, rule in RULES.items()])
    if len(aliases) > 1:
        _keep_differences(folder, streams, aliases)


def _metrics(table: Statistics, alias: str) -> Iterator[tuple[str, Estimate]]:
    """Means over heads, and for the statistics that heads are known by, each head."""
    middle = f"/{alias}" if alias else ""
    for name, known in STATISTICS.items():
        if (name, 0) in table.overall.sums:
            yield f"{name}{middle}", _estimate(table.overall, (name, 0), 0, known.unit)
    for name in ("distance", "entropy", "hoyer"):
        for key in sorted(key for key in table.moments.sums if key[0] == name):
            for head in range(len(table.moments.sums[key])):
                found = _estimate(table.moments, key, head, STATISTICS[name].unit)
                yield f"{name}{middle}/{key[1]}/{head}", found


def _estimate(moments: Moments, key: Key, head: int, unit: str) -> Estimate:
    value, half = float(moments.mean(key)[head]), float(moments.half_width(key)[head])
    if not np.isfinite(half):  # one image has no interval
        return Estimate(value, n=moments.count, unit=unit)
    return Estimate(value, value - half, value + half, moments.count, unit)


def _heads(table: Statistics, roles: Specialisation) -> Iterator[dict[str, object]]:
    measured = {name for name, _ in table.moments.sums}
    values = {name: getattr(table, name) for name in STATISTICS if name in measured}
    for site in table.sites:
        for head in range(site.heads):
            numbers = {name: _number(found[site.layer, head]) for name, found in values.items()}
            labelled = head < len(roles.labels[site.layer])
            yield {
                "layer": site.layer,
                "head": head,
                "label": roles.labels[site.layer][head] if labelled else None,
                "score": _number(roles.scores[site.layer][head]) if labelled else None,
                **numbers,
            }


def _layers(table: Statistics) -> Iterator[dict[str, object]]:
    uniform = table.uniform_distance()
    tokens = {name: getattr(table, name)[:, 0] for name in TOKEN_STATISTICS if (name, 0) in table.moments.sums}
    for site in table.sites:
        place = table.geometries[site.layer]
        yield {
            "layer": site.layer,
            "module": site.module,
            "kind": site.kind,
            "heads": site.heads,
            "keys": site.keys,
            "grid": None if place is None else list(place.grid),
            "uniform_distance": _number(uniform[site.layer]),
            **{name: _number(found[site.layer]) for name, found in tokens.items()},
        }


def _number(value: Any) -> float | None:
    """For JSON: six digits, nothing for NaN."""
    found = float(value)
    return float(f"{found:.6g}") if np.isfinite(found) else None


def _keep_arrays(folder: RunFolder, alias: str, table: Statistics, roles: Specialisation) -> None:
    names = sorted({name for name, _ in table.moments.sums})
    arrays = {name: getattr(table, name).numpy() for name in names}
    arrays |= {f"{name}_low": table.low(name).numpy() for name in names}
    arrays |= {f"{name}_high": table.high(name).numpy() for name in names}
    scores = {f"score_{name.replace(' ', '_')}": found.numpy() for name, found in roles.all_scores.items()}
    folder.arrays(f"stats-{alias}", **arrays, uniform_distance=table.uniform_distance().numpy(), **scores)
    offsets = {f"layer{layer}": mass.numpy() for layer, mass in enumerate(table.offset_mass) if mass is not None}
    ratios = {f"ratio{layer}": ratio.numpy() for layer, ratio in enumerate(roles.ratios) if ratio is not None}
    if offsets:
        folder.arrays(f"offsets-{alias}", **_single({**offsets, **ratios}))


def _single(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _keep_differences(folder: RunFolder, streams: Streams, aliases: Sequence[str]) -> None:
    """How the two models differ: overall, and head by head with Holm's correction over the heads of a statistic."""
    for name, known in STATISTICS.items():
        if (name, 0) in streams.overall.sums:
            found = _estimate(streams.overall, (name, 0), 0, known.unit)
            folder.metric(f"difference/{name}/{aliases[0]}/{aliases[1]}", found)
    moments, depth = streams.differences, len(streams.streams[0].result().sites)
    arrays: dict[str, Any] = {}
    rows: list[dict[str, object]] = []
    for name in STATISTICS:
        keys = sorted(key for key in moments.sums if key[0] == name)
        if not keys or moments.count < 2:  # one image says nothing of others
            continue
        p_values = [p for key in keys for p in moments.p_values(key)]
        adjusted = iter(holm(p_values))
        corrected = {key[1]: torch.tensor([next(adjusted) for _ in moments.sums[key]]) for key in keys}
        arrays[name] = per_head({key[1]: moments.mean(key) for key in keys}, depth).numpy()
        arrays[f"{name}_p"] = per_head(corrected, depth).numpy()
        significant = sum(int((found <= 0.05).sum()) for found in corrected.values())
        rows.append({"statistic": name, "heads": len(p_values), "significant": significant})
    folder.table("differences", rows)
    if arrays:
        folder.arrays("differences", **arrays)
