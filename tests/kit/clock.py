"""Clocks for tests of times: each pass of a model takes as long as the test says."""

import itertools

import pytest

_READ = "vitlens.analysis.cost.passes.perf_counter"


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def moved_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which passes are timed from now on."""
    clock = Clock()
    monkeypatch.setattr(_READ, clock)
    return clock


def ticking_clock(monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> None:
    """From now on every pass takes this long: so much lies between two readings of the clock."""
    ticks = itertools.count()
    monkeypatch.setattr(_READ, lambda: seconds * next(ticks))
