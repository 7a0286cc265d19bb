"""What `vitlens stats` keeps in its folder: metrics, tables and arrays."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vitlens.analysis.answers.moments import Key, Moments
from vitlens.analysis.heads.labels import rules
from vitlens.analysis.heads.registry import STATISTICS, head_statistics, shown_in, token_statistics
from vitlens.analysis.heads.specialisation import Specialisation, specialise
from vitlens.analysis.heads.statistics import Statistics, per_head
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.models.identity import backbone, same_backbone
from vitlens.runs.stats_streams import Streams
from vitlens.uncertainty import Estimate, holm


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
    folder.table("rules", [{"label": name, "rule": label.sentence} for name, label in rules().items()])
    if len(aliases) > 1:
        _keep_differences(folder, streams, aliases)


def _metrics(table: Statistics, alias: str) -> Iterator[tuple[str, Estimate]]:
    """Means over heads, and for the statistics that heads are known by, each head."""
    middle = f"/{alias}" if alias else ""
    for name, known in head_statistics().items():
        if (name, 0) in table.overall.sums:
            yield f"{name}{middle}", _estimate(table.overall, (name, 0), 0, known.unit)
    for name in shown_in("each head"):
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
    values = {name: getattr(table, name) for name in head_statistics() if name in measured}
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
    tokens = {name: getattr(table, name)[:, 0] for name in token_statistics() if (name, 0) in table.moments.sums}
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
    first, second = (stream.model for stream in streams.streams)
    identical = same_backbone(first, second)
    parameters = sum(value.numel() for value in backbone(first).values())
    folder.table("backbones", [{"comparable": streams.comparable, "identical": identical, "parameters": parameters}])
    for name, known in head_statistics().items():
        if (name, 0) in streams.overall.sums:
            found = _estimate(streams.overall, (name, 0), 0, known.unit)
            folder.metric(f"difference/{name}/{aliases[0]}/{aliases[1]}", found)
    moments, depth = streams.differences, len(streams.streams[0].result().sites)
    arrays: dict[str, Any] = {}
    rows: list[dict[str, object]] = []
    for name in head_statistics():
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
        _keep_changes(folder, moments, aliases)


def _keep_changes(folder: RunFolder, moments: Moments, aliases: Sequence[str]) -> None:
    """Every head's differences with their paired intervals, and how many heads differ in any of them.

    Holm's correction is over all heads and all of these statistics, so that the count of heads holds for all of them.
    """
    keys = [key for name in shown_in("differences") for key in sorted(key for key in moments.sums if key[0] == name)]
    adjusted = iter(holm([p for key in keys for p in moments.p_values(key)]))
    rows: list[dict[str, object]] = []
    for name, layer in keys:
        for head in range(len(moments.sums[name, layer])):
            found, p = _estimate(moments, (name, layer), head, STATISTICS[name].unit), next(adjusted)
            row: dict[str, object] = {"statistic": name, "layer": layer, "head": head, "difference": found.value}
            rows.append({**row, "low": found.low, "high": found.high, "n": found.n, "p_holm": p})
    heads = {(row["layer"], row["head"]) for row in rows}
    changed = {(row["layer"], row["head"]) for row in rows if float(str(row["p_holm"])) <= 0.05}
    folder.table("changes", rows)
    folder.metric(f"heads_changed/{aliases[0]}/{aliases[1]}", Estimate(len(changed) / len(heads), n=len(heads)))
