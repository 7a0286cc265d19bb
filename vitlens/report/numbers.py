"""Numbers in words: the one place where a report formats them."""

from collections.abc import Sequence
from math import floor, log10
from typing import Final

from vitlens.report.document import Cell
from vitlens.uncertainty import Estimate

_LONG: Final = 100  # seconds from which a time is said in minutes
COUNTED: Final = {"bytes": "B", "FLOPs": "FLOPs"}  # units of large counts, which are shown with a prefix


def in_words(cell: Cell, *, with_n: bool = True) -> str:
    """Return a value as a report says it: "93.1 % (90.5 to 95.0, n = 480)".

    Estimates have their interval, unit and, with_n, number of images; None is a dash.
    """
    if cell is None:
        return "–"
    if isinstance(cell, Estimate) and cell.unit in COUNTED:
        return f"{in_thousands(cell.value)}{COUNTED[cell.unit]}"
    if isinstance(cell, Estimate) and cell.unit == "s" and cell.low is None and cell.value >= _LONG:
        return in_time(cell.value)
    if isinstance(cell, Estimate):
        scale, unit = (100.0, "%") if cell.unit == "fraction" else (1.0, cell.unit)
        known = [each * scale for each in (cell.value, cell.low, cell.high) if each is not None]
        digits = 1 if cell.unit in ("fraction", "points") else _decimals(known) if len(known) > 1 else None
        value, *ends = [number(each, digits) for each in known]
        value = f"{value} {unit}".rstrip()
        notes = []
        if len(ends) == 2:
            notes.append(" to ".join(ends))
        if with_n and cell.n is not None:
            notes.append(f"n = {cell.n:,}")
        return f"{value} ({', '.join(notes)})" if notes else value
    if isinstance(cell, float):
        return number(cell)
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _decimals(values: Sequence[float]) -> int | None:
    """Return the decimals of an estimate and the ends of its interval: three significant digits of the largest.

    None, which is three of each, for those with a prefix or a power of ten.
    """
    largest = max(map(abs, values))
    return max(0, 2 - floor(log10(largest))) if 1e-4 <= largest < 999.5 else None


def number(value: float, digits: int | None = None) -> str:
    """Return a plain number with this many decimals, or with three significant digits."""
    if digits is not None:
        text = f"{value:.{digits}f}"
        return text.removeprefix("-") if float(text) == 0 else text
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"  # .3g makes 1e+03 of it


def in_thousands(count: float) -> str:
    """Return a count with three digits and the prefix of the unit that follows: "2.69 M"."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 0.9995 * 10**power:
            return f"{number(count / 10**power)} {prefix}"
    return f"{number(count)} "


def in_time(seconds: float) -> str:
    """Seconds as a person says them: "0.8 s", "42 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as a percentage: "12 %"."""
    return f"{number(100 * share, digits)} %"


def in_ranges(numbers: Sequence[int]) -> str:
    """Numbers of layers in ranges: "layer 3", "layers 0 to 4 and 7"."""
    known = sorted(set(numbers))
    starts = [number for number in known if number - 1 not in known]
    ends = [number for number in known if number + 1 not in known]
    parts = [str(start) if start == end else f"{start} to {end}" for start, end in zip(starts, ends)]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{'layer' if len(known) == 1 else 'layers'} {listed}"
