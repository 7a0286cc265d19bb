"""What `vitlens features` records. Layers and heads count from 0; "embedding" is what enters block 0 (a CNN's stem)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitlens.arrays import FlagMatrix, Flags, Form, Indices, Matrix, Pixels, Stacks, Vector, Words
from vitlens.commands.shared.comparison import signed
from vitlens.names import FeaturePool, KnownObjective, Projection, Weighting
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.uncertainty import Estimate

PROBE: Final = "probe"  # name of a classifier; the others are "knn-20" and so on
Numbers = Mapping[str, Estimate]  # by number of neighbours
Of = Literal["images", "patches", "embedding", "content"]
_Names = Annotated[NDArray[Any], Form("U", (None, None))]
_Places = Annotated[NDArray[np.integer], Form("iu", (None, 2))]


def classifier_name(name: str) -> str:
    """Return a classifier in words: "20 nearest neighbours", "linear probe"."""
    k = name.partition("-")[2]
    return "linear probe" if name == PROBE else "nearest neighbour" if k == "1" else f"{k} nearest neighbours"


@dataclass(frozen=True)
class SetsRow:
    """The images. chance: the accuracy of always predicting the most frequent class (0 without labels); masked: whether
    masks of the objects are known; bank: labelled training images that the classifiers use; no_bank: why there are
    none."""

    test: int = col("test images")
    chance: float = col("most frequent class", unit="fraction")
    masked: bool = col("masks of the objects")
    bank: int | None = col("training images", default=None)
    no_bank: str = col("without training images", default="")

    @property
    def largest(self) -> int:
        """Return how many test images the largest class has; 0 without labels."""
        return round(self.chance * self.test)


@dataclass(frozen=True)
class FeaturesRow(OfModel):
    """One model: what it was pretrained for, how its features were read, and what its last layer reaches.

    recipe, data, labels: of the pretraining and of a fine-tuning afterwards, "" where not known or none; source: what
    tells the objective; pool: the tokens of an image's vector; knn, majority: accuracy by number of neighbours, with
    votes by similarity or one vote each; precision: of their class; errors: whose errors the maps mark; among: the
    images that were searched; colours: share of the patches' variance in the three colours; no_zero_shot: why there is
    none; candidates: the classes of the data, among which zero-shot classification chooses.
    """

    objective: KnownObjective = col("pretraining")
    recipe: str = col("recipe")
    data: str = col("pretraining data")
    labels: str = col("then labels of")
    source: str = col("known from")
    parameters: int = col("parameters")
    pool: FeaturePool = col("vector of an image")
    kind: Literal["block", "stage"] = col("kind of layer")
    layers: int = col("layers")
    dim: int = col("dimensions of the last layer")
    knn: Numbers = col("k-NN", better="higher", metric="knn_accuracy/{model}/{key}")
    majority: Numbers = col("with one vote each", better="higher", metric="knn_majority_accuracy/{model}/{key}")
    precision: Numbers = col("of the class", better="higher", metric="retrieval_precision/{model}/{key}")
    norm: str | None = col("final norm applied", default=None)
    embedding: Literal["embedding", "stem"] | None = col("read before the first layer", default=None)
    accuracy: Estimate | None = col("own classifier", better="higher", metric="accuracy/{model}", default=None)
    probe: Estimate | None = col("linear probe", better="higher", metric="probe_accuracy/{model}", default=None)
    zero_shot: Estimate | None = col("zero-shot", better="higher", metric="zero_shot_accuracy/{model}", default=None)
    no_zero_shot: str = col("without zero-shot accuracy", default="")
    candidates: int | None = col("classes to choose from, zero-shot", default=None)
    chance: float | None = col("accuracy by chance, zero-shot", unit="fraction", default=None)
    errors: str = col("errors marked", default="")
    among: Literal["training images", "test images", "images shown", ""] = col("searched", default="")
    searched: int = col("images searched", default=0)
    colours: float | None = col("variance in three colours", unit="fraction", default=None)

    def reached(self, classifier: str) -> Estimate | None:
        """Return the accuracy of a classifier with the last layer."""
        return self.probe if classifier == PROBE else self.knn.get(classifier.partition("-")[2])

    @property
    def words(self) -> str:
        """Return the objective with its recipe: "self-supervised (DINOv2)"."""
        return f"{self.objective} ({self.recipe})" if self.recipe else self.objective


@dataclass(frozen=True)
class DepthRow(OfModel):
    """One classifier on one layer's features. layer: None for the embedding; depth: the layer's share of the model's
    layers; weighting: of the neighbours' votes, None for the probe; c: the probe's inverse regularisation."""

    title: str = col("layer")
    depth: float = col("share of layers")
    classifier: str = col("classifier")
    accuracy: Estimate = col("accuracy", better="higher")
    chance: float = col("most frequent class", unit="fraction")
    layer: int | None = col("number", default=None)
    weighting: Weighting | None = col("votes", default=None)
    c: float | None = col("inverse regularisation", default=None)

    @property
    def name(self) -> str:
        """Return the classifier in words."""
        return classifier_name(self.classifier)

    @property
    def place(self) -> str:
        """Return the layer in a sentence: "block 5", "the embedding"."""
        return f"the {self.title}" if self.layer is None else self.title


@dataclass(frozen=True)
class PairRow:
    """One classifier on two models' last layers, on the same images. probe, knn: the difference of its accuracy, first
    minus second; p: McNemar's exact test; p_holm: corrected for the number of comparisons; better: the model that is
    significantly better, else "undecided"."""

    first: str = col("first")
    second: str = col("second")
    classifier: str = col("classifier")
    k: int = col("neighbours")
    p: float = col("p")
    p_holm: float = col("p (Holm)")
    better: str = col("better")
    probe: Estimate | None = col("by the probe", metric="probe_difference/{first}/{second}", default=None)
    knn: Estimate | None = col("by neighbours", metric="knn_difference/{first}/{second}/{k}", default=None)

    @property
    def difference(self) -> Estimate:
        """First minus second, in points."""
        return self.probe or self.knn or Estimate(0.0, unit="points")

    def gain(self, of: str) -> Estimate:
        """Return the difference as one of the two models minus the other."""
        return signed(self.difference, of == self.first)


@dataclass(frozen=True)
class HeadRow(OfModel):
    """One classifier on a model's last layer minus the model's own, on the same images; p, p_holm as in PairRow."""

    classifier: str = col("classifier")
    difference: Estimate = col("minus the own classifier", metric="head_difference/{model}/{classifier}")
    p: float = col("p")
    p_holm: float = col("p (Holm)")


@dataclass(frozen=True)
class LayersRow:
    """Two layers of one model on the same images; None where a layer's features do not vary. rank: Spearman's
    correlation of the distances between images."""

    first: str = col("model")
    second: str = col("and model")
    layer: str = col("layer")
    other: str = col("and layer")
    cka: Estimate | None = col("linear CKA", term="similarity of two layers up to rotation and scale; 1 is equal")
    rank: float | None = col("rank correlation of distances")

    @property
    def alone(self) -> bool:
        """Return True if the layers are of one model."""
        return self.first == self.second

    @property
    def models(self) -> str:
        """ "a" or "a (down), b (across)"."""
        return self.first if self.alone else f"{self.first} (down), {self.second} (across)"


@dataclass(frozen=True)
class BetweenRow(LayersRow):
    """Two layers of two models."""

    cka: Estimate | None = col("linear CKA", metric="cka/{first}/{second}/{layer}/{other}")


@dataclass(frozen=True)
class MapRow(OfModel):
    """A map in two dimensions of the last layer's images or patches, of the patches that enter block 0 ("embedding"),
    or of these minus the mean of their place ("content"). neighbours: of each point that trustworthiness compares;
    explained: share of the variance."""

    of: Of = col("of")
    method: Projection = col("method")
    n: int = col("points")
    dim: int = col("dimensions")
    trustworthiness: Estimate = col(
        "trustworthiness",
        term="how far neighbours in a map are neighbours in the features: 1 all, about 0.5 at random",
        better="higher",
        metric="trustworthiness/{model}/{method}/{of}",
    )
    neighbours: int = col("neighbours")
    perplexity: float | None = col("perplexity", default=None)
    explained: float | None = col("variance", unit="fraction", default=None)


@dataclass(frozen=True)
class PatchesRow(OfModel):
    """What the nearest patches of other images share with a patch of one layer, for a sample of patches.

    share: "position" is the share of neighbours at the same place of their image (within an eighth of its side),
    "class" of those whose image is of the same class, "object" the intersection over union of the patches on the object
    with those for which neighbours vote; chance: the same for patches drawn at random ("object": for all patches).
    """

    layer: str = col("number")
    title: str = col("layer")
    share: Literal["position", "class", "object"] = col("shared by neighbours")
    value: Estimate = col(
        "share",
        term="of a patch's nearest patches of other images those at its place, or of its class; of the object the "
        "intersection over union of the patches that neighbours vote to be on it with those that are",
        metric="patch_neighbours/{model}/{layer}/{share}",
    )
    chance: float = col("by chance", unit="fraction")
    images: int = col("images")
    neighbours: int = col("neighbours")
    grid: tuple[int, int] = col("patches (rows, columns)")

    @property
    def place(self) -> str:
        """Return the layer in a sentence."""
        return f"the {self.title}" if self.layer == "embedding" else self.title


@dataclass(frozen=True)
class MatchRow(OfModel):
    """An image and its nearest neighbour. matches: patches that are each other's best match; grid: of both."""

    first: str = col("image")
    second: str = col("nearest")
    matches: int = col("matches")
    grid: tuple[int, int] = col("patches (rows, columns)")


@dataclass(frozen=True)
class TemplateRow(OfModel):
    """Zero-shot accuracy with one template of prompts; the first row of a model is the ensemble of all. gain: minus the
    ensemble's, with McNemar's exact test; p_holm: corrected for the number of templates."""

    template: str = col("template")
    accuracy: Estimate = col("accuracy", better="higher")
    gain: Estimate | None = col("minus the ensemble", default=None)
    p: float | None = col("p", default=None)
    p_holm: float | None = col("p (Holm)", default=None)


@dataclass(frozen=True)
class PromptRow(OfModel):
    """The similarity of an image that is drawn and a prompt. image: its number, name: its label or file."""

    image: int = col("number")
    name: str = col("image")
    prompt: str = col("prompt")
    cosine: float = col("cosine similarity")


@dataclass(frozen=True)
class NoteRow:
    """A note on how the numbers were computed."""

    note: str = col("note", unit="text")


@dataclass(frozen=True)
class MapArrays:
    """The maps of one model. points: by "tsne_images" and so on; labels: of the points, as indices into classes (of
    patches, where masks are known: 1 on the object); wrong: which images are misclassified; pictures: indices of the
    images that are also drawn as thumbnails, with their pixels; grid, places: of the patches that enter block 0; cut:
    indices of those that are drawn as what they show, with their pixels."""

    classes: Words
    points: Mapping[str, Annotated[NDArray[np.floating], Form("f", (None, 2))]]
    labels_images: Indices | None = None
    wrong_images: Flags | None = None
    labels_patches: Indices | None = None
    pictures: Indices | None = None
    pixels: Pixels | None = None
    grid: Annotated[NDArray[np.integer], Form("iu", (2,))] | None = None
    places: _Places | None = None
    cut: Indices | None = None
    cut_pixels: Pixels | None = None


@dataclass(frozen=True)
class ShownArrays:
    """The images that are drawn, the same for all models, and what one model makes of them.

    colours (images, rows, columns, 3): of the patches, in [0, 1]; prompts (images, prompts, rows, columns): relevance.
    Queries and their nearest images (queries, neighbours), nearest first; same: whether of the query's class. first,
    second: the pairs of images in the table of matches; by the number of the pair the positions (row, column) of
    matched patches and their similarity, most similar first.
    """

    pixels: Pixels
    names: Words
    colours: Annotated[NDArray[np.floating], Form("f", (None, None, None, 3))] | None = None
    prompts: Stacks | None = None
    queries: Pixels | None = None
    query_names: Words | None = None
    near: Annotated[NDArray[np.uint8], Form("u", (None, None, 3, None, None))] | None = None
    near_names: _Names | None = None
    similarity: Matrix | None = None
    same: FlagMatrix | None = None
    first: Pixels | None = None
    second: Pixels | None = None
    sources: Mapping[int, _Places] = field(default_factory=dict)
    targets: Mapping[int, _Places] = field(default_factory=dict)
    alike: Mapping[int, Vector] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FeaturesRecord(Record):
    """The features of models at every layer. head: classifiers beside each model's own; within, between: layers of one
    model, and of two."""

    sets: tuple[SetsRow, ...] = table()
    features: tuple[FeaturesRow, ...] = table()
    depth: tuple[DepthRow, ...] = table()
    pairs: tuple[PairRow, ...] = table()
    head: tuple[HeadRow, ...] = table()
    within: tuple[LayersRow, ...] = table()
    between: tuple[BetweenRow, ...] = table()
    maps: tuple[MapRow, ...] = table()
    patches: tuple[PatchesRow, ...] = table()
    matches: tuple[MatchRow, ...] = table()
    templates: tuple[TemplateRow, ...] = table()
    prompts: tuple[PromptRow, ...] = table()
    notes: tuple[NoteRow, ...] = table()
    spaces: Mapping[str, MapArrays] = arrays("space-{model}")
    shown: Mapping[str, ShownArrays] = arrays("shown-{model}")
