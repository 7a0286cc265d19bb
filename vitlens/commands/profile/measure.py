"""The cost of models: parameters, FLOPs, memory, latency, and their growth with tokens."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.cost.flops import crossover, exponent, flops_by_part
from vitlens.analysis.cost.latency import LONGEST, TimedBatch, latencies
from vitlens.analysis.cost.memory import process_peak
from vitlens.analysis.cost.parts import PARTS, PRODUCTS, STAGE, in_order
from vitlens.analysis.cost.profile import Profile, profile, tokens_of
from vitlens.commands.profile.models import load_for_cost, sized
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.profile.record import (
    Cost,
    CostRow,
    ExponentRow,
    LeftOutSizeRow,
    MachineRow,
    PartRow,
    ProfileRecord,
    Size,
    SpeedRow,
    Sweep,
    TokensRow,
)
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress.bar import progress
from vitlens.commands.scaffold.run import Run
from vitlens.devices import autocast, device_name
from vitlens.models.model import Model
from vitlens.models.resizing import untrained_at
from vitlens.uncertainty import Estimate, median_of

_LARGEST: Final = {"cpu": 64, "other": 1024}  # batch, without --batch-sizes
_IMAGES: Final = {"cpu": 1, "other": 32}  # at a time for growth: one image does not occupy a GPU


def measure(options: ProfileOptions) -> Path | None:
    """Measure the cost of each model and write the report; returns its path, None in all processes but the first.

    Models without weights of their own are untrained. Raises InputError (or one of its kind) before anything is
    written.
    """
    variants: Mapping[str, Sequence[str]] = {}

    def load(given: RunOptions) -> tuple[Model, ...]:
        nonlocal variants
        loaded, variants = load_for_cost(options, given)
        return loaded

    run = Run("profile", options, images=False, load=load)
    for model in run.models:
        for size in options.sizes:
            untrained_at(model, size)  # refuses a size that does not fit before anything is measured
    device = run.model.device
    requested = options.batch_sizes or (() if run.run.batch_size is None else (run.run.batch_size,))
    batches = requested or tuple(2**power for power in range(_LARGEST[_kind(device)].bit_length()))
    longest = None if requested else LONGEST
    arithmetic = "fp32" if isinstance(autocast(device, run.run.precision), nullcontext) else "bf16"
    with run.folder("Cost of") as folder:
        steps = len(run.models) * (1 + len(batches))
        with progress("Measuring", steps, unit="measurements", quiet=run.run.quiet) as advance:
            costs: list[Profile] = []
            for model in run.models:
                costs.append(profile(model, batch_sizes=(), precision=arithmetic))
                advance(1)
            timed = latencies(run.models, batches, precision=arithmetic, longest=longest, advance=advance)
        grown = list(growth(run.models, variants, options.sizes, precision=arithmetic))
        points = tuple(row for row in grown if isinstance(row, TokensRow))
        pairs = list(zip(run.models, costs))
        machine = MachineRow(device_name(device), torch.get_num_threads(), arithmetic, longest, process_peak())
        return folder.publish(
            lambda: ProfileRecord(
                machine=(machine,),
                costs=tuple(cost_row(model, cost) for model, cost in pairs),
                parts=tuple(row for model, cost in pairs for row in part_rows(model.alias, cost)),
                speed=tuple(
                    speed_row(model.alias, each) for model, own in zip(run.models, timed) for each in own
                ),
                tokens=points,
                left_out=tuple(row for row in grown if isinstance(row, LeftOutSizeRow)),
                exponents=tuple(exponent_rows(points)),
            )
        )  # fmt: skip


def _kind(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else "other"


def cost_row(model: Model, cost: Profile) -> CostRow:
    """The totals of one model."""
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


def part_rows(alias: str, cost: Profile) -> Iterator[PartRow]:
    """The parts of one model in the order of a forward pass."""
    for part in in_order({*cost.parameters, *cost.flops}):
        meaning = PARTS[STAGE if part.startswith(f"{STAGE} ") else part]
        yield PartRow(alias, part, meaning, cost.parameters.get(part, 0), cost.flops.get(part, 0))


def speed_row(alias: str, timed: TimedBatch) -> SpeedRow:
    """The passes of one model at one batch size."""
    quartiles, time = timed.latency, _median(timed)
    low, high = (None if end is None else 1000 * quartiles.images / end for end in (time.high, time.low))
    rate = Estimate(1000 * quartiles.images / time.value, low, high, time.n, "images/s")
    return SpeedRow(alias, quartiles.images, time, rate, quartiles.high / quartiles.low, timed.device_bytes)


def _median(timed: TimedBatch) -> Estimate:
    return median_of([1000 * second for second in timed.seconds], unit="ms")


def growth(
    models: Sequence[Model], variants: Mapping[str, Sequence[str]], sizes: Sequence[Size], *, precision: str
) -> Iterator[TokensRow | LeftOutSizeRow]:
    """Cost at each number of tokens, by patch size or image size; or a size at which a model does not run."""
    by_alias = {model.alias: model for model in models}
    several = {base: names for base, names in variants.items() if len(names) > 1}
    for base, names in several.items():
        for name in names:
            yield _point(base, "patch-size", by_alias[name], precision)
    repatched = {name for names in several.values() for name in names}
    for model in models:
        if model.alias in repatched and not sizes:
            continue
        for size, resized in sized(model, sizes):
            if isinstance(resized, str):  # the reason why it does not run
                yield LeftOutSizeRow(model.alias, "image-size", size, resized)
            else:
                yield _point(model.alias, "image-size", resized, precision)


def _point(alias: str, sweep: Sweep, model: Model, precision: str) -> TokensRow:
    flops, images = flops_by_part(model), _IMAGES[_kind(model.device)]
    ((timed,),) = latencies([model], [images], precision=precision)
    return TokensRow(
        alias, sweep, model.input_size, tokens_of(model), sum(flops.values()), flops.get(PRODUCTS, 0), images,
        _median(timed),
    )  # fmt: skip


def exponent_rows(points: Sequence[TokensRow]) -> Iterator[ExponentRow]:
    """The exponents of latency, FLOPs and attention products; none without attention, or for one number of tokens."""
    for model, sweep in dict.fromkeys((row.model, row.sweep) for row in points):
        own = [row for row in points if (row.model, row.sweep) == (model, sweep)]
        tokens = [row.tokens for row in own]
        costs: dict[Cost, list[float]] = {
            "latency": [row.latency.value for row in own],
            "flops": [row.flops for row in own],
            "products": [row.products for row in own],
        }
        for cost, values in costs.items():
            if len(set(tokens)) > 1 and min(values) > 0:
                yield ExponentRow(model, sweep, cost, exponent(tokens, values), min(tokens), max(tokens))
