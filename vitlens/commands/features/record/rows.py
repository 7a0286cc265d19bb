"""The rows of `vitlens features`, but for those on patches and on pretraining."""

from dataclasses import dataclass
from typing import Literal

from vitlens.names import FeaturePool, Projection, Weighting
from vitlens.records import UntrustedName
from vitlens.uncertainty import Estimate

PROBE = "probe"  # name of a classifier; the others are "knn-20" and so on
OWN_HEAD = "own head"


@dataclass(frozen=True)
class FeatureDataRow:
    """The images. test: how many are classified, mapped and compared; bank: how many labelled training images the
    classifiers use; no_bank: why there are none ("" where there are); chance: the accuracy of always predicting the
    most frequent class (0 without labels); masked: whether masks of the objects are known."""

    test: int
    bank: int | None
    no_bank: str
    chance: float
    masked: bool


@dataclass(frozen=True)
class FeaturesRow:
    """How one model's features were read. family: of the model; dim: of the last layer; norm: the module of the final
    norm that was applied; layers: its blocks or stages; embedding: the name of what enters the first of them, which is
    read too, None where it is not."""

    model: str
    family: str
    pool: FeaturePool
    layers: int
    kind: Literal["block", "stage"]
    dim: int
    norm: str | None
    images: int
    embedding: Literal["embedding", "stem"] | None = None


@dataclass(frozen=True)
class DepthRow:
    """The accuracy of one classifier on one layer's features. layer: None for what enters block 0; weighting: of the
    neighbours' votes, None for the probe; c: the probe's inverse regularisation, None for k-NN."""

    model: str
    layer: int | None
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

    @property
    def place(self) -> str:
        """The layer in a sentence: "block 5", "the embedding"."""
        return f"the {self.title}" if self.layer is None else self.title

    @property
    def voters(self) -> int:
        """How many neighbours vote; 0 for the probe."""
        return int(self.classifier.partition("-")[2] or 0)


@dataclass(frozen=True)
class MarkedErrorsRow:
    """The classifier whose errors are marked in the maps of one model: "by 20-NN"."""

    model: str
    by: str


@dataclass(frozen=True)
class FeatureNoteRow:
    """A note on how the numbers were computed."""

    note: str


@dataclass(frozen=True)
class FeaturePairRow:
    """The accuracy of one classifier on two models' last layers, on the same images; difference: first minus second, in
    points. In the table "head" the second is the first model's own head.

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
    """All layers of one model compared with those of another, or of itself (first and second are the same).

    Linear CKA and the rank correlation of distances of the first model's first and last layer with the second's last;
    mean, most: the mean and the greatest CKA of all pairs of layers (within a model: of different layers); most_layers:
    the pair with the greatest. None where a layer's features do not vary. Layers are blocks or stages; embedded:
    whether the arrays begin with the first model's embedding, and with the second's; embedding_last: CKA of the first
    model's embedding with the second's last layer.
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
    embedded: tuple[bool, bool] = (False, False)
    embedding_last: float | None = None
    embedding_last_low: float | None = None
    embedding_last_high: float | None = None


@dataclass(frozen=True)
class SpaceRow:
    """One map of features: of the last layer's, for images or patches, or of the patches that enter block 0 (of:
    "embedding"), and of these minus the mean of their place ("content"). neighbours: how many trustworthiness compares;
    explained: shares of the variance of PCA's two components; perplexity: of t-SNE."""

    model: str
    of: Literal["images", "patches", "embedding", "content"]
    method: Projection
    n: int
    dim: int
    perplexity: float | None
    neighbours: int
    trustworthiness: float
    explained: tuple[float, ...] | None


@dataclass(frozen=True)
class RetrievalRow:
    """The retrieved images of one model. among: the images that were searched; images: their number."""

    model: str
    among: Literal["bank", "test", "shown"]
    images: int
    queries: int
    neighbours: int


@dataclass(frozen=True)
class LastLayerHeadsRow:
    """The attention of the last layer's heads that is drawn. reading: the query ("the CLS token")."""

    model: str
    reading: str
    layer: int
    heads: int


@dataclass(frozen=True)
class TemplateRow:
    """Zero-shot accuracy of one model with one template of prompts; the first row of a model is the ensemble of all.

    gain: the accuracy minus the ensemble's, in points; p: McNemar's exact test against the ensemble; p_holm: corrected
    for the number of templates; None for the ensemble itself.
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
class NoZeroShotRow:
    """A language-image model without zero-shot accuracy, and the reason."""

    model: str
    reason: str


@dataclass(frozen=True)
class PromptRow:
    """The cosine similarity of an image shown and a prompt. image: its number in the figure, from 0; name: its
    label."""

    model: str
    image: int
    name: UntrustedName
    prompt: UntrustedName
    cosine: float
