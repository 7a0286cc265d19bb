"""Changes of one property of images, each with a control that changes them as much and leaves the property as it is.

An object with a known mask is moved, scaled and given another contrast over its own ground, filled in where it stood;
without masks the whole image is. A tint is as large a change of the pixels at the same luminance.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.covariates import Subject, centroids, luminance
from vitlens.analysis.failures.operations import blurred
from vitlens.analysis.faithfulness.road import imputed
from vitlens.data.scenes import LUMINANCE
from vitlens.data.split import Split
from vitlens.shapes import Images, Masks

Shift = Float[Tensor, "batch 2"]  # down and to the right, px
PerImage = Float[Tensor, "batch 1 1 1"]

_CONTRAST: Final = 1.5  # times the contrast
_BRIGHTER: Final = 0.15  # of the range of luminance
_ZOOM: Final = 1.25
_BLUR, _LEAST_BLUR = 0.01, 0.6  # standard deviation: of the shorter side, and at least, px
_CLEAR: Final = 1 / 16  # of the shorter side: how far an object is moved off the border
_GROUND_BLUR: Final = 1 / 8  # of the shorter side
_ROOM: Final = 1 / 4  # of each side: how far an image is shifted at most


class Edited(NamedTuple):
    """changed: with the property changed; control: changed as much, with the property as it was."""

    changed: Images
    control: Images


@dataclass(frozen=True)
class Pictures:
    """The images at some indices."""

    subject: Subject
    indices: Int[Tensor, " batch"]

    @cached_property
    def split(self) -> Split:
        """These images alone."""
        return self.subject.split.pick(self.indices)

    @cached_property
    def images(self) -> Images:
        """Their pixels."""
        return next(iter(self.split.batches(len(self.split)))).images

    @property
    def masks(self) -> Masks | None:
        """The objects, where they are known."""
        return self.split.masks

    @cached_property
    def layer(self) -> Float[Tensor, "batch 1 height width"]:
        """The object with its smoothed edge, 1 or 0; nothing where it would be the whole image."""
        assert self.masks is not None
        edge = F.max_pool2d(self.masks[:, None].float(), 3, stride=1, padding=1)
        return edge * ~(edge > 0).flatten(1).all(1)[:, None, None, None]

    @cached_property
    def ground(self) -> Images:
        """The images with their objects filled in from what surrounds them."""
        return imputed(self.images, self.layer > 0)

    @cached_property
    def box(self) -> tuple[Float[Tensor, "batch 2"], Float[Tensor, "batch 2"]]:
        """The first row and column of each object, and the ones after its last; without an object the whole image."""
        assert self.masks is not None
        lines = [self.masks.any(axis) for axis in (2, 1)]
        lines = [line | ~line.any(1, keepdim=True) for line in lines]
        first = torch.stack([line.float().argmax(1) for line in lines], 1)
        last = torch.stack([line.shape[1] - line.flip(1).float().argmax(1) for line in lines], 1)
        return first.float(), last.float()

    @property
    def extent(self) -> Tensor:
        """Height and width, px."""
        return torch.tensor(self.images.shape[-2:], dtype=torch.float32)

    def place(self) -> tuple[Shift, Shift, Shift]:
        """Where the object (without masks: what the map marks) lies from the centre, and the ends of its shifts."""
        if self.masks is None:
            middle = torch.stack([self.subject.mapped[name][self.indices] for name in ("row", "column")], 1) - 0.5
            room = (self.extent * _ROOM).expand_as(middle)
            return (middle * self.extent).nan_to_num(0.0), -room, room
        low, high = self.box
        return (centroids(self.masks) - self.extent / 2).nan_to_num(0.0), -low, self.extent - high

    def placed(self, shift: Tensor, scale: Tensor | float = 1.0, turn: float = 0.0) -> Images:
        """The object, or the image without masks, shifted (whole px), scaled and turned around its centre."""
        whole = shift.round()
        if self.masks is None:
            return _sampled(self.images, whole, torch.zeros_like(whole), scale, turn, "reflection")
        low, high = self.box
        layers = torch.cat([self.images * self.layer, self.layer], 1)
        layers = _sampled(layers, whole, (low + high - self.extent) / 2, scale, turn, "zeros")
        cover = layers[:, 3:]
        return (self.ground * (1 - cover) + layers[:, :3]).clamp(0, 1)


def _sampled(pixels: Tensor, shift: Shift, pivot: Shift, scale: Tensor | float, turn: float, beyond: str) -> Tensor:
    """Images shifted, and scaled and turned around a pivot (px from the centre); `beyond` the edge: as grid_sample."""
    height, width = pixels.shape[-2:]
    half = torch.tensor([height / 2, width / 2])
    inverse = 1 / torch.as_tensor(scale).expand(len(pixels))
    cos, sin = math.cos(turn) * inverse, math.sin(turn) * inverse
    matrix = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # of (row, column), px
    offset = pivot - torch.einsum("bij,bj->bi", matrix, pivot + shift)
    matrix = (matrix * half / half[:, None]).flip(1, 2)  # x before y, from -1 to 1
    theta = torch.cat([matrix, (offset / half).flip(1)[:, :, None]], 2)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode=beyond, align_corners=False)


def around_centre(pictures: Pictures, sign: int) -> Edited:
    """Moved to the centre, or twice as far from it; control: as far around it, at the same distance."""
    place, least, most = pictures.place()
    shift = (-place if sign < 0 else place).clamp(least, most).round()
    radius, length = place.norm(dim=1), shift.norm(dim=1)
    angle = 2 * torch.asin((length / (2 * radius).clamp_min(1e-6)).clamp(max=1.0))
    options = []
    for side in (1, -1):
        turned = torch.view_as_real(torch.view_as_complex(place) * torch.polar(torch.ones_like(angle), side * angle))
        options.append((turned - place).clamp(least, most))
    miss = [((place + option).norm(dim=1) - radius).abs() + (option.norm(dim=1) - length).abs() for option in options]
    control = torch.where((miss[0] <= miss[1])[:, None], options[0], options[1])
    return Edited(pictures.placed(shift), pictures.placed(control))


def off_border(pictures: Pictures, _sign: int) -> Edited:
    """Objects at the border moved off it; control: as far, still at the border."""
    (low, high), extent = pictures.box, pictures.extent
    clear = (_CLEAR * extent.amin()).round().clamp_min(1.0)
    first, last = low <= 0, high >= extent
    shift = torch.where(first & ~last, clear, torch.where(last & ~first, -clear, 0.0)).clamp(-low, extent - high)
    length = shift.norm(dim=1, keepdim=True).round()
    best = torch.zeros_like(shift)
    for direction in ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)):
        moved = (length * torch.tensor(direction)).clamp(-low, extent - high)
        touches = ((low + moved <= 0) | (high + moved >= extent)).any(1, keepdim=True)
        best = torch.where(touches & (moved.norm(dim=1) > best.norm(dim=1))[:, None], moved, best)
    return Edited(pictures.placed(shift), pictures.placed(best))


def scaled(pictures: Pictures, sign: int) -> Edited:
    """Shrunk or enlarged; control: an object is turned, an image shifted, by as much on average."""
    images = pictures.images
    scale = torch.full((len(images),), _ZOOM if sign > 0 else 1 / _ZOOM)
    still = torch.zeros(len(images), 2)
    if pictures.masks is None:
        far = (_ZOOM - 1) * float(pictures.extent.norm()) / math.sqrt(12)  # root mean square, of a zoom
        angle = pictures.indices * 2.4  # the golden angle: all directions alike
        return Edited(pictures.placed(still, scale), pictures.placed(far * torch.stack([angle.sin(), angle.cos()], 1)))
    low, high = pictures.box
    room = (pictures.extent / (high - low).clamp_min(1.0)).amin(1).clamp_min(1.0)
    scale = torch.minimum(scale, room)
    half, middle = (high - low) / 2 * scale[:, None], (low + high) / 2
    inside = torch.minimum(torch.maximum(middle, half), pictures.extent - half) - middle
    return Edited(pictures.placed(inside if sign > 0 else still, scale), pictures.placed(still, turn=_ZOOM - 1))


def with_contrast(pictures: Pictures, sign: int) -> Edited:
    """More or less contrast, of an object to its surroundings or of the whole image; control: a tint."""
    images, planes = pictures.images, luminance(pictures.images)
    where = torch.ones_like(images[:, :1]) if pictures.masks is None else pictures.masks[:, None].float()
    around = where if pictures.masks is None else 1 - where
    middle = (planes[:, None] * around).sum((2, 3), keepdim=True) / around.sum((2, 3), keepdim=True).clamp_min(1.0)
    changed = middle + (_CONTRAST if sign > 0 else 1 / _CONTRAST) * (images - middle)
    return _beside_tint(images, torch.where(where > 0, changed, images), where)


def with_brightness(pictures: Pictures, sign: int) -> Edited:
    """Brightened or darkened; control: a tint."""
    return _beside_tint(pictures.images, pictures.images + sign * _BRIGHTER, torch.ones_like(pictures.images[:, :1]))


def with_sharpness(pictures: Pictures, sign: int) -> Edited:
    """Sharpened (unsharp masking) or blurred; control: a tint."""
    images = pictures.images
    smooth = blurred(images, max(_LEAST_BLUR, _BLUR * min(images.shape[-2:])))
    return _beside_tint(images, 2 * images - smooth if sign > 0 else smooth, torch.ones_like(images[:, :1]))


def without_clutter(pictures: Pictures, _sign: int) -> Edited:
    """The ground without distractors, or blurred; control: another ground, or its mirror image."""
    scenes = pictures.split.scenes
    if scenes is not None:
        drawn = (scenes.redrawn(how) for how in ("without distractors", "other ground"))
        return Edited(*(pixels.float() / 255 for pixels in drawn))
    smooth = blurred(pictures.ground, _GROUND_BLUR * min(pictures.images.shape[-2:]))
    grounds = smooth, pictures.ground.flip(3)
    return Edited(*(torch.where(pictures.layer > 0, pictures.images, ground) for ground in grounds))


def _beside_tint(images: Images, changed: Images, where: Tensor) -> Edited:
    """The change, and the images tinted there by as much (root mean square): of eight tints of unchanged luminance the
    one that comes nearest to that once it is kept within the range of colours."""
    changed = changed.clamp(0, 1)
    wanted = _size(changed - images)
    weights = torch.tensor(LUMINANCE)
    first = torch.linalg.cross(weights, torch.tensor([1.0, 0.0, 0.0]))
    second = torch.linalg.cross(weights, first)
    first, second = first / first.norm(), second / second.norm()
    share = where.mean((1, 2, 3), keepdim=True).clamp_min(1e-9)
    best, miss = images, torch.full_like(wanted, torch.inf)
    for at in range(8):
        tint = math.cos(at * math.pi / 4) * first + math.sin(at * math.pi / 4) * second
        strength = wanted * math.sqrt(3) / share.sqrt()
        tinted = (images + strength * tint[None, :, None, None] * where).clamp(0, 1)
        off = (_size(tinted - images) - wanted).abs()
        best, miss = torch.where(off < miss, tinted, best), torch.minimum(off, miss)
    return Edited(changed, best)


def _size(change: Images) -> PerImage:
    """The root mean square of each change."""
    return change.square().mean((1, 2, 3), keepdim=True).sqrt()


CHANGES: Final[Mapping[str, Callable[[Pictures, int], Edited]]] = MappingProxyType(
    {
        "off_centre": around_centre,
        "size": scaled,
        "object_contrast": with_contrast,
        "border": off_border,
        "contrast": with_contrast,
        "brightness": with_brightness,
        "sharpness": with_sharpness,
        "clutter": without_clutter,
        "map_off_centre": around_centre,
        "map_size": scaled,
    }
)
