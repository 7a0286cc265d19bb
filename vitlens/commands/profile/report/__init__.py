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

_DISTURBED: Final = 1.5  # upper over lower quartile: passes of one batch size differ little on a quiet machine
_KEPT: Final = (
    "What autograd keeps of a forward pass until the backward pass, each storage once, parameters not counted; it "
    "grows with the batch. A training step also needs the parameters, their gradients and the optimiser's state "
    "(AdamW: twice the parameters)."
)
_LIMITS: Final = (
    "Intervals of medians are those of order statistics and take passes as independent, which successive passes are "
    "not quite. Reading, decoding and resizing of images are not in the times, normalisation is.",
    "FLOPs do not determine time: small products keep a processor waiting for memory, and what is not counted (norms, "
    "softmax, activations) takes time too. For FLOPs, which are exact, the interval of an exponent says how far the "
    "curve is from a power law.",
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
    """The size of a model, its FLOPs, and the share of attention in them."""
    words = (
        f"`{row.model}` has {row.parameters:,} parameters and takes {in_thousands(row.flops)}FLOPs for an image of "
        f"{in_pixels(row.size)} px"
    )
    if not row.products:
        return Sentence(f"{words}; it has no attention." if row.family == "cnn" else f"{words}.", (row,))
    words += f", {number(100 * row.products / row.flops)} % of them for the products of attention"
    if row.crossover is not None:
        side = "below" if row.tokens < row.crossover else "above"
        words += (
            f"; its {row.tokens:,} tokens are {side} the {row.crossover:,.0f} from which these products take more "
            "FLOPs than the projections and MLPs"
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
            "kept for training (MB)": lambda row: number(row.training_bytes / 1e6),
            "inference peak (MB)": lambda row: number(row.inference_bytes / 1e6),
        },
    )


def _convention(record: Record) -> str:
    return " ".join(row.says for row in record.rows(CONVENTIONS))


def _parts_caption(record: Record) -> str:
    return (
        "Each bar is one model, of 100 % in its own unit: bars do not compare totals, the numbers beside them do. "
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
        "What the parts are",
        record.rows(MEANINGS),
        {"part": lambda row: row.part, "is": lambda row: row.meaning},
    )
    names = ", ".join(f"`{row.model}`" for row in models if row.by_formula)
    checked = (
        f"The counter's FLOPs equal the formula's (8 N d² + 4 N² d + 4 N d h a block) for {names}." if names else None
    )
    return Section("Parameters and FLOPs by part", sentences(_convention(record), checked), (table, meanings))


def _memory(record: Record, models: Sequence[CostRow], machine: MachineRow) -> Section:
    table = Table.of(
        "Activations",
        models,
        {
            "model": lambda row: row.model,
            "parameters, fp32 (MB)": lambda row: number(4 * row.parameters / 1e6),
            "kept for the backward pass, an image (MB)": lambda row: number(row.training_bytes / 1e6),
            "most at once in inference, one image (MB)": lambda row: number(row.inference_bytes / 1e6),
        },
    )
    peak = record.metrics.get(PROCESS_PEAK())
    process = None if peak is None else (
        f"The whole process had at most {number(peak.value / 1e6)} MB of memory: Python, its libraries and all models "
        "together."
    )  # fmt: skip
    casts = (
        "In bf16 autograd also keeps the weights' casts; they are counted." if machine.arithmetic == "bf16" else None
    )
    return Section("Memory", sentences(_KEPT, process, casts), (table,))


def _limits(record: Record, machine: MachineRow) -> Iterator[Sentence]:
    threads = f"{machine.threads} thread{'s' if machine.threads != 1 else ''}"
    yield Sentence(
        f"Times hold for this machine ({machine.name}, {threads}, {machine.arithmetic}) and whatever else it did "
        "meanwhile; the order of models may be another elsewhere.",
        (machine,),
    )
    rows = record.rows(SPEED)
    disturbed = [row for row in rows if row.high > _DISTURBED * row.low]
    if disturbed:
        yield Sentence(
            f"At {len(disturbed)} of {len(rows)} batch sizes the upper quartile is more than {_DISTURBED} times the "
            "lower: something else ran on this machine. Measure again when it is quiet before comparing times.",
            tuple(disturbed),
        )
    yield from sentences(*_LIMITS)
