"""Growth of cost with tokens: sentences, tables and curves."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.profile.record import (
    EXPONENTS,
    LEFT_OUT,
    TOKENS,
    CostRow,
    ExponentRow,
    Sweep,
    TokensRow,
    in_pixels,
)
from vitlens.commands.profile.report.speed import CURVES
from vitlens.figures.profile.counts import in_thousands
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COSTS: Final = {"latency": "latency", "flops": "FLOPs", "products": "FLOPs of attention products"}
_TOKENS: Final = "Tokens of a windowed model or a CNN are the positions that its first block works on."
_STEPS: Final = (
    "A windowed model pads its maps to whole windows, or uses smaller windows, depending on the size: its curve has "
    "steps."
)
_SWEEPS: Final[dict[Sweep, tuple[str, str]]] = {  # the name of the figure, and how tokens are varied
    "patch size": ("growth_patches", "smaller patches"),
    "image size": ("growth", "larger images"),
}


def growth_sections(record: Record, models: Sequence[CostRow]) -> Iterator[Section]:
    """Cost by number of tokens, varied by patch size and by image size."""
    for sweep, (name, how) in _SWEEPS.items():
        exponents = [row for row in record.rows(EXPONENTS) if row.sweep == sweep]
        points = [row for row in record.rows(TOKENS) if row.sweep == sweep]
        if not exponents:
            continue
        batch = "one image" if points[0].images == 1 else f"{points[0].images} images"
        how_grown = [
            f"The number of tokens is raised by {how}; each model is rebuilt with new position embeddings for each "
            f"{sweep}, and timed with {batch} at a time. The exponent k is that of cost = c · tokens^k, by linear "
            "regression of the logarithms over the range in the table; FLOPs are exact, so the interval of their "
            "exponent shows only how far the curve is from a power law.",
            _TOKENS if any(row.family in ("windowed", "cnn") for row in models) else "",
            _STEPS if any(row.family == "windowed" for row in models) else "",
        ]
        lines = (
            *_exponent_sentences(exponents),
            *(
                Sentence(f"Left out, `{row.model}` at {in_pixels(row.size)} px: {row.reason}.", (row,))
                for row in record.rows(LEFT_OUT)
                if row.sweep == sweep
            ),
            *sentences(*how_grown, says="method"),
        )
        figure = FigureSpec(name, _growth_caption(exponents), partial(_draw_growth, sweep, points, exponents))
        tables = (_exponent_table(exponents), _points_table(points))
        yield Section(f"Growth of cost with tokens: {sweep}", lines, tables, (figure,), leading=True)


def _exponent_sentences(exponents: Sequence[ExponentRow]) -> Iterator[Sentence]:
    """How latency, FLOPs and attention products of each model grow, and over which range."""
    for model in dict.fromkeys(row.model for row in exponents):
        by_cost = {row.cost: row for row in exponents if row.model == model}
        span = by_cost["flops"]
        words = (
            f"From {span.tokens_from:,} to {span.tokens_to:,} tokens the latency of `{model}` grows with exponent "
            f"{_power(by_cost['latency'])}, its FLOPs with {_power(by_cost['flops'])}"
        )
        if "products" in by_cost:
            words += f", the products of attention with {_power(by_cost['products'])}"
        yield Sentence(f"{words}.", tuple(by_cost.values()))


def _power(row: ExponentRow) -> str:
    """ "1.10 (1.04 to 1.15)"."""
    interval = "" if row.low is None or row.high is None else f" ({row.low:.2f} to {row.high:.2f})"
    return f"{row.value:.2f}{interval}"


def _exponent_table(exponents: Sequence[ExponentRow]) -> Table:
    return Table.of(
        "Exponents, with Student's 95 % interval",
        exponents,
        {
            "model": lambda row: row.model,
            "cost": lambda row: _COSTS[row.cost],
            "exponent": _power,
            "points": lambda row: row.n,
            "from (tokens)": lambda row: row.tokens_from,
            "to (tokens)": lambda row: row.tokens_to,
        },
    )


def _points_table(points: Sequence[TokensRow]) -> Table:
    return Table.of(
        "Cost by number of tokens; latency: median of a pass",
        points,
        {
            "model": lambda row: row.model,
            "image (px)": lambda row: in_pixels(row.size),
            "tokens": lambda row: row.tokens,
            "latency (ms)": lambda row: number(1000 * row.median),
            "quartiles (ms)": lambda row: f"{number(1000 * row.low)} to {number(1000 * row.high)}",
            "FLOPs": lambda row: in_thousands(row.flops).strip(),
            "of attention products": lambda row: percent(row.products / row.flops, 1),
        },
    )


def _growth_caption(exponents: Sequence[ExponentRow]) -> str:
    count = len({row.model for row in exponents})
    more = f" The first {CURVES} of {count} models." if count > CURVES else ""
    return (
        "Each mark is the model built for that number of tokens. On logarithmic axes a power law is a straight line "
        "whose slope is the exponent; where the marks depart from the line, the exponent is only a mean over the range."
        f"{more}"
    )


def _draw_growth(sweep: Sweep, points: Sequence[TokensRow], exponents: Sequence[ExponentRow]) -> "Figure":
    from vitlens.figures.profile.growth import Growth, growth_by_tokens

    growths = []
    for model in list(dict.fromkeys(row.model for row in exponents))[:CURVES]:
        of_model = sorted((row for row in points if row.model == model), key=lambda row: row.tokens)
        growths.append(
            Growth(
                model,
                tokens=[row.tokens for row in of_model],
                low=[row.low for row in of_model],
                median=[row.median for row in of_model],
                high=[row.high for row in of_model],
                flops=[row.flops for row in of_model],
                products=[row.products for row in of_model],
                exponents={row.cost: row.value for row in exponents if row.model == model},
            )
        )
    return growth_by_tokens(growths=growths, title=f"Growth of cost with the number of tokens, by {_SWEEPS[sweep][1]}")
