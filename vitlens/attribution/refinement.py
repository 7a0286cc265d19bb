"""Refinement of maps: by attention between patches, views, another map, or the image's edges.

A view is the image shifted by half a patch, or mirrored. It shows the same content at another place
of the patch grid. So the mean of the maps, each moved back, is finer than the grid: it has twice as
many cells a side.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.affinity import affinity, refine_maps, require_affinity
from vitlens.analysis.attention.registry import REFINE_STEPS
from vitlens.analysis.faithfulness.maps import AnyMaps, enlarge_maps, removal_grid
from vitlens.attribution.registry import ATTRIBUTIONS, attribution
from vitlens.errors import InputError, UnknownNameError, UnsupportedError, argument
from vitlens.models.model import Model
from vitlens.names import REFINEMENTS, UPSAMPLINGS, Refining, Upsampling
from vitlens.shapes import Images

MapsOf = Callable[[Images, str], AnyMaps]  # the maps of images by the method of this name
# the regularisation of the guided filter: a region counts as flat if the variance of a colour, from
# 0 to 1, is below it
_EDGES = 1e-2


class View(NamedTuple):
    """A view of an image: the content is shifted, then mirrored or not.

    up, left: the shift in half patches, 0 or 1.
    """

    up: int
    left: int
    is_mirrored: bool


# diagonal shifts come first: with two views, both axes gain
VIEWS: Final = (
    View(0, 0, is_mirrored=False),
    View(1, 1, is_mirrored=False),
    View(1, 0, is_mirrored=False),
    View(0, 1, is_mirrored=False),
    View(0, 0, is_mirrored=True),
    View(1, 1, is_mirrored=True),
    View(1, 0, is_mirrored=True),
    View(0, 1, is_mirrored=True),
)


@dataclass(frozen=True)
class Refinement:
    """The refinement of a method's maps; by default none.

    refine: "affinity" spreads a map by the attention between patches (affinity.py).
    layers: the layers of this attention (None: all).
    steps: how many times it is applied, an even number.
    times: another method: the result is the product of both maps. Each is refined in the same way,
        loses its negative values and is divided by its mean.
    views: the number of shifted and mirrored views that are averaged (VIEWS).
    upsample: "image" enlarges to the pixels of the image by a filter that follows its edges.

    Raises InputError and UnknownNameError.

    >>> import vitlens
    >>> vitlens.Refinement(refine="affinity", views=2).words
    'refined by attention between patches (2 steps), mean of 2 views'
    """

    refine: Refining = "none"
    layers: tuple[int, ...] | None = None
    steps: int = REFINE_STEPS
    times: str | None = None
    views: int = 1
    upsample: Upsampling = "none"

    def __post_init__(self) -> None:
        if self.refine not in REFINEMENTS:
            raise UnknownNameError("refinement", self.refine, REFINEMENTS)
        if self.upsample not in UPSAMPLINGS:
            raise UnknownNameError("upsampling", self.upsample, UPSAMPLINGS)
        if self.times is not None:
            attribution(self.times)
        if self.layers is not None and self.refine == "none":
            layers = argument("layers", flag="refine-layers")
            refine = argument("refine", "affinity")
            raise InputError(
                f"expected {refine} with {layers}, found no {argument('refine')}; add it"
            )
        if self.steps < 0 or self.steps % 2:
            raise InputError(
                "expected an even number of steps (an odd one may exchange object and "
                f"background), found {self.steps}"
            )
        if not 1 <= self.views <= len(VIEWS):
            raise InputError(f"expected 1 to {len(VIEWS)} views, found {self.views}")

    @property
    def changes(self) -> bool:
        """Return True if maps are changed."""
        return self != Refinement(steps=self.steps)  # steps mean nothing without `refine`

    @property
    def words(self) -> str:
        """Return the refinement in words, for a caption; "" for none.

        For example "refined by attention between patches, mean of 2 views".
        """
        parts = list[str]()
        if self.times is not None:
            parts.append(f"times {attribution(self.times).title}")
        if self.refine == "affinity" and self.steps:
            of_layers = ""
            if self.layers is not None:
                of_layers = f" of layers {', '.join(map(str, self.layers))}"
            parts.append(f"refined by attention between patches{of_layers} ({self.steps} steps)")
        if self.views > 1:
            parts.append(f"mean of {self.views} views")
        if self.upsample == "image":
            parts.append("enlarged along the image's edges")
        return ", ".join(parts)


def require_refinement(model: Model, method: str, refinement: Refinement) -> None:
    """Raise UnsupportedError if this model, or this method's maps, cannot be refined this way.

    Raises InputError for a layer that the model does not have, and for a method times itself.
    """
    if method == refinement.times:
        raise InputError(
            f"expected another method for {argument('times')} than {method}, found the same"
        )
    if refinement.refine == "none":
        return
    require_affinity(model, refinement.layers)
    names = [method]
    if refinement.times:
        names.append(refinement.times)
    for name in names:
        if refinable(name):
            continue
        reason = "refined already; use it as it is"
        if attribution(name).resolution == "pixel":
            reason = f"a map of pixels; use {argument('views')}"
        raise UnsupportedError(
            f"expected a map of patches for {argument('refine', 'affinity')}, found {name}, "
            f"{reason}, or one of {', '.join(filter(refinable, ATTRIBUTIONS))}"
        )


def applies(model: Model, method: str, refinement: Refinement) -> bool:
    """Return True if this model and this method's maps can be refined this way.

    Raises InputError for a layer that the model does not have.
    """
    if method == refinement.times:
        return False
    with suppress(UnsupportedError):
        require_refinement(model, method, refinement)
        return True
    return False


def refinable(method: str) -> bool:
    """Return True if attention between patches can refine a method's maps.

    They must have one value a patch, and not be refined already.
    """
    entry = attribution(method)
    return entry.resolution == "patch" and not entry.refined


def refined_maps(
    model: Model, images: Images, maps_of: MapsOf, method: str, refinement: Refinement
) -> AnyMaps:
    """Return the maps of a method on images (or views of them), refined."""

    def refine_view(view: Images) -> AnyMaps:
        similarity = None
        if refinement.refine == "affinity":
            similarity = affinity(model, view, layers=refinement.layers)

        def refine_method(name: str) -> AnyMaps:
            maps = maps_of(view, name)
            if similarity is None:
                return maps
            return refine_maps(maps, similarity, steps=refinement.steps)

        if refinement.times is None:
            return refine_method(method)
        return product(refine_method(method), refine_method(refinement.times))

    maps = over_views(refine_view, images, views=refinement.views, cells=removal_grid(model))
    if refinement.upsample == "image":
        return along_edges(maps, images)
    return maps


def over_views(
    maps_of: Callable[[Images], AnyMaps], images: Images, *, views: int, cells: tuple[int, int]
) -> AnyMaps:
    """Return the mean of the maps of the first `views` of VIEWS, each moved back.

    The maps of one view are returned unchanged. The mean has twice as many cells a side as a map,
    or as many as the image where that is fewer. The image is mirrored at the edges.

    cells: the rows and columns of patches, which decide the shift.
    """
    first = maps_of(images)
    if views == 1:
        return first
    height, width = images.shape[-2:]
    half_height = max(1, round(height / cells[0] / 2))
    half_width = max(1, round(width / cells[1] / 2))
    rows = min(2 * first.shape[-2], height)
    columns = min(2 * first.shape[-1], width)
    total = enlarge_maps(first, (rows, columns))
    for view in VIEWS[1:views]:
        pixels_up = view.up * half_height
        pixels_left = view.left * half_width
        moved = images
        if view.up or view.left:
            # continue the image to the right and below by its mirror image, then cut off as much
            moved = F.pad(images, (0, pixels_left, 0, pixels_up), mode="reflect")
        moved = moved[..., pixels_up:, pixels_left:]
        if view.is_mirrored:
            maps = maps_of(moved.flip(-1)).flip(-1)
        else:
            maps = maps_of(moved)
        large = enlarge_maps(maps, (rows, columns))
        # The content of the view is pixels_up higher and pixels_left further left than that of the
        # image. Move its map back: the edge fills the first rows and columns, which the view lacks.
        columns_left = round(pixels_left * columns / width)
        rows_up = round(pixels_up * rows / height)
        padding = (columns_left, 0, rows_up, 0)
        padded = F.pad(large.unsqueeze(1), padding, mode="replicate").squeeze(1)
        total = total + padded[..., :rows, :columns]
    return total / views


def product(first: AnyMaps, second: AnyMaps) -> AnyMaps:
    """Return the product of the positive parts of two maps, each divided by its mean.

    The coarser map is enlarged to the finer.
    """
    rows = max(first.shape[1], second.shape[1])
    columns = max(first.shape[2], second.shape[2])
    first_evidence = evidence(enlarge_maps(first, (rows, columns)))
    second_evidence = evidence(enlarge_maps(second, (rows, columns)))
    return first_evidence * second_evidence


def evidence(maps: AnyMaps) -> AnyMaps:
    """Return a map's positive part divided by its mean; 0 where it has none."""
    positive = maps.clamp_min(0)
    mean = positive.mean((1, 2), keepdim=True)
    return positive / mean.clamp_min(torch.finfo(positive.dtype).tiny)


def along_edges(maps: AnyMaps, images: Images) -> Float[Tensor, "batch height width"]:
    """Return maps enlarged to the pixels of images by a guided filter (He 2010).

    They change where the image does. In each window the filter fits the map as a line in a colour
    channel, slope * image + offset. The radius of the window is a cell of the map; the result is
    the mean over the three channels.
    """
    height, width = images.shape[-2:]
    radius = max(1, round(height / maps.shape[-2]))
    large = enlarge_maps(maps, (height, width)).unsqueeze(1).to(images)
    scale = large.abs().amax((2, 3), keepdim=True).clamp_min(torch.finfo(large.dtype).tiny)
    signal = large / scale
    mean_image = _box(images, radius)
    mean_signal = _box(signal, radius)
    covariance = _box(images * signal, radius) - mean_image * mean_signal
    variance = _box(images * images, radius) - mean_image**2
    slope = covariance / (variance + _EDGES)
    offset = mean_signal - slope * mean_image
    filtered = (_box(slope, radius) * images + _box(offset, radius)).mean(1)
    return filtered * scale[:, 0]


def _box(values: Tensor, radius: int) -> Tensor:
    """Return the mean over a square of 2 · radius + 1 pixels; edges repeat."""
    padded = F.pad(values, (radius,) * 4, mode="replicate")
    return F.avg_pool2d(padded, 2 * radius + 1, 1)
