"""The interventions on cues: functions of a view, a region and a level to changed images in
[0, 1]."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.operations import OPERATIONS, blurred, frequency_bands, shuffled
from vitlens.analysis.reliance.colour import OPPOSITE, luminance_of, mean_hue, turned, with_chroma
from vitlens.analysis.reliance.cues import Region
from vitlens.analysis.reliance.views import View
from vitlens.data.draws import uniform
from vitlens.shapes import Images

_SHIFT = 1 / 8  # of the shorter side
_SMALLER = 0.75  # times the size
_CONTRAST = 0.5  # of the contrast is left
_BRIGHTER = 0.15  # of the range of luminance
_BORDER = 1 / 16  # of the shorter side
_GROUND_BLUR = 1 / 8  # of the shorter side
_TURN_STREAM = 21  # of the random numbers of an image: its hue where its partner has none
_PLACE_STREAM = 22  # the direction of its shift


def within(view: View, changed: Images, region: Region) -> Images:
    """Return the images, changed within a region only."""
    return torch.where(view.region(region) > 0, changed, view.images)


def greyed(view: View, region: Region, _level: float) -> Images:
    """Replace each pixel by its luminance."""
    return within(view, luminance_of(view.images).expand_as(view.images), region)


def hue_turned(view: View, region: Region, _level: float) -> Images:
    """Turn the hue of each pixel to its opposite."""
    angle = torch.full((len(view.images),), OPPOSITE, device=view.images.device)
    return within(view, turned(view.images, angle), region)


def hue_exchanged(view: View, region: Region, _level: float) -> Images:
    """Turn all hues of an image by one angle, so that their mean is that of its partner."""
    angle, size = mean_hue(view.images, view.region(region))
    other, other_size = mean_hue(view.partner.images, view.partner.region(region))
    drawn = 2 * OPPOSITE * uniform(view.keys, 1, stream=_TURN_STREAM)[:, 0].to(angle)
    turn = torch.where((size > 0) & (other_size > 0), other - angle, drawn)
    return within(view, turned(view.images, turn), region)


def background_exchanged(view: View, _region: Region, _level: float) -> Images:
    """Set the object on the ground of its partner, from which the partner's object is removed."""
    return torch.where(view.layer > 0, view.images, view.partner.ground)


def background_blurred(view: View, _region: Region, _level: float) -> Images:
    """Blur what surrounds the object, from which the object is removed."""
    smooth = blurred(view.ground, _GROUND_BLUR * min(view.images.shape[-2:])).clamp(0, 1)
    return torch.where(view.layer > 0, view.images, smooth)


def disturbed(view: View, kind: str, level: float) -> Images:
    """Apply a disturbance, a key of DISTURBANCES, at a level; of tiles at the nearest number that
    divides the sides.
    """
    if kind == "shuffle":
        level = _dividing(view, level)
    return OPERATIONS[DISTURBANCES[kind].operation](view.images, level, view.keys).clamp(0, 1)


def pixelated(view: View, _region: Region, off: float) -> Images:
    """Replace blocks of the size of a patch by their mean, but keep the outline of the object.

    Without it, small objects would grow to whole blocks. off: shares of a block by which the grid
    is shifted.
    """
    height, width = view.images.shape[-2:]
    rows, columns = view.patch
    top = round(off * rows)
    left = round(off * columns)
    bottom = -(height + top) % rows
    right = -(width + left) % columns
    padded = F.pad(view.images - view.flat, (left, right, top, bottom), mode="replicate")
    coarse = F.avg_pool2d(padded, view.patch)
    whole = coarse.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    return (view.flat + whole[..., top : top + height, left : left + width]).clamp(0, 1)


def low_pass(view: View, _region: Region, cutoff: float) -> Images:
    """Remove frequencies above the cut-off, a share of Nyquist's, but keep the outline of the
    object.
    """
    low, _ = frequency_bands(view.images - view.flat, cutoff=cutoff)
    return (view.flat + low).clamp(0, 1)


def patches_shuffled(view: View, _region: Region, off: float) -> Images:
    """Shuffle tiles of the size of a patch, or near it; off: shares of a tile by which their grid
    is shifted.
    """
    height, width = view.images.shape[-2:]
    wanted = min(height // view.patch[0], width // view.patch[1])
    parts = _dividing(view, wanted)
    down = round(off * height / parts)
    across = round(off * width / parts)
    moved = view.images.roll((-down, -across), (2, 3))
    return shuffled(moved, parts, view.keys).roll((down, across), (2, 3))


def _dividing(view: View, wanted: float) -> float:
    """Return the number of tiles along a side nearest to the wanted one that divides the sides."""
    height, width = view.images.shape[-2:]
    return min(DISTURBANCES["shuffle"].at((height, width)), key=lambda count: abs(count - wanted))


def shifted(view: View, _region: Region, _level: float) -> Images:
    """Shift each image diagonally, off the patch grid; an object stays inside the image where it
    has room.
    """
    moved = shift(view, _object_layers(view), "constant")
    return _composed(moved, shift(view, view.ground, "reflect"))


def shrunk(view: View, _region: Region, _level: float) -> Images:
    """Shrink each image around its object, which keeps its place, or around its centre where no
    object is known.
    """
    moved = shrink(view, _object_layers(view), "zeros")
    return _composed(moved, shrink(view, view.ground, "reflection"))


def shift(view: View, pixels: Tensor, beyond: str, *, back: bool = False) -> Tensor:
    """Shift pixels (batch, channels, height, width) as `shifted` does, or back; beyond the edge: as
    F.pad.
    """
    height, width = pixels.shape[-2:]
    step = max(1, round(_SHIFT * min(height, width)))
    step += step % view.patch[0] == 0 and view.patch[0] > 1
    step = min(step, height - 1, width - 1)
    padded = F.pad(pixels, (step, step, step, step), mode=beyond)
    starts = [(2 * step * up, 2 * step * left) for up in (0, 1) for left in (0, 1)]
    options = torch.stack(
        [padded[..., top : top + height, left : left + width] for top, left in starts]
    )
    drawn = (
        (uniform(view.keys, 1, stream=_PLACE_STREAM)[:, 0] * len(starts)).long().to(pixels.device)
    )
    up = _with_room(view.cutout.amax((1, 3)) > 0, step, drawn // 2)
    left = _with_room(view.cutout.amax((1, 2)) > 0, step, drawn % 2)
    if back:
        up = 1 - up
        left = 1 - left
    return options[2 * up + left, torch.arange(len(pixels), device=pixels.device)]


def _with_room(occupied: Tensor, step: int, drawn: Tensor) -> Tensor:
    """Return the drawn directions (batch,), 1 towards the start of an axis, or the others where
    only those have room.

    occupied: (batch, places) whether an object has pixels at a place of the axis.
    """
    towards_start = ~occupied[:, :step].any(1)
    towards_end = ~occupied[:, -step:].any(1)
    return torch.where(towards_start == towards_end, drawn, towards_start.long())


def shrink(view: View, pixels: Tensor, beyond: str) -> Tensor:
    """Shrink pixels (batch, channels, height, width) around each object; beyond the edge: as
    F.grid_sample.
    """
    return _scaled_around(view.centre, pixels, _SMALLER, beyond)


def enlarge(view: View, pixels: Tensor) -> Tensor:
    """Enlarge shrunk pixels to what they were, without the detail that was lost."""
    return _scaled_around(view.centre, pixels, 1 / _SMALLER, "reflection")


def _scaled_around(centre: Tensor, pixels: Tensor, scale: float, beyond: str) -> Tensor:
    """Scale pixels around a place each (batch, 2), down and across from -1 to 1."""
    theta = torch.zeros(len(pixels), 2, 3).to(pixels)
    theta[:, 0, 0] = 1 / scale
    theta[:, 1, 1] = 1 / scale
    theta[:, :, 2] = centre.flip(1) * (1 - 1 / scale)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode=beyond, align_corners=False)


def _object_layers(view: View) -> Tensor:
    """Return each object on black, and where it is (batch, 4, height, width)."""
    return torch.cat([view.images * view.cutout, view.cutout], 1)


def _composed(layers: Tensor, ground: Images) -> Images:
    """Set objects, given with where they are, on a ground."""
    cover = layers[:, 3:]
    return (ground * (1 - cover) + layers[:, :3]).clamp(0, 1)


def contrast_halved(view: View, _region: Region, _level: float) -> Images:
    """Halve the distance of each pixel's luminance from the mean, and keep its colour."""
    luminance = luminance_of(view.images)
    mean = luminance.mean((2, 3), keepdim=True)
    return with_chroma(mean + _CONTRAST * (luminance - mean), view.images - luminance)


def brightness_changed(view: View, _region: Region, _level: float) -> Images:
    """Brighten dark images and darken bright ones."""
    step = _BRIGHTER * direction(view.images, view.region("image"))
    return (view.images + step).clamp(0, 1)


def border_covered(view: View, _region: Region, _level: float) -> Images:
    """Fill the border with the mean colour of the image."""
    width = max(1, round(_BORDER * min(view.images.shape[-2:])))
    mean = view.images.mean((2, 3), keepdim=True)
    changed = mean.expand_as(view.images).clone()
    changed[..., width:-width, width:-width] = view.images[..., width:-width, width:-width]
    return changed


def direction(images: Images, region: Tensor) -> Tensor:
    """Return 1 for images that are dark within a region, else -1, (batch, 1, 1, 1)."""
    area = region.sum((1, 2, 3), keepdim=True).clamp_min(1)
    mean = (luminance_of(images) * region).sum((1, 2, 3), keepdim=True) / area
    return torch.where(mean < 0.5, 1.0, -1.0).to(images.dtype)
