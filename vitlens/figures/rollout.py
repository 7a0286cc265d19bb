"""Attention rollout on its images, one panel for each way of fusing heads."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from numpy.typing import ArrayLike

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
    """Input and rollout for each way of fusing heads: images (batch, 3, height, width) in [0, 1].

    maps: (batch, fusions, rows, columns), rows of the rollout as fractions; titles: the fusions ("mean", "max",
    "min"); names: one an image; masks: (batch, height, width), outlined; hits: (batch, fusions), the pointing game's
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
