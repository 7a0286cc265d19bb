"""Growth of cost with tokens: every model at several image sizes or patch sizes, and the exponents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from vitlens.analysis.cost.flops import exponent, flops_by_part
from vitlens.analysis.cost.latency import latencies
from vitlens.analysis.cost.parts import PRODUCTS
from vitlens.analysis.cost.profile import tokens_of
from vitlens.commands.profile.measure.models import sized
from vitlens.commands.profile.record import (
    EXPONENT,
    EXPONENTS,
    LEFT_OUT,
    TOKENS,
    Cost,
    ExponentRow,
    LeftOutSizeRow,
    Size,
    Sweep,
    TokensRow,
)
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate

_IMAGES: Final = {"cpu": 1, "other": 32}  # at a time: one image does not occupy a GPU


def growth(
    models: Sequence[Model], variants: Mapping[str, Sequence[str]], sizes: Sequence[Size], *, precision: str
) -> Iterator[TokensRow | LeftOutSizeRow]:
    """Cost at each number of tokens, by patch size or image size; or a size at which a model does not run."""
    by_alias = {model.alias: model for model in models}
    several = {base: names for base, names in variants.items() if len(names) > 1}
    for base, names in several.items():
        for name in names:
            yield _point(base, "patch size", by_alias[name], precision)
    repatched = {name for names in several.values() for name in names}
    for model in models:
        if model.alias in repatched and not sizes:
            continue
        for size, resized in sized(model, sizes):
            if isinstance(resized, str):  # the reason why it does not run
                yield LeftOutSizeRow(model.alias, "image size", size, resized)
            else:
                yield _point(model.alias, "image size", resized, precision)


def _point(alias: str, sweep: Sweep, model: Model, precision: str) -> TokensRow:
    flops = flops_by_part(model)
    images = _IMAGES["cpu" if model.device.type == "cpu" else "other"]
    ((timed,),) = latencies([model], [images], precision=precision)
    return TokensRow(
        model=alias,
        sweep=sweep,
        size=model.input_size,
        tokens=tokens_of(model),
        flops=sum(flops.values()),
        products=flops.get(PRODUCTS, 0),
        **asdict(timed.latency),
    )


def write_growth(folder: RunFolder, rows: Iterator[TokensRow | LeftOutSizeRow]) -> None:
    """Write cost by tokens, the sizes that did not run, and the exponents as a table and as metrics."""
    points, left_out = [], []
    for row in rows:
        if isinstance(row, TokensRow):
            points.append(row)
        else:
            left_out.append(row)
    folder.write(TOKENS, points)
    folder.write(LEFT_OUT, left_out)
    exponents: list[ExponentRow] = []
    for model, sweep in dict.fromkeys((row.model, row.sweep) for row in points):
        of_sweep = [row for row in points if (row.model, row.sweep) == (model, sweep)]
        for cost, fit in _fits(of_sweep):
            tokens = [row.tokens for row in of_sweep]
            ends = (min(tokens), max(tokens))
            exponents.append(ExponentRow(model, sweep, cost, fit.value, fit.low, fit.high, len(of_sweep), *ends))
            folder.metric(EXPONENT(model=model, sweep=sweep.replace(" ", "-"), cost=cost), fit)
    folder.write(EXPONENTS, exponents)


def _fits(points: Sequence[TokensRow]) -> Iterator[tuple[Cost, Estimate]]:
    """The exponents of latency, FLOPs and attention products; none without attention, or for one number of tokens."""
    tokens = [float(row.tokens) for row in points]
    if len(set(tokens)) < 2:
        return
    costs: dict[Cost, list[float]] = {
        "latency": [row.median for row in points],
        "flops": [row.flops for row in points],
        "products": [row.products for row in points],
    }
    for cost, values in costs.items():
        if min(values) > 0:
            yield cost, exponent(tokens, values)
