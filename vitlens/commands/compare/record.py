"""What `vitlens compare` records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.arrays import Masks, Pixels, Stack
from vitlens.commands.shared.calibration import CalibrationRow
from vitlens.commands.shared.comparison import PairRow
from vitlens.commands.shared.failures import FailuresRecord
from vitlens.commands.shared.maps.record import MapCheckRow, OnObjectRow
from vitlens.commands.shared.reliance import RelianceRecord
from vitlens.commands.shared.trainings import Budget
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow
from vitlens.record import OfModel, arrays, col, table
from vitlens.uncertainty import Estimate

# cells of errors, as analysis/failures/compare.py orders them (tested), with the words for two models
CELLS: Final[Mapping[str, str]] = {
    "both-right": "both correct",
    "only-first-wrong": "only {first} wrong",
    "only-second-wrong": "only {second} wrong",
    "both-wrong-alike": "both wrong, the same class",
    "both-wrong-differently": "both wrong, different classes",
}


@dataclass(frozen=True)
class ScoreRow(OfModel):
    """One model on all images."""

    accuracy: Estimate = col("top-1 accuracy", better="higher", metric="accuracy/{model}")
    calibration_error: Estimate = col(
        "calibration error",
        better="lower",
        metric="calibration_error/{model}",
        term="the mean difference of confidence and accuracy over bins of confidence, weighted by their images",
    )


@dataclass(frozen=True)
class CellRow:
    """The images on which both, one or none of the two models is wrong. cell: a key of CELLS; name: in words."""

    first: str = col("first")
    second: str = col("second")
    cell: str = col("cell")
    name: str = col("images")
    count: int = col("number")
    share: Estimate = col("share", metric="cell/{first}/{second}/{cell}")


@dataclass(frozen=True)
class MapRow(OfModel):
    """The maps of one model by one method: means over those of the sampled images that are usable (not constant,
    finite, with a positive value), None where none is."""

    method: str = col("maps by")
    usable: Estimate = col("usable maps", metric="maps/{model}/usable")
    half: Estimate | None = col(
        "area of half the map",
        metric="maps/{model}/half",
        default=None,
        term="the smallest share of the image that holds half of a map; 50 % of a uniform one",
    )
    spread: Estimate | None = col("spread", metric="maps/{model}/spread", default=None)
    central: Estimate | None = col(
        "on the middle quarter",
        metric="maps/{model}/central",
        default=None,
        term="the share of a map on the middle quarter of the image; 25 % of a uniform one",
    )
    row: Estimate | None = col("centre of mass, down", metric="maps/{model}/row", default=None)
    column: Estimate | None = col("centre of mass, across", metric="maps/{model}/column", default=None)
    inside: Estimate | None = col("on the object", metric="maps/{model}/inside", default=None)
    pointing: Estimate | None = col("maximum on the object", metric="localisation/{model}/pointing", default=None)


@dataclass(frozen=True)
class AgreementRow:
    """Both models' maps of the same images: rank correlation, the share of the top tenth of one that is in the top
    tenth of the other, the mass in the same places; half_difference: area of half the map, first minus second."""

    first: str = col("first")
    second: str = col("second")
    spearman: Estimate = col("rank correlation", metric="agreement/{first}/{second}/spearman")
    top: Estimate = col("top tenth in common", metric="agreement/{first}/{second}/top")
    shared: Estimate = col("mass in common", metric="agreement/{first}/{second}/shared")
    half_difference: Estimate = col("difference in area", metric="half_difference/{first}/{second}")


@dataclass(frozen=True)
class ImageRow:
    """One image that is shown. image: its index in the data; cell: a key of CELLS; agreement: rank correlation of the
    two maps, None where one is not usable; panel: its place among the panels by rising agreement, None for an example
    of its cell alone; example: whether it is one."""

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
        return (self.first_prediction, self.first_probability), (self.second_prediction, self.second_probability)


@dataclass(frozen=True)
class HarderRow(OfModel):
    """One model under one disturbance at one level; chance: the accuracy of a guess."""

    kind: str = col("disturbance")
    level: float = col("level")
    accuracy: Estimate = col("accuracy", better="higher", metric="hardened_accuracy/{model}/{kind}/{level:g}")
    chance: float = col("chance", unit="fraction")

    @property
    def panel(self) -> str:
        """Return the disturbance and what its level is."""
        return f"{self.kind}: {DISTURBANCES[self.kind].description}"


@dataclass(frozen=True, kw_only=True)
class DisturbedPairRow(PairRow):
    """Both models on the same disturbed images. p_holm: corrected for all rows of the table."""

    kind: str = col("disturbance")
    level: float = col("level")
    p: float = col("p")
    difference: Estimate = col("first minus second")


@dataclass(frozen=True)
class BiasRow(OfModel):
    """One model on the cue conflicts of a data set: bias, predictions by shape among those by shape or by texture, None
    without any. note: a remark on the predictions, or empty."""

    n: int = col("images")
    bias: Estimate | None = col(
        "shape bias",
        metric="shape_bias/{model}",
        term="the share of predictions of the shape's class among those of the shape's or the texture's (Geirhos 2019)",
    )
    shape: Estimate = col("predictions by shape", metric="shape_answers/{model}")
    texture: Estimate = col("by texture", metric="texture_answers/{model}")
    data: str = col("data")
    note: str = col("note", unit="text")


@dataclass(frozen=True)
class ConflictRow(OfModel):
    """The n cue conflicts of one class of shape, for one model: predictions by shape and by texture."""

    class_name: str = col("class of the shape")
    n: int = col("images")
    shape: int = col("predictions by shape")
    texture: int = col("by texture")
    share: float | None = col("by shape, of those by shape or texture", unit="fraction", default=None)


@dataclass(frozen=True)
class ShownArrays:
    """By row of the table of images: pixels, the positive part of both models' maps, and masks where known."""

    pixels: Pixels
    first: Stack
    second: Stack
    masks: Masks | None = None


@dataclass(frozen=True, kw_only=True)
class CompareRecord(FailuresRecord, RelianceRecord):
    """Two models on the same labelled images."""

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
    cue_conflicts: tuple[ConflictRow, ...] = table()
    training: tuple[Budget, ...] = table()
    shown: ShownArrays | None = arrays("images")
