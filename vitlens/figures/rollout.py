"""Attention rollout by fusion of heads, and several attention methods side by side."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import as_array
from vitlens.figures.overlay import Scale
from vitlens.figures.overlays import overlay_rows

_PERCENT = Scale(0.0, 100.0)


def rollout_overlays(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    titles: Sequence[str],
    names: Sequence[str] | None = None,
    masks: ArrayLike | None = None,
    hits: ArrayLike | None = None,
    title: str = "Attention rollout",
    failed: Sequence[str] | None = None,
) -> Figure:
    """Input and rollout for each fusion of heads, as shares of its largest value, on images (batch, 3, height, width).

    maps: (batch, fusions, rows, columns), not negative; titles: the fusions ("mean", "max", "min"); names: one per
    image; masks: (batch, height, width), outlined; hits: (batch, fusions), the pointing game's result, marked;
    failed: why the maps of a fusion say nothing, "" where they do. The fusions leave very different amounts of
    the readout's row on the patches, so that one scale of the weights would leave some of them blank. Errors as
    overlay_rows; raises InputError also for a negative value.
    """
    return _shares(f"{title} by fusion of heads", images, maps, titles, names, masks, hits, failed)


def method_overlays(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    titles: Sequence[str],
    names: Sequence[str] | None = None,
    masks: ArrayLike | None = None,
    hits: ArrayLike | None = None,
    failed: Sequence[str] | None = None,
) -> Figure:
    """Input and maps of several methods, as shares of their largest values, on images (batch, 3, height, width).

    maps: (batch, methods, rows, columns), not negative, raw; titles: the methods; the rest and the errors as
    rollout_overlays.
    """
    return _shares("Attention maps by method", images, maps, titles, names, masks, hits, failed)


def _shares(
    title: str,
    images: ArrayLike,
    maps: ArrayLike,
    titles: Sequence[str],
    names: Sequence[str] | None,
    masks: ArrayLike | None,
    hits: ArrayLike | None,
    failed: Sequence[str] | None,
) -> Figure:
    values = as_array(maps, name="maps", axes=("batch", "panels", "rows", "columns"))
    if values.min() < -1e-6 * np.abs(values).max():
        raise InputError(f"expected maps without negative values, found {values.min():.3g}")
    greatest = values.max((2, 3), keepdims=True)
    outlined = "; outline: the object" if masks is not None else ""
    pointing = "; mark: the map's highest point" if hits is not None else ""
    return overlay_rows(
        images=images,
        maps=100 * values / np.where(greatest > 0, greatest, 1.0),
        titles=titles,
        title=f"{title}, share of each map's largest value{outlined}{pointing}",
        label="% of its maximum",
        names=names,
        masks=masks,
        hits=hits,
        scale=_PERCENT,
        failed=failed,
    )
