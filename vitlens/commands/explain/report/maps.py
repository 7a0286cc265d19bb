"""Figures of the first images with the map of every method."""

from collections.abc import Collection, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.commands.explain.conclusions import checks_of
from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import IMAGES, MAPS, METHODS, ExplainArrays, ExplainImageRow, MethodRow
from vitlens.commands.shared.maps.judged import judged_maps
from vitlens.commands.shared.sheets import EACH, sheets
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Sentence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKED_AT: Final = ("Digits in scenes", "coco_masks")  # titles of data sets (benchmarks/best_map.md)
_METHODS: Final = 7  # in a figure; more are divided among several


def map_figures(record: Record, alias: str) -> Iterator[FigureSpec]:
    """The sheets of a model's images; none where no map can be drawn."""
    arrays, methods = record.arrays(MAPS, model=alias), methods_of(record, alias)
    drawn = len(arrays.images)
    if not any(is_drawable(values) for maps in arrays.maps.values() for values in maps[:drawn]):
        return
    name = "explain" if len(record.aliases) == 1 else f"explain_{alias}"
    caption = _caption(record, alias, outlined=arrays.masks is not None)
    parts = [(images, columns) for images in _evenly(drawn, EACH) for columns in _evenly(len(methods), _METHODS)]
    for (figure, _), (images, columns) in zip(sheets(name, len(parts), 1), parts, strict=True):
        yield FigureSpec(figure, caption, partial(_draw, record, alias, arrays, methods, images, columns))


def _evenly(count: int, most: int) -> list[slice]:
    """The fewest parts of at most that many, of about equal size."""
    parts = -(-count // most)
    edges = [round(count * part / parts) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def best_sentences(record: Record, methods: Collection[str]) -> Iterator[Sentence]:
    """That `best` was made while looking at this data set, where it was and `best` is among the methods."""
    data = record.config.data
    if data is not None and data.title in _LOOKED_AT and "best" in methods:
        yield Sentence(
            f"The settings of best were chosen while looking at images of {data.title}, so a lead of best over the "
            "other methods is optimistic here; benchmarks/best_map.md has sets that were kept aside.",
            says="method",
        )


def methods_of(record: Record, alias: str) -> tuple[MethodRow, ...]:
    """The rows of a model's methods."""
    return tuple(row for row in record.rows(METHODS) if row.model == alias)


def has_classifier(record: Record, alias: str) -> bool:
    """Whether the maps of a model explain a class."""
    return any(row.target is not None for row in images_of(record, alias))


def target_words(record: Record) -> str:
    """The class that the maps are of."""
    words = {"predicted": "the predicted class", "true": "the true class"}
    return words.get(record.options(ExplainOptions).target, "the class of --target")


def _draw(
    record: Record,
    alias: str,
    arrays: ExplainArrays,
    methods: tuple[MethodRow, ...],
    images: slice,
    columns: slice,
) -> "Figure":
    from vitlens.figures.explain import attribution_overlays

    pixels: Any = arrays.images / np.float32(255)
    shown, faults = methods[columns], _faults(record, alias)
    return attribution_overlays(
        images=pixels[images],
        maps=[arrays.maps[index][images] for index in range(len(methods))[columns]],
        signed=[row.signed for row in shown],
        titles=[row.title for row in shown],
        names=[below(row) for row in images_of(record, alias)[images]],
        masks=None if arrays.masks is None else arrays.masks[images],
        failed=[faults.get(row.method, "") for row in shown],
        title=_title(record, alias),
    )


def _faults(record: Record, alias: str) -> dict[str, str]:
    """Why methods failed the checks, in a few words; empty without --verify."""
    return {each.check.method: each.fault for each in judged_maps(checks_of(record, alias)) if each.fault}


def images_of(record: Record, alias: str) -> tuple[ExplainImageRow, ...]:
    """The rows of a model's images."""
    return tuple(row for row in record.rows(IMAGES) if row.model == alias)


def is_drawable(values: Any) -> bool:
    """Whether a map is finite and not constant."""
    return bool(np.isfinite(values).all() and np.ptp(values) > 1e-6 * np.abs(values).max())


def _title(record: Record, alias: str) -> str:
    if not has_classifier(record, alias):
        return f"{alias}: maps of methods that explain no class"
    return f"{alias}: evidence for (red) and against (blue) the target"


def below(row: ExplainImageRow) -> str:
    """The text below an image: the prediction, and the target where it is another class."""
    if row.target is None or row.target_probability is None:
        return Path(row.image).name
    target = f"{row.target} ({100 * row.target_probability:.0f} %)"
    if row.target == row.prediction:
        return f"predicted: {target}"
    sure = "" if row.probability is None else f" ({100 * row.probability:.0f} %)"
    return f"predicted: {row.prediction}{sure}; target: {target}"


def _caption(record: Record, alias: str, *, outlined: bool) -> str:
    unsigned = [row.title for row in methods_of(record, alias) if not row.signed]
    without_signs = f" Unsigned, and drawn from the minimum: {', '.join(unsigned)}." if unsigned else ""
    outline = " Outlined: the object." if outlined else ""
    explained = has_classifier(record, alias)
    other = "; target: the class that the maps explain, where it is another"
    below = f"the prediction and its probability{other}" if explained else "its file"
    verified = record.options(ExplainOptions).verify
    crossed = " Crossed out: a uniform map, or a method that failed the checks below." if verified else ""
    checked = "; see the checks below" if verified else "; vitlens explain --verify checks the methods"
    return (
        f"Below each image: {below}.{crossed} Each map is divided by the 99.5th percentile of its absolute values and "
        "interpolated: positions can be compared between methods, amounts cannot."
        f"{without_signs}{outline} A map alone is no evidence{checked if explained else ''}."
    )
