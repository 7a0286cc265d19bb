"""Maps that say nothing, crossed out."""

from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from vitlens.figures.style import SMALL, VERMILLION

_PLATE: Final[dict[str, Any]] = {"facecolor": "white", "alpha": 0.85, "linewidth": 0.0, "pad": 1.5}


def cross_out(axes: Axes, reason: str = "") -> None:
    """Draw two diagonals over a panel that shows an image, and the reason in a few words in its middle."""
    for ends in ((0.0, 1.0), (1.0, 0.0)):
        (line,) = axes.plot((0.02, 0.98), [0.02 + 0.96 * end for end in ends], transform=axes.transAxes)
        line.set(color=VERMILLION, linewidth=1.1, solid_capstyle="butt", gid="crossed out")
        line.set_path_effects([withStroke(linewidth=2.0, foreground="white")])
    if reason:
        axes.text(
            0.5, 0.5, reason, fontsize=SMALL, ha="center", va="center", transform=axes.transAxes, bbox=_PLATE, zorder=5
        )
