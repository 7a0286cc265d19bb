"""The cost of models: parameters, FLOPs, memory, latency, and their growth with tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.cost.flops import PARTS, PRODUCTS, STAGE, crossover, exponent, flops_by_part, in_order
from vitlens.analysis.cost.passes import LONGEST, TimedBatch, latencies, process_peak
from vitlens.analysis.cost.profile import Profile, profile, tokens_of
from vitlens.commands.profile import record as rows
from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.run.load import load_models
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.run import Run
from vitlens.devices import device_name, in_bf16, resolve_device
from vitlens.errors import InputError
from vitlens.models.configs import VIT_PRESETS
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.naming import parse_models, require_rule
from vitlens.models.rebuild import default_classes, untrained_like
from vitlens.models.sources.registry import source_of
from vitlens.uncertainty import Estimate, median_of

_FACTORS: Final = (0.5, 0.75, 1.0, 1.5, 2.0)  # of the model's own image side
_LARGEST: Final = {True: 64, False: 1024}  # batch on a CPU and elsewhere, without --batch-sizes
_IMAGES: Final = {True: 1, False: 32}  # at a time for growth: one image does not occupy a GPU
Variants = Mapping[str, Mapping[str, rows.Size]]


def measure(options: ProfileOptions) -> Path | None:
    """Measure the cost of each model and write the report; returns its path, None in all processes but the first.

    Models without weights of their own are untrained. Raises InputError (or one of its kind) before anything is
    written.
    """
    variants = _variants(options)
    run = Run("profile", options, images=False, load=lambda given: _loaded(options, given, variants))
    for model in run.models:
        for size in options.sizes:
            _at(model, size)  # refuses a size that does not fit before anything is measured
    device = run.model.device
    requested = options.batch_sizes or (() if run.run.batch_size is None else (run.run.batch_size,))
    batches = requested or tuple(2**power for power in range(_LARGEST[device.type == "cpu"].bit_length()))
    longest = None if requested else LONGEST
    arithmetic = "bf16" if in_bf16(device, run.run.precision) else "fp32"
    with run.folder("Cost of") as folder:
        steps = len(run.models) * (1 + len(batches))
        with run.progress("Measuring", steps, "measurements") as advance:
            costs: dict[Model, Profile] = {}
            for model in run.models:
                costs[model] = profile(model, batch_sizes=(), precision=arithmetic)
                advance(1)
            timed = latencies(run.models, batches, precision=arithmetic, longest=longest, advance=advance)
        grown = list(_growth(run.models, variants, options.sizes, precision=arithmetic))
        points = tuple(row for row in grown if isinstance(row, rows.TokensRow))
        machine = rows.MachineRow(device_name(device), torch.get_num_threads(), arithmetic, longest, process_peak())
        return folder.publish(
            lambda: rows.ProfileRecord(
                machine=(machine,),
                costs=tuple(_cost_row(model, cost) for model, cost in costs.items()),
                parts=tuple(row for model, cost in costs.items() for row in _part_rows(model.alias, cost)),
                speed=tuple(speed_row(model.alias, each) for model, own in zip(run.models, timed) for each in own),
                tokens=points,
                left_out=tuple(row for row in grown if isinstance(row, rows.LeftOutSizeRow)),
                exponents=tuple(_exponent_rows(points)),
            )
        )


def _variants(options: ProfileOptions) -> Variants:
    """By alias of each ViT preset that is built with several patch sizes: these, by alias, as alias-p4 and so on."""
    require_rule(options.models)
    named = parse_models(options.models)
    sizes = options.patch_sizes
    words = {f"{height}" if height == width else f"{height}x{width}": (height, width) for height, width in sizes}
    found = {
        model.alias: {f"{model.alias}-p{word}": size for word, size in words.items()}
        for model in named
        if sizes and model.name in VIT_PRESETS and not model.weights
    }
    if sizes and not found:
        raise InputError(
            f"expected a preset of a ViT with --patch-size, found {', '.join(model.name for model in named)}; "
            f"try {next(iter(VIT_PRESETS))}, or --sizes for any model"
        )
    return found if options.model_options.weights is None else {}


def _loaded(options: ProfileOptions, run: RunOptions, variants: Variants) -> tuple[Model, ...]:
    """Return the models; one without weights of its own (a preset, a name of a hub) stays untrained."""
    given = options.model_options
    if given.weights is not None:
        return load_models(options.models, model_options=given, options=run)
    loaded: list[Model] = []
    for model in parse_models(options.models):
        for alias, size in variants.get(model.alias, {}).items():
            variant = untrained(
                model.name,
                classes=default_classes(VIT_PRESETS[model.name].classes),
                image_size=given.image_size,
                seed=run.seed,
                alias=alias,
                overrides={"patch_size": [*size]},
            )
            variant.provenance = replace(variant.provenance, weights="random")
            loaded.append(variant.to(resolve_device(run.device)).eval().requires_grad_(False))
        if model.alias not in variants:
            source = source_of(model.name)
            bare = not model.weights and (source is None or source.weights != "own")
            own = replace(given, random_weights=True) if bare else given
            loaded += load_models([model], model_options=own, options=run)
    return tuple(loaded)


def _cost_row(model: Model, cost: Profile) -> rows.CostRow:
    one_sequence = model.anatomy.layout is not None
    products = cost.flops.get(PRODUCTS, 0)
    return rows.CostRow(
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


def _part_rows(alias: str, cost: Profile) -> Iterator[rows.PartRow]:
    """Yield the parts of one model in the order of a forward pass."""
    totals = [sum(each.values()) for each in (cost.parameters, cost.flops)]
    for part in in_order({*cost.parameters, *cost.flops}):
        meaning = PARTS[STAGE if part.startswith(f"{STAGE} ") else part]
        parameters = cost.parameters.get(part, 0)
        flops = cost.flops.get(part, 0)
        yield rows.PartRow(alias, part, meaning, parameters, flops, parameters / totals[0], flops / totals[1])


def speed_row(alias: str, timed: TimedBatch) -> rows.SpeedRow:
    """Return the passes of one model at one batch size."""
    quartiles = timed.latency
    time = _median(timed)
    low, high = (None if end is None else 1000 * quartiles.images / end for end in (time.high, time.low))
    rate = Estimate(1000 * quartiles.images / time.value, low, high, time.n, "images/s")
    return rows.SpeedRow(alias, quartiles.images, time, rate, quartiles.high / quartiles.low, timed.device_bytes)


def _median(timed: TimedBatch) -> Estimate:
    return median_of([1000 * second for second in timed.seconds], unit="ms")


def _growth(
    models: Sequence[Model], variants: Variants, sizes: Sequence[rows.Size], *, precision: str
) -> Iterator[rows.TokensRow | rows.LeftOutSizeRow]:
    """Cost at each number of tokens, by patch size or image size; or a size at which a model does not run."""
    bases = {alias: base for base, names in variants.items() if len(names) > 1 for alias in names}
    for model in models:
        if model.alias in bases:
            yield _point(bases[model.alias], "patch-size", model, precision)
    for model in models:
        if model.alias in bases and not sizes:
            continue
        for size in sizes or default_sizes(model):
            try:
                resized = _at(model, size)
            except InputError as error:  # of a default size: those of --sizes were tried before
                yield rows.LeftOutSizeRow(model.alias, "image-size", size, str(error))
            else:
                yield _point(model.alias, "image-size", resized, precision)


def _at(model: Model, size: rows.Size) -> Model:
    """Return the model itself at its own size, else an untrained one of the same architecture. Raises InputError."""
    return model if size == model.input_size else untrained_like(model, seed=0, size=size)


def default_sizes(model: Model) -> list[rows.Size]:
    """From half to double the model's own size, in whole patches (without patches, in steps of 8 px or less)."""
    sides = model.input_size
    layout = model.anatomy.layout
    steps = (next((unit for unit in (8, 4, 2) if side % unit == 0 and side // unit >= 4), 1) for side in sides)
    units = layout.patch_size if layout is not None else tuple(steps)
    height, width = (
        [max(1, round(side / unit * factor)) * unit for factor in _FACTORS] for side, unit in zip(sides, units)
    )
    return list(dict.fromkeys(zip(height, width)))


def _point(alias: str, sweep: rows.Sweep, model: Model, precision: str) -> rows.TokensRow:
    flops = flops_by_part(model)
    images = _IMAGES[model.device.type == "cpu"]
    ((timed,),) = latencies([model], [images], precision=precision)
    total = sum(flops.values())
    products = flops.get(PRODUCTS, 0)
    return rows.TokensRow(alias, sweep, model.input_size, tokens_of(model), total, products, images, _median(timed))


def _exponent_rows(points: Sequence[rows.TokensRow]) -> Iterator[rows.ExponentRow]:
    """Yield the exponents of latency, FLOPs and attention products; none without attention, or for one number of
    tokens."""
    for model, sweep in dict.fromkeys((row.model, row.sweep) for row in points):
        own = [row for row in points if (row.model, row.sweep) == (model, sweep)]
        tokens = [row.tokens for row in own]
        costs: dict[rows.Cost, list[float]] = {
            "latency": [row.latency.value for row in own],
            "flops": [row.flops for row in own],
            "products": [row.products for row in own],
        }
        for cost, values in costs.items():
            if len(set(tokens)) > 1 and min(values) > 0:
                yield rows.ExponentRow(model, sweep, cost, exponent(tokens, values), min(tokens), max(tokens))
