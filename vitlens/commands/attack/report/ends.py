"""Estimates as figures take them: rows value, low, high."""

from collections.abc import Iterable

from vitlens.uncertainty import Estimate


def ends(estimates: Iterable[Estimate]) -> list[list[float]]:
    """Values, lows and highs (3, estimates); an end that is not defined is the value."""
    known = list(estimates)
    return [
        [one.value for one in known],
        [one.value if one.low is None else one.low for one in known],
        [one.value if one.high is None else one.high for one in known],
    ]
