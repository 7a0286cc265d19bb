"""The record of `vitlens compare`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.evaluation.rows import CalibrationRow, ClassRow, ConfusionRow
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.rows import ClassBias
from vitlens.arrays import Masks, Pixels, Stack
from vitlens.commands.compare.outcome_attention import OutcomeAttentionRecord
from vitlens.commands.shared.comparison import PairRow
from vitlens.commands.shared.failures_record import FailuresRecord
from vitlens.commands.shared.maps.record import MapCheckRow, OnObjectRow
from vitlens.commands.shared.reliance import RelianceRecord
from vitlens.commands.shared.trainings import Budget
from vitlens.record import OfModel, arrays, col, table
from vitlens.uncertainty import Estimate

# names of the cells, in the order of analysis/failures/compare.py (tested)
CELLS: Final[Mapping[str, str]] = {
    "both-right": "both correct",
    "only-first-wrong": "only {first} wrong",
    "only-second-wrong": "only {second} wrong",
    "both-wrong-alike": "both wrong, the same class",
    "both-wrong-differently": "both wrong, different classes",
}


@dataclass(frozen=True)
class ScoreRow(OfModel):
    """The accuracy and calibration of one model on all images."""

    accuracy: Estimate = col(
        "top-1 accuracy", better="higher", metric="accuracy/{model}", share=True
    )
    calibration_error: Estimate = col(
        "calibration error",
        better="lower",
        metric="calibration_error/{model}",
        share=True,
        term="mean difference between confidence and accuracy over bins of confidence, weighted by "
        "their images",
    )


@dataclass(frozen=True)
class CellRow:
    """The number of images on which both models, one, or none is wrong.

    cell: a key of CELLS.
    name: the cell in words, with the names of the models.
    """

    first: str = col("first")
    second: str = col("second")
    cell: str = col("cell")
    name: str = col("images")
    count: int = col("number")
    share: Estimate = col("share", metric="cell/{first}/{second}/{cell}")


@dataclass(frozen=True)
class MapRow(OfModel):
    """The maps of one model by one method: means over usable maps of the sampled images, None
    without usable maps.

    A map is usable if it is finite, not constant, and positive somewhere.
    """

    method: str = col("maps by")
    usable: Estimate = col("usable maps", metric="maps/{model}/usable")
    half: Estimate | None = col(
        "area of half the map",
        metric="maps/{model}/half",
        default=None,
        term="smallest share of the image that holds half of a map; 50 % for a uniform map",
    )
    spread: Estimate | None = col("spread", metric="maps/{model}/spread", default=None)
    central: Estimate | None = col(
        "on the middle quarter",
        metric="maps/{model}/central",
        default=None,
        term="share of a map on the middle quarter of the image; 25 % for a uniform map",
    )
    row: Estimate | None = col("centre of mass, down", metric="maps/{model}/row", default=None)
    column: Estimate | None = col(
        "centre of mass, across", metric="maps/{model}/column", default=None
    )
    inside: Estimate | None = col("on the object", metric="maps/{model}/inside", default=None)
    pointing: Estimate | None = col(
        "maximum on the object", metric="localisation/{model}/pointing", default=None
    )


@dataclass(frozen=True)
class AgreementRow:
    """The agreement of both models' maps of the same images.

    top: share of the top tenth of one map that is in the top tenth of the other.
    shared: share of mass in the same places.
    half_difference: area of half the map, first minus second.
    """

    first: str = col("first")
    second: str = col("second")
    spearman: Estimate = col("rank correlation", metric="agreement/{first}/{second}/spearman")
    top: Estimate = col("top tenth in common", metric="agreement/{first}/{second}/top")
    shared: Estimate = col("mass in common", metric="agreement/{first}/{second}/shared")
    half_difference: Estimate = col("difference in area", metric="half_difference/{first}/{second}")


@dataclass(frozen=True)
class ImageRow:
    """An image whose maps are shown.

    image: its index in the data.
    cell: a key of CELLS.
    agreement: rank correlation of the two maps, None if one of them is not usable.
    panel: position among the panels by rising agreement, None for images that are only examples.
    example: True for an example of its cell.
    """

    image: int = col("image")
    file: str = col("file")
    truth: str = col("class")
    cell: str = col("cell")
    first_prediction: str = col("prediction of the first")
    first_probability: float = col("probability", unit="fraction")
    second_prediction: str = col("prediction of the second")
    second_probability: float = col("probability of the second", unit="fraction")
    agreement: float | None = col("agreement of the maps", default=None)
    panel: int | None = col("panel", default=None)
    example: bool = col("example", default=False)

    @property
    def predicted(self) -> tuple[tuple[str, float], tuple[str, float]]:
        """Return both models' predictions with their probabilities."""
        first = (self.first_prediction, self.first_probability)
        second = (self.second_prediction, self.second_probability)
        return first, second


@dataclass(frozen=True)
class HarderRow(OfModel):
    """The accuracy of one model under one disturbance at one level.

    chance: the accuracy of guessing.
    """

    kind: str = col("disturbance")
    level: float = col("level")
    accuracy: Estimate = col(
        "accuracy", better="higher", metric="hardened_accuracy/{model}/{kind}/{level:g}", share=True
    )
    chance: float = col("chance", unit="fraction")

    @property
    def panel(self) -> str:
        """Return the disturbance with the meaning of its level."""
        return f"{self.kind}: {DISTURBANCES[self.kind].description}"


@dataclass(frozen=True, kw_only=True)
class DisturbedPairRow(PairRow):
    """The difference of both models on the same disturbed images.

    p_holm: corrected for all rows of the table.
    """

    kind: str = col("disturbance")
    level: float = col("level")
    p: float = col("p")
    difference: Estimate = col("first minus second")


@dataclass(frozen=True)
class BiasRow(OfModel):
    """The shape bias of one model on images with cue conflicts.

    bias: predictions by shape among those by shape or texture, None without any.
    note: a remark on the predictions, or "".
    """

    n: int = col("images")
    bias: Estimate | None = col(
        "shape bias",
        metric="shape_bias/{model}",
        share=True,
        term="share of predictions of the shape's class among those of the shape's or texture's "
        "class (Geirhos 2019)",
    )
    shape: Estimate = col("predictions by shape", metric="shape_answers/{model}", share=True)
    texture: Estimate = col("by texture", metric="texture_answers/{model}", share=True)
    data: str = col("data")
    note: str = col("note", unit="text")


@dataclass(frozen=True)
class ShownArrays:
    """The pixels, the positive part of both models' maps, and masks if known, by row of
    `images_shown`.
    """

    pixels: Pixels
    first: Stack
    second: Stack
    masks: Masks | None = None


@dataclass(frozen=True, kw_only=True)
class CompareRecord(FailuresRecord, RelianceRecord, OutcomeAttentionRecord):
    """The tables and arrays of two models on the same labelled images."""

    scores: tuple[ScoreRow, ...] = table()
    pairs: tuple[PairRow, ...] = table()
    cells: tuple[CellRow, ...] = table()
    per_class: tuple[ClassRow, ...] = table()
    confusions: tuple[ConfusionRow, ...] = table()
    calibration: tuple[CalibrationRow, ...] = table()
    methods: tuple[MapRow, ...] = table()
    map_checks: tuple[MapCheckRow, ...] = table()
    agreement: tuple[AgreementRow, ...] = table()
    on_object: tuple[OnObjectRow, ...] = table()
    images_shown: tuple[ImageRow, ...] = table()
    robustness: tuple[HarderRow, ...] = table()
    disturbed_pairs: tuple[DisturbedPairRow, ...] = table()
    shape_bias: tuple[BiasRow, ...] = table()
    cue_conflicts: tuple[ClassBias, ...] = table()
    training: tuple[Budget, ...] = table()
    shown: ShownArrays | None = arrays("images")
