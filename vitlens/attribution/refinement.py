"""Refinement of any method's maps: by attention between patches, by views, by another map, by the
image's own edges.

A view is the image shifted by half a patch, or mirrored: it shows the same content at another place
of the patch grid, so the mean of the maps, each moved back, is finer than the grid: it has twice as
many cells a side.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.affinity import affinity, refined, require_affinity
from vitlens.analysis.attention.registry import REFINE_STEPS
from vitlens.analysis.faithfulness.maps import AnyMaps, enlarged, removal_grid
from vitlens.attribution.registry import ATTRIBUTIONS, attribution
from vitlens.errors import InputError, UnknownNameError, UnsupportedError, argument
from vitlens.models.model import Model
from vitlens.names import REFINEMENTS, UPSAMPLINGS, Refining, Upsampling
from vitlens.shapes import Images

MapsOf = Callable[[Images, str], AnyMaps]  # of images, by the method of this name
# of the guided filter: variance of a colour (squared, of [0, 1]) below which a region counts as
# flat
_EDGES = 1e-2
VIEWS: Final = (  # content moved up and left by so many half patches, then mirrored or not
    (0, 0, False),
    (1, 1, False),
    (1, 0, False),
    (0, 1, False),
    (0, 0, True),
    (1, 1, True),
    (1, 0, True),
    (0, 1, True),
)


@dataclass(frozen=True)
class Refinement:
    """What is done with a method's maps; by default nothing.

    refine: "affinity", steps of the attention between patches (affinity.py), of layers (None: all),
    an even number; times: a method whose map is multiplied (refined in the same way; both without
    their negative values and divided by their mean); views: shifted and mirrored views that are
    averaged (VIEWS); upsample: "image", to the image's pixels by a filter that follows its edges.
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
        """Return True if it does anything."""
        return self != Refinement(steps=self.steps)

    @property
    def words(self) -> str:
        """Return what is done, for a caption: "refined by attention between patches, mean of 2
        views"; empty for nothing.
        """
        parts = []
        if self.times is not None:
            parts.append(f"times {ATTRIBUTIONS[self.times].title}")
        if self.refine == "affinity" and self.steps:
            chosen = "" if self.layers is None else f" of layers {', '.join(map(str, self.layers))}"
            parts.append(f"refined by attention between patches{chosen} ({self.steps} steps)")
        if self.views > 1:
            parts.append(f"mean of {self.views} views")
        if self.upsample == "image":
            parts.append("enlarged along the image's edges")
        return ", ".join(parts)


def require_refinement(model: Model, method: str, refinement: Refinement) -> None:
    """Raise UnsupportedError where this model, or this method's maps, cannot be refined so,
    InputError for a layer that the model does not have, and for a method times itself.
    """
    if method == refinement.times:
        raise InputError(
            f"expected another method for {argument('times')} than {method}, found the same"
        )
    if refinement.refine == "none":
        return
    require_affinity(model, refinement.layers)
    for name in (method, *((refinement.times,) if refinement.times else ())):
        if not refinable(name):
            of_pixels = ATTRIBUTIONS[name].resolution == "pixel"
            found = (
                f"a map of pixels; use {argument('views')}"
                if of_pixels
                else "refined already; use it as it is"
            )
            raise UnsupportedError(
                f"expected a map of patches for {argument('refine', 'affinity')}, found {name}, "
                f"{found}, or one of {', '.join(filter(refinable, ATTRIBUTIONS))}"
            )


def applies(model: Model, method: str, refinement: Refinement) -> bool:
    """Return True if this model and this method's maps can be refined so."""
    with suppress(InputError):
        require_refinement(model, method, refinement)
        return True
    return False


def refinable(method: str) -> bool:
    """Return True if a method's maps have one value a patch, which the attention between patches
    can refine.
    """
    return ATTRIBUTIONS[method].resolution == "patch" and not ATTRIBUTIONS[method].refined


def refined_maps(
    model: Model, images: Images, maps_of: MapsOf, method: str, refinement: Refinement
) -> AnyMaps:
    """Return the maps that a method gives for images (or views of them), refined."""

    def once(batch: Images) -> AnyMaps:
        similarity = (
            affinity(model, batch, layers=refinement.layers)
            if refinement.refine == "affinity"
            else None
        )

        def smooth(name: str) -> AnyMaps:
            maps = maps_of(batch, name)
            return maps if similarity is None else refined(maps, similarity, steps=refinement.steps)

        return (
            smooth(method)
            if refinement.times is None
            else product(smooth(method), smooth(refinement.times))
        )

    maps = over_views(once, images, views=refinement.views, cells=removal_grid(model))
    return along_edges(maps, images) if refinement.upsample == "image" else maps


def over_views(
    maps_of: Callable[[Images], AnyMaps], images: Images, *, views: int, cells: tuple[int, int]
) -> AnyMaps:
    """Return the mean of the maps of the first `views` of VIEWS, each moved back; one view: its
    maps as they are.

    cells: rows and columns of patches, which decide the shift. The mean has twice as many cells a
    side as a map, or as many as the image where that is fewer. What a shift moves in at the edge is
    the image mirrored.
    """
    first = maps_of(images)
    if views == 1:
        return first
    height, width = images.shape[-2:]
    half = max(1, round(height / cells[0] / 2)), max(1, round(width / cells[1] / 2))
    size = min(2 * first.shape[-2], height), min(2 * first.shape[-1], width)
    total = enlarged(first, size)
    for up, left, mirrored in VIEWS[1:views]:
        # px
        bottom = up * half[0]
        right = left * half[1]
        moved = F.pad(images, (0, right, 0, bottom), mode="reflect") if up or left else images
        moved = moved[..., bottom:, right:]
        seen = maps_of(moved.flip(-1) if mirrored else moved)
        large = enlarged(seen.flip(-1) if mirrored else seen, size)
        # moved back; the first rows and columns keep their own values
        room = (round(right * size[1] / width), 0, round(bottom * size[0] / height), 0)
        total = (
            total
            + F.pad(large.unsqueeze(1), room, mode="replicate").squeeze(1)[
                ..., : size[0], : size[1]
            ]
        )
    return total / views


def product(first: AnyMaps, second: AnyMaps) -> AnyMaps:
    """Return the product of two maps' positive parts, each divided by its mean; the coarser is
    enlarged to the finer.
    """
    size = max(first.shape[-2], second.shape[-2]), max(first.shape[-1], second.shape[-1])
    return evidence(enlarged(first, size)) * evidence(enlarged(second, size))


def evidence(maps: AnyMaps) -> AnyMaps:
    """Return a map's positive part divided by its mean; 0 where it has none."""
    positive = maps.clamp_min(0)
    return positive / positive.mean((1, 2), keepdim=True).clamp_min(
        torch.finfo(positive.dtype).tiny
    )


def along_edges(maps: AnyMaps, images: Images) -> Float[Tensor, "batch height width"]:
    """Return maps enlarged to the images' pixels by a guided filter (He 2010): they change where
    the image does.

    The radius is a cell of the map; the mean of the filters of the three channels.
    """
    height, width = images.shape[-2:]
    radius = max(1, round(height / maps.shape[-2]))
    large = enlarged(maps, (height, width)).unsqueeze(1).to(images)
    scale = large.abs().amax((2, 3), keepdim=True).clamp_min(torch.finfo(large.dtype).tiny)
    signal = large / scale
    guides = images
    mean_guide = _box(guides, radius)
    mean_signal = _box(signal, radius)
    covariance = _box(guides * signal, radius) - mean_guide * mean_signal
    slope = covariance / (_box(guides * guides, radius) - mean_guide**2 + _EDGES)
    offset = mean_signal - slope * mean_guide
    filtered = (_box(slope, radius) * guides + _box(offset, radius)).mean(1)
    return filtered * scale[:, 0]


def _box(values: Tensor, radius: int) -> Tensor:
    """Return the mean over a square of 2 · radius + 1 pixels; edges repeat."""
    padded = F.pad(values, (radius,) * 4, mode="replicate")
    return F.avg_pool2d(padded, 2 * radius + 1, 1)
