"""Attention rollout by fusion of heads, and several attention methods side by side."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from vitlens.errors import InputError
from vitlens.figures.inputs import as_array
from vitlens.figures.overlay import Scale
from vitlens.figures.overlays import overlay_rows


def rollout_overlays(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    titles: Sequence[str],
    names: Sequence[str] | None = None,
    masks: ArrayLike | None = None,
    hits: ArrayLike | None = None,
    scale: Scale | None = None,
    title: str = "Attention rollout",
) -> Figure:
    """Input and rollout for each fusion of heads: images (batch, 3, height, width) in [0, 1].

    maps: (batch, fusions, rows, columns), rows of the rollout as fractions; titles: the fusions ("mean", "max",
    "min"); names: one per image; masks: (batch, height, width), outlined; hits: (batch, fusions), the pointing game's
    result, marked; scale: in %. Errors as overlay_rows.
    """
    values = 100 * as_array(maps, name="maps", axes=("batch", "fusions", "rows", "columns"))
    outlined = "; outline: the object" if masks is not None else ""
    pointing = "; mark: the map's highest point" if hits is not None else ""
    return overlay_rows(
        images=images,
        maps=values,
        titles=titles,
        title=f"{title} by fusion of heads, share of each patch{outlined}{pointing}",
        label="rollout (%)",
        names=names,
        masks=masks,
        hits=hits,
        scale=scale,
    )


def method_overlays(
    *,
    images: ArrayLike,
    maps: ArrayLike,
    titles: Sequence[str],
    names: Sequence[str] | None = None,
    masks: ArrayLike | None = None,
    hits: ArrayLike | None = None,
    scale: Scale | None = None,
) -> Figure:
    """Input and the maps of several methods, each as shares of its own sum: images (batch, 3, height, width) in [0, 1].

    maps: (batch, methods, rows, columns), not negative, raw; the caption of one that is zero everywhere says so.
    titles: the methods; the rest and the errors as rollout_overlays; raises InputError also for a negative value.
    """
    values = as_array(maps, name="maps", axes=("batch", "methods", "rows", "columns"))
    if values.min() < -1e-6 * np.abs(values).max():
        raise InputError(f"expected maps without negative values, found {values.min():.3g}")
    sums = values.sum((2, 3), keepdims=True)
    outlined = "; outline: the object" if masks is not None else ""
    pointing = "; mark: the map's highest point" if hits is not None else ""
    return overlay_rows(
        images=images,
        maps=100 * values / np.where(sums > 0, sums, 1.0),
        titles=titles,
        title=f"Attention maps by method, share of each map's sum{outlined}{pointing}",
        label="share of the map (%)",
        names=names,
        masks=masks,
        hits=hits,
        scale=scale,
    )
