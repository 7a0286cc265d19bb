"""The record of `vitlens explain`. Every row names its model; the tables of the league are empty without --verify."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.commands.explain.choice_record import CHOICES
from vitlens.commands.explain.evidence_record import EVIDENCE
from vitlens.commands.shared.explorer import EXPLORER, EXPLORER_ARRAYS
from vitlens.commands.shared.maps.on_object import ON_OBJECT
from vitlens.commands.shared.maps.rows import MapCheck
from vitlens.names import Substrate
from vitlens.records import ArraysOf, ClassNames, Contents, Masks, MetricName, Pixels, TableOf, UntrustedName

SEARCH: Final = "search"  # the greedy search's name among the orders of patches


@dataclass(frozen=True)
class MethodRow:
    """One method on one model's images.

    source: paper, or the package whose maps these are; map: rows and columns; signed: whether negative values are
    evidence against the target; maps: their number; constant, not_finite: the number with this fault; seconds: for one
    image; gain: mean |F(image) - F(black)| in logits, of methods whose maps sum to that.
    """

    model: str
    method: str
    title: str
    source: str
    map: str
    signed: bool
    maps: int
    constant: int
    not_finite: int
    seconds: float
    gain: float | None


@dataclass(frozen=True)
class ExplainImageRow:
    """One image: prediction and explained class with their probabilities (None where the model has no classifier), and
    the label (None where there is none)."""

    model: str
    image: UntrustedName
    prediction: UntrustedName | None
    probability: float | None
    target: UntrustedName | None
    target_probability: float | None
    label: UntrustedName | None


@dataclass(frozen=True)
class LeagueRow:
    """One method, or baseline, in every check: means over images, whose intervals are in the metrics of `CHECKS`.

    None where a check was not run or gave no number. by_stage: mean Spearman correlation of the maps before and after
    the weights are randomised, by the part that is randomised in addition (None: undefined). seconds, forwards: the
    cost for an image; faults: of the maps, in words, empty where there are none; flagged: by the
    randomisation check; check: paired differences from the baselines and the judged cascade (None: a baseline, or a
    folder of a version before them). relevance_gain: LeRF minus MoRF of the target's logit; cascade: the mean
    correlation over all stages of the randomisation (None: a folder of a version before them).
    """

    model: str
    method: str
    baseline: bool
    deletion: float
    insertion: float
    gap: float
    deletion_accuracy: float
    insertion_accuracy: float
    road: float | None
    size: float | None
    roc_auc: float | None
    average_precision: float | None
    iou: float | None
    pixel_accuracy: float | None
    mass: float | None
    pointing: float | None
    randomisation: float | None
    by_stage: Mapping[str, float | None] | None
    seconds: float
    forwards: float | None
    faults: str
    flagged: bool
    verdict: str
    check: MapCheck | None = None
    relevance_gain: float | None = None
    cascade: float | None = None


@dataclass(frozen=True)
class MethodAgreementRow:
    """The similarity of the maps of two methods: means over n images of Spearman's correlation, of the overlap of their
    highest cells and of the intersection over union of the cells above their means."""

    model: str
    first: str
    second: str
    spearman: float
    top_overlap: float
    iou: float
    n: int


@dataclass(frozen=True)
class LeagueSettingsRow:
    """The settings of one model's checks. images, randomised: their number in all, and in the randomisation check."""

    model: str
    substrate: Substrate
    steps: int | None
    road: bool
    counterfactuals: bool
    seed: int
    batch_size: int | None
    images: int
    randomised: int


_Shares = Annotated[NDArray[np.floating], Form("f", (None,))]
_Curves = Annotated[NDArray[np.floating], Form("f", (None, None))]
_Words = Annotated[NDArray[Any], Form("U", (None,))]


@dataclass(frozen=True)
class ExplainArrays:
    """images: pixels of the drawn images; masks: of their objects, where known; maps: by row of the model's methods
    (images, rows, columns), raw."""

    images: Pixels
    maps: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None, None))]
    masks: Masks | None = None


@dataclass(frozen=True)
class LeagueArrays:
    """The mean curves: probability of the target (methods, points) at the shares of patches that are removed or
    inserted."""

    methods: _Words
    shares: _Shares
    inserted: _Shares
    deletion: _Curves
    insertion: _Curves


@dataclass(frozen=True)
class CounterfactualArrays:
    """The removed patches of a few images by each order of patches (images, orders, rows, columns), and the class that
    is predicted without them (images, orders); methods: the orders; prediction: of the whole image."""

    images: Pixels
    methods: _Words
    removed: Annotated[NDArray[np.bool_], Form("b", (None, None, None, None))]
    turned: Annotated[NDArray[np.integer], Form("iu", (None, None))]
    prediction: Annotated[NDArray[np.integer], Form("iu", (None,))]
    classes: ClassNames


METHODS = TableOf("methods", MethodRow)
IMAGES = TableOf("images", ExplainImageRow)
LEAGUE = TableOf("league", LeagueRow)
AGREEMENTS = TableOf("agreement", MethodAgreementRow)
SETTINGS = TableOf("league_settings", LeagueSettingsRow)

MAPS = ArraysOf("explain-{model}", ExplainArrays)
CURVES = ArraysOf("league-{model}", LeagueArrays)
COUNTERFACTUALS = ArraysOf("counterfactuals-{model}", CounterfactualArrays)

# mean |sum of a map - (F(image) - F(black))|, in logits
COMPLETENESS = MetricName("completeness/{model}/{method}")
AGREEMENT = MetricName("agreement/{model}/{first}/{second}")  # mean Spearman correlation
SECONDS = MetricName("cost/{model}/seconds/{method}")
FORWARDS = MetricName("cost/{model}/forwards/{method}")
TURNED = MetricName("counterfactual/{model}/turned/{method}")  # fraction of images whose prediction changes
SIZE_SEARCHED = MetricName("counterfactual/{model}/size_searched/{method}")  # on the images of the greedy search

# the columns of LeagueRow that have an interval; size: share of the patches whose removal changes the prediction
CHECKS: Final[Mapping[str, MetricName]] = {
    "deletion": MetricName("faithfulness/{model}/deletion/{method}"),
    "insertion": MetricName("faithfulness/{model}/insertion/{method}"),
    "gap": MetricName("faithfulness/{model}/gap/{method}"),
    "deletion_accuracy": MetricName("faithfulness/{model}/deletion_accuracy/{method}"),
    "insertion_accuracy": MetricName("faithfulness/{model}/insertion_accuracy/{method}"),
    "road": MetricName("faithfulness/{model}/road/{method}"),
    "size": MetricName("counterfactual/{model}/size/{method}"),
    "roc_auc": MetricName("localisation/{model}/roc_auc/{method}"),
    "average_precision": MetricName("localisation/{model}/average_precision/{method}"),
    "iou": MetricName("localisation/{model}/iou/{method}"),
    "pixel_accuracy": MetricName("localisation/{model}/pixel_accuracy/{method}"),
    "mass": MetricName("localisation/{model}/mass/{method}"),
    "pointing": MetricName("localisation/{model}/pointing/{method}"),
    "randomisation": MetricName("randomisation/{model}/{method}"),
    "relevance_gain": MetricName("faithfulness/{model}/relevance_gain/{method}"),
    "cascade": MetricName("randomisation_cascade/{model}/{method}"),
}

RECORD = Contents(
    metrics=(
        COMPLETENESS,
        *CHECKS.values(),
        SECONDS,
        FORWARDS,
        TURNED,
        SIZE_SEARCHED,
        AGREEMENT,
        *EVIDENCE.metrics,
        *CHOICES.metrics,
    ),
    tables=(METHODS, IMAGES, LEAGUE, AGREEMENTS, SETTINGS, ON_OBJECT, EXPLORER, *EVIDENCE.tables, *CHOICES.tables),
    arrays=(MAPS, CURVES, COUNTERFACTUALS, EXPLORER_ARRAYS, *EVIDENCE.arrays),
)
