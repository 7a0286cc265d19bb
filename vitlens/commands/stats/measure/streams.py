"""The statistics of one model, or of two and their differences, batch by batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vitlens.analysis.answers.moments import Key, Moments
from vitlens.analysis.heads.measure import BatchStatistics
from vitlens.analysis.heads.statistics import Stream, over_heads
from vitlens.models.identity import same_anatomy

MOST_MODELS = 2  # differences are those of one pair


@dataclass
class Streams:
    """The statistics of one model, or of two on the same images with their differences, first minus second.

    differences: of each head, where both models have it; overall: of the means over heads.
    """

    streams: Sequence[Stream]
    differences: Moments = field(init=False)
    overall: Moments = field(init=False)

    def __post_init__(self) -> None:
        clusters = self.streams[0].moments.clusters
        self.differences, self.overall = Moments(clusters=clusters), Moments(clusters=clusters)

    def add(
        self,
        images: Sequence[torch.Tensor],
        *,
        numbers: torch.Tensor | None = None,
        masks: Sequence[torch.Tensor | None] = (None,) * MOST_MODELS,
    ) -> None:
        """Add a batch of images, preprocessed for each model as are the masks of their objects; numbers: of the images
        in the data (None: in order of their addition)."""
        measured = [
            stream.add(batch, numbers=numbers, masks=mask) for stream, batch, mask in zip(self.streams, images, masks)
        ]
        if len(measured) == MOST_MODELS:
            first, second = measured
            shared, of_data = self.streams[0], self.streams[0].groups
            before = shared.moments.count - first.images
            known = torch.arange(before, shared.moments.count) if numbers is None else numbers
            groups = None if of_data is None else of_data[known.cpu()]
            if self.comparable:
                self.differences.add(_differences(first, second), first.images, groups=groups)
            means, others = over_heads(first.values), over_heads(second.values)
            between = {key: means[key] - others[key] for key in means.keys() & others.keys()}
            self.overall.add(between, first.images, groups=groups)

    @property
    def comparable(self) -> bool:
        """Whether there are two models whose heads of the same number can be compared."""
        return len(self.streams) == MOST_MODELS and same_anatomy(self.streams[0].model, self.streams[1].model)

    def join(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add up the statistics of several processes; total: sums a tensor over all of them."""
        for stream in self.streams:
            stream.join(total)
        self.differences.join(total)
        self.overall.join(total)


def _differences(first: BatchStatistics, second: BatchStatistics) -> dict[Key, torch.Tensor]:
    """First minus second of every head; empty where the models differ in their attention layers."""
    if first.sites != second.sites:
        return {}
    return {key: first.values[key] - second.values[key] for key in first.values if key in second.values}
