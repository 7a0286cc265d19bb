"""3D: the attention of every head in space, a floor a layer, a plane of patches a head."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.attention.weights import attention_maps
from vitlens.charts.space import across, colours_of, middles, outlines, strengths, ticks
from vitlens.commands.run.options import RunOptions
from vitlens.demo.limits import POINTS
from vitlens.demo.markup import joined, said, sentence
from vitlens.demo.pictures import Picture
from vitlens.demo.record import DemoRecord, PointArrays, PointRow, SpaceRow
from vitlens.demo.report import claims, left_out
from vitlens.demo.site import Asked, Export, Here, TabParts, Updates, open_slider
from vitlens.demo.tabs.intervene import write_record
from vitlens.demo.tabs.look import LACKING
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.model import Model
from vitlens.models.support import require
from vitlens.report.prose import say

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SHARE: Final = 25  # % of the points at first: of all of them, those in front hide the others
_STRONGEST: Final = 8  # points in the table
_BAR: Final = 0.16  # of the height, for the colour bar
_SIZES: Final = (2.5, 11.0)  # px of a marker


def space_of(model: Model, picture: Picture, *, share: float = 1.0, most: int = POINTS) -> DemoRecord:
    """Where every head of every layer looks: the strongest `share` of all points, at most `most`.

    Raises UnsupportedError for a model without attention that is a map of the image, InputError for a share outside
    0 to 1.
    """
    if not 0 < share <= 1:
        raise InputError(f"expected a share of points above 0 and at most 1, found {share:g}")
    require(model, "maps")
    maps = attention_maps(model, picture.images(model))
    parts = []
    for each in maps:
        values = each.maps[0].double().cpu().numpy()  # (heads, rows, columns)
        index = np.indices(values.shape).reshape(3, -1)
        parts.append((np.full(values.size, each.site.layer), *index, values.ravel() * values[0].size))
    layer, head, row, column, strength = (np.concatenate(values) for values in zip(*parts, strict=True))
    count = min(most, max(1, round(share * len(strength))))
    order = np.argsort(-strength, kind="stable")
    kept, first = np.sort(order[:count]), order[: min(count, _STRONGEST)]
    strongest = tuple(
        PointRow(int(layer[at]), int(head[at]), int(row[at]), int(column[at]), float(strength[at])) for at in first
    )
    grid = int(maps[-1].maps.shape[-2]), int(maps[-1].maps.shape[-1])
    return DemoRecord(
        space=(SpaceRow(model.alias, picture.name, maps[-1].reading, len(strength), count, grid),),
        strongest=strongest,
        points=PointArrays(layer[kept], head[kept], row[kept], column[kept], strength[kept].astype(np.float32)),
    )


def space_html(record: DemoRecord) -> str:
    """What is shown, and where most attention lies, in words."""
    (row,), (claim,) = record.space, claims(record)
    words = say(
        "Each point is a patch that {{ row.reading|whole }} attends to, of {{ row.model }}: a floor a layer (the first "
        "one below), a plane of patches a head; larger and brighter is more attention.", row=row,
    )  # fmt: skip
    return joined(said(" ".join([words, *left_out(row), claim.says])))


def space_figure(record: DemoRecord) -> "Figure":
    """The plotly figure; its colours hold on light and on dark ground."""
    from plotly import graph_objects

    (row,), found = record.space, record.points
    assert found is not None
    rows, heads = row.grid[0], int(found.head.max()) + 1
    powers, names = (each[::2] for each in ticks(found.share))  # every other one is legible on a narrow page
    bar = {
        "title": {"text": "× uniform"}, "tickvals": powers, "ticktext": names, "tickangle": 0, "thickness": 12,
        "len": 0.7, "orientation": "h", "y": 0.0, "yanchor": "bottom", "x": 0.5,
    }  # fmt: skip
    points = graph_objects.Scatter3d(
        x=across(found.head, found.column, row.grid), y=rows - 1 - found.row, z=found.layer, mode="markers",
        marker={
            "size": _SIZES[0] + (_SIZES[1] - _SIZES[0]) * strengths(found.share), "line": {"width": 0},
            "color": colours_of(found.share), "colorscale": "Viridis", "opacity": 0.8, "colorbar": bar,
        },
        customdata=np.stack([found.layer, found.head, found.row, found.column, found.share], -1),
        hovertemplate="L%{customdata[0]}.H%{customdata[1]}, row %{customdata[2]}, column %{customdata[3]}: "
        "%{customdata[4]:.2f} × uniform<extra></extra>",
    )  # fmt: skip
    layers = sorted(set(found.layer.tolist()))
    quiet: dict[str, Any] = {"showbackground": False, "zeroline": False, "showgrid": False}
    x, y, z = outlines(layers, heads, row.grid)
    planes = graph_objects.Scatter3d(
        x=x, y=y, z=z, mode="lines", hoverinfo="skip", line={"color": "#8a8a8a", "width": 1}
    )
    figure = graph_objects.Figure([planes, points])
    named = {"tickvals": middles(heads, row.grid), "ticktext": [f"H{head}" for head in range(heads)]}
    scene = {
        "xaxis": {**quiet, "title": {"text": "head"}, **named},
        "yaxis": {**quiet, "title": {"text": "row"}, "showticklabels": False},
        "zaxis": {**quiet, "title": {"text": "layer"}, "tickvals": layers, "ticktext": [f"L{n}" for n in layers]},
        "domain": {"y": [_BAR, 1.0]}, "aspectmode": "manual", "aspectratio": {"x": 1.6, "y": 0.7, "z": 1.1},
        "camera": {"eye": {"x": 0.85, "y": -2.5, "z": 1.1}, "center": {"x": 0.0, "y": 0.0, "z": -0.15}},
    }  # fmt: skip
    figure.update_layout(
        showlegend=False, margin={"l": 0, "r": 0, "t": 0, "b": 0}, paper_bgcolor="rgba(0,0,0,0)",
        font={"color": "#8a8a8a"}, scene=scene,
    )  # fmt: skip
    return figure


def write_space(models: tuple[Model, ...], picture: Picture, run: RunOptions, *, share: float) -> Path:
    """The report of the attention of all heads in space. Raises what the tab raises."""
    (model,) = models
    return write_record(space_of(model, picture, share=share), model, picture, run)


def space_tab(here: Here) -> TabParts:
    """The attention of all layers and heads in space."""
    import gradio

    share = open_slider(
        1, 100, value=_SHARE, step=1, label="Share of all points that is shown, the strongest first, in %",
        elem_id="space-share",
    )  # fmt: skip
    words = gradio.HTML(elem_id="space-words")
    done = gradio.State(())  # the share of the points that are shown
    plot = gradio.Plot(elem_id="space-plot", label="Attention by layer, head and patch", show_label=False)
    outputs = (words, plot, done)

    def refresh(now: Asked, percent: float) -> Updates:
        with here.turn(now) as (model,):
            try:
                space = space_of(model, now.picture, share=percent / 100)
            except UnsupportedError as error:
                lacks = joined(said(say("{{ error|whole }}.", error=error)), sentence(LACKING, "quiet"))
                return {words: lacks, plot: gradio.Plot(visible=False), done: 1.0}
        return {words: space_html(space), plot: gradio.Plot(space_figure(space), visible=True), done: percent / 100}

    def export(alias: str, of: float) -> Export:
        return Export((alias,), partial(write_space, share=of))

    here.on(share.release, refresh, (share,), outputs)
    return TabParts(here.tab, (share,), outputs, refresh, "space", export, done)
