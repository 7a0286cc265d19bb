"""How long a forward pass takes: quartiles of wall time, after warming up."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.models.specimen import Specimen
from vitlens.shapes import Images


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


def latency(
    specimen: Specimen,
    images: Images,
    repeats: int = 20,
    *,
    warm_up: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> Latency:
    """How long a specimen takes for these images, normalisation included; nothing is kept of its answers.

    repeats: timed passes; warm_up: passes before them that are not timed; clock: seconds. What else the machine does
    is in the numbers: time two models one after the other, more than once. Raises InputError for fewer than 1 repeat.
    """
    if repeats < 1 or warm_up < 0:
        raise InputError(f"expected at least 1 repeat, found {repeats} (and {warm_up} to warm up); try repeats=20")
    seconds = []
    with evaluating(specimen), torch.inference_mode():
        for turn in range(warm_up + repeats):
            _wait(images.device)
            begin = clock()
            specimen(images)
            _wait(images.device)
            if turn >= warm_up:
                seconds.append(clock() - begin)
    low, median, high = (float(value) for value in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Latency(low, median, high, repeats, len(images))


def _wait(device: torch.device) -> None:
    """A GPU answers before it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
