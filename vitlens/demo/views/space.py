"""3D: the attention of every head in space, a floor a layer, a plane of patches a head."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.attention.weights import attention_maps
from vitlens.charts.space import across, colours_of, middles, outlines, strengths, ticks
from vitlens.demo.limits import POINTS
from vitlens.demo.pictures import Picture
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import require

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_BELOW: Final = {"orientation": "h", "y": 0.0, "yanchor": "bottom", "x": 0.5}  # the colour bar
_BAR: Final = 0.16  # of the height, for the colour bar
_SMALLEST: Final = 2.5  # px of a marker
_LARGEST: Final = 11.0


@dataclass(frozen=True)
class Space:
    """The strongest points of all. layer, head, row, column: (points,) integers; share: of the attention of the query
    that is read, relative to a uniform map (1: uniform); total: the points that there were; reading: that query;
    grid: rows and columns of a head's plane in the last layer."""

    alias: str
    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    share: NDArray[np.float64]
    total: int
    reading: str
    grid: tuple[int, int]


def space_of(model: Model, picture: Picture, *, share: float = 1.0, most: int = POINTS) -> Space:
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
        layer = np.full(values.size, each.site.layer)
        parts.append((layer, *index, values.ravel() * values[0].size))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    strength = columns[4]
    count = min(most, max(1, round(share * len(strength))))
    kept = np.sort(np.argsort(-strength, kind="stable")[:count])
    layer, head, row, column = (each[kept].astype(np.int64) for each in columns[:4])
    grid = int(maps[-1].maps.shape[-2]), int(maps[-1].maps.shape[-1])
    return Space(model.alias, layer, head, row, column, strength[kept], len(strength), maps[-1].reading, grid)


def space_words(space: Space) -> str:
    """What is shown, and where most attention lies, in words."""
    best = int(np.argmax(space.share))
    left_out = (
        f" Of {space.total:,} points the {len(space.share):,} strongest are shown."
        if space.total > len(space.share)
        else ""
    )
    return (
        f"Each point is a patch that {space.reading} attends to, of {space.alias}: a floor a layer (L0 below), a plane "
        f"of patches a head; larger and brighter is more attention, 1 that of a uniform map.{left_out} The strongest "
        f"is L{space.layer[best]}.H{space.head[best]} at row {space.row[best]}, column {space.column[best]}: "
        f"{space.share[best]:.1f} times uniform."
    )


def space_figure(space: Space) -> "Figure":
    """The plotly figure; its colours hold on light and on dark ground."""
    from plotly import graph_objects

    rows = space.grid[0]
    heads = int(space.head.max()) + 1
    powers, names = (each[::2] for each in ticks(space.share))  # every other one is legible on a narrow page
    points = graph_objects.Scatter3d(
        x=across(space.head, space.column, space.grid),
        y=rows - 1 - space.row,
        z=space.layer,
        mode="markers",
        marker={
            "size": _SMALLEST + (_LARGEST - _SMALLEST) * strengths(space.share),
            "color": colours_of(space.share),
            "colorscale": "Viridis",
            "opacity": 0.8,
            "colorbar": {
                "title": {"text": "× uniform"},
                "tickvals": powers,
                "ticktext": names,
                "tickangle": 0,
                "thickness": 12,
                "len": 0.7,
                **_BELOW,
            },
            "line": {"width": 0},
        },
        customdata=np.stack([space.layer, space.head, space.row, space.column, space.share], -1),
        hovertemplate="L%{customdata[0]}.H%{customdata[1]}, row %{customdata[2]}, column %{customdata[3]}: "
        "%{customdata[4]:.2f} × uniform<extra></extra>",
    )
    layers = sorted(set(space.layer.tolist()))
    quiet: dict[str, Any] = {"showbackground": False, "zeroline": False, "showgrid": False}
    x, y, z = outlines(layers, heads, space.grid)
    planes = graph_objects.Scatter3d(
        x=x, y=y, z=z, mode="lines", hoverinfo="skip", line={"color": "#8a8a8a", "width": 1}
    )
    figure = graph_objects.Figure([planes, points])
    figure.update_layout(
        showlegend=False,
        margin={"l": 0, "r": 0, "t": 0, "b": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        font={"color": "#8a8a8a"},
        scene={
            "xaxis": {
                **quiet,
                "title": {"text": "head"},
                "tickvals": middles(heads, space.grid),
                "ticktext": [f"H{head}" for head in range(heads)],
            },
            "yaxis": {**quiet, "title": {"text": "row"}, "showticklabels": False},
            "zaxis": {**quiet, "title": {"text": "layer"}, "tickvals": layers, "ticktext": [f"L{n}" for n in layers]},
            "domain": {"y": [_BAR, 1.0]},
            "aspectmode": "manual",
            "aspectratio": {"x": 1.6, "y": 0.7, "z": 1.1},
            "camera": {"eye": {"x": 0.85, "y": -2.5, "z": 1.1}, "center": {"x": 0.0, "y": 0.0, "z": -0.15}},
        },
    )
    return figure
