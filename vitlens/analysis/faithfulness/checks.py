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

ENOUGH: Final = 10  # a method is judged on at least so many images
SIMILAR: Final = 0.5  # maps with at least this mean rank correlation have hardly changed
# a randomisation that keeps at least this share of the predictions has not changed the model
KEPT: Final = 0.9
FAR: Final = 1 / 8  # a highest point that moves further, as a share of a side, has jumped
JUMPY: Final = 0.25  # a method fails if a larger share of images jumps
STEADY_IMAGES: Final = 16  # images of the stability check, which needs a map of each for each shift
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
    lack: the reason why the maps do not pass, as a key of commands/shared/maps/record.py.
    """

    state: Literal["pass", "fail", "inconclusive"]
    value: Estimate | None = None
    lack: str = ""


@dataclass(frozen=True)
class Stage:
    """The maps after one stage of the randomisation, which includes all before it.

    name: the parameters that the stage adds.
    similarity: mean rank correlation with the maps of the trained model, None where undefined.
    kept: the share of the images that keep the prediction of the trained model.
    """

    name: str
    similarity: Estimate | None
    kept: float | None = None


def judged_cascade(stages: Sequence[Stage]) -> Judgement:
    """Judge a method by the similarity of its maps at every stage.

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
        return Judgement("inconclusive", lack="uniform maps")
    # the stages of blocks, titled "block 3" or "blocks 3 to 5"
    blocks = [index for index, stage in enumerate(stages) if stage.name.startswith("block")]
    middle = len(stages) - 1
    if blocks:
        middle = blocks[(len(blocks) - 1) // 2]
    upper = similarities[: middle + 1]
    predictions_kept = stages[middle].kept
    last = similarities[-1]
    least = min(upper, key=lambda similarity: similarity.value)
    only_last_fails = last.value >= SIMILAR and least.value < SIMILAR
    decisive = last if only_last_fails else least  # is reported as the value
    if (last.n or 0) < ENOUGH:
        return Judgement("inconclusive", decisive, lack="few images")
    if predictions_kept is not None and predictions_kept >= KEPT:
        return Judgement("inconclusive", decisive, lack="predictions unchanged")
    if least.value >= SIMILAR or last.value >= SIMILAR:
        return Judgement("fail", decisive, lack="ignores the weights")
    # perhaps that of another stage than `least`
    least_upper_bound = min(_upper_bound(similarity) for similarity in upper)
    if least_upper_bound < SIMILAR and _upper_bound(last) < SIMILAR:
        return Judgement("pass", decisive)
    return Judgement("inconclusive", decisive, lack="interval holds the threshold")


def _upper_bound(estimate: Estimate) -> float:
    return estimate.value if estimate.high is None else estimate.high


def judged_stability(correlation: Estimate | None, jumped: Estimate | None) -> Judgement:
    """Judge if a method's maps follow shifts of the image.

    - It fails if the interval of the share that jumps lies above JUMPY, or that of the correlation
      below SIMILAR.
    - It passes if the first interval lies at or below JUMPY, and the second at or above SIMILAR.
    - It is inconclusive otherwise, and with fewer than ENOUGH images.

    correlation: the mean rank correlation of its maps with the shifted ones, over the shifts.
    jumped: the share of images with a highest point that jumps. Both are None if no image has a
        usable map.
    """
    inconclusive = Judgement("inconclusive", jumped, lack="may jump")
    if correlation is None or jumped is None or (jumped.n or 0) < ENOUGH:
        return inconclusive
    if correlation.low is None or correlation.high is None:
        return inconclusive
    if jumped.low is None or jumped.high is None:
        return inconclusive
    if jumped.low > JUMPY or correlation.high < SIMILAR:
        return Judgement("fail", jumped, lack="jumps")
    if jumped.high <= JUMPY and correlation.low >= SIMILAR:
        return Judgement("pass", jumped)
    return inconclusive


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """One candidate, or baseline, of the choice of a method.

    The images are in two halves: one selects the method, the other reports how good it is.

    selection, report: the mean in each check, and the score, on this half of the images.
    wins: the share of bootstrap draws of the selection half in which no candidate scores higher,
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

    against: the other method.
    check: the name of a check, or of the score.
    difference: the mean paired difference.
    """

    model: str = col("model", default="")
    against: str = col("method")
    check: str = col("check")
    difference: Estimate = col("chosen minus this")
