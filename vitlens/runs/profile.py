"""`vitlens profile`: what models cost, side by side: parameters, FLOPs, memory, latency, growth with tokens."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.cost.flops import CONVENTION
from vitlens.analysis.cost.latency import LONGEST, TimedBatch, latencies
from vitlens.analysis.cost.memory import process_peak
from vitlens.analysis.cost.parts import in_order
from vitlens.analysis.cost.profile import Profile
from vitlens.analysis.cost.profile import profile as profile_model
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.progress import Advance, progress
from vitlens.devices import autocast, device_name
from vitlens.models.model import Model
from vitlens.models.resizing import untrained_at
from vitlens.runs.profile_draw import draw
from vitlens.runs.profile_growth import growth, keep_growth
from vitlens.runs.profile_models import Size, load_for_cost
from vitlens.runs.profile_tell import tell
from vitlens.runs.report import publish
from vitlens.uncertainty import Estimate, median_of

__all__ = ["draw", "profile", "tell"]

_LARGEST: Final = {"cpu": 64, "other": 1024}  # batch, where none is asked for


def profile(
    models: Sequence[str],
    *,
    patch_sizes: Sequence[Size] = (),
    sizes: Sequence[Size] = (),
    batch_sizes: Sequence[int] = (),
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """What each model costs, and the report; returns its path. Models without weights of their own are untrained.

    patch_sizes: ViT presets are taken with each; sizes: images (height, width) by which the number of tokens is
    varied (default: from half to double each model's side; with several patch sizes, by these); batch_sizes: default
    1, 2, 4 ... until a pass takes longer than LONGEST. Raises InputError (or one of its kind) before anything is
    written.
    """
    loaded, variants = load_for_cost(models, patch_sizes=patch_sizes, model_options=model_options, options=options)
    for model in loaded:
        for size in sizes:
            untrained_at(model, size)  # one that does not fit is refused before anything is measured
    device = loaded[0].device
    kind = "cpu" if device.type == "cpu" else "other"
    asked = tuple(batch_sizes) or (() if options.batch_size is None else (options.batch_size,))
    batches = asked or tuple(2**power for power in range(_LARGEST[kind].bit_length()))
    aliases = [model.alias for model in loaded]
    choices = {"patch_sizes": list(patch_sizes), "sizes": list(sizes), "batch_sizes": list(batches)}
    config = described(options, models=loaded, choices={**choices, "bounded": not asked, "longest": LONGEST})
    effective = "fp32" if isinstance(autocast(device, options.precision), nullcontext) else "bf16"
    machine = {"name": device_name(device), "threads": torch.get_num_threads(), "arithmetic": effective}
    with (
        RunFolder.create(
            "profile",
            name_parts=tuple(models) if len(models) < 4 else (f"{len(models)}-models",),
            title=f"What {_listed(aliases)} cost{'s' if len(aliases) == 1 else ''}",
            out=options.out,
            overwrite=options.overwrite,
            config={**config, "machine": machine},
            formats=options.formats,
        ) as folder,
        progress("Measuring", len(aliases) * (1 + len(batches)), unit="measurements", quiet=options.quiet) as advance,
    ):
        keep_costs(folder, [_cost(model, effective, advance) for model in loaded], loaded)
        longest = None if asked else LONGEST
        speeds = latencies(loaded, batches, precision=effective, longest=longest, advance=advance)
        keep_speeds(folder, aliases, speeds)
        keep_growth(folder, growth(loaded, variants, sizes, precision=effective), several=len(models) > 1)
        peak = process_peak()
        if peak is not None:
            folder.metric("process_peak", Estimate(float(peak), unit="bytes"))
        return publish(folder, draw, tell)


def _cost(model: Model, precision: str, advance: Advance) -> Profile:
    found = profile_model(model, batch_sizes=(), precision=precision)
    advance(1)
    return found


def keep_costs(folder: RunFolder, costs: Sequence[Profile], models: Sequence[Model]) -> None:
    """Write the tables models and parts, and the totals as metrics."""
    rows: list[dict[str, object]] = []
    parts: list[dict[str, object]] = []
    for cost, model in zip(costs, models):
        totals = {
            "parameters": sum(cost.parameters.values()),
            "flops": sum(cost.flops.values()),
            "training_bytes": cost.training_bytes,
            "inference_bytes": cost.inference_bytes,
        }
        end = f"/{model.alias}" if len(models) > 1 else ""
        for name, total in totals.items():
            unit = {"parameters": "", "flops": "FLOPs"}.get(name, "bytes")
            folder.metric(f"{name}{end}", Estimate(float(total), unit=unit))
        rows.append(
            {
                "model": model.alias,
                "family": model.anatomy.family,
                "untrained": model.provenance.weights == "random",
                "size": list(model.input_size),
                "tokens": cost.tokens,
                "one_sequence": model.anatomy.layout is not None,
                "by_formula": cost.by_formula,
                **totals,
            }
        )
        for part in in_order({*cost.parameters, *cost.flops}):
            counts = {"parameters": cost.parameters.get(part, 0), "flops": cost.flops.get(part, 0)}
            parts.append({"model": model.alias, "part": part, **counts})
    folder.table("conventions", [{"of": "FLOPs", "says": CONVENTION}])
    folder.table("models", rows)
    folder.table("parts", parts)


def keep_speeds(folder: RunFolder, aliases: Sequence[str], speeds: Sequence[Sequence[TimedBatch]]) -> None:
    """Write the table speed (seconds, quartiles), every pass as arrays, and medians in ms as metrics."""
    rows: list[dict[str, object]] = []
    arrays: dict[str, list[float]] = {}
    for alias, timed in zip(aliases, speeds):
        end = f"/{alias}" if len(aliases) > 1 else ""
        for one in timed:
            size = one.latency.images
            rows.append({"model": alias, **asdict(one.latency), "device_bytes": one.device_bytes})
            arrays[f"{alias}_batch{size}"] = list(one.seconds)
            found = median_of([1000 * second for second in one.seconds], unit="ms")
            folder.metric(f"latency{end}/{size}", found)
            folder.metric(f"throughput{end}/{size}", _rate(found, size))
    folder.table("speed", rows)
    folder.arrays("seconds", **arrays)


def _rate(milliseconds: Estimate, images: int) -> Estimate:
    """Images per second; the ends of the interval change places."""
    low, high = (None if end is None else 1000 * images / end for end in (milliseconds.high, milliseconds.low))
    return Estimate(1000 * images / milliseconds.value, low, high, milliseconds.n, "images/s")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
