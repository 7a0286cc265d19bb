"""The statistics of one model, or of two and their differences, batch by batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vitlens.analysis.answers.moments import Key, Moments
from vitlens.analysis.heads.measure import BatchStatistics
from vitlens.analysis.heads.statistics import Stream, over_heads
from vitlens.models.identity import same_anatomy

MOST = 2  # models: a figure of differences has two sides


@dataclass
class Streams:
    """The statistics of one model, or of two on the same images with their differences, first minus second.

    differences: of each head, where both models have it; overall: of the means over heads.
    """

    streams: Sequence[Stream]
    differences: Moments = field(default_factory=Moments)
    overall: Moments = field(default_factory=Moments)

    def add(self, images: Sequence[torch.Tensor]) -> None:
        """Take in a batch, for each model as it takes it."""
        measured = [stream.add(batch) for stream, batch in zip(self.streams, images)]
        if len(measured) == MOST:
            first, second = measured
            if self.comparable:
                self.differences.add(_differences(first, second), first.images)
            one, two = over_heads(first.values), over_heads(second.values)
            self.overall.add({key: one[key] - two[key] for key in one.keys() & two.keys()}, first.images)

    @property
    def comparable(self) -> bool:
        """Whether there are two models whose heads of the same number can be compared."""
        return len(self.streams) == MOST and same_anatomy(self.streams[0].model, self.streams[1].model)

    def join(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add up what several processes took in; total: the sum of a tensor over all of them."""
        for stream in self.streams:
            stream.join(total)
        self.differences.join(total)
        self.overall.join(total)


def _differences(first: BatchStatistics, second: BatchStatistics) -> dict[Key, torch.Tensor]:
    """First minus second of every head; nothing where the models' attention is not of one shape."""
    if first.sites != second.sites:
        return {}
    return {key: first.values[key] - second.values[key] for key in first.values if key in second.values}
