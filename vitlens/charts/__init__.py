"""The kinds of chart that all reports share; each takes rows and the names of their columns.

    intervals   a dot with its interval for each row          (plots)
    lines       curves over one column                        (plots)
    scatter     points of two columns                         (plots)
    bars        counts or shares by name                      (plots)
    board       maps of layers by heads                       (grids)
    matrix      a cell for each pair of two columns           (grids)
    images      images, with maps over them or without        (image_chart)

Each is called with the names of its columns and returns a function of rows and a title, which draws
a Figure. `Chart` (report/sections.py) holds this function. Figures that are no such chart have a
function each, in layers, features, walkthrough and windows.
"""

from vitlens.charts.grids import board, matrix
from vitlens.charts.image_chart import images
from vitlens.charts.pictures import Picture, amplification, pixels
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
