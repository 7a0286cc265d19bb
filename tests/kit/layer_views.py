"""Layers of which everything is known, with long names, and the picture of them."""

import numpy as np
from matplotlib.figure import Figure

from vitlens.charts.layer_views import Exemplar, HeadView, LayerView, RoleView
from vitlens.charts.layers import layers
from vitlens.charts.style import of_width
from vitlens.names import FigureWidth
from vitlens.uncertainty import Estimate

IMAGE = np.random.default_rng(0).random((3, 32, 32))
LONG = "German short-haired pointer and American black bear"


def views(count: int, heads: int) -> list[LayerView]:
    """Return views of so many layers with long names, in which everything is known."""
    random = np.random.default_rng(1)
    rows = []
    for layer in range(count):
        head_views = []
        for head in random.permutation(heads).tolist():
            lost = float(random.normal())
            estimate = Estimate(lost, lost - 1, lost + 1, 200, "points")
            head_views.append(
                HeadView(head, random.random((8, 8)), float(random.random()), estimate, lost > 1)
            )
        exemplars = (Exemplar(IMAGE, (7, 7), (8, 8)), Exemplar(IMAGE))
        role = RoleView(
            head_views[0].head, (LONG, "tench"), f"needed most for {LONG}", True, exemplars
        )
        stage = "early" if layer < count / 2 else "late"
        rows.append(
            LayerView(layer, stage, tuple(head_views), Estimate(layer / count, 0.0, 1.0, 64), role)
        )
    return rows


def drawn(rows: list[LayerView], width: FigureWidth = "page") -> Figure:
    with of_width(width):
        return layers(rows, IMAGE, 0.1, f"How {LONG} works, layer by layer")
