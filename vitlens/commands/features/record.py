"""The record of `vitlens features`.

Layers count from 0. The layer "embedding" is the input of block 0, or the stem of a CNN. The
classifiers on features are named "probe", or "knn-20" for 20 neighbours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.features.rows import TemplateRow
from vitlens.arrays import FlagMatrix, Flags, Form, Indices, Matrix, Pixels, Stacks, Vector, Words
from vitlens.commands.shared.comparison import signed
from vitlens.names import FeaturePool, KnownObjective, Projection, Weighting
from vitlens.record import OfModel, Record, arrays, col, table
from vitlens.uncertainty import Estimate

# name of the linear probe among classifiers; the others are "knn-20" and so on
PROBE: Final = "probe"
ByNeighbours = Mapping[str, Estimate]  # accuracy or precision by number of neighbours
PointsOf = Literal["images", "patches", "embedding", "content"]
_Names = Annotated[NDArray[Any], Form("U", (None, None))]
_Places = Annotated[NDArray[np.integer], Form("iu", (None, 2))]


def classifier_name(name: str) -> str:
    """Return a classifier in words: "20 nearest neighbours", "linear probe"."""
    if name == PROBE:
        return "linear probe"
    k = neighbours_of(name)
    if k == "1":
        return "nearest neighbour"
    return f"{k} nearest neighbours"


def neighbours_of(name: str) -> str:
    """Return the number of neighbours of a classifier, "20" for "knn-20"; "" for the probe."""
    return name.partition("-")[2]


def _layer_words(title: str, *, is_embedding: bool) -> str:
    return f"the {title}" if is_embedding else title


@dataclass(frozen=True)
class SetsRow:
    """The images of the run.

    test: number of test images.
    chance: accuracy of always predicting the most frequent class, 0 without labels.
    masked: True if masks of the objects are known.
    bank: number of labelled training images, None without them.
    no_bank: why there are none, "" if there are.
    """

    test: int = col("test images")
    chance: float = col("most frequent class", unit="fraction")
    masked: bool = col("masks of the objects")
    bank: int | None = col("training images", default=None)
    no_bank: str = col("without training images", default="")

    @property
    def largest(self) -> int:
        """Return the number of test images of the largest class, 0 without labels."""
        return round(self.chance * self.test)


@dataclass(frozen=True)
class FeaturesRow(OfModel):
    """One model: its pretraining, how its features were read, and the accuracy on its last layer.

    objective, recipe, data: the pretraining; recipe and data are "" if unknown.
    labels: the data of a later fine-tuning by labels, "" if unknown or none.
    source: where the objective is known from.
    pool: tokens that form the vector of an image.
    knn: accuracy by number of neighbours, which vote by similarity.
    majority: the same with one vote each.
    precision: share of neighbours of the image's class, by their number.
    no_zero_shot: reason for a missing zero-shot accuracy.
    candidates: number of classes among which zero-shot classification chooses.
    errors: the classifier of the errors that the maps mark, in words.
    among: images that were searched.
    searched: their number.
    colours: share of the patches' variance in three colours.
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
    knn: ByNeighbours = col(
        "k-NN", better="higher", metric="knn_accuracy/{model}/{key}", share=True
    )
    majority: ByNeighbours = col(
        "with one vote each",
        better="higher",
        metric="knn_majority_accuracy/{model}/{key}",
        share=True,
    )
    precision: ByNeighbours = col(
        "of the class", better="higher", metric="retrieval_precision/{model}/{key}", share=True
    )
    norm: str | None = col("final norm applied", default=None)
    embedding: Literal["embedding", "stem"] | None = col(
        "read before the first layer", default=None
    )
    accuracy: Estimate | None = col(
        "model's classifier", better="higher", metric="accuracy/{model}", share=True, default=None
    )
    probe: Estimate | None = col(
        "linear probe", better="higher", metric="probe_accuracy/{model}", share=True, default=None
    )
    zero_shot: Estimate | None = col(
        "zero-shot", better="higher", metric="zero_shot_accuracy/{model}", share=True, default=None
    )
    no_zero_shot: str = col("without zero-shot accuracy", default="")
    candidates: int | None = col("classes to choose from, zero-shot", default=None)
    chance: float | None = col("accuracy by chance, zero-shot", unit="fraction", default=None)
    errors: str = col("errors marked", default="")
    among: Literal["training images", "test images", "images shown", ""] = col(
        "searched", default=""
    )
    searched: int = col("images searched", default=0)
    colours: float | None = col("variance in three colours", unit="fraction", default=None)

    def reached(self, classifier: str) -> Estimate | None:
        """Return the accuracy of a classifier on the last layer."""
        if classifier == PROBE:
            return self.probe
        return self.knn.get(neighbours_of(classifier))

    @property
    def words(self) -> str:
        """Return the objective with its recipe: "self-supervised (DINOv2)"."""
        if not self.recipe:
            return self.objective
        return f"{self.objective} ({self.recipe})"


@dataclass(frozen=True)
class DepthRow(OfModel):
    """The accuracy of one classifier on the features of one layer.

    depth: position of the layer, as a share of all layers.
    layer: None for the embedding.
    weighting: the weighting of the neighbours' votes, None for the probe.
    c: inverse regularisation of the probe.
    """

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
        return _layer_words(self.title, is_embedding=self.layer is None)


@dataclass(frozen=True)
class PairRow:
    """The difference of one classifier on two models' last layers, on the same images.

    k: the number of neighbours, 0 for the probe.
    probe, knn: the difference of accuracy, first minus second; one of them, by the classifier.
    p: the p-value of McNemar's exact test.
    p_holm: corrected for the number of comparisons.
    better: the model that is significantly better, or "undecided".
    """

    first: str = col("first")
    second: str = col("second")
    classifier: str = col("classifier")
    k: int = col("neighbours")
    p: float = col("p")
    p_holm: float = col("p (Holm)")
    better: str = col("better")
    probe: Estimate | None = col(
        "by the probe", metric="probe_difference/{first}/{second}", default=None
    )
    knn: Estimate | None = col(
        "by neighbours", metric="knn_difference/{first}/{second}/{k}", default=None
    )

    @property
    def difference(self) -> Estimate:
        """Return the accuracy of the first model minus that of the second, in points."""
        return self.probe or self.knn or Estimate(0.0, unit="points")

    def gain(self, of: str) -> Estimate:
        """Return the difference as one of the two models minus the other."""
        return signed(self.difference, keep=of == self.first)


@dataclass(frozen=True)
class HeadRow(OfModel):
    """A classifier on a model's last layer compared with the model's classifier.

    difference: accuracy of the classifier minus that of the model's, on the same images.
    p, p_holm: as in PairRow.
    """

    classifier: str = col("classifier")
    difference: Estimate = col(
        "minus the model's classifier", metric="head_difference/{model}/{classifier}"
    )
    p: float = col("p")
    p_holm: float = col("p (Holm)")


@dataclass(frozen=True)
class LayersRow:
    """The similarity of two layers of one model on the same images.

    Similarities are None if the features of a layer do not vary.

    cka: linear CKA.
    rank: Spearman's correlation of the distances between images.
    """

    first: str = col("model")
    second: str = col("and model")
    layer: str = col("layer")
    other: str = col("and layer")
    cka: Estimate | None = col(
        "linear CKA", term="similarity of two layers up to rotation and scale; 1: equal"
    )
    rank: float | None = col("rank correlation of distances")

    @property
    def alone(self) -> bool:
        """Return True if the layers are of one model."""
        return self.first == self.second

    @property
    def models(self) -> str:
        """Return the title of the pair: "a" or "a (down), b (across)"."""
        if self.alone:
            return self.first
        return f"{self.first} (down), {self.second} (across)"


@dataclass(frozen=True)
class BetweenRow(LayersRow):
    """The similarity of two layers of two models on the same images."""

    cka: Estimate | None = col("linear CKA", metric="cka/{first}/{second}/{layer}/{other}")


@dataclass(frozen=True)
class MapRow(OfModel):
    """A map in two dimensions.

    of: what the points are: "images" or "patches" of the last layer; "embedding", patches that
        enter block 0; "content", these minus the mean at their place.
    n: number of points.
    dim: dimensions of the features.
    neighbours: number of neighbours of each point, for the trustworthiness.
    perplexity: of t-SNE, None for PCA.
    explained: share of the variance, None for t-SNE.
    """

    of: PointsOf = col("of")
    method: Projection = col("method")
    n: int = col("points")
    dim: int = col("dimensions")
    trustworthiness: Estimate = col(
        "trustworthiness",
        term="how far neighbours in a map are neighbours in the features; 1: all, about 0.5 at "
        "random",
        better="higher",
        metric="trustworthiness/{model}/{method}/{of}",
    )
    neighbours: int = col("neighbours")
    perplexity: float | None = col("perplexity", default=None)
    explained: float | None = col("variance", unit="fraction", default=None)


@dataclass(frozen=True)
class PatchesRow(OfModel):
    """A property that a sample of patches of one layer shares with its nearest patches.

    The nearest patches are those of other images.

    share: "position", the share of neighbours at the same place of their image (within an eighth of
        its side); "class", the share in images of the same class; "object", the intersection over
        union of the patches on the object and those that neighbours vote for.
    chance: the same for patches drawn at random ("object": for all patches).
    """

    layer: str = col("number")
    title: str = col("layer")
    share: Literal["position", "class", "object"] = col("shared by neighbours")
    value: Estimate = col(
        "share",
        term="share of the nearest patches of other images at the same place, or of the same "
        "class; for the object, intersection over union of the patches on it and the patches that "
        "neighbours vote for",
        metric="patch_neighbours/{model}/{layer}/{share}",
    )
    chance: float = col("by chance", unit="fraction")
    images: int = col("images")
    neighbours: int = col("neighbours")
    grid: tuple[int, int] = col("patches (rows, columns)")

    @property
    def place(self) -> str:
        """Return the layer in a sentence."""
        return _layer_words(self.title, is_embedding=self.layer == "embedding")


@dataclass(frozen=True)
class MatchRow(OfModel):
    """An image and its nearest neighbour.

    matches: number of pairs of patches that are most similar to each other.
    grid: rows and columns of patches of both images.
    """

    first: str = col("image")
    second: str = col("nearest")
    matches: int = col("matches")
    grid: tuple[int, int] = col("patches (rows, columns)")


@dataclass(frozen=True)
class PromptRow(OfModel):
    """The similarity of a drawn image and a prompt.

    image: the number of the image.
    name: its label or file.
    """

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
    """The maps of one model.

    classes: the names of the classes.
    points: (n, 2) by method and kind, e.g. "tsne_images".
    labels_images: (n,), the classes of mapped images as indices into `classes`.
    wrong_images: (n,), True for misclassified images.
    labels_patches: (n,), with masks 1 for patches on the object and 0 for others; else the classes
        of their images.
    pictures: indices of the points that are also drawn as thumbnails.
    pixels: the pixels of these.
    grid: rows and columns of the patches that enter block 0.
    places: (n, 2), row and column of each of them.
    cut: indices of the patches that are drawn as pictures.
    cut_pixels: the pixels of these.
    """

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
    """The images that are drawn, the same for all models, with the results of one model.

    pixels, names: of the images.
    colours: (images, rows, columns, 3), the colours of patches in [0, 1].
    prompts: (images, prompts, rows, columns), relevance.
    queries, query_names: query images.
    near, near_names: (queries, neighbours, ..), their nearest images, nearest first.
    similarity: (queries, neighbours), cosine similarity.
    same: (queries, neighbours), True for neighbours of the query's class.
    first, second: pairs of images in the table of matches.
    sources, targets: by number of the pair, (matches, 2), row and column of matched patches in the
        first and the second image, most similar first.
    alike: by number of the pair, (matches,), the similarity of these patches.
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
    """The tables and arrays of `vitlens features`.

    sets: one row.
    features: one row for each model.
    depth: each classifier at each layer.
    pairs: classifiers on the last layers of two models.
    head: classifiers on the last layer compared with the model's classifier.
    within, between: similarity of layers of one model, and of two.
    maps: maps in two dimensions.
    patches: what nearest patches share.
    matches: pairs of images with matched patches.
    templates, prompts: of language-image models.
    spaces: the points of the maps.
    shown: the images that are drawn.
    """

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
