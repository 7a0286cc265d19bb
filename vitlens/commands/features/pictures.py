"""The rows of the figures of `vitlens features`, from its record.

Maps, colours of patches, nearest images, matches of patches, and maps of prompts.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture
from vitlens.charts.features import Cloud, Matches, PatchMap
from vitlens.charts.style import RIGHT, RIGHT_SYMBOL, WRONG, WRONG_SYMBOL
from vitlens.commands.features.caveats import GROUP, SEARCHED
from vitlens.commands.features.record import FeaturesRecord, MapRow, PointsOf
from vitlens.commands.shared.sheets import file_names
from vitlens.names import Projection
from vitlens.record import by

_METHODS: Final[dict[Projection, str]] = {"tsne": "t-SNE", "pca": "PCA"}
_FEW_MODELS: Final = 2  # models up to which all methods are drawn; for more, one method each


def shows_groups(record: FeaturesRecord) -> bool:
    """Return True if maps can show groups by class, or if --tsne asks for maps."""
    if record.options["tsne"] is True:  # None without the option
        return True
    largest = record.sets[0].largest
    has_no_classes = largest == 0
    return has_no_classes or largest >= GROUP


def map_title(row: MapRow) -> str:
    """Return the title of a map; its second line, the share of the variance, only for PCA."""
    points = "images" if row.of == "images" else "patches"
    title = (
        f"{_METHODS[row.method]}, {row.n:,} {points}, trustworthiness "
        f"{row.trustworthiness.value:.3f}"
    )
    if row.explained is None:
        return title
    return f"{title}\n{100 * row.explained:.0f} % of the variance"


def image_clouds(record: FeaturesRecord) -> Iterator[Cloud]:
    """Yield the maps of images, coloured by class; nothing if classes are too small for groups."""
    if not shows_groups(record):
        return
    errors_by_model = {row.model: row.errors for row in record.features}
    models_with_map = set()
    for row in _rows_to_draw(record, "images"):
        arrays = record.spaces[row.model]
        cloud = Cloud(
            title=_title(record, row),
            points=arrays.points[f"{row.method}_images"],
            classes=[str(name) for name in arrays.classes],
            labels=arrays.labels_images,
            wrong=arrays.wrong_images,
            by=errors_by_model[row.model],
        )
        yield cloud
        is_first_of_model = row.model not in models_with_map
        models_with_map.add(row.model)
        if is_first_of_model and arrays.pictures is not None and arrays.pixels is not None:
            yield cloud.with_thumbnails(arrays.pictures, arrays.pixels / 255)


def patch_clouds(record: FeaturesRecord) -> Iterator[Cloud]:
    """Yield the maps of patches, coloured by object and background.

    Without masks they are coloured by class, under the condition of `image_clouds`.
    """
    has_masks = record.sets[0].masked
    if not has_masks and not shows_groups(record):
        return
    for row in _rows_to_draw(record, "patches"):
        arrays = record.spaces[row.model]
        classes = ["background", "object"] if has_masks else [str(name) for name in arrays.classes]
        yield Cloud(
            title=_title(record, row),
            points=arrays.points[f"{row.method}_patches"],
            classes=classes,
            labels=arrays.labels_patches,
            named=False,
        )


def _rows_to_draw(record: FeaturesRecord, of: PointsOf) -> Iterator[MapRow]:
    """Yield the maps of images or patches; of many models only the first method of each."""
    models = set()
    for row in record.maps:
        if row.of != of:
            continue
        if len(record.features) > _FEW_MODELS and row.model in models:
            continue
        models.add(row.model)
        yield row


def _title(record: FeaturesRecord, row: MapRow) -> str:
    if len(record.features) == 1:
        return map_title(row)
    return f"{row.model}: {map_title(row)}"


def patch_maps(record: FeaturesRecord) -> Iterator[PatchMap]:
    """Yield the map of each model's patch embeddings, with positions and without them.

    It is by t-SNE, or else by PCA.
    """
    rows_of_embedding = [row for row in record.maps if row.of in ("embedding", "content")]
    for model, rows in by(rows_of_embedding, "model").items():
        method = "tsne" if any(row.method == "tsne" for row in rows) else "pca"
        captions = [map_title(row).split("\n")[0] for row in rows if row.method == method]
        arrays = record.spaces[model]
        has_both = len(captions) == 2
        if not has_both or arrays.places is None or arrays.grid is None:
            continue
        yield PatchMap(
            model=model,
            points=arrays.points[f"{method}_embedding"],
            content=arrays.points[f"{method}_content"],
            captions=captions,
            places=arrays.places,
            grid=arrays.grid.tolist(),
            cut=arrays.cut,
            pixels=None if arrays.cut_pixels is None else arrays.cut_pixels / 255,
        )


def patch_colours(record: FeaturesRecord) -> Iterator[Picture]:
    """Yield the images, and below them the colours of their patches by every model."""
    models = [row.model for row in record.features if row.colours is not None]
    if not models:
        return
    for index, pixels in enumerate(record.shown[models[0]].pixels):
        yield Picture(pixels / 255, row="image", column=str(index))
    for model in models:
        colours_of_images = record.shown[model].colours
        if colours_of_images is None:
            continue
        for index, colours in enumerate(colours_of_images):
            yield Picture(np.moveaxis(colours, -1, 0), row=model, column=str(index))


def nearest_images(record: FeaturesRecord) -> Iterator[Picture]:
    """Yield queries and their nearest images.

    Without --query, nothing is drawn if so few images were searched that the nearest need not be
    similar.
    """
    for row in record.features:
        # Any: the arrays of a search are all None, or all arrays
        arrays: Any = record.shown.get(row.model)
        if arrays is None or arrays.queries is None:
            continue
        is_asked_for = bool(record.options.get("query"))
        if row.searched < SEARCHED and not is_asked_for:
            continue
        names = file_names([str(name) for name in arrays.query_names])
        for query, name in enumerate(names):
            yield Picture(arrays.queries[query] / 255, row=name, column="query", of=row.model)
            for rank in range(len(arrays.near[query])):
                yield _nearest_image(arrays, query, rank, row=name, of=row.model)


def _nearest_image(arrays: Any, query: int, rank: int, *, row: str, of: str) -> Picture:
    """Return one of the nearest images of a query; its frame shows if it is of the query's class.

    query, rank: the indices of the query and of its neighbour.
    """
    frame = ""
    below = f"{arrays.near_names[query][rank]}\n{arrays.similarity[query, rank]:.3f}"
    if arrays.same is not None:
        if arrays.same[query, rank]:
            frame = RIGHT
            below = f"{RIGHT_SYMBOL} {below}"
        else:
            frame = WRONG
            below = f"{WRONG_SYMBOL} {below}"
    return Picture(
        arrays.near[query][rank] / 255,
        row=row,
        column=str(rank + 1),
        frame=frame,
        below=below,
        of=of,
    )


def matched_patches(record: FeaturesRecord) -> Iterator[Matches]:
    """Yield images and their nearest neighbours with their matching patches."""
    for model, rows in by(record.matches, "model").items():
        arrays = record.shown[model]
        if arrays.first is None or arrays.second is None:
            continue
        for index, row in enumerate(rows):
            if row.matches:
                yield Matches(
                    title=f"{row.model}: {row.first} and {row.second}",
                    first=arrays.first[index] / 255,
                    second=arrays.second[index] / 255,
                    sources=arrays.sources[index],
                    targets=arrays.targets[index],
                    similarity=arrays.alike[index],
                    grid=row.grid,
                )


def prompt_maps(record: FeaturesRecord) -> Iterator[Picture]:
    """Yield the relevance of the images for each prompt."""
    for model, rows in by(record.prompts, "model").items():
        arrays = record.shown[model]
        if arrays.prompts is None:
            continue
        prompts = list(dict.fromkeys(row.prompt for row in rows))
        names = file_names([str(name) for name in arrays.names])
        for image, prompt in np.ndindex(arrays.prompts.shape[:2]):
            yield Picture(
                arrays.pixels[image] / 255,
                arrays.prompts[image, prompt],
                row=names[image],
                column=prompts[prompt],
                of=model,
            )
