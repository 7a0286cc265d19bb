"""The rule of the randomisation check, on the mean similarity of the maps at every stage; free of torch.

Weights are randomised cumulatively from the head down (Adebayo 2018). What counts is the whole cascade: maps that still
agree with the trained model's when its upper half is random do not show what the model learned there, whatever becomes
of them once the embedding is random, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vitlens.uncertainty import Estimate

SIMILAR: Final = 0.5  # mean rank correlation, from which on maps count as hardly changed
ENOUGH: Final = 10  # images from which on a method is judged
KEPT: Final = 0.9  # share of the predictions, from which on randomising counts as not having changed the model

CascadeState = Literal["passes", "fails", "inconclusive"]
Obstacle = Literal["", "uniform maps", "few images", "predictions unchanged", "interval holds the threshold"]


@dataclass(frozen=True)
class RandomisedStage:
    """The maps after one stage, which includes all before it.

    similarity: mean Spearman correlation with the trained model's maps, None where undefined; low, high: its 95 %
    interval (None: not recorded); kept: share of the images whose prediction is still that of the trained model (None:
    not recorded).
    """

    name: str
    similarity: float | None = None
    low: float | None = None
    high: float | None = None
    kept: float | None = None

    @property
    def upper(self) -> float:
        """The end by which it passes: of the interval where there is one; infinite where undefined."""
        known = self.similarity if self.high is None else self.high
        return float("inf") if known is None else known


@dataclass(frozen=True)
class Cascade:
    """All stages from the head down, judged; made by `judged_cascade`.

    n: images whose map is not uniform; middle: the place of the stage that randomises the middle block; obstacle: why
    the check is inconclusive, else empty.
    """

    stages: tuple[RandomisedStage, ...]
    n: int
    middle: int
    state: CascadeState
    obstacle: Obstacle

    @property
    def decisive(self) -> RandomisedStage:
        """The stage of the smallest similarity down to the middle block; the last stage where that one fails alone."""
        upper = [stage for stage in self.stages[: self.middle + 1] if stage.similarity is not None]
        last = self.stages[-1]
        least = min(upper, key=lambda stage: stage.similarity or 0.0, default=last)
        return last if _is_similar(last) and not _is_similar(least) else least

    @property
    def similarity(self) -> Estimate | None:
        """The mean similarity at the decisive stage, with its interval where that was recorded."""
        stage = self.decisive
        if stage.similarity is None:
            return None
        return Estimate(stage.similarity, stage.low, stage.high, self.n, "")

    @property
    def first_below(self) -> str | None:
        """The stage at which the similarity first falls below SIMILAR; None where it never does."""
        return next((stage.name for stage in self.stages if not _is_similar(stage)), None)


def judged_cascade(stages: Sequence[RandomisedStage], n: int) -> Cascade:
    """Whether a method passes, by the similarity of its maps at every stage. n: images whose map is not uniform.

    It fails where the mean similarity is at least SIMILAR at every stage from the head down to the middle block, or at
    the last stage. It passes where the interval lies below SIMILAR at one of the former and at the latter. It is
    inconclusive between the two, with fewer than ENOUGH images, and where the model with its upper half randomised
    keeps KEPT of its predictions, so that no map had to change.
    """
    middle = middle_of([stage.name for stage in stages])
    state, obstacle = _judged(stages, n, middle)
    return Cascade(tuple(stages), n, middle, state, obstacle)


def middle_of(names: Sequence[str]) -> int:
    """The place of the stage that randomises the middle block: the upper half of those of blocks."""
    blocks = [place for place, name in enumerate(names) if name.startswith("block")]
    return blocks[(len(blocks) - 1) // 2] if blocks else len(names) - 1


def hardly_changes(stages: Sequence[RandomisedStage], middle: int) -> bool:
    """Whether maps stay similar at every stage down to the middle, or are so at the last."""
    return all(map(_is_similar, stages[: middle + 1])) or _is_similar(stages[-1])


def _judged(stages: Sequence[RandomisedStage], n: int, middle: int) -> tuple[CascadeState, Obstacle]:
    if n == 0 or not stages:
        return "inconclusive", "uniform maps"
    if n < ENOUGH:
        return "inconclusive", "few images"
    kept = stages[middle].kept
    if kept is not None and kept >= KEPT:
        return "inconclusive", "predictions unchanged"
    if hardly_changes(stages, middle):
        return "fails", ""
    if min(stage.upper for stage in stages[: middle + 1]) < SIMILAR and stages[-1].upper < SIMILAR:
        return "passes", ""
    return "inconclusive", "interval holds the threshold"


def _is_similar(stage: RandomisedStage) -> bool:
    return stage.similarity is not None and stage.similarity >= SIMILAR
