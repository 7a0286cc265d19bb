"""The report of `vitlens profile`, from its record."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.profile.conclusions import findings, verdicts
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
    PartRow,
    in_pixels,
)
from vitlens.commands.profile.report.growth import growth_sections
from vitlens.commands.profile.report.limits import limits
from vitlens.commands.profile.report.speed import fastest, fastest_sentences, speed_section
from vitlens.figures.profile.counts import in_thousands
from vitlens.records import Record
from vitlens.report.document import Cell, Document, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.findings import ranked
from vitlens.report.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STORED: Final = (
    "Training memory is what autograd stores from a forward pass for the backward pass, each storage counted once and "
    "parameters not counted; it grows with the batch. A training step also needs the parameters, their gradients and "
    "the optimiser's state (AdamW: twice the parameters)."
)


def report(record: Record) -> Document:
    """The models side by side, then parts, speed, memory and growth."""
    (machine,) = record.rows(MACHINE)
    models = record.rows(COSTS)
    summary = Section(
        "Summary",
        (*fastest_sentences(record, models), *map(_model_sentence, models), *_untrained(models)),
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
    return Document(
        record.config.title,
        tuple(sections),
        limits=tuple(limits(record, machine)),
        verdicts=tuple(verdicts(record)),
        findings=ranked(findings(record)),
    )


def _untrained(models: Sequence[CostRow]) -> Iterator[Sentence]:
    names = [f"`{row.model}`" for row in models if row.untrained]
    if names:
        yield Sentence(f"Untrained: {', '.join(names)}; cost does not depend on the weights.", says="setting")


def _model_sentence(row: CostRow) -> Sentence:
    """The size of a model, its FLOPs, and the share of attention among these."""
    words = (
        f"`{row.model}` has {row.parameters:,} parameters and needs {in_thousands(row.flops)}FLOPs for an image of "
        f"{in_pixels(row.size)} px"
    )
    share = row.products / row.flops
    rows = (row, row.flops / 1e3, row.flops / 1e6, row.flops / 1e9, share)
    if not row.products:
        return Sentence(f"{words}; it has no attention." if row.family == "cnn" else f"{words}.", rows)
    words += f", {number(100 * share)} % of them for the products of attention"
    if row.crossover is not None:
        side = "below" if row.tokens < row.crossover else "above"
        words += (
            f"; its {row.tokens:,} tokens are {side} the {row.crossover:,.0f} tokens at which these products would "
            "equal the FLOPs of projections and MLPs"
        )
    return Sentence(f"{words}.", rows)


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
        f"The counted FLOPs equal those of the formula `8 N d² + 4 N² d + 4 N d h` a block for {names}."
        if names
        else None
    )
    lines = (
        *map(_largest_part, models, [_parts_of(record, row.model) for row in models]),
        *sentences(checked, rows=models),
        *sentences(_convention(record), says="method"),
    )
    return Section("Parameters and FLOPs by part", lines, (table, meanings))


def _parts_of(record: Record, alias: str) -> list[PartRow]:
    return [row for row in record.rows(PARTS) if row.model == alias]


def _largest_part(model: CostRow, parts: Sequence[PartRow]) -> Sentence:
    """The part with the most FLOPs."""
    row = max(parts, key=lambda row: row.flops)
    share = row.flops / model.flops
    return Sentence(f"In `{model.model}` {percent(share, 1)} of the FLOPs are those of: {row.part}.", (row, share))


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
    process = () if peak is None else sentences(
        f"The peak memory of the process was {number(peak.value / 1e6)} MB: Python, its libraries and all models "
        "together.",
        rows=(peak, peak.value / 1e6),
    )  # fmt: skip
    casts = "In bf16 autograd also stores the cast weights; they are counted." if machine.arithmetic == "bf16" else None
    lines = (*map(_activations, models), *process, *sentences(_STORED, casts, says="method"))
    return Section("Memory", lines, (table,))


def _activations(row: CostRow) -> Sentence:
    """What one image needs in memory."""
    stored, peak = row.training_bytes / 1e6, row.inference_bytes / 1e6
    return Sentence(
        f"One image of `{row.model}` takes {number(stored)} MB for a backward pass and {number(peak)} MB at the peak "
        "of inference.",
        (row, stored, peak),
    )
