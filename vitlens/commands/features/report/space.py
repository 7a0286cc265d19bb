"""Similarity of layers, and the maps of the last layer's features."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.commands.features.arrays import LAYER_SIMILARITY, SPACE_ARRAYS, SpaceArrays
from vitlens.commands.features.conclusions import GROUP, largest_class
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import DATA, MARKS, SIMILARITY, SPACE
from vitlens.commands.features.record.rows import SimilarityRow, SpaceRow
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS: Final = {"tsne": "t-SNE", "pca": "PCA"}
_CKA_CAPTION: Final = (
    "A similarity that is invariant to rotation and scale of the features; 1 means that they are equal up to these. "
    "Bright blocks are layers with similar features; in maps of two models a white dot marks, for each row, the most "
    "similar layer of the other model. CKA is dominated by the directions of greatest variance, which need not be "
    "those that a classifier reads."
)
_RANK_CAPTION: Final = (
    "Whether images that are far apart in one layer are also far apart in the other, whatever the scale of distances "
    "(Spearman, over pairs of images)."
)
_IMAGES_CAPTION: Final = (
    "t-SNE keeps neighbours together: which points are neighbours is meaningful, sizes of groups and distances between "
    "them are not. PCA shows the two directions of greatest variance. Trustworthiness is 1 where the neighbours "
    "in the map are those of the features, about 0.5 for points placed at random."
)
_PATCHES_CAPTION: Final = "A seeded sample of patches of these images, on maps of the same kinds."


def between_sentences(record: Record) -> Iterator[Sentence]:
    """The similarity of the layers of each pair of models."""
    for row in record.rows(SIMILARITY):
        if row.first == row.second or row.mean is None or row.most is None or row.most_layers is None:
            continue
        if row.last_last is None:
            continue
        layer, other = row.most_layers
        last = _with_interval(row, row.last_last, row.last_last_low, row.last_last_high)
        yield Sentence(
            f"Between `{row.first}` and `{row.second}` the last layers have a CKA of {last}. The mean over all pairs "
            f"of layers is {row.mean:.2f}; the most similar pair, selected from these values, is layer {layer} of "
            f"`{row.first}` and layer {other} of `{row.second}` with {row.most:.2f}.",
            (row,),
        )


def similarity_sections(record: Record) -> Iterator[Section]:
    """CKA and rank correlation of all layers; sentences on each model alone (those on pairs are in the summary)."""
    rows = record.rows(SIMILARITY)
    if rows:
        sentences = [_within(row) for row in rows if row.first == row.second]
        figures = (
            FigureSpec("cka", _CKA_CAPTION, partial(_draw_similarity, record, "cka")),
            FigureSpec("distances", _RANK_CAPTION, partial(_draw_similarity, record, "rank")),
        )
        yield Section("Similarity of layers", tuple(sentences), figures=figures, leading=True)


def _within(row: SimilarityRow) -> Sentence:
    if row.first_last is None or row.rank_first_last is None:
        return Sentence(
            f"Some layer of `{row.first}` has the same features for all images: its first and last layer are not "
            "compared.",
            (row,),
        )
    embedding, whose = "", "their"
    if row.embedding_last is not None:
        last = _with_interval(row, row.embedding_last, row.embedding_last_low, row.embedding_last_high)
        embedding, whose = f", the embedding and the last one of {last}", "the first and the last layer's"
    return Sentence(
        f"Within `{row.first}` the first and the last layer have a CKA of "
        f"{_with_interval(row, row.first_last, row.first_last_low, row.first_last_high)}{embedding}; the rank "
        f"correlation of {whose} distances between images is {row.rank_first_last:.2f}.",
        (row,),
    )


def _with_interval(row: SimilarityRow, value: float, low: float | None, high: float | None) -> str:
    """A similarity with its interval and its images: "0.76 (0.74 to 0.79, n = 450)"."""
    ends = "" if low is None or high is None else f"{low:.2f} to {high:.2f}, "
    return f"{value:.2f} ({ends}n = {row.images:,})"


def _draw_similarity(record: Record, measure: str) -> "Figure":
    from vitlens.figures.features.similarity import LayerMap, layer_similarity

    rows, arrays = record.rows(SIMILARITY), record.arrays(LAYER_SIMILARITY)
    values = arrays.cka if measure == "cka" else arrays.rank
    maps = [LayerMap(values[number], row.first, row.second, row.embedded) for number, row in enumerate(rows)]
    first = " (E: the embedding)" if any(True in row.embedded for row in rows) else ""
    if measure == "cka":
        return layer_similarity(maps=maps, title=f"Linear CKA of the layers{first}", label="CKA")
    return layer_similarity(maps=maps, title=f"Rank correlation of distances between images{first}", label="Spearman")


def space_sections(record: Record, *, masked: bool) -> Iterator[Section]:
    """The maps of each model's images and patches, and their trustworthiness."""
    sentences: list[Sentence] = []
    figures: list[FigureSpec] = []
    by = {row.model: row.by for row in record.rows(MARKS)}
    for alias in record.aliases:
        rows = [row for row in record.rows(SPACE) if row.model == alias and row.of in ("images", "patches")]
        if not rows:
            continue
        sentences += [*_singletons(record, alias, rows), _trust(alias, rows), *_without_tsne(record, alias, rows)]
        images, patches = ([row for row in rows if row.of == of] for of in ("images", "patches"))
        if _is_refused(record):
            images, patches = [], patches if masked else []
        if not images and not patches:
            continue
        arrays = record.arrays(SPACE_ARRAYS, model=alias)
        if images:
            draw = partial(_draw_images, alias, arrays, images, by.get(alias, ""))
            figures.append(FigureSpec(f"space_images_{alias}", _IMAGES_CAPTION, draw))
        if patches:
            caption = _PATCHES_CAPTION if images else _IMAGES_CAPTION
            draw = partial(_draw_patches, alias, arrays, patches, masked)
            figures.append(FigureSpec(f"space_patches_{alias}", caption, draw))
    if sentences:
        yield Section("Maps of the last layer's features", tuple(sentences), figures=tuple(figures), leading=True)


def _trust(alias: str, rows: Sequence[SpaceRow]) -> Sentence:
    listed = "; ".join(f"{_METHODS[row.method]} of {row.n:,} {row.of}: {row.trustworthiness:.3f}" for row in rows)
    return Sentence(
        f"Trustworthiness of the maps of `{alias}` (of the {rows[0].neighbours} nearest neighbours): {listed}.",
        tuple(rows),
    )


def _singletons(record: Record, alias: str, rows: Sequence[SpaceRow]) -> Iterator[Sentence]:
    """That classes of few images cannot form groups."""
    (data,) = record.rows(DATA)
    largest = largest_class(data)
    if largest and largest < GROUP and any(row.of == "images" for row in rows):
        refused = " No map of the images is drawn; `--tsne` draws it all the same." if _is_refused(record) else ""
        yield Sentence(
            f"Whether the features of `{alias}` group images by class cannot be seen here: the largest of the classes "
            f"has {largest} of the {data.test:,} images. It takes classes of at least {GROUP}.{refused}",
            (data, largest, GROUP),
        )


def _is_refused(record: Record) -> bool:
    """Whether maps would show points of classes too small to form groups, and nobody asked for them."""
    (data,) = record.rows(DATA)
    largest = largest_class(data)
    return bool(largest and largest < GROUP) and record.options(FeaturesOptions).tsne is not True


def _without_tsne(record: Record, alias: str, rows: Sequence[SpaceRow]) -> Iterator[Sentence]:
    """The reason why a map that is made by default is missing."""
    options = record.options(FeaturesOptions)
    images = [row for row in rows if row.of == "images"]
    if options.tsne is not False and images and not any(row.method == "tsne" for row in images):
        yield Sentence(
            f"There is no t-SNE of the images of `{alias}`: {images[0].n} are too few for a perplexity of "
            f"{options.perplexity:g}, which takes more than {3 * options.perplexity:g} (`--perplexity`).",
            (*images, options.perplexity, 3 * options.perplexity),
        )


def _title(row: SpaceRow) -> str:
    """The title of a map, with its trustworthiness."""
    title = f"{_METHODS[row.method]}, {row.n:,} {row.of}, trustworthiness {row.trustworthiness:.3f}"
    if row.explained is not None:
        return f"{title}\n{100 * sum(row.explained):.0f} % of the variance"
    return title if row.perplexity is None else f"{title}\nperplexity {row.perplexity:g}"


def _draw_images(alias: str, arrays: SpaceArrays, rows: Sequence[SpaceRow], by: str) -> "Figure":
    from vitlens.figures.features.space import Cloud, feature_space

    points: dict[str, Any] = {"tsne": arrays.tsne_images, "pca": arrays.pca_images}
    labels: Any = arrays.labels_images
    wrong: Any = arrays.wrong_images
    clouds = [Cloud(_title(row), points[row.method], labels, wrong) for row in rows]
    if arrays.pixels is not None and arrays.pictures is not None:
        thumbnails = arrays.pictures
        clouds.append(
            Cloud(
                f"{_title(rows[0])}, {len(thumbnails)} of them as thumbnails",
                points[rows[0].method][thumbnails],
                None if labels is None else labels[thumbnails],
                None if wrong is None else wrong[thumbnails],
                arrays.pixels / 255,
            )
        )
    classes = [str(name) for name in arrays.classes]
    title = f"The last layer's features of {alias}, one point per image"
    return feature_space(clouds=clouds, classes=classes, title=title, wrong=by)


def _draw_patches(alias: str, arrays: SpaceArrays, rows: Sequence[SpaceRow], masked: bool) -> "Figure":
    from vitlens.figures.features.space import NAMED, Cloud, feature_space

    points: dict[str, Any] = {"tsne": arrays.tsne_patches, "pca": arrays.pca_patches}
    labels: Any = arrays.labels_patches
    clouds = [Cloud(_title(row), points[row.method], labels, named=False) for row in rows]
    title = f"The last layer's features of {alias}, one point per patch"
    if labels is not None and len(np.unique(labels)) <= NAMED:
        title += ", coloured by " + ("object or background" if masked else "the class of their image")
    classes = ["background", "object"] if masked else [str(name) for name in arrays.classes]
    return feature_space(clouds=clouds, classes=classes, title=title)
