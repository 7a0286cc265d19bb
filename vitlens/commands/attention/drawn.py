"""The figures of `vitlens attention`, drawn from its record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitlens.charts import Picture, images
from vitlens.commands.attention.record import AttentionRecord, LayerRow, PatchRow, Size
from vitlens.commands.scaffold.maps.on_object import ATTENTION, ROLLOUT, mass_of
from vitlens.commands.scaffold.receptive.report import draw_maps
from vitlens.commands.scaffold.sheets import DRAWN, EACH
from vitlens.figures.attention import attention_grid, attention_overlays
from vitlens.figures.development import development
from vitlens.figures.patches import patch_grid
from vitlens.figures.positions import position_maps
from vitlens.figures.views import images_on_a_page, panel_view, shared_scale
from vitlens.figures.walkthrough.matrices import head_matrices
from vitlens.figures.windows.layout import windows_and_shift
from vitlens.report.numbers import in_ranges
from vitlens.report.sections import Chart
from vitlens.uncertainty import Estimate

_LAYERS: Final = 6  # maps in a row of the picture
DEVELOPED: Final = 12  # images in the figure of attention and rollout


@dataclass(frozen=True)
class Drawn:
    """A picture of a sheet of images."""

    sheet: int
    picture: Picture


@dataclass(frozen=True)
class ShareRow:
    """What lies on the object, by layer."""

    layer: int
    what: str
    share: Estimate


@dataclass(frozen=True)
class Stage:
    """Layers with equal heads and maps: all of a ViT, one stage of a Swin; indices: of the record's layers."""

    number: int
    record: AttentionRecord
    indices: Sequence[int]
    layers: str
    kind: str
    heads: int
    map: Size
    reading: str


def pixels(record: AttentionRecord) -> NDArray[np.floating]:
    """The images (batch, 3, height, width) in [0, 1]."""
    known: NDArray[Any] = np.zeros((0, 3, 1, 1)) if record.maps is None else record.maps.images
    return np.asarray(known / np.float32(255))


def whole(record: AttentionRecord) -> list[AttentionRecord]:
    """The record, as the row of a chart that draws its arrays."""
    return [record]


def names(record: AttentionRecord) -> list[str]:
    """The images' file names, or their numbers in the data."""
    return [Path(row.image).name for row in record.shown]


def reader(row: LayerRow) -> str:
    """The query whose attention a layer's map shows, as in a figure's title."""
    return row.reading.removeprefix("the ")


def pictures(record: AttentionRecord) -> Iterator[Drawn]:
    """The first DRAWN images, EACH a sheet, each with the mean map of at most _LAYERS layers."""
    if record.maps is None:
        return
    shown = pixels(record)
    chosen = sorted({round(at) for at in np.linspace(0, len(record.layers) - 1, min(len(record.layers), _LAYERS))})
    named = names(record)[:DRAWN]
    for at, name in enumerate(named):
        row = f"{at}: {name}" if len(set(named)) < len(named) else name
        yield Drawn(at // EACH, Picture(shown[at], row=row, column="image"))
        for index in chosen:
            own = 100 * record.maps.layer[index][at].mean(0)
            yield Drawn(at // EACH, Picture(shown[at], own, row, f"layer {record.layers[index].layer}"))


def draw_pictures(rows: Sequence[Drawn], title: str) -> Figure:
    """The pictures of one sheet, on one colour scale."""
    return images(scale="joint", label="attention (%)")([row.picture for row in rows], title)


def shares(record: AttentionRecord) -> list[ShareRow]:
    """What lies on the object of attention and of rollout, and of the best map that ignores the image."""
    kinds = {ATTENTION: "attention of the layer", ROLLOUT: "rollout up to it"}
    own = [
        ShareRow(row.layer or 0, words, row.estimate)
        for kind, words in kinds.items()
        for row in mass_of(record.on_object, kind)
    ]
    other = "map that ignores the image"
    return own + [ShareRow(row.layer or 0, other, row.of_baseline) for row in mass_of(record.on_object, ATTENTION)]


def stages(record: AttentionRecord) -> list[Stage]:
    """The layers in sequences of equal heads and maps."""
    if record.maps is None:
        return []
    shapes = [record.maps.layer[index].shape[1:] for index in range(len(record.layers))]
    starts = [index for index in range(len(shapes)) if index == 0 or shapes[index] != shapes[index - 1]]
    found = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(shapes)]), start=1):
        row = record.layers[start]
        layers = in_ranges([each.layer for each in record.layers[start:end]])
        found.append(Stage(number, record, range(start, end), layers, row.kind, row.heads, row.map, row.reading))
    return found


def grid(rows: Sequence[Stage], _: str) -> Figure:
    """Every head of one stage on the first image."""
    record, indices = rows[0].record, rows[0].indices
    assert record.maps is not None
    return attention_grid(
        maps=np.stack([record.maps.layer[index][0] for index in indices]),
        image=pixels(record)[0],
        query=reader(record.layers[indices[0]]),
        numbers=[record.layers[index].layer for index in indices],
    )


def chosen_layer(record: AttentionRecord) -> int:
    """The index of the layer that is drawn large, by default the last."""
    layer = record.options.get("layer")
    known = [row.layer for row in record.layers]
    return known.index(layer) if layer in known else len(known) - 1


def large(rows: Sequence[AttentionRecord], _: str) -> Figure:
    """Every head of the chosen layer on the images that fit on a page."""
    (record,) = rows
    assert record.maps is not None
    index = chosen_layer(record)
    maps, row = record.maps.layer[index], record.layers[index]
    part = slice(0, images_on_a_page(row.heads))
    return attention_overlays(
        images=pixels(record)[part], maps=maps[part], layer=row.layer, names=names(record)[part],
        scale=shared_scale(list(maps.swapaxes(0, 1))), query=reader(row),
    )  # fmt: skip


def developed(rows: Sequence[AttentionRecord], title: str) -> Figure:
    """The mean map of each layer, and the rollout up to it, of the first images."""
    (record,) = rows
    assert record.maps is not None
    assert record.development is not None
    means = np.stack([record.maps.layer[index].mean(1) for index in range(len(record.layers))], 1)
    return development(
        images=pixels(record)[:DEVELOPED], attention=means[:DEVELOPED],
        rollout=record.development.rollout[:DEVELOPED], numbers=[row.layer for row in record.layers], title=title,
    )  # fmt: skip


def view_figure(view: str, head: bool, rows: Sequence[AttentionRecord], title: str) -> Figure:
    """The attention of a patch, or to it, layer by layer: the mean of heads, or the chosen head."""
    (record,) = rows
    of_view, arrays = rows_of_view(view, record), record.views[view]
    maps = arrays.head if head else arrays.mean
    part = slice(0, images_on_a_page(len(of_view)))
    return panel_view(
        images=pixels(record)[part],
        maps=[maps[index][part] for index in sorted(maps)],
        titles=[f"layer {of_view[index].layer}" for index in sorted(maps)],
        title=title,
        names=names(record)[part],
        patches=[(of_view[index].row, of_view[index].column) for index in sorted(maps)],
        smooth=False,
    )


def rows_of_view(view: str, record: AttentionRecord) -> Sequence[PatchRow]:
    """The rows of the table of a view."""
    rows: Sequence[PatchRow] = getattr(record, view)
    return rows


def has_view(view: str, head: bool, record: AttentionRecord) -> list[AttentionRecord]:
    """The record, where it has the view, of the chosen head or of their mean."""
    arrays = record.views.get(view)
    return [record] if arrays is not None and (arrays.head if head else arrays.mean) else []


def over_training(rows: Sequence[AttentionRecord], title: str) -> Figure:
    """One head with the weights of each checkpoint."""
    (record,) = rows
    assert record.checkpoints is not None
    part = slice(0, images_on_a_page(len(record.training)))
    return panel_view(
        images=pixels(record)[part],
        maps=list(record.checkpoints.maps[part].swapaxes(0, 1)),
        titles=[f"epoch {row.epochs}" if row.epochs else "untrained" for row in record.training],
        title=title,
        names=names(record)[part],
    )


def matrix(rows: Sequence[AttentionRecord], title: str) -> Figure:
    """Scores and weights of the head that was asked for."""
    (record,) = rows
    assert record.head_matrix is not None
    arrays, (row,) = record.head_matrix, record.matrix
    return head_matrices(scores=arrays.scores, weights=arrays.weights, prefix=row.prefix, title=title)


def windows(rows: Sequence[AttentionRecord], _: str) -> Figure:
    """Two layers after one another: the first pair of which the second connects something, else the first two."""
    (record,) = rows
    assert record.window_maps is not None
    own, arrays = record.windows, record.window_maps
    pairs = [at for at in range(1, len(own)) if own[at].map == own[at - 1].map]
    at = next((place for place in pairs if own[place].new), pairs[0] if pairs else 1)
    before = at - 1 if own[at - 1].map == own[at].map else at
    return windows_and_shift(
        image=pixels(record)[0], plain=arrays.part[before], shifted=arrays.part[at],
        reached_before=arrays.reach[before], reached_after=arrays.reach[at], mask=arrays.mask[at],
        patch=own[at].patch, layers=(own[before].layer, own[at].layer),
    )  # fmt: skip


def field_maps(rows: Sequence[AttentionRecord], _: str) -> Figure:
    """The effective receptive field of each layer."""
    (record,) = rows
    assert record.field_maps is not None
    return draw_maps(record.receptive_fields, record.field_maps)


def positions(rows: Sequence[AttentionRecord], _: str) -> Figure:
    """The similarity of each position embedding with all others."""
    (record,) = rows
    assert record.positions is not None
    return position_maps(similarity=record.positions.similarity, grid=record.layout[0].grid)


def patches(rows: Sequence[AttentionRecord], _: str) -> Figure:
    """The first image cut into patches."""
    (record,) = rows
    return patch_grid(image=pixels(record)[0], patch_size=record.layout[0].patch_size)


def view_charts(view: str, words: str) -> Iterator[Chart]:
    """The mean of heads, and the chosen head in the layers that have it."""
    for head, name in ((False, "mean of heads"), (True, "head {{ record.options.head[1] }}")):
        place = f"row {{{{ record.{view}[0].row }}}}, column {{{{ record.{view}[0].column }}}}"
        yield Chart(
            f"{view}_head" if head else view,
            partial(view_figure, view, head),
            f"Attention {words} the outlined patch, layer by layer ({name}), on the first images. All panels share one "
            "colour scale; layers without the head are left out.",
            title=f"Attention {words} the patch in {place}, {name}",
            rows=partial(has_view, view, head),
        )
