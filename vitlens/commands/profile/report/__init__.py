"""The report of `vitlens profile`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.profile.record import (
    CONVENTIONS,
    COSTS,
    LATENCY,
    MACHINE,
    MEANINGS,
    PARTS,
    PROCESS_PEAK,
    SPEED,
    CostRow,
    MachineRow,
)
from vitlens.commands.profile.report.growth import growth_sections, in_pixels
from vitlens.commands.profile.report.speed import fastest, fastest_sentences, speed_section
from vitlens.figures.profile.counts import in_thousands
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DISTURBED: Final = 1.5  # upper over lower quartile; on an idle machine the passes of one batch size differ less
_STORED: Final = (
    "Training memory is what autograd stores from a forward pass for the backward pass, each storage counted once and "
    "parameters not counted; it grows with the batch. A training step also needs the parameters, their gradients and "
    "the optimiser's state (AdamW: twice the parameters)."
)
_LIMITS: Final = (
    "Intervals of medians are those of order statistics and assume independent passes, while successive passes are "
    "correlated. Times include normalisation, but not reading, decoding and resizing of images.",
    "FLOPs do not determine time: small matrix products are limited by memory access, and operations that are not "
    "counted (norms, softmax, activations) take time, too. FLOPs are exact, so the interval of their exponent shows "
    "only how far the curve is from a power law.",
    "Tokens of a windowed model or a CNN are the positions that its first block works on.",
)


def report(record: Record) -> Document:
    """The models side by side, then parts, speed, memory and growth."""
    (machine,) = record.rows(MACHINE)
    models = record.rows(COSTS)
    summary = Section(
        "Summary",
        (*_untrained(models), *map(_model_sentence, models), *fastest_sentences(record, models)),
        (_side_by_side(record, models),),
        (FigureSpec("parts", _parts_caption(record), partial(_draw_parts, record)),),
        leading=True,
    )
    sections = [
        summary,
        _parts(record, models),
        speed_section(record, machine),
        _memory(record, models, machine),
        *growth_sections(record, models),
    ]
    return Document(record.config.title, tuple(sections), limits=tuple(_limits(record, machine)))


def _untrained(models: Sequence[CostRow]) -> Iterator[Sentence]:
    names = [f"`{row.model}`" for row in models if row.untrained]
    if names:
        yield Sentence(f"Untrained: {', '.join(names)}; cost does not depend on the weights.")


def _model_sentence(row: CostRow) -> Sentence:
    """The size of a model, its FLOPs, and the share of attention among these."""
    words = (
        f"`{row.model}` has {row.parameters:,} parameters and needs {in_thousands(row.flops)}FLOPs for an image of "
        f"{in_pixels(row.size)} px"
    )
    if not row.products:
        return Sentence(f"{words}; it has no attention." if row.family == "cnn" else f"{words}.", (row,))
    words += f", {number(100 * row.products / row.flops)} % of them for the products of attention"
    if row.crossover is not None:
        side = "below" if row.tokens < row.crossover else "above"
        words += (
            f"; its {row.tokens:,} tokens are {side} the {row.crossover:,.0f} tokens at which these products would "
            "equal the FLOPs of projections and MLPs"
        )
    return Sentence(f"{words}.", (row,))


def _side_by_side(record: Record, models: Sequence[CostRow]) -> Table:
    speed = record.rows(SPEED)
    size = min(row.images for row in speed)
    best = {row.model: fastest(speed, row.model) for row in models}
    latency = {row.model: record.metrics.get(LATENCY(model=row.model, batch=size)) for row in models}

    def milliseconds(row: CostRow) -> Cell:
        time = latency[row.model]
        return None if time is None else number(time.value)

    return Table.of(
        "Side by side, for one image unless said otherwise",
        models,
        {
            "model": lambda row: row.model,
            "family": lambda row: row.family,
            "input (px)": lambda row: in_pixels(row.size),
            "tokens": lambda row: row.tokens,
            "parameters": lambda row: row.parameters,
            "FLOPs": lambda row: in_thousands(row.flops).strip(),
            f"latency, batch of {size} (ms)": milliseconds,
            "best images/s": lambda row: f"{best[row.model].rate:,.0f} (batch of {best[row.model].images})",
            "stored for backward (MB)": lambda row: number(row.training_bytes / 1e6),
            "inference peak (MB)": lambda row: number(row.inference_bytes / 1e6),
        },
    )


def _convention(record: Record) -> str:
    return " ".join(row.says for row in record.rows(CONVENTIONS))


def _parts_caption(record: Record) -> str:
    return (
        "Shares of each model's own total, which stands beside its bar: bars show composition, not totals. "
        + _convention(record)
    )


def _draw_parts(record: Record) -> "Figure":
    from vitlens.figures.profile.parts import cost_by_part

    aliases, rows = [row.model for row in record.rows(COSTS)], record.rows(PARTS)
    return cost_by_part(
        parameters={alias: {row.part: row.parameters for row in rows if row.model == alias} for alias in aliases},
        flops={alias: {row.part: row.flops for row in rows if row.model == alias} for alias in aliases},
    )


def _parts(record: Record, models: Sequence[CostRow]) -> Section:
    totals = {row.model: row for row in models}
    table = Table.of(
        "Parameters and FLOPs of one image, by part",
        record.rows(PARTS),
        {
            "model": lambda row: row.model,
            "part": lambda row: row.part,
            "parameters": lambda row: row.parameters,
            "of all": lambda row: percent(row.parameters / totals[row.model].parameters, 1),
            "FLOPs": lambda row: row.flops,
            "of all FLOPs": lambda row: percent(row.flops / totals[row.model].flops, 1),
        },
    )
    meanings = Table.of(
        "Definition of the parts",
        record.rows(MEANINGS),
        {"part": lambda row: row.part, "definition": lambda row: row.meaning},
    )
    names = ", ".join(f"`{row.model}`" for row in models if row.by_formula)
    checked = (
        f"The counted FLOPs equal those of the formula (8 N d² + 4 N² d + 4 N d h a block) for {names}."
        if names
        else None
    )
    return Section("Parameters and FLOPs by part", sentences(_convention(record), checked), (table, meanings))


def _memory(record: Record, models: Sequence[CostRow], machine: MachineRow) -> Section:
    table = Table.of(
        "Activations",
        models,
        {
            "model": lambda row: row.model,
            "parameters, fp32 (MB)": lambda row: number(4 * row.parameters / 1e6),
            "stored for the backward pass, one image (MB)": lambda row: number(row.training_bytes / 1e6),
            "peak in inference, one image (MB)": lambda row: number(row.inference_bytes / 1e6),
        },
    )
    peak = record.metrics.get(PROCESS_PEAK())
    process = None if peak is None else (
        f"The peak memory of the process was {number(peak.value / 1e6)} MB: Python, its libraries and all models "
        "together."
    )  # fmt: skip
    casts = "In bf16 autograd also stores the cast weights; they are counted." if machine.arithmetic == "bf16" else None
    return Section("Memory", sentences(_STORED, process, casts), (table,))


def _limits(record: Record, machine: MachineRow) -> Iterator[Sentence]:
    threads = f"{machine.threads} thread{'s' if machine.threads != 1 else ''}"
    yield Sentence(
        f"Times were measured on this machine ({machine.name}, {threads}, {machine.arithmetic}) under its load at the "
        "time; on other machines the order of models may differ.",
        (machine,),
    )
    rows = record.rows(SPEED)
    disturbed = [row for row in rows if row.high > _DISTURBED * row.low]
    if disturbed:
        yield Sentence(
            f"At {len(disturbed)} of {len(rows)} batch sizes the upper quartile is more than {_DISTURBED} times the "
            "lower, so other work probably ran on this machine. Repeat the measurement on an idle machine before "
            "comparing times.",
            tuple(disturbed),
        )
    yield from sentences(*_LIMITS)
