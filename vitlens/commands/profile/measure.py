"""Measure the cost of models: parameters, FLOPs, memory, latency, and growth with tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.cost.flops import PARTS, PRODUCTS, STAGE, crossover, in_order
from vitlens.analysis.cost.passes import LONGEST, TimedBatch, latencies, process_peak
from vitlens.analysis.cost.profile import Profile, profile
from vitlens.commands.profile.growth import at_size, fit_exponents, measure_growth, median_latency
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.profile.record import CostRow, MachineRow, PartRow, ProfileRecord, SpeedRow
from vitlens.commands.profile.variants import load_for_profile, variants_by_preset
from vitlens.commands.run.run import Run
from vitlens.devices import device_name, in_bf16
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate

_LARGEST_ON_CPU: Final = 64  # largest default batch size on a CPU
_LARGEST_ELSEWHERE: Final = 1024  # largest default batch size on other devices


@dataclass(frozen=True)
class Timing:
    """The settings of the timings.

    batch_sizes: the batch sizes that are tried.
    arithmetic: fp32 or bf16.
    longest: no larger batch is tried once a pass takes this many seconds; None to try all, which a
        user has chosen.
    """

    batch_sizes: tuple[int, ...]
    arithmetic: str
    longest: float | None


def measure(options: ProfileOptions) -> Path | None:
    """Measure the cost of each model and write the report.

    Models without trained weights get random ones. Returns the path of the report, None in all
    processes but the first. Raises InputError (or a subclass) before anything is written.
    """
    variants = variants_by_preset(options)
    run = Run(
        "profile",
        options,
        load=lambda run_options: load_for_profile(options, run_options, variants),
    )
    for model in run.models:
        for size in options.sizes:
            at_size(model, size)  # raises before anything is measured if the size does not fit
    timing = _timing(run)
    with run.folder("Cost of") as folder:
        costs, batches = _measure_costs(run, timing)
        growth = measure_growth(run.models, variants, options.sizes, precision=timing.arithmetic)
        machine = MachineRow(
            name=device_name(run.model.device),
            threads=torch.get_num_threads(),
            arithmetic=timing.arithmetic,
            longest=timing.longest,
            peak=process_peak(),
        )

        def record() -> ProfileRecord:
            return ProfileRecord(
                machine=(machine,),
                costs=tuple(_cost_row(model, cost) for model, cost in costs.items()),
                parts=tuple(_all_part_rows(costs)),
                speed=tuple(_speed_rows(run.models, batches)),
                tokens=growth.tokens,
                left_out=growth.left_out,
                exponents=tuple(fit_exponents(growth.tokens)),
            )

        return folder.publish(record)


def _timing(run: Run[ProfileOptions]) -> Timing:
    """Return the settings of the timings.

    Batch sizes are those of --batch-sizes or --batch-size, else powers of two up to a largest one.
    """
    device = run.model.device
    arithmetic = "bf16" if in_bf16(device, run.run_options.precision) else "fp32"
    if run.options.batch_sizes:
        return Timing(run.options.batch_sizes, arithmetic, longest=None)
    if run.run_options.batch_size is not None:
        return Timing((run.run_options.batch_size,), arithmetic, longest=None)
    largest = _LARGEST_ON_CPU if device.type == "cpu" else _LARGEST_ELSEWHERE
    batch_sizes = []
    size = 1
    while size <= largest:
        batch_sizes.append(size)
        size *= 2
    return Timing(tuple(batch_sizes), arithmetic, LONGEST)


def _measure_costs(
    run: Run[ProfileOptions], timing: Timing
) -> tuple[dict[Model, Profile], list[list[TimedBatch]]]:
    """Return the cost of each model for one image, and its timed batches."""
    steps = len(run.models) * (1 + len(timing.batch_sizes))
    with run.progress("Measuring", steps, "measurements") as advance:
        costs: dict[Model, Profile] = {}
        for model in run.models:
            costs[model] = profile(model, batch_sizes=(), precision=timing.arithmetic)
            advance(1)
        batches = latencies(
            run.models,
            timing.batch_sizes,
            precision=timing.arithmetic,
            longest=timing.longest,
            advance=advance,
        )
    return costs, batches


def _cost_row(model: Model, cost: Profile) -> CostRow:
    """Return the row of a model from its cost for one image."""
    one_sequence = model.anatomy.layout is not None
    products = cost.flops.get(PRODUCTS, 0)
    crossover_tokens = None
    if one_sequence and products:  # else the products do not grow with the square of the tokens
        crossover_tokens = crossover(cost.flops, cost.tokens)
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
        crossover=crossover_tokens,
        training_bytes=cost.training_bytes,
        inference_bytes=cost.inference_bytes,
    )


def _all_part_rows(costs: Mapping[Model, Profile]) -> Iterator[PartRow]:
    for model, cost in costs.items():
        yield from _part_rows(model.alias, cost)


def _part_rows(alias: str, cost: Profile) -> Iterator[PartRow]:
    """Yield the parts of one model in the order of a forward pass."""
    all_parameters = sum(cost.parameters.values())
    all_flops = sum(cost.flops.values())
    for part in in_order({*cost.parameters, *cost.flops}):
        is_stage = part.startswith(f"{STAGE} ")  # "stage 2", of which PARTS has only "stage"
        name = STAGE if is_stage else part
        parameters = cost.parameters.get(part, 0)
        flops = cost.flops.get(part, 0)
        yield PartRow(
            model=alias,
            part=part,
            meaning=PARTS[name],
            parameters=parameters,
            flops=flops,
            of_parameters=parameters / all_parameters,
            of_flops=flops / all_flops,
        )


def _speed_rows(
    models: Sequence[Model], batches: Sequence[Sequence[TimedBatch]]
) -> Iterator[SpeedRow]:
    for model, batches_of_model in zip(models, batches):
        for batch in batches_of_model:
            yield speed_row(model.alias, batch)


def speed_row(alias: str, batch: TimedBatch) -> SpeedRow:
    """Return the latency and throughput of one model at one batch size."""
    images = batch.latency.images
    latency = median_latency(batch)
    return SpeedRow(
        model=alias,
        images=images,
        latency=latency,
        rate=_throughput(images, latency),
        spread=batch.latency.high / batch.latency.low,
        device_bytes=batch.device_bytes,
    )


def _throughput(images: int, latency: Estimate) -> Estimate:
    """Return images per second from the milliseconds of a pass over this many images."""
    # the longest time gives the lowest rate
    low = None
    if latency.high is not None:
        low = 1000 * images / latency.high
    high = None
    if latency.low is not None:
        high = 1000 * images / latency.low
    rate = 1000 * images / latency.value
    return Estimate(rate, low, high, latency.n, unit="images/s")
