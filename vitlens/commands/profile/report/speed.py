"""Latency and throughput by batch size: sentences, table and curves."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.profile.record import LATENCY, SPEED, CostRow, MachineRow, SpeedRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES: Final = 6  # at most in one figure, to be distinguishable


def fastest_sentences(record: Record, models: Sequence[CostRow]) -> Iterator[Sentence]:
    """The model with the lowest latency, and the batch size of the highest throughput of each."""
    if len(models) < 2:
        return
    rows = record.rows(SPEED)
    size = min(row.images for row in rows)
    times = {row.model: record.metrics.get(LATENCY(model=row.model, batch=size)) for row in models}
    timed = {alias: time for alias, time in times.items() if time is not None}
    if len(timed) > 1:
        first, last = min(timed, key=lambda alias: timed[alias].value), max(timed, key=lambda alias: timed[alias].value)
        images = "one image" if size == 1 else f"a batch of {size}"
        overlap = "" if apart(timed[first], timed[last]) is Side.BELOW else ", but their intervals overlap"
        yield Sentence(
            f"For {images} `{first}` has the lowest median latency, {in_words(timed[first])}; that of `{last}` is "
            f"{number(timed[last].value / timed[first].value)} times as high, {in_words(timed[last])}{overlap}."
        )
    best = [fastest(rows, row.model) for row in models]
    listed = "; ".join(f"`{row.model}` {row.rate:,.0f} images/s in batches of {row.images}" for row in best)
    yield Sentence(f"Highest throughput: {listed}.", tuple(best))


def fastest(rows: Sequence[SpeedRow], alias: str) -> SpeedRow:
    """The batch size with the greatest throughput of a model."""
    return max((row for row in rows if row.model == alias), key=lambda row: (row.rate, row.images))


def speed_section(record: Record, machine: MachineRow) -> Section:
    """Quartiles of latency, and throughput, of every model and batch size."""
    rows = record.rows(SPEED)
    columns = {
        "model": lambda row: row.model,
        "batch": lambda row: row.images,
        "median (ms)": lambda row: number(1000 * row.median),
        "quartiles (ms)": lambda row: f"{number(1000 * row.low)} to {number(1000 * row.high)}",
        "images/s": lambda row: f"{row.rate:,.0f}",
        "passes": lambda row: row.repeats,
    }
    if any(row.device_bytes is not None for row in rows):
        columns["device peak (MB)"] = lambda row: None if row.device_bytes is None else number(row.device_bytes / 1e6)
    figure = FigureSpec("speed", _speed_caption(rows), partial(_draw_speed, record))
    table = Table.of("Latency and throughput by batch size", rows, columns)
    return Section("Speed by batch size", sentences(_stopped(rows, machine)), (table,), (figure,))


def _stopped(rows: Sequence[SpeedRow], machine: MachineRow) -> str | None:
    """The largest batch size of each model that stopped before the largest of all."""
    last = {alias: max(row.images for row in rows if row.model == alias) for alias in _aliases(rows)}
    names = ", ".join(f"`{alias}` at {size}" for alias, size in last.items() if size < machine.largest_batch)
    if machine.longest is None or not names:
        return None
    return (
        f"Batches were enlarged until a pass took more than {number(machine.longest)} s or the device ran out of "
        f"memory: {names}; --batch-sizes sets others."
    )


def _speed_caption(rows: Sequence[SpeedRow]) -> str:
    count = len(_aliases(rows))
    more = f" The first {CURVES} of {count} models." if count > CURVES else ""
    return (
        f"Median and quartiles of at least {min(row.repeats for row in rows)} passes at each batch size after warm-up, "
        f"with models alternating. Where throughput (right) is flat, larger batches are no faster.{more}"
    )


def _aliases(rows: Sequence[SpeedRow]) -> list[str]:
    return list(dict.fromkeys(row.model for row in rows))


def _draw_speed(record: Record) -> "Figure":
    from vitlens.figures.profile.speed import SpeedCurve, speed_by_batch

    rows, speeds = record.rows(SPEED), []
    for alias in _aliases(rows)[:CURVES]:
        of_model = sorted((row for row in rows if row.model == alias), key=lambda row: row.images)
        quartiles = ([row.low for row in of_model], [row.median for row in of_model], [row.high for row in of_model])
        speeds.append(SpeedCurve(alias, [row.images for row in of_model], *quartiles))
    return speed_by_batch(speeds=speeds)
