"""The maps of a rollout over the images: every fusion of heads, and all methods side by side."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.commands.rollout.conclusions import title_of
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import CHECKS, IMAGES, MAPS, PATCH_MASS, MapRow, RolloutArrays, RolloutImageRow
from vitlens.commands.scaffold.maps.information import UNIFORM, is_uniform
from vitlens.commands.scaffold.sheets import EACH, sheets
from vitlens.records import Record
from vitlens.report.document import FigureSpec
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_READOUTS: Final = {
    "cls": "the CLS token",
    "cls+distillation": "the mean of the CLS and distillation tokens",
    "mean": "the mean over all patches",
    "pool": "the attention pooling's query",
    None: "the model's own",
}


_CROSSED: Final = (
    f" Crossed out: uniform maps, which have no maximum, and kinds of map shown to hold fewer than {UNIFORM} bits."
)


def fusion_sheets(record: Record, arrays: RolloutArrays) -> Iterator[FigureSpec]:
    """Overlays of rollout for each fusion of heads."""
    columns = [index for index, row in enumerate(record.rows(MAPS)) if row.fusion]
    if not columns:
        return
    titles = [f"{record.rows(MAPS)[index].fusion} of heads" for index in columns]
    for name, part in sheets("rollout", len(arrays.images), EACH):
        yield FigureSpec(name, _rollout_caption(record), partial(_draw_fusions, record, arrays, part, columns, titles))


def _draw_fusions(
    record: Record, arrays: RolloutArrays, part: slice, columns: Sequence[int], titles: Sequence[str]
) -> "Figure":
    from vitlens.figures.rollout import rollout_overlays

    maps: Any = arrays.maps[: len(arrays.images), columns]
    return rollout_overlays(
        images=_fractions(arrays)[part],
        masks=None if arrays.masks is None else arrays.masks[part],
        maps=maps[part],
        titles=titles,
        names=[_prediction(row) for row in record.rows(IMAGES)[part]],
        hits=None if arrays.hits is None else arrays.hits[part][:, columns],
        failed=_faults(record, columns),
    )


def _faults(record: Record, columns: Sequence[int]) -> list[str]:
    """For each kind of map, that its maps are shown to be uniform; "" for others."""
    checks = {row.maps: row for row in record.rows(CHECKS)}
    kinds = [record.rows(MAPS)[index].method for index in columns]
    return ["nearly uniform" if name in checks and is_uniform(checks[name], len(checks)) else "" for name in kinds]


def method_sheets(record: Record, arrays: RolloutArrays) -> Iterator[FigureSpec]:
    """Overlays of all methods side by side, where there are others than rollout."""
    kinds = record.rows(MAPS)
    others = [index for index, row in enumerate(kinds) if not row.fusion]
    if not others:
        return
    columns = [*[index for index, row in enumerate(kinds) if row.fusion][:1], *others]
    caption = _methods_caption(record, [kinds[index] for index in columns])
    for name, part in sheets("methods", len(arrays.images), EACH):
        yield FigureSpec(name, caption, partial(_draw_methods, record, arrays, part, columns))


def _draw_methods(record: Record, arrays: RolloutArrays, part: slice, columns: Sequence[int]) -> "Figure":
    from vitlens.figures.rollout import method_overlays

    maps: Any = arrays.maps[: len(arrays.images), columns]
    predicted = record.options(RolloutOptions).target == "predicted"
    return method_overlays(
        images=_fractions(arrays)[part],
        masks=None if arrays.masks is None else arrays.masks[part],
        maps=maps[part],
        titles=[title_of(record.rows(MAPS)[index]) for index in columns],
        # the target class, where it is not the prediction
        names=[_prediction(row) if predicted else f"target: {row.target}" for row in record.rows(IMAGES)[part]],
        hits=None if arrays.hits is None else arrays.hits[part][:, columns],
        failed=_faults(record, columns),
    )


def _fractions(arrays: RolloutArrays) -> Any:
    return arrays.images / np.float32(255)


def _prediction(row: RolloutImageRow) -> str:
    if row.prediction is None or row.probability is None:
        return Path(row.image).name
    return f"{row.prediction} ({100 * row.probability:.0f} %)"


def _rollout_caption(record: Record) -> str:
    options, rows = record.options(RolloutOptions), record.rows(MAPS)
    classless = record.rows(IMAGES)[0].prediction is None
    dropped = f", the lowest {100 * options.discard:.0f} % of each row dropped" if options.discard else ""
    beside = "its file" if classless else "the prediction and its probability"
    return (
        f"Rollout (Abnar & Zuidema 2020), alpha = {options.alpha}{dropped}{_start(options)}; readout: "
        f"{_READOUTS[rows[0].readout]}. Below each image: {beside}. Each map is divided by its "
        f"largest value: positions can be compared between fusions, amounts cannot.{_masses(record)}{_CROSSED} Bright "
        "patches have the largest share in the readout through attention and residual connections; this does not show "
        f"that the {'output' if classless else 'prediction'} depends on them: rollout ignores value "
        "vectors and the class."
    )


def _methods_caption(record: Record, rows: Sequence[MapRow]) -> str:
    options = record.options(RolloutOptions)
    classless = record.rows(IMAGES)[0].prediction is None
    described = "; ".join(f"{title_of(row)}: {ATTENTION_METHODS[row.kind].description}" for row in rows)
    target = {"predicted": "the predicted class", "true": "the true class"}.get(options.target, "the class of --target")
    gradients = "" if classless else f" Gradients are of the logit of {target}."
    layer = "" if options.layer is None else f" Attention is that of layer {options.layer}."
    return (
        f"Methods side by side{_start(options)}; readout: {_READOUTS[rows[0].readout]}. {described}."
        f"{gradients}{layer} Each map is divided by its largest value: positions can be compared between "
        f"methods, amounts cannot.{_CROSSED} A bright patch is no evidence that the "
        f"{'output' if classless else 'prediction'} depends on it."
    )


def _masses(record: Record) -> str:
    """The share of the readout's row that each fusion leaves on the patches."""
    (alias,) = record.aliases
    fusions = [row.fusion for row in record.rows(MAPS) if row.fusion]
    known = {fusion: record.metrics.get(PATCH_MASS(model=alias, fusion=fusion)) for fusion in fusions}
    words = [f"{in_words(Estimate(mass.value))} ({fusion})" for fusion, mass in known.items() if mass is not None]
    return f" Patches hold on average {', '.join(words)} of the readout's row." if words else ""


def _start(options: RolloutOptions) -> str:
    return f", from layer {options.start_layer}" if options.start_layer else ""
