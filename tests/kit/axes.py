"""Read a figure in tests: as pixels, and as the boxes of its texts."""

from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text


def drawn(figure: Figure) -> FigureCanvasAgg:
    """Return the figure's canvas, drawn once and again only after a change."""
    if not isinstance(figure.canvas, FigureCanvasAgg):
        FigureCanvasAgg(figure)
        figure.stale = True
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    if figure.stale or not hasattr(canvas, "renderer"):
        canvas.draw()
        figure.stale = False
    return canvas


def pixels(figure: Figure) -> np.ndarray:
    """Return the figure drawn, (height, width, 3) in [0, 1]."""
    return np.asarray(drawn(figure).buffer_rgba())[..., :3] / 255


def shown(figure: Figure) -> list[Axes]:
    """Return the panels of pictures and maps, without a colour bar's."""
    return [axes for axes in figure.axes if axes.images]


def array(axes: Axes) -> np.ndarray:
    """Return the numbers of a panel's picture."""
    return np.asarray(axes.images[0].get_array())


def texts(figure: Figure) -> list[str]:
    """Return all visible texts of the figure."""
    return [text.get_text() for text in _visible(figure)]


def cut_off(figure: Figure) -> list[str]:
    """Return the texts that do not lie wholly inside the figure."""
    renderer = drawn(figure).get_renderer()
    width = figure.bbox.width
    height = figure.bbox.height
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in _visible(figure)]
    outside = []
    for word, box in boxes:
        is_left_or_below = min(box.x0, box.y0) < -0.5
        if is_left_or_below or box.x1 > width + 0.5 or box.y1 > height + 0.5:
            outside.append(word)
    return outside


def crosses(axes: Axes) -> list[Line2D]:
    """Return the diagonals that cross a panel out."""
    return [line for line in axes.lines if line.get_gid() == "crossed out"]


def overlapping(figure: Figure) -> bool:
    """Return True if any two panels, a colour bar among them, cover each other."""
    boxes = [axes.get_position() for axes in figure.axes]
    pairs = combinations(boxes, 2)
    return any(
        min(one.x1, other.x1) - max(one.x0, other.x0) > 1e-6
        and min(one.y1, other.y1) - max(one.y0, other.y0) > 1e-6
        for one, other in pairs
    )


def _visible(figure: Figure) -> list[Text]:
    drawn(figure)
    unseen = set()
    for axes in figure.axes:
        unseen |= {id(text) for text in _unseen_ticks(axes)}
    matches = figure.findobj(
        lambda artist: isinstance(artist, Text) and bool(artist.get_text().strip())
    )
    return [text for text in matches if text.get_visible() and id(text) not in unseen]


def _unseen_ticks(axes: Axes) -> list[Text]:
    """Return labels that matplotlib has but does not draw.

    They lie beyond the ends of an axis, or belong to one that is switched off.
    """
    labels = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        room = 1e-9 * (high - low)
        for tick in (*axis.majorTicks, *axis.minorTicks):
            if not axes.axison or not low - room <= tick.get_loc() <= high + room:
                labels += [tick.label1, tick.label2]
    return labels
