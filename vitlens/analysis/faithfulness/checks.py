"""Rules by which attribution maps pass the checks; free of torch.

Weights are randomised cumulatively from the head down (Adebayo 2018). The complete cascade counts:
maps that still agree with those of the trained model when its upper half is random do not show what
the model learned there, even if they change once the embedding is random, too. A shift by at most a
pixel leaves the evidence in its place, so the map of the shifted image must be the shifted map.
Most photographs do not depend on a flip: it is reported, but not judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vitlens.record import col
from vitlens.uncertainty import Estimate

ENOUGH: Final = 10  # images from which on a method is judged
SIMILAR: Final = 0.5  # mean rank correlation, from which on maps count as hardly changed
# share of the predictions, from which on randomising counts as not having changed the model
KEPT: Final = 0.9
FAR: Final = 1 / 8  # of a side: a top point that moves further has jumped
JUMPY: Final = 0.25  # share of images with a top point that jumps, above which a method fails
STEADY_IMAGES: Final = 16  # images of the check, which needs a map of each for every change
FLIP: Final = "flip"  # left and right exchanged
DISTURBANCES: Final[Mapping[str, float]] = {  # px that the image is shifted right and down
    "shift-quarter": 0.25,
    "shift-half": 0.5,
    "shift-one": 1.0,
    FLIP: 0.0,
}


@dataclass(frozen=True)
class Judgement:
    """The result of one check of a method's maps.

    value: the number that decides, None where it is undefined.
    lack: why they do not pass, a word of commands/shared/maps/record.py.
    """

    state: Literal["pass", "fail", "inconclusive"]
    value: Estimate | None = None
    lack: str = ""


@dataclass(frozen=True)
class Stage:
    """The maps after one stage of the randomisation, which includes all before it.

    similarity: mean rank correlation with the maps of the trained model, None where undefined.
    kept: the share of the images with the prediction of the trained model.
    """

    name: str
    similarity: Estimate | None
    kept: float | None = None


def judged_cascade(stages: Sequence[Stage]) -> Judgement:
    """Return whether a method passes, by the similarity of its maps at every stage.

    Stages are ordered from the head down. The upper stages end with the middle one, which
    randomises the middle block.

    - It fails if the mean similarity is at least SIMILAR at all upper stages, or at the last stage.
    - It passes if the interval lies below SIMILAR at one of the upper stages and at the last stage.
    - It is inconclusive otherwise, with fewer than ENOUGH images, and if the model with its upper
      half randomised keeps KEPT of its predictions, so that no map had to change.

    The value is the smallest similarity of the upper stages; if only the last stage fails, that of
    the last stage.
    """
    similarities = [stage.similarity for stage in stages if stage.similarity is not None]
    if len(similarities) < len(stages) or not stages:
        return Judgement("inconclusive", None, "uniform maps")
    blocks = [place for place, stage in enumerate(stages) if stage.name.startswith("block")]
    middle = blocks[(len(blocks) - 1) // 2] if blocks else len(stages) - 1
    upper = similarities[: middle + 1]
    predictions_kept = stages[middle].kept
    last = similarities[-1]
    least = min(upper, key=lambda similarity: similarity.value)
    decisive = last if last.value >= SIMILAR > least.value else least
    if (last.n or 0) < ENOUGH:
        return Judgement("inconclusive", decisive, "few images")
    if predictions_kept is not None and predictions_kept >= KEPT:
        return Judgement("inconclusive", decisive, "predictions unchanged")
    if least.value >= SIMILAR or last.value >= SIMILAR:
        return Judgement("fail", decisive, "ignores the weights")
    least_bound = min(_upper_bound(similarity) for similarity in upper)
    if least_bound < SIMILAR and _upper_bound(last) < SIMILAR:
        return Judgement("pass", decisive)
    return Judgement("inconclusive", decisive, "interval holds the threshold")


def _upper_bound(estimate: Estimate) -> float:
    return estimate.value if estimate.high is None else estimate.high


def judged_stability(correlation: Estimate | None, jumped: Estimate | None) -> Judgement:
    """Return whether a method's maps follow shifts of the image.

    correlation: the mean rank correlation of its maps with the shifted ones, over the shifts.
    jumped: the share of images with a top point that jumps; both are None if no image has a usable
        map. They fail where the interval of the share lies above JUMPY, or that of the correlation
        below SIMILAR. They pass where neither can be.

    The check is inconclusive between the two or with fewer than ENOUGH images.
    """
    inconclusive = Judgement("inconclusive", jumped, "may jump")
    if correlation is None or jumped is None or (jumped.n or 0) < ENOUGH:
        return inconclusive
    if correlation.low is None or correlation.high is None:
        return inconclusive
    if jumped.low is None or jumped.high is None:
        return inconclusive
    if jumped.low > JUMPY or correlation.high < SIMILAR:
        return Judgement("fail", jumped, "jumps")
    if jumped.high <= JUMPY and correlation.low >= SIMILAR:
        return Judgement("pass", jumped)
    return inconclusive


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """One candidate, or baseline, of a choice: its mean in each check and its score, by half.

    wins: share of the bootstrap draws of the selection half in which no candidate scores higher,
    None for a baseline.
    """

    model: str = col("model", default="")
    method: str = col("method")
    baseline: bool = col("baseline")
    selection: Mapping[str, Estimate] = col(
        "selection half", metric="choice/{model}/selection/{key}/{method}"
    )
    report: Mapping[str, Estimate] = col(
        "other half", metric="choice/{model}/report/{key}/{method}"
    )
    wins: float | None = col("wins", unit="fraction", default=None)


@dataclass(frozen=True, kw_only=True)
class ChoiceMargin:
    """The chosen method minus another one on the report half.

    difference: the mean paired difference in a check or of the score.
    """

    model: str = col("model", default="")
    against: str = col("method")
    check: str = col("check")
    difference: Estimate = col("chosen minus this")
