"""Latency and throughput by batch size: sentences, table and curves."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.profile.conclusions import common_batches, ratio, times_at
from vitlens.commands.profile.record import SPEED, CostRow, MachineRow, SpeedRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate, Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES: Final = 6  # at most in one figure, to be distinguishable


def fastest_sentences(record: Record, models: Sequence[CostRow]) -> Iterator[Sentence]:
    """The model with the lowest latency at the batch sizes that all had, and the highest throughput of each."""
    if len(models) < 2:
        return
    batches = common_batches(record)
    for batch in dict.fromkeys([*batches[:1], *batches[-1:]]):
        yield from _fastest_at(times_at(record, batch), batch)
    best = [fastest(record.rows(SPEED), row.model) for row in models]
    listed = "; ".join(f"`{row.model}` {row.rate:,.0f} images/s in batches of {row.images}" for row in best)
    yield Sentence(f"Highest throughput: {listed}.", (*best, *(row.rate for row in best)))


def _fastest_at(times: Mapping[str, Estimate], batch: int) -> Iterator[Sentence]:
    """The lowest and the highest latency at one batch size, where these can be told apart."""
    if len(times) < 2:
        return
    first, last = min(times, key=lambda alias: times[alias].value), max(times, key=lambda alias: times[alias].value)
    images = "one image" if batch == 1 else f"batches of {batch}"
    if apart(times[first], times[last]) is not Side.BELOW:
        yield Sentence(
            f"For {images} the models are not shown to differ in latency: `{first}` {in_words(times[first])}, `{last}` "
            f"{in_words(times[last])}, whose intervals overlap.",
            (times[first], times[last], batch),
        )
        return
    factor = ratio(times[last], times[first])
    yield Sentence(
        f"For {images} `{first}` has the lowest median latency, {in_words(times[first])}; that of `{last}` is "
        f"{number(factor.value)} times as high, {in_words(times[last])}.",
        (times[first], times[last], factor, batch),
    )


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
    several = len({row.images for row in rows}) > 1  # one size is no curve
    figures = (FigureSpec("speed", _speed_caption(rows), partial(_draw_speed, record)),) if several else ()
    table = Table.of("Latency and throughput by batch size", rows, columns)
    best = [fastest(rows, alias) for alias in _aliases(rows)]
    opening = tuple(
        Sentence(
            f"`{row.model}` classifies most images per second in batches of {row.images}: {row.rate:,.0f}, a pass in "
            f"{number(1000 * row.median)} ms.",
            (row, row.rate, 1000 * row.median),
        )
        for row in best
    )
    lines = (*opening, *sentences(_stopped(rows, machine), rows=(machine, *rows)))
    return Section("Speed by batch size", lines, (table,), figures, leading=True)


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
