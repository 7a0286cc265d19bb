"""A clock for tests of times: each pass of a model takes as long as the test says."""

import pytest


class Clock:
    """A clock that moves by `tick` seconds between two readings, and on request."""

    def __init__(self, tick: float) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def clock_of_passes(monkeypatch: pytest.MonkeyPatch, *, tick: float = 0.0) -> Clock:
    """Return the clock by which passes are timed from now on."""
    clock = Clock(tick)
    monkeypatch.setattr("vitlens.analysis.cost.passes.perf_counter", clock)
    return clock
