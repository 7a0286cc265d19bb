"""Seconds and memory of a piece of work on a device: after a warm-up, the median of repeats."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vitlens.analysis.cost.passes import device_peak

Work = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """Seconds: the median, the shortest and the longest of `repeats`; peak: of the device's
    tensors, bytes, or None.
    """

    seconds: float
    shortest: float
    longest: float
    repeats: int
    peak: int | None


def timed(work: Work, device: torch.device, *, repeats: int = 5, warm_up: int = 1) -> Timed:
    """Return how long some work takes, and the peak of the device's memory, what was there before
    included.
    """
    return alternating({"": work}, device, repeats=repeats, warm_up=warm_up)[""]


def alternating(
    jobs: Mapping[str, Work], device: torch.device, *, repeats: int = 5, warm_up: int = 1
) -> dict[str, Timed]:
    """Several pieces of work in turns, so that a change of the machine's clock affects all
    alike."""
    peaks: dict[str, int | None] = {}
    for name, work in jobs.items():
        with device_peak(device) as peak:
            for _ in range(max(1, warm_up)):
                work()
            peaks[name] = peak()
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, work in jobs.items():
            found[name].append(once(work, device))
    return {
        name: Timed(statistics.median(values), min(values), max(values), len(values), peaks[name])
        for name, values in found.items()
    }


def once(work: Work, device: torch.device) -> float:
    """Seconds of one run: by CUDA's events, else by the clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3
