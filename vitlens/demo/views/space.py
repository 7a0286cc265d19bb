"""3D: the attention of every head in space, a floor a layer, a plane of patches a head; free of plotly but for a figure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.attention.weights import attention_maps
from vitlens.demo.limits import POINTS
from vitlens.demo.pictures import Picture
from vitlens.models.model import Model
from vitlens.models.support import require

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_GAP: Final = 0.15  # between planes, as a share of a plane's side
_LARGEST: Final = 9.0  # px of a marker


@dataclass(frozen=True)
class Space:
    """The strongest points of all. layer, head, row, column: (points,) integers; share: of the attention of the query
    that is read, relative to a uniform map (1: uniform); total: the points that there were; reading: that query."""

    alias: str
    layer: NDArray[np.int64]
    head: NDArray[np.int64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    share: NDArray[np.float64]
    total: int
    reading: str


def space_of(model: Model, picture: Picture, *, most: int = POINTS) -> Space:
    """Where every head of every layer looks; of more than `most` points the strongest ones.

    Raises UnsupportedError for a model without attention that is a map of the image.
    """
    require(model, "maps")
    maps = attention_maps(model, picture.images(model))
    parts = []
    for each in maps:
        values = each.maps[0].double().cpu().numpy()  # (heads, rows, columns)
        index = np.indices(values.shape).reshape(3, -1)
        layer = np.full(values.size, each.site.layer)
        parts.append((layer, *index, values.ravel() * values[0].size))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    share = columns[4]
    kept = np.sort(np.argsort(-share, kind="stable")[:most])
    layer, head, row, column = (each[kept].astype(np.int64) for each in columns[:4])
    return Space(model.alias, layer, head, row, column, share[kept], len(share), maps[-1].reading)


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
        f"of patches a head; larger and brighter is more attention, 1 that of a uniform map.{left_out} The strongest is "
        f"L{space.layer[best]}.H{space.head[best]} at row {space.row[best]}, column {space.column[best]}: "
        f"{space.share[best]:.1f} times uniform."
    )


def space_figure(space: Space) -> "Figure":
    """The plotly figure; its colours hold on light and on dark ground."""
    from plotly import graph_objects

    rows, columns = int(space.row.max()) + 1, int(space.column.max()) + 1
    heads = int(space.head.max()) + 1
    strength = np.sqrt(np.clip(space.share / max(float(space.share.max()), 1e-12), 0, 1))
    across = space.head * (1 + _GAP) * columns + space.column
    points = graph_objects.Scatter3d(
        x=across,
        y=rows - 1 - space.row,
        z=space.layer,
        mode="markers",
        marker={
            "size": 1.5 + (_LARGEST - 1.5) * strength,
            "color": np.log2(np.maximum(space.share, 2.0**-6)),
            "colorscale": "Viridis",
            "opacity": 0.8,
            "colorbar": {"title": {"text": "× uniform"}, **_ticks(space.share), "thickness": 12, "len": 0.6},
            "line": {"width": 0},
        },
        customdata=np.stack([space.layer, space.head, space.row, space.column, space.share], -1),
        hovertemplate="L%{customdata[0]}.H%{customdata[1]}, row %{customdata[2]}, column %{customdata[3]}: "
        "%{customdata[4]:.2f} × uniform<extra></extra>",
    )
    middles = [(head * (1 + _GAP) + 0.5) * columns for head in range(heads)]
    layers = sorted(set(space.layer.tolist()))
    quiet: dict[str, Any] = {"showbackground": False, "zeroline": False, "showgrid": False}
    figure = graph_objects.Figure(points)
    figure.update_layout(
        height=620,
        margin={"l": 0, "r": 0, "t": 0, "b": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        font={"color": "#8a8a8a"},
        scene={
            "xaxis": {**quiet, "title": {"text": "head"}, "tickvals": middles, "ticktext": [f"H{n}" for n in range(heads)]},
            "yaxis": {**quiet, "title": {"text": "row"}, "showticklabels": False},
            "zaxis": {**quiet, "title": {"text": "layer"}, "tickvals": layers, "ticktext": [f"L{n}" for n in layers]},
            "aspectmode": "manual",
            "aspectratio": {"x": 1.6, "y": 0.7, "z": 1.1},
            "camera": {"eye": {"x": 0.9, "y": -1.9, "z": 0.7}},
        },
    )
    return figure


def _ticks(share: NDArray[np.float64]) -> dict[str, list[Any]]:
    """Ticks of the colours, at powers of 4."""
    top = int(np.ceil(np.log2(max(float(share.max()), 1.0))))
    powers = list(range(-6, top + 1, 2))
    return {"tickvals": powers, "ticktext": [f"{2.0**power:.3g}" for power in powers]}
