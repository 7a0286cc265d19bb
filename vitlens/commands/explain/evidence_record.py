"""The record of the evidence beyond the league: substrates, stability, power, composites. Empty without --verify.

Intervals are in the metrics, by the names below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.faithfulness.steadiness import SteadyState
from vitlens.archives import Form
from vitlens.records import ArraysOf, ClassNames, Contents, Masks, MetricName, Pixels, TableOf
from vitlens.uncertainty import Estimate

IMPUTED: Final = "imputed"  # ROAD's replacement, beside the substrates of the command line
SHIFTS: Final = "shifts"  # all judged disturbances together


@dataclass(frozen=True)
class SubstrateRow:
    """Insertion minus deletion (LeRF minus MoRF) of one method, or baseline, with one substrate: the mean of n images,
    the same for every substrate."""

    model: str
    method: str
    baseline: bool
    substrate: str
    gap: float
    n: int


@dataclass(frozen=True)
class SubstrateAgreementRow:
    """The rankings of the methods, without the baselines, with two substrates. tau: Kendall's; swapped: number of pairs
    of methods that significantly change places."""

    model: str
    first: str
    second: str
    tau: float
    methods: int
    swapped: int
    n: int


@dataclass(frozen=True)
class SwappedPairRow:
    """Two methods of which the first substrate shows one to be better and the second the other. in_first, in_second:
    mean paired differences of insertion minus deletion of n images, better minus worse, with the intervals that all
    pairs of methods require (Bonferroni)."""

    model: str
    first: str
    second: str
    better: str
    worse: str
    in_first: Estimate
    in_second: Estimate


@dataclass(frozen=True)
class StabilityRow:
    """Whether the maps of one method follow its images. disturbance: a name of the registry, or "shifts" for the judged
    ones together; correlation: mean rank correlation of the map of the disturbed image with the map that is disturbed
    in the same way; jumped: share of the n images whose top point lies far from its place. None: no usable map."""

    model: str
    method: str
    disturbance: str
    correlation: float | None
    jumped: float | None
    n: int
    state: SteadyState


@dataclass(frozen=True)
class PowerRow:
    """What paired comparisons of the best method with the others can see in one check. error: median standard error of
    the mean difference; detectable: the smallest true difference that is found with a probability of 80 % at 5 %; n:
    images, groups: independent ones; best: the method that is compared."""

    model: str
    check: str
    best: str
    error: float
    detectable: float
    n: int
    groups: int


@dataclass(frozen=True)
class CompositeSetRow:
    """The composites of one kind. refused: why there are none, empty where there are; labels: "labels" or
    "predictions", what the explained classes come from; usable, classes: confidently classified images and their
    classes; composites, maps: their number; chance: mean share that the evidence covers; recognised: share of the
    explained classes among the most probable of their composite, as many as it has classes; guessed: that share by
    chance. seen: whether the interval of recognised lies above guessed; where it does not, the model does not see the
    parts, and no map can be expected to find them."""

    model: str
    kind: str
    refused: str
    labels: str
    usable: int
    classes: int
    composites: int
    maps: int
    chance: float | None
    recognised: float | None
    guessed: float
    seen: bool
    seed: int


@dataclass(frozen=True)
class CompositeRow:
    """One method, or baseline, on one kind of composites: means over its maps. above: the baselines that its mass is
    shown to exceed (paired interval, as wide as all methods require)."""

    model: str
    kind: str
    method: str
    baseline: bool
    mass: float
    pointing: float
    roc_auc: float
    above: tuple[str, ...]


@dataclass(frozen=True)
class CompositeArrays:
    """The first composites with their maps: images and masks of the evidence, one for each map; maps: by row of the
    methods (maps, rows, columns), raw; targets: the explained classes."""

    images: Pixels
    masks: Masks
    maps: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None, None))]
    methods: Annotated[NDArray[Any], Form("U", (None,))]
    targets: ClassNames


SUBSTRATES = TableOf("substrates", SubstrateRow, optional=True)
SUBSTRATE_AGREEMENTS = TableOf("substrate_agreement", SubstrateAgreementRow, optional=True)
SWAPPED = TableOf("swapped_pairs", SwappedPairRow, optional=True)
STABILITY = TableOf("stability", StabilityRow, optional=True)
POWER = TableOf("power", PowerRow, optional=True)
COMPOSITE_SETS = TableOf("composite_sets", CompositeSetRow, optional=True)
COMPOSITES = TableOf("composites", CompositeRow, optional=True)

COMPOSITE_MAPS = ArraysOf("composites-{kind}-{model}", CompositeArrays)

SUBSTRATE_GAP = MetricName("substrates/{model}/{substrate}/{method}")
SUBSTRATE_TAU = MetricName("substrate_agreement/{model}/{first}/{second}")
STEADY = MetricName("stability/{model}/{score}/{disturbance}/{method}")  # score: correlation, jumped
DETECTABLE = MetricName("detectable/{model}/{check}")
COMPOSITE = MetricName("composites/{model}/{kind}/{score}/{method}")  # score: mass, pointing, roc_auc
RECOGNISED = MetricName("composites/{model}/{kind}/recognised")

EVIDENCE: Final = Contents(
    metrics=(SUBSTRATE_GAP, SUBSTRATE_TAU, STEADY, DETECTABLE, COMPOSITE, RECOGNISED),
    tables=(SUBSTRATES, SUBSTRATE_AGREEMENTS, SWAPPED, STABILITY, POWER, COMPOSITE_SETS, COMPOSITES),
    arrays=(COMPOSITE_MAPS,),
)
