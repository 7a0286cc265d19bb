"""What `vitlens features` writes; its arrays: arrays.py."""

from dataclasses import dataclass
from typing import Literal

from vitlens.commands.features.arrays import ARRAYS
from vitlens.names import FeaturePool, Projection, Weighting
from vitlens.records import Contents, MetricName, TableOf, UntrustedName
from vitlens.uncertainty import Estimate

PROBE = "probe"  # as a classifier; the others are "knn-20" and so on


@dataclass(frozen=True)
class FeatureDataRow:
    """The images. test: how many are classified, mapped and compared; bank: labelled training images that answer for
    them; no_bank: why there are none ("" where there are); chance: the accuracy of always predicting the most frequent
    class (0 without labels); masked: whether masks of the objects are known."""

    test: int
    bank: int | None
    no_bank: str
    chance: float
    masked: bool


@dataclass(frozen=True)
class FeaturesRow:
    """How one model's features were read. family: of the model; dim: of the last layer; norm: the module of the final
    norm that was applied."""

    model: str
    family: str
    pool: FeaturePool
    layers: int
    kind: Literal["block", "stage"]
    dim: int
    norm: str | None
    images: int


@dataclass(frozen=True)
class DepthRow:
    """The accuracy of one classifier of one layer's features. weighting: of neighbours' votes, c: the probe's inverse
    regularisation; None for the other kind of classifier."""

    model: str
    layer: int
    title: str
    dim: int
    norm: str | None
    classifier: str
    accuracy: float
    low: float
    high: float
    n: int
    bank: int
    weighting: Weighting | None
    c: float | None

    @property
    def estimate(self) -> Estimate:
        """The accuracy with its interval."""
        return Estimate(self.accuracy, self.low, self.high)


@dataclass(frozen=True)
class MarkedRow:
    """Which classifier's errors are marked in the maps of one model: "by 20-NN"."""

    model: str
    by: str


@dataclass(frozen=True)
class FeatureNoteRow:
    """What must be said of how the numbers came about."""

    note: str


@dataclass(frozen=True)
class FeaturePairRow:
    """Two models' last layers by one classifier on the same images; difference: first minus second, in points.

    p: McNemar's exact test of equal accuracy; p_holm: corrected for the number of comparisons.
    """

    classifier: str
    first: str
    second: str
    difference: float
    low: float | None
    high: float | None
    n: int
    p: float
    p_holm: float

    @property
    def estimate(self) -> Estimate:
        """The difference with its interval."""
        return Estimate(self.difference, self.low, self.high, self.n, "points")


@dataclass(frozen=True)
class SimilarityRow:
    """All layers of one model against those of another, or of itself (first and second alike).

    Linear CKA and the rank correlation of distances of the first model's first and last layer with the second's last;
    mean, most: of the CKA of all pairs of layers (within a model: of different layers), and the greatest one with the
    layers that have it. None where a layer's features do not vary.
    """

    first: str
    second: str
    images: int
    first_last: float | None
    first_last_low: float | None
    first_last_high: float | None
    last_last: float | None
    last_last_low: float | None
    last_last_high: float | None
    rank_first_last: float | None
    rank_last_last: float | None
    mean: float | None
    most: float | None
    most_layers: tuple[int, int] | None


@dataclass(frozen=True)
class SpaceRow:
    """One map of the last layer's features. of: what its points are; neighbours: those that trustworthiness compares;
    explained: shares of the variance of PCA's two components; perplexity: of t-SNE."""

    model: str
    of: Literal["images", "patches"]
    method: Projection
    n: int
    dim: int
    perplexity: float | None
    neighbours: int
    trustworthiness: float
    explained: tuple[float, ...] | None


@dataclass(frozen=True)
class PatchColoursRow:
    """The colours of one model's patches. grid: rows and columns; explained: shares of the variance of the three
    principal components."""

    model: str
    grid: tuple[int, int]
    explained: tuple[float, ...]


@dataclass(frozen=True)
class MatchesRow:
    """Two images whose patches were matched. matches: pairs of patches each of which is the other's best match."""

    model: str
    first: UntrustedName
    second: UntrustedName
    grid: tuple[int, int]
    matches: int


@dataclass(frozen=True)
class RetrievalRow:
    """The neighbours drawn of one model. among: where they were looked for; images: how many those are."""

    model: str
    among: Literal["bank", "test", "shown"]
    images: int
    queries: int
    neighbours: int


@dataclass(frozen=True)
class ReadingHeadsRow:
    """The attention of the last layer's heads that is drawn. reading: whose attention ("the CLS token")."""

    model: str
    reading: str
    layer: int
    heads: int


@dataclass(frozen=True)
class TemplateRow:
    """Zero-shot accuracy of one model with one template of prompts; the first row of a model is the ensemble of all.

    gain: minus the ensemble's, in points; p: McNemar's exact test against the ensemble; p_holm: corrected for the
    number of templates; None for the ensemble itself.
    """

    model: str
    template: UntrustedName
    accuracy: float
    low: float
    high: float
    n: int
    p: float | None
    p_holm: float | None
    gain: float | None
    gain_low: float | None
    gain_high: float | None

    @property
    def estimate(self) -> Estimate:
        """The accuracy with its interval."""
        return Estimate(self.accuracy, self.low, self.high, self.n)

    @property
    def gain_estimate(self) -> Estimate | None:
        """The difference from the ensemble with its interval."""
        return None if self.gain is None else Estimate(self.gain, self.gain_low, self.gain_high, unit="points")


@dataclass(frozen=True)
class SilentRow:
    """A language-image model whose zero-shot accuracy is not known, and why."""

    model: str
    reason: str


@dataclass(frozen=True)
class PromptRow:
    """The cosine of an image drawn and a prompt. image: its number in the figure, from 0; name: what it is called."""

    model: str
    image: int
    name: UntrustedName
    prompt: UntrustedName
    cosine: float


DATA = TableOf("images", FeatureDataRow)
FEATURES = TableOf("features", FeaturesRow)
DEPTH = TableOf("depth", DepthRow)
MARKS = TableOf("marks", MarkedRow)
NOTES = TableOf("notes", FeatureNoteRow)
PAIRS = TableOf("pairs", FeaturePairRow)
SIMILARITY = TableOf("similarity", SimilarityRow)
SPACE = TableOf("space", SpaceRow)
PATCHES = TableOf("patches", PatchColoursRow)
MATCHES = TableOf("matches", MatchesRow)
RETRIEVAL = TableOf("retrieval", RetrievalRow)
HEADS = TableOf("heads", ReadingHeadsRow)
TEMPLATES = TableOf("templates", TemplateRow)
SILENT = TableOf("silent", SilentRow)
PROMPTS = TableOf("prompts", PromptRow)

ACCURACY = MetricName("accuracy/{model}")  # of the model's own classifier
KNN = MetricName("knn_accuracy/{model}/{k}")
KNN_MAJORITY = MetricName("knn_majority_accuracy/{model}/{k}")
PROBE_ACCURACY = MetricName("probe_accuracy/{model}")
RETRIEVAL_PRECISION = MetricName("retrieval_precision/{model}/{k}")
TRUSTWORTHINESS = MetricName("trustworthiness/{model}/{method}/{of}")
ZERO_SHOT = MetricName("zero_shot_accuracy/{model}")
KNN_DIFFERENCE = MetricName("knn_difference/{first}/{second}/{k}")
PROBE_DIFFERENCE = MetricName("probe_difference/{first}/{second}")
CKA = MetricName("cka/{first}/{second}/{layer}/{other}")

RECORD = Contents(
    metrics=(
        ACCURACY, KNN, KNN_MAJORITY, PROBE_ACCURACY, RETRIEVAL_PRECISION, TRUSTWORTHINESS, ZERO_SHOT, KNN_DIFFERENCE,
        PROBE_DIFFERENCE, CKA,
    ),
    tables=(
        DATA, FEATURES, DEPTH, MARKS, NOTES, PAIRS, SIMILARITY, SPACE, PATCHES, MATCHES, RETRIEVAL, HEADS, TEMPLATES,
        SILENT, PROMPTS,
    ),
    arrays=ARRAYS,
)  # fmt: skip
