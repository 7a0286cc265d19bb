"""Numbers in words: the one place where a report formats them."""

from collections.abc import Sequence
from math import floor, log10
from typing import Final

from vitlens.report.document import Cell
from vitlens.uncertainty import Estimate

_LONG: Final = 100  # a time of at least so many seconds is printed in minutes
_ROUNDS_TO_1000: Final = 999.5  # the smallest number that rounds to 1000 with three digits
_SMALLEST: Final = 1e-4  # smaller numbers are printed with a power of ten
_SMALLEST_P: Final = 1e-6  # of smaller p-values, only this bound is printed
# units of large counts, which are printed with a prefix
COUNTED: Final = {"bytes": "B", "FLOPs": "FLOPs"}


def in_words(cell: Cell, *, with_n: bool = True) -> str:
    """Return a value as a report says it: "93.1 % (90.5 to 95.0, n = 480)".

    Estimates have their interval, unit and, with_n, number of images; None is a dash.
    """
    if cell is None:
        return "–"
    if isinstance(cell, Estimate):
        return _estimate_in_words(cell, with_n=with_n)
    if isinstance(cell, float):
        return number(cell)
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell)


def _estimate_in_words(estimate: Estimate, *, with_n: bool) -> str:
    if estimate.unit in COUNTED:
        return f"{in_thousands(estimate.value)}{COUNTED[estimate.unit]}"
    if estimate.unit == "s" and estimate.low is None and estimate.value >= _LONG:
        return in_time(estimate.value)
    scale = 1.0
    unit = estimate.unit
    if estimate.unit == "fraction":
        scale = 100.0
        unit = "%"
    values = [scale * estimate.value]
    if estimate.low is not None:
        values.append(scale * estimate.low)
    if estimate.high is not None:
        values.append(scale * estimate.high)
    digits = None
    if estimate.unit in ("fraction", "points"):
        digits = 1
    elif len(values) > 1:
        digits = _decimals(values)
    value, *ends = [number(value, digits) for value in values]
    text = f"{value} {unit}".rstrip()
    notes = []
    if len(ends) == 2:
        notes.append(" to ".join(ends))
    if with_n and estimate.n is not None:
        notes.append(f"n = {estimate.n:,}")
    if notes:
        text += f" ({', '.join(notes)})"
    return text


def _decimals(values: Sequence[float]) -> int | None:
    """Return the decimals of an estimate and the ends of its interval.

    The largest of the numbers has three significant digits. The result is None for very large and
    very small numbers: each then has three significant digits.
    """
    largest = max(map(abs, values))
    if _SMALLEST <= largest < _ROUNDS_TO_1000:
        return max(0, 2 - floor(log10(largest)))
    return None


def number(value: float, digits: int | None = None) -> str:
    """Return a plain number with this many decimals, or with three significant digits."""
    if digits is None:
        if abs(value) >= _ROUNDS_TO_1000:
            return f"{value:,.0f}"  # .3g would write 1e+03
        return f"{value:.3g}"
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        return text.removeprefix("-")
    return text


def in_thousands(count: float) -> str:
    """Return a count with three digits and the prefix of the unit that follows: "2.69 M"."""
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 0.9995 * 10**power:  # rounds to 1.00 with this prefix
            return f"{number(count / 10**power)} {prefix}"
    return f"{number(count)} "


def in_time(seconds: float) -> str:
    """Return seconds as a person says them: "0.8 s", "42 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 9.95:  # from here, it rounds to 10.0
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, left_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left_seconds} s"
    hours, left_minutes = divmod(minutes, 60)
    return f"{hours} h {left_minutes} min"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as a percentage: "12 %"."""
    return f"{number(100 * share, digits)} %"


def p_value(p: float) -> float | str:
    """Return a p-value as a table shows it: the number, or "< 1e-06" for a smaller one."""
    return p if p >= _SMALLEST_P else f"< {_SMALLEST_P:g}"


def frequency(p: float) -> str:
    """Return a p-value as the frequency of such a result by chance: "about 5 of 1,000"."""
    if p < 0.001:
        return "fewer than 1 of 1,000"
    if p < 0.1:
        return f"about {round(1000 * p)} of 1,000"
    return f"about {round(100 * p)} of 100"


def in_ranges(numbers: Sequence[int]) -> str:
    """Return numbers of layers in ranges: "layer 3", "layers 0 to 4 and 7"."""
    layers = sorted(set(numbers))
    runs: list[list[int]] = []  # successive numbers
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    ranges = []
    for run in runs:
        if len(run) == 1:
            ranges.append(str(run[0]))
        else:
            ranges.append(f"{run[0]} to {run[-1]}")
    noun = "layer" if len(layers) == 1 else "layers"
    if len(ranges) == 1:
        return f"{noun} {ranges[0]}"
    return f"{noun} {', '.join(ranges[:-1])} and {ranges[-1]}"
