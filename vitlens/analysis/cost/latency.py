"""The latency of a forward pass: quartiles of wall time after warming up; several models are timed in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np
import torch

from vitlens.analysis.cost.memory import device_peak
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError
from vitlens.lens.layers import probe_images
from vitlens.models.model import Model
from vitlens.shapes import Images

ROUNDS: Final = 3  # rounds in which several models are timed, one after the other
LONGEST: Final = 1.0  # seconds of one pass; beyond it no larger batch is tried
_ROUND: Final = 0.25  # seconds, about, for which one model is timed in a round
_FEWEST, _MOST = 2, 10  # passes in a round


@dataclass(frozen=True)
class Latency:
    """Seconds for one forward pass of a batch of `images`: lower quartile, median, upper quartile of `repeats`."""

    low: float
    median: float
    high: float
    repeats: int
    images: int

    @property
    def images_per_second(self) -> float:
        """At the median."""
        return self.images / self.median


@dataclass(frozen=True)
class TimedBatch:
    """One model on one batch size: quartiles, all passes in seconds, the peak of CUDA's tensors in bytes or None."""

    latency: Latency
    seconds: tuple[float, ...]
    device_bytes: int | None


def latency(
    model: Model,
    images: Images,
    repeats: int = 20,
    *,
    warm_up: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> Latency:
    """How long a model takes for these images, normalisation included; its logits are not kept.

    repeats: timed passes; warm_up: passes before them that are not timed; clock: seconds. Other load on the machine
    affects the numbers: to compare two models, time them in turns, more than once. Raises InputError for fewer than 1
    repeat.
    """
    return quartiles(passes(model, images, repeats, warm_up=warm_up, clock=clock), len(images))


def quartiles(seconds: Sequence[float], images: int) -> Latency:
    """The quartiles of passes over a batch of this many images."""
    low, median, high = (float(value) for value in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Latency(low, median, high, len(seconds), images)


def passes(
    model: Model, images: Images, repeats: int, *, warm_up: int = 1, clock: Callable[[], float] = perf_counter
) -> list[float]:
    """Seconds of each of `repeats` forward passes. Raises InputError for fewer than 1."""
    if repeats < 1 or warm_up < 0:
        raise InputError(f"expected at least 1 repeat, found {repeats} (and {warm_up} to warm up); try repeats=20")
    seconds = []
    with evaluating(model), torch.inference_mode():
        for turn in range(warm_up + repeats):
            _wait(images.device)
            begin = clock()
            model(images)
            _wait(images.device)
            if turn >= warm_up:
                seconds.append(clock() - begin)
    return seconds


def latencies(
    models: Sequence[Model],
    batch_sizes: Sequence[int],
    *,
    precision: str = "fp32",
    longest: float | None = None,
    clock: Callable[[], float] = perf_counter,
    advance: Callable[[int], object] = lambda _: None,
) -> list[list[TimedBatch]]:
    """Every model on every batch size of random pixels, in turns, so that other load affects all models alike.

    longest: seconds of one pass; a model that took longer, or for whose batch a CUDA device had too little memory, is
    not timed on larger batches (None: every batch is measured); advance: called after each batch size of a model.
    """
    timed_batches: list[list[TimedBatch]] = [[] for _ in models]
    remaining = set(range(len(models)))
    for size in batch_sizes:
        seconds: dict[int, list[float]] = {}
        peaks: dict[int, int | None] = {}
        for turn in range(ROUNDS):
            for index in sorted(remaining):
                try:
                    timed, peak = _round(models[index], size, precision, clock)
                except torch.cuda.OutOfMemoryError:
                    if longest is None:
                        raise
                    remaining.discard(index)
                    seconds.pop(index, None)
                    continue
                seconds.setdefault(index, []).extend(timed)
                peaks[index] = peak if turn == 0 else max(peak or 0, peaks[index] or 0) or None
        for index, timed in seconds.items():
            timed_batches[index].append(TimedBatch(quartiles(timed, size), tuple(timed), peaks[index]))
            advance(1)
            if longest is not None and timed_batches[index][-1].latency.median > longest:
                remaining.discard(index)
    return timed_batches


def _round(model: Model, size: int, precision: str, clock: Callable[[], float]) -> tuple[list[float], int | None]:
    """Passes of one model for about a quarter of a second, and the peak of the device's memory."""
    with device_peak(model.device) as peak, autocast(model.device, precision):
        images = probe_images(model, size)
        (first,) = passes(model, images, 1, clock=clock)
        repeats = max(_FEWEST, min(_MOST, int(_ROUND / max(first, 1e-6))))
        return passes(model, images, repeats, warm_up=0, clock=clock), peak()


def _wait(device: torch.device) -> None:
    """Wait for the device: a call on a GPU returns before it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
