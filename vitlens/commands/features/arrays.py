"""The arrays that `vitlens features` writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, ClassNames, Pixels
from vitlens.schema import Untrusted

_Matrix = Annotated[NDArray[np.floating], Form("f", (None, None))]
_Points = Annotated[NDArray[np.floating], Form("f", (None, 2))]
_Labels = Annotated[NDArray[np.integer], Form("iu", (None,))]
_Maps = Annotated[NDArray[np.floating], Form("f", (None, None, None, None))]


@dataclass(frozen=True)
class SimilarityArrays:
    """By the number of the row of SIMILARITY: values (layers of the first model, layers of the second), NaN where a
    layer's features do not vary; the first layer of each is its embedding where the row says so."""

    cka: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None))]
    rank: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None, None))]


@dataclass(frozen=True)
class SpaceArrays:
    """Maps of one model's last layer, those that SPACE lists; labels: of the points, as indices into classes (of
    patches, where masks are known: 1 on the object); wrong: which images are misclassified; pictures: indices of the
    images that are also drawn as thumbnails, with their pixels. Maps of the patches that enter block 0, and of their
    content without the mean of each place: grid: their rows and columns; places: the row and column of each; cut:
    indices of the patches that are drawn as what they show, with their pixels.
    """

    classes: ClassNames
    labels_images: _Labels | None = None
    wrong_images: Annotated[NDArray[np.bool_], Form("b", (None,))] | None = None
    tsne_images: _Points | None = None
    pca_images: _Points | None = None
    labels_patches: _Labels | None = None
    tsne_patches: _Points | None = None
    pca_patches: _Points | None = None
    pictures: _Labels | None = None
    pixels: Pixels | None = None
    tsne_embedding: _Points | None = None
    pca_embedding: _Points | None = None
    tsne_content: _Points | None = None
    pca_content: _Points | None = None
    grid: Annotated[NDArray[np.integer], Form("iu", (2,))] | None = None
    places: Annotated[NDArray[np.integer], Form("iu", (None, 2))] | None = None
    cut: _Labels | None = None
    cut_pixels: Pixels | None = None


@dataclass(frozen=True)
class ShownArrays:
    """The images whose patches are drawn."""

    pixels: Pixels


@dataclass(frozen=True)
class PatchColourArrays:
    """Colours (images, rows, columns, 3) of one model's patches, in [0, 1]."""

    colours: Annotated[NDArray[np.floating], Form("f", (None, None, None, 3))]


@dataclass(frozen=True)
class MatchArrays:
    """The pairs of images of one model's rows in MATCHES; by the number of the pair, the positions (row, column) of
    matched patches and their cosine similarity, most similar first."""

    first: Pixels
    second: Pixels
    sources: Annotated[Mapping[int, NDArray[np.integer]], Form("iu", (None, 2))]
    targets: Annotated[Mapping[int, NDArray[np.integer]], Form("iu", (None, 2))]
    similarity: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None,))]


@dataclass(frozen=True)
class RetrievalArrays:
    """Queries and their nearest neighbours (queries, neighbours), nearest first; same: whether a neighbour is of the
    query's class."""

    queries: Pixels
    query_names: ClassNames
    neighbours: Annotated[NDArray[np.uint8], Form("u", (None, None, 3, None, None))]
    names: Annotated[NDArray[Any], Form("U", (None, None)), Untrusted()]
    similarity: _Matrix
    same: Annotated[NDArray[np.bool_], Form("b", (None, None))] | None = None


@dataclass(frozen=True)
class LastLayerHeadsArrays:
    """Attention (images, heads, rows, columns) of the last layer's heads to the patches, and the images."""

    pixels: Pixels
    maps: _Maps


@dataclass(frozen=True)
class PromptArrays:
    """Relevance (images, prompts, rows, columns) of each prompt over the images."""

    pixels: Pixels
    maps: _Maps


LAYER_SIMILARITY = ArraysOf("similarity", SimilarityArrays)
SPACE_ARRAYS = ArraysOf("space-{model}", SpaceArrays)
SHOWN_ARRAYS = ArraysOf("patches", ShownArrays)
COLOUR_ARRAYS = ArraysOf("patches-{model}", PatchColourArrays)
MATCH_ARRAYS = ArraysOf("matches-{model}", MatchArrays)
RETRIEVAL_ARRAYS = ArraysOf("retrieval-{model}", RetrievalArrays)
HEAD_ARRAYS = ArraysOf("heads-{model}", LastLayerHeadsArrays)
PROMPT_ARRAYS = ArraysOf("prompts-{model}", PromptArrays)

ARRAYS = (
    LAYER_SIMILARITY, SPACE_ARRAYS, SHOWN_ARRAYS, COLOUR_ARRAYS, MATCH_ARRAYS, RETRIEVAL_ARRAYS, HEAD_ARRAYS,
    PROMPT_ARRAYS,
)  # fmt: skip
