"""The pictures of `vitlens explain`: images with their maps, and without the patches that change a
prediction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitlens.charts import Picture
from vitlens.charts.overlay import upsample
from vitlens.commands.explain.claims import verdicts_of
from vitlens.commands.explain.record import (
    SEARCH,
    CompositeSetRow,
    ExplainArrays,
    ExplainRecord,
    ImageRow,
    MethodRow,
    SetArrays,
)
from vitlens.commands.shared.explorer import ExplorerContents, explorer_of
from vitlens.commands.shared.maps.record import JUMPS
from vitlens.commands.shared.sheets import EACH, file_names
from vitlens.record import by
from vitlens.report.explorer import Explorer
from vitlens.report.prose import Marked, finalize

_METHODS: Final = 7  # on a sheet; more are divided among several
_COMPOSITE_METHODS: Final = 5  # on a sheet of composites; the worse ones are not drawn
_ORDERS: Final = 5  # orders of patches in a row of pictures
_TARGETS: Final = {"predicted": ", the predicted class", "true": ", the true class"}
_GREY: Final = 0.8  # share of grey in a removed patch
_FLAT: Final = 1e-6  # share of the largest value: a map that varies by less is constant


@dataclass(frozen=True)
class Sheet:
    """One figure with some images of a model and the maps of some methods.

    methods: all methods of the model.
    names: the names of all drawn images.
    faults: by method.
    image_slice, method_slice: the images and methods of this sheet.
    """

    arrays: ExplainArrays
    methods: Sequence[MethodRow]
    names: Sequence[str]
    faults: dict[str, str]
    title: str
    number: int
    image_slice: slice
    method_slice: slice

    def pictures(self) -> Iterator[Picture]:
        """Yield each image, followed by its maps."""
        image_indices = range(len(self.arrays.images))[self.image_slice]
        method_indices = range(len(self.methods))[self.method_slice]
        for index in image_indices:
            image = self.arrays.images[index] / np.float32(255)
            placement: dict[str, Any] = {
                "row": self.names[index],
                "sheet": self.number,
                "of": self.title,
            }
            if self.arrays.masks is not None:
                placement["mask"] = self.arrays.masks[index]
            yield Picture(image, column="image", **placement)
            for method_index in method_indices:
                method = self.methods[method_index]
                fault = self.faults.get(method.method, "")
                # maps that only jump under shifts are not crossed out
                crossed = "" if fault in ("", JUMPS) else "failed"
                column = method.title
                if fault:
                    column = f"{method.title} ({fault})"
                yield Picture(
                    image,
                    np.asarray(self.arrays.maps[method_index][index], float),
                    signed=method.signed,
                    column=column,
                    crossed=crossed,
                    **placement,
                )


def sheets(record: ExplainRecord) -> Iterator[Picture]:
    """Yield the drawn images of each model with their maps, on sheets of at most EACH images and
    _METHODS methods.
    """
    verdicts_by_model = verdicts_of(record)
    number = 0
    for alias in record.aliases:
        if alias not in record.maps or not _has_drawable_map(record.maps[alias]):
            continue
        arrays = record.maps[alias]
        methods = _of_model(record.methods, alias)
        image_rows = _of_model(record.shown, alias)
        verdicts = verdicts_by_model.get(alias, ())
        faults = {verdict.method: verdict.fault for verdict in verdicts}
        for image_slice in _evenly(len(arrays.images), EACH):
            for method_slice in _evenly(len(methods), _METHODS):
                sheet = Sheet(
                    arrays=arrays,
                    methods=methods,
                    names=_image_titles(image_rows),
                    faults=faults,
                    title=_sheet_title(record, alias, image_rows),
                    number=number,
                    image_slice=image_slice,
                    method_slice=method_slice,
                )
                yield from sheet.pictures()
                number += 1


def _of_model(rows: Sequence[Any], alias: str) -> Sequence[Any]:
    return by(rows, "model").get(alias, ())


def _has_drawable_map(arrays: ExplainArrays) -> bool:
    """Return True if any map of the drawn images can be drawn."""
    drawn = len(arrays.images)
    for method_maps in arrays.maps.values():
        if any(_is_drawable(values) for values in method_maps[:drawn]):
            return True
    return False


def _sheet_title(record: ExplainRecord, alias: str, rows: Sequence[ImageRow]) -> Marked:
    """Return the model and its target class, for the title of a figure."""
    target = ""
    if any(row.similarity is not None for row in rows):
        target = f": “{finalize(rows[0].target)}”"
    elif any(row.target is not None for row in rows):
        target = _TARGETS.get(record.options.get("target", ""), ", the class of --target")
        is_predicted = all(row.target == row.prediction for row in rows)
        if record.options.get("maps") and not is_predicted:
            target = ", the class of the maps"
    return Marked(finalize(alias) + target)


def _image_titles(rows: Sequence[ImageRow]) -> list[str]:
    """Return the file name of each image, with its prediction and target class if the model has a
    classifier.
    """
    titles = file_names([row.image for row in rows])
    for index, row in enumerate(rows):
        if row.target is not None:
            titles[index] += f": {_below(row)}"
    return titles


def _evenly(count: int, most: int) -> list[slice]:
    """Return the fewest slices of at most `most` items, of about equal size."""
    parts = ceil(count / most)
    edges = [round(count * part / parts) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _is_drawable(values: Any) -> bool:
    """Return True if a map is finite and not constant."""
    return bool(np.isfinite(values).all() and np.ptp(values) > _FLAT * np.abs(values).max())


def _below(row: ImageRow) -> str:
    """Return the text below an image: the prediction, and the target class if it is another one."""
    if row.target is None:
        return Path(row.image).name
    if row.similarity is not None:
        return _similar(row)
    if row.target_probability is None:
        return Path(row.image).name
    target = f"{row.target} ({100 * row.target_probability:.0f} %)"
    if row.target == row.prediction:
        return f"predicted: {target}"
    return f"target: {target}; predicted: {row.prediction} ({100 * (row.probability or 0.0):.0f} %)"


def _similar(row: ImageRow) -> str:
    """Return the similarity of an image to a phrase, and its probability among several."""
    text = f"{row.target}: similarity {row.similarity:.3f}"
    if row.target_probability is None:
        return text
    return f"{text} ({100 * row.target_probability:.0f} %)"


def explorer(record: ExplainRecord) -> Explorer | None:
    """Return the attention of the first model that has one, with its drawn images and their
    maps."""
    for row in record.explorer:
        if row.model in record.explorer_arrays:
            return explorer_of(record, _explored_images(record, row.model))
    return None


def _explored_images(record: ExplainRecord, alias: str) -> ExplorerContents:
    """Return the drawn images of a model, with the maps that can be drawn on all of them."""
    arrays = record.maps[alias]
    names = []
    texts = []
    for row in _of_model(record.shown, alias):
        names.append(row.image)
        texts.append([_below(row)])
    maps = {}
    drawn = len(arrays.images)
    for index, method in enumerate(_of_model(record.methods, alias)):
        method_maps = arrays.maps[index]
        if all(_is_drawable(values) for values in method_maps[:drawn]):
            maps[method.title] = method_maps
    return ExplorerContents(arrays.images, names, texts, maps)


def removed_patches(record: ExplainRecord) -> Iterator[Picture]:
    """Yield the first images of the first model, whole and without patches.

    In each picture, patches are removed in one of the best orders until the prediction changes.
    Removed patches are grey.
    """
    if not record.sets:
        return
    alias, arrays = next(iter(record.sets.items()))
    methods = []
    baselines = []
    for row in _of_model(record.league, alias):
        if row.baseline:
            baselines.append(row.method)
        else:
            methods.append(row.method)
    # the rows of the league are sorted, the best first; the other two are a baseline and the search
    orders = [*methods[: _ORDERS - 2], baselines[0], SEARCH]
    for index, pixels in enumerate(arrays.images):
        title = f"{index}: {arrays.classes[arrays.prediction[index]]}"
        yield Picture(pixels / np.float32(255), row=title, column="image")
        for order in orders:
            yield _without_patches(arrays, index, order, row=title)


def _without_patches(arrays: SetArrays, index: int, order: str, *, row: str) -> Picture:
    """Return an image without the patches of one order, with their number and the prediction
    below."""
    order_index = arrays.methods.tolist().index(order)
    image = arrays.images[index] / np.float32(255)
    removed = arrays.removed[index, order_index]
    mask = upsample(removed.astype(float), image.shape[1:], smooth=False) > 0.5
    greyed = np.where(mask, (1 - _GREY) * image + _GREY * np.float32(0.5), image)
    below = "none found"
    if removed.any():
        turned = arrays.classes[arrays.turned[index, order_index]]
        below = f"{int(removed.sum())} of {removed.size}\n→ {turned}"
    return Picture(greyed, row=row, column=order, below=below)


def composite_sheets(record: ExplainRecord) -> Iterator[Picture]:
    """Yield the first composites of each kind with maps of the methods that have most mass in the
    right place.
    """
    sheet = 0
    for row in record.composite_sets:
        if not row.refused:
            yield from _composite_sheet(record, row, sheet)
            sheet += 1


def _composite_sheet(record: ExplainRecord, row: CompositeSetRow, sheet: int) -> Iterator[Picture]:
    """Yield the first composites of one kind, each followed by its maps."""
    methods = {method.method: method for method in record.methods}
    arrays = record.composite_maps[f"{row.kind}-{row.model}"]
    indices = {name: index for index, name in enumerate(arrays.methods.tolist())}
    best_methods = []  # the rows are sorted, the largest mass first
    for scores in record.composites:
        if (scores.model, scores.kind) == (row.model, row.kind) and not scores.baseline:
            best_methods.append(scores.method)
    for index, pixels in enumerate(arrays.images / np.float32(255)):
        placement: dict[str, Any] = {
            "row": f"{index}: explained: {arrays.targets[index]}",
            "mask": arrays.masks[index],
            "sheet": sheet,
            "of": row.model,
        }
        yield Picture(pixels, column="image", **placement)
        for name in best_methods[:_COMPOSITE_METHODS]:
            values = np.asarray(arrays.maps[indices[name]][index], float)
            method = methods[name]
            yield Picture(pixels, values, column=method.title, signed=method.signed, **placement)
