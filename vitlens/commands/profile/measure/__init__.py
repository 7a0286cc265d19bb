"""The cost of models: parameters, FLOPs, memory, latency, and their growth with tokens."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import numpy as np
import torch

from vitlens.analysis.cost.flops import CONVENTION, crossover
from vitlens.analysis.cost.latency import LONGEST, TimedBatch, latencies
from vitlens.analysis.cost.memory import process_peak
from vitlens.analysis.cost.parts import PARTS as MEANING_OF
from vitlens.analysis.cost.parts import PRODUCTS, STAGE, in_order
from vitlens.analysis.cost.profile import Profile, profile
from vitlens.commands.profile.measure.growth import growth, write_growth
from vitlens.commands.profile.measure.models import load_for_cost
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.profile.record import (
    CONVENTIONS,
    COSTS,
    FLOPS,
    INFERENCE_BYTES,
    LATENCY,
    MACHINE,
    MEANINGS,
    PARAMETERS,
    PARTS,
    PROCESS_PEAK,
    SECONDS,
    SPEED,
    THROUGHPUT,
    TRAINING_BYTES,
    ConventionRow,
    CostRow,
    MachineRow,
    PartMeaningRow,
    PartRow,
    SecondsArrays,
    SpeedRow,
)
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.progress.bar import Advance, progress
from vitlens.commands.scaffold.publish import publish
from vitlens.devices import autocast, device_name
from vitlens.models.model import Model
from vitlens.models.resizing import untrained_at
from vitlens.uncertainty import Estimate, median_of

_LARGEST: Final = {"cpu": 64, "other": 1024}  # batch, without --batch-sizes


def measure(options: ProfileOptions) -> Path:
    """Measure the cost of each model and write the report; returns the report's path.

    Models without weights of their own are untrained. Raises InputError (or one of its kind) before anything is
    written.
    """
    run = options.run
    models, variants = load_for_cost(options)
    for model in models:
        for size in options.sizes:
            untrained_at(model, size)  # refuses a size that does not fit before anything is measured
    device = models[0].device
    kind = "cpu" if device.type == "cpu" else "other"
    requested = options.batch_sizes or (() if run.batch_size is None else (run.batch_size,))
    batches = requested or tuple(2**power for power in range(_LARGEST[kind].bit_length()))
    longest = None if requested else LONGEST
    arithmetic = "fp32" if isinstance(autocast(device, run.precision), nullcontext) else "bf16"
    with (
        RunFolder.create(
            "profile",
            name_parts=options.models if len(options.models) < 4 else (f"{len(options.models)}-models",),
            title=f"Cost of {_listed([model.alias for model in models])}",
            out=run.out,
            overwrite=run.overwrite,
            config=settings(options, run, models=models),
            formats=run.formats,
        ) as folder,
        progress("Measuring", len(models) * (1 + len(batches)), unit="measurements", quiet=run.quiet) as advance,
    ):
        machine = MachineRow(device_name(device), torch.get_num_threads(), arithmetic, max(batches), longest)
        folder.write(MACHINE, [machine])
        _write_costs(folder, models, [_cost(model, arithmetic, advance) for model in models])
        _write_speed(folder, models, latencies(models, batches, precision=arithmetic, longest=longest, advance=advance))
        write_growth(folder, growth(models, variants, options.sizes, precision=arithmetic))
        peak = process_peak()
        if peak is not None:
            folder.metric(PROCESS_PEAK(), Estimate(float(peak), unit="bytes"))
        return publish(folder)


def _cost(model: Model, precision: str, advance: Advance) -> Profile:
    cost = profile(model, batch_sizes=(), precision=precision)
    advance(1)
    return cost


def _write_costs(folder: RunFolder, models: Sequence[Model], costs: Sequence[Profile]) -> None:
    """Write the cost of each model and of its parts, and the totals as metrics."""
    rows = [_cost_row(model, cost) for model, cost in zip(models, costs)]
    for row in rows:
        folder.metric(PARAMETERS(model=row.model), Estimate(float(row.parameters), unit=""))
        folder.metric(FLOPS(model=row.model), Estimate(float(row.flops), unit="FLOPs"))
        folder.metric(TRAINING_BYTES(model=row.model), Estimate(float(row.training_bytes), unit="bytes"))
        folder.metric(INFERENCE_BYTES(model=row.model), Estimate(float(row.inference_bytes), unit="bytes"))
    parts = [
        PartRow(model.alias, part, cost.parameters.get(part, 0), cost.flops.get(part, 0))
        for model, cost in zip(models, costs)
        for part in in_order({*cost.parameters, *cost.flops})
    ]
    kinds = {STAGE if row.part.startswith(f"{STAGE} ") else row.part for row in parts}
    folder.write(CONVENTIONS, [ConventionRow("FLOPs", CONVENTION)])
    folder.write(COSTS, rows)
    folder.write(PARTS, parts)
    folder.write(MEANINGS, [PartMeaningRow(part, meaning) for part, meaning in MEANING_OF.items() if part in kinds])


def _cost_row(model: Model, cost: Profile) -> CostRow:
    one_sequence, products = model.anatomy.layout is not None, cost.flops.get(PRODUCTS, 0)
    return CostRow(
        model=model.alias,
        family=model.anatomy.family,
        untrained=model.provenance.weights == "random",
        size=model.input_size,
        tokens=cost.tokens,
        one_sequence=one_sequence,
        by_formula=cost.by_formula,
        parameters=sum(cost.parameters.values()),
        flops=sum(cost.flops.values()),
        products=products,
        crossover=crossover(cost.flops, cost.tokens) if one_sequence and products else None,
        training_bytes=cost.training_bytes,
        inference_bytes=cost.inference_bytes,
    )


def _write_speed(folder: RunFolder, models: Sequence[Model], speeds: Sequence[Sequence[TimedBatch]]) -> None:
    """Write quartiles in seconds as a table, every pass as arrays, and medians in ms as metrics."""
    rows: list[SpeedRow] = []
    for model, timed in zip(models, speeds):
        for batch in timed:
            quartiles = batch.latency
            rows.append(
                SpeedRow(
                    model.alias,
                    quartiles.low,
                    quartiles.median,
                    quartiles.high,
                    quartiles.repeats,
                    quartiles.images,
                    batch.device_bytes,
                )
            )
            latency = median_of([1000 * second for second in batch.seconds], unit="ms")
            folder.metric(LATENCY(model=model.alias, batch=quartiles.images), latency)
            folder.metric(THROUGHPUT(model=model.alias, batch=quartiles.images), _rate(latency, quartiles.images))
        seconds = {batch.latency.images: np.array(batch.seconds) for batch in timed}
        folder.save(SECONDS, SecondsArrays(seconds), model=model.alias)
    folder.write(SPEED, rows)


def _rate(milliseconds: Estimate, images: int) -> Estimate:
    """Images per second; the ends of the interval change places."""
    low, high = (None if end is None else 1000 * images / end for end in (milliseconds.high, milliseconds.low))
    return Estimate(1000 * images / milliseconds.value, low, high, milliseconds.n, "images/s")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
