"""Figures of the first images with the map of every method."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import IMAGES, MAPS, METHODS, ExplainArrays, ExplainImageRow, MethodRow
from vitlens.commands.scaffold.sheets import EACH, sheets
from vitlens.records import Record
from vitlens.report.document import FigureSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES: Final = 6  # lines of panels in a figure, at most


def map_figures(record: Record, alias: str) -> Iterator[FigureSpec]:
    """The sheets of a model's images; none where no map can be drawn."""
    arrays, methods = record.arrays(MAPS, model=alias), methods_of(record, alias)
    drawn = len(arrays.images)
    if not any(is_drawable(values) for maps in arrays.maps.values() for values in maps[:drawn]):
        return
    name = "explain" if len(record.aliases) == 1 else f"explain_{alias}"
    caption = _caption(record, alias, outlined=arrays.masks is not None)
    for figure, part in sheets(name, drawn, images_on_a_sheet(len(methods))):
        yield FigureSpec(figure, caption, partial(_draw, record, alias, arrays, methods, part))


def images_on_a_sheet(methods: int) -> int:
    """The number of images in a figure, given the number of methods."""
    from vitlens.figures.explain import lines_of

    return max(1, min(EACH, _LINES // lines_of(1 + methods)))


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


def _draw(record: Record, alias: str, arrays: ExplainArrays, methods: tuple[MethodRow, ...], part: slice) -> "Figure":
    from vitlens.figures.explain import attribution_overlays

    images: Any = arrays.images / np.float32(255)
    return attribution_overlays(
        images=images[part],
        maps=[arrays.maps[index][part] for index in range(len(methods))],
        signed=[row.signed for row in methods],
        titles=[row.title for row in methods],
        names=[below(row) for row in images_of(record, alias)[part]],
        masks=None if arrays.masks is None else arrays.masks[part],
        title=_title(record, alias),
    )


def images_of(record: Record, alias: str) -> tuple[ExplainImageRow, ...]:
    """The rows of a model's images."""
    return tuple(row for row in record.rows(IMAGES) if row.model == alias)


def is_drawable(values: Any) -> bool:
    """Whether a map is finite and not constant."""
    return bool(np.isfinite(values).all() and np.ptp(values) > 1e-6 * np.abs(values).max())


def _title(record: Record, alias: str) -> str:
    if not has_classifier(record, alias):
        return f"{alias}: maps of methods that explain no class"
    return f"{alias}: evidence for the target (red) and against it (blue)"


def below(row: ExplainImageRow) -> str:
    """The text below an image."""
    if row.target is None or row.target_probability is None:
        return Path(row.image).name
    target = f"{row.target} ({100 * row.target_probability:.0f} %)"
    return target if row.target == row.prediction else f"target: {target}; predicted: {row.prediction}"


def _caption(record: Record, alias: str, *, outlined: bool) -> str:
    unsigned = [row.title for row in methods_of(record, alias) if not row.signed]
    without_signs = f" Unsigned, and drawn from the minimum: {', '.join(unsigned)}." if unsigned else ""
    outline = " Outlined: the object." if outlined else ""
    explained = has_classifier(record, alias)
    below = f"{target_words(record)} and its probability" if explained else "its file"
    verified = record.options(ExplainOptions).verify
    checked = "; see the checks below" if verified else "; vitlens explain --verify checks the methods"
    return (
        f"Below each image: {below}. Each map is divided by the 99.5th percentile of its absolute values and "
        "interpolated: positions can be compared between methods, amounts cannot."
        f"{without_signs}{outline} A map alone is no evidence{checked if explained else ''}."
    )
