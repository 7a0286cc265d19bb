"""How fast training goes: images a second, time spent, time left; looks at the test images do not count as training."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts from its making.

    seconds: spent by earlier runs of the same training.
    """

    def __init__(self, *, seconds: float = 0.0) -> None:
        self._earlier = seconds
        self._began = time.perf_counter()
        self._paused = 0.0
        self._pause_began: float | None = None
        self._images = 0
        self._epoch = (0.0, 0)  # training seconds and images at its start

    def count(self, images: int) -> None:
        """These were trained on."""
        self._images += images

    def pause(self) -> None:
        """Training waits from here on."""
        self._pause_began = time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside is not training, within an epoch."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def begin_epoch(self) -> None:
        """Training goes on; the epoch's rate counts from here."""
        if self._pause_began is not None:
            self._paused += time.perf_counter() - self._pause_began
            self._pause_began = None
        self._epoch = (self._training(), self._images)

    def seconds(self) -> float:
        """Spent by all runs of this training together, looks at the test images included."""
        return self._earlier + time.perf_counter() - self._began

    def epoch_rate(self) -> float:
        """Images a second in this epoch."""
        return (self._images - self._epoch[1]) / max(self._training() - self._epoch[0], 1e-9)

    def rate(self) -> float:
        """Images a second since this run began."""
        return self._images / max(self._training(), 1e-9)

    def seconds_left(self, images: int) -> float:
        """Until so many more images are through, at the pace so far, pauses included."""
        return images * (time.perf_counter() - self._began) / max(self._images, 1)

    def _training(self) -> float:
        now = time.perf_counter() if self._pause_began is None else self._pause_began
        return now - self._began - self._paused
