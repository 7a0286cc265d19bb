"""The maps of a rollout over the images: every fusion of heads, and all methods side by side."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.attention.registry import ATTENTION_METHODS
from vitlens.commands.rollout.conclusions import title_of
from vitlens.commands.rollout.options import RolloutOptions
from vitlens.commands.rollout.record import IMAGES, MAPS, MapRow, RolloutArrays, RolloutImageRow
from vitlens.commands.scaffold.sheets import EACH, sheets
from vitlens.records import Record
from vitlens.report.document import FigureSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_READOUTS: Final = {
    "cls": "the CLS token",
    "cls+distillation": "the mean of the CLS and distillation tokens",
    "mean": "the mean over all patches",
    "pool": "the attention pooling's query",
    None: "the model's own",
}


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
    from vitlens.figures.views import shared_scale

    maps: Any = arrays.maps[: len(arrays.images)]
    return rollout_overlays(
        images=_fractions(arrays)[part],
        masks=None if arrays.masks is None else arrays.masks[part],
        maps=maps[part][:, columns],
        titles=titles,
        names=[_prediction(row) for row in record.rows(IMAGES)[part]],
        hits=None if arrays.hits is None else arrays.hits[part][:, columns],
        scale=shared_scale(list(maps[:, columns].swapaxes(0, 1))),  # of all sheets
    )


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
    from vitlens.figures.views import shared_scale

    maps: Any = arrays.maps[: len(arrays.images)]
    sums = maps.sum((2, 3), keepdims=True)
    shares = maps[:, columns] / np.where(sums > 0, sums, 1.0)[:, columns]
    predicted = record.options(RolloutOptions).target == "predicted"
    return method_overlays(
        images=_fractions(arrays)[part],
        masks=None if arrays.masks is None else arrays.masks[part],
        maps=maps[part][:, columns],
        titles=[title_of(record.rows(MAPS)[index]) for index in columns],
        # the target class, where it is not the prediction
        names=[_prediction(row) if predicted else f"target: {row.target}" for row in record.rows(IMAGES)[part]],
        hits=None if arrays.hits is None else arrays.hits[part][:, columns],
        scale=shared_scale(list(shares.swapaxes(0, 1))),
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
        f"{_READOUTS[rows[0].readout]}. Beside each image: {beside}. Colours share one scale, in % of the readout's "
        "row; a panel that looks flat has small values compared with the others, not less structure. Bright patches "
        "have the largest share in the readout through attention and residual connections; this does not show that the "
        f"{'output' if classless else 'prediction'} depends on them: rollout ignores value vectors and the class."
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
        f"{gradients}{layer} Each map is divided by its sum, and all share one colour scale: positions can be "
        f"compared between methods, amounts cannot. A bright patch is no evidence that the "
        f"{'output' if classless else 'prediction'} depends on it."
    )


def _start(options: RolloutOptions) -> str:
    return f", from layer {options.start_layer}" if options.start_layer else ""
