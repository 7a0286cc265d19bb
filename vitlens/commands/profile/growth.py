"""Measure how the cost of models grows with the number of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.cost.flops import PRODUCTS, exponent, flops_by_part
from vitlens.analysis.cost.passes import TimedBatch, latencies
from vitlens.analysis.cost.profile import tokens_of
from vitlens.commands.profile.record import (
    Cost,
    ExponentRow,
    LeftOutSizeRow,
    Size,
    Sweep,
    TokensRow,
)
from vitlens.commands.profile.variants import Variants
from vitlens.errors import InputError
from vitlens.models.derived import untrained_like
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, median_of

_FACTORS: Final = (0.5, 0.75, 1.0, 1.5, 2.0)  # default image sides, in sides of the model's input
# px of which image sides of models without patches are multiples, the first that fits
_STEPS: Final = (8, 4, 2)
_FEWEST_STEPS: Final = 4  # steps in a side; with fewer, rounding would merge the sizes
_IMAGES_ON_CPU: Final = 1  # images in a timed pass on a CPU
# images in a timed pass on other devices: one image does not occupy a GPU
_IMAGES_ELSEWHERE: Final = 32


@dataclass(frozen=True)
class Growth:
    """The cost of models at several numbers of tokens, and image sizes at which they do not run."""

    tokens: tuple[TokensRow, ...]
    left_out: tuple[LeftOutSizeRow, ...]


def measure_growth(
    models: Sequence[Model], variants: Variants, sizes: Sequence[Size], *, precision: str
) -> Growth:
    """Return the cost of each model at several numbers of tokens.

    Each model is measured at several image sizes. Variants of one preset with several patch sizes
    are instead one series over patch sizes; with `sizes`, they are measured at these, too.

    sizes: (height, width) of images; () for the default sizes of each model.
    """
    preset_of_variant = _presets_with_several_variants(variants)
    tokens: list[TokensRow] = []
    left_out: list[LeftOutSizeRow] = []
    for model in models:
        preset = preset_of_variant.get(model.alias)
        if preset is not None:
            tokens.append(_tokens_row(preset, "patch-size", model, precision))
    for model in models:
        if model.alias in preset_of_variant and not sizes:
            continue
        for size in sizes or default_sizes(model):
            try:
                resized = at_size(model, size)
            except InputError as error:  # only default sizes: those of --sizes were checked before
                left_out.append(LeftOutSizeRow(model.alias, "image-size", size, str(error)))
            else:
                tokens.append(_tokens_row(model.alias, "image-size", resized, precision))
    return Growth(tuple(tokens), tuple(left_out))


def _presets_with_several_variants(variants: Variants) -> dict[str, str]:
    """Return the preset of each variant of a preset with several, by alias of the variant."""
    presets = {}
    for preset, patch_sizes in variants.items():
        if len(patch_sizes) > 1:
            presets.update(dict.fromkeys(patch_sizes, preset))
    return presets


def at_size(model: Model, size: Size) -> Model:
    """Return the model, or an untrained one of the same architecture at another input size.

    Raises InputError if the architecture does not accept the size.
    """
    if size == model.input_size:
        return model
    return untrained_like(model, seed=0, size=size)


def default_sizes(model: Model) -> list[Size]:
    """Return image sizes from half to double the input size.

    Their sides are whole patches, or without patches whole steps.
    """
    layout = model.anatomy.layout
    sides_by_axis = []
    for axis, side in enumerate(model.input_size):
        step = _step(side) if layout is None else layout.patch_size[axis]
        sides_by_axis.append(_scaled_sides(side, step))
    heights, widths = sides_by_axis
    return list(dict.fromkeys(zip(heights, widths)))


def _step(side: int) -> int:
    """Return the largest step in px that divides a side into enough parts."""
    for step in _STEPS:
        if side % step == 0 and side // step >= _FEWEST_STEPS:
            return step
    return 1


def _scaled_sides(side: int, step: int) -> list[int]:
    """Return the side times each factor, rounded to whole steps."""
    sides = []
    for factor in _FACTORS:
        steps = max(1, round(side / step * factor))
        sides.append(steps * step)
    return sides


def _tokens_row(alias: str, sweep: Sweep, model: Model, precision: str) -> TokensRow:
    """Return the measured cost of a model.

    alias: the name of the series of which it is a point: the model's, or that of its preset.
    """
    flops = flops_by_part(model)
    images = _IMAGES_ON_CPU if model.device.type == "cpu" else _IMAGES_ELSEWHERE
    [[batch]] = latencies([model], [images], precision=precision)  # by model and batch size
    return TokensRow(
        model=alias,
        sweep=sweep,
        size=model.input_size,
        tokens=tokens_of(model),
        flops=sum(flops.values()),
        products=flops.get(PRODUCTS, 0),
        images=images,
        latency=median_latency(batch),
    )


def median_latency(batch: TimedBatch) -> Estimate:
    """Return the median time of a pass with its interval, in milliseconds."""
    return median_of([1000 * seconds for seconds in batch.seconds], unit="ms")


def fit_exponents(rows: Sequence[TokensRow]) -> Iterator[ExponentRow]:
    """Yield the exponents of latency, FLOPs and attention products for each model and sweep.

    Costs at a single number of tokens have none, nor do products of models without attention.
    """
    series: dict[tuple[str, Sweep], list[TokensRow]] = {}
    for row in rows:
        series.setdefault((row.model, row.sweep), []).append(row)
    for (model, sweep), rows_of_series in series.items():
        tokens = [row.tokens for row in rows_of_series]
        if len(set(tokens)) == 1:
            continue
        for cost, values in _costs(rows_of_series).items():
            if min(values) > 0:  # a power law has no zeros
                yield ExponentRow(
                    model=model,
                    sweep=sweep,
                    cost=cost,
                    exponent=exponent(tokens, values),
                    tokens_from=min(tokens),
                    tokens_to=max(tokens),
                )


def _costs(rows: Sequence[TokensRow]) -> Mapping[Cost, list[float]]:
    return {
        "latency": [row.latency.value for row in rows],
        "flops": [row.flops for row in rows],
        "products": [row.products for row in rows],
    }
