"""The kinds of chart that all reports share; each takes rows and the names of their columns.

    intervals   a dot with its interval for each row          (plots)
    lines       curves over one column                        (plots)
    scatter     points of two columns                         (plots)
    bars        counts or shares by name                      (plots)
    board       maps of layers by heads                       (grids)
    matrix      a cell for each pair of two columns           (grids)
    images      images, with maps over them or without        (pictures)

Each is called with its columns and gives a function from rows and a title to a Figure, which
`Chart` holds. What none of them draws has a function of its own: features, walkthrough and windows.
"""

from vitlens.charts.grids import board, matrix
from vitlens.charts.pictures import Picture, amplification, images, pixels
from vitlens.charts.plots import bars, intervals, lines, scatter

__all__ = [
    "Picture",
    "amplification",
    "bars",
    "board",
    "images",
    "intervals",
    "lines",
    "matrix",
    "pixels",
    "scatter",
]
