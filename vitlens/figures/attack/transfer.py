"""Transfer of adversarial images between models as a matrix."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.gaps import as_array_with_gaps, no_value_patch
from vitlens.figures.inputs import as_array, require_length
from vitlens.figures.overlay import Scale, colour_bar
from vitlens.figures.style import COUNTS, heading, sheet, shortened, styled

_PERCENT = Scale(0.0, 100.0)


@styled
def transfer_matrix(
    *, rates: ArrayLike, clean: ArrayLike, counts: ArrayLike, names: Sequence[str], title: str
) -> Figure:
    """Of the images that fool the source (row), the share (%) that fool the target (column); clean accuracies.

    rates: (models, models), fractions, NaN where there is no such image; counts: (models, models), the number of images
    of each; clean: (models,), fractions. Raises InputError when shapes do not fit.
    """
    values = 100 * as_array_with_gaps(rates, name="rates", axes=("sources", "targets"))
    accuracy = 100 * as_array(clean, name="clean accuracy", axes=("models",))
    images = as_array(counts, name="counts", axes=("sources", "targets"))
    count = len(names)
    if values.shape != (count, count):
        raise InputError(f"expected rates of shape ({count}, {count}), found {values.shape}")
    if images.shape != values.shape:
        raise InputError(f"expected counts of shape ({count}, {count}), found {images.shape}")
    require_length(len(accuracy), count, name="clean accuracies", of="the models")
    figure = sheet(2.6 + 0.75 * count, 1.5 + 0.55 * count)
    axes, bar = figure.subplots(1, 2, width_ratios=[1, 0.05])
    axes.add_patch(no_value_patch((-0.5, -0.5), float(count), float(count), zorder=0))
    axes.imshow(np.ma.masked_invalid(values), cmap=COUNTS, norm=_PERCENT.norm, aspect="auto", zorder=1)
    for row in range(count):
        for column in range(count):
            if not np.isnan(values[row, column]):
                ink = "white" if values[row, column] > 60 else "black"
                text = f"{values[row, column]:.0f} %\nof {images[row, column]:.0f}"
                axes.text(column, row, text, ha="center", va="center", color=ink)
    short = [shortened(name, 16) for name in names]
    axes.set_xticks(range(count), [f"{name}\nclean {value:.0f} %" for name, value in zip(short, accuracy)])
    axes.set_yticks(range(count), short)
    axes.set(xlabel="shown to", ylabel="made for")
    colour_bar(bar, scale=_PERCENT, label="fooled (%)", colours=COUNTS)
    heading(figure, title)
    return figure
