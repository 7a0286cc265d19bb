"""The interventions on cues: functions of a view, a region and a level to changed images in [0, 1]."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.operations import OPERATIONS, blurred, shuffled
from vitlens.analysis.reliance.colour import OPPOSITE, luminance_of, mean_hue, turned
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
    """Apply a disturbance, a key of DISTURBANCES, at a level; of tiles at the nearest number that divides the sides."""
    if kind == "shuffle":
        level = _dividing(view, level)
    return OPERATIONS[DISTURBANCES[kind].operation](view.images, level, view.keys).clamp(0, 1)


def pixelated(view: View, _region: Region, off: float) -> Images:
    """Replace blocks of the size of a patch by their mean; off: shares of a block by which their grid is shifted."""
    height, width = view.images.shape[-2:]
    rows, columns = view.patch
    top = round(off * rows)
    left = round(off * columns)
    bottom = -(height + top) % rows
    right = -(width + left) % columns
    padded = F.pad(view.images, (left, right, top, bottom), mode="replicate")
    coarse = F.avg_pool2d(padded, view.patch)
    whole = coarse.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    return whole[..., top : top + height, left : left + width]


def patches_shuffled(view: View, _region: Region, off: float) -> Images:
    """Shuffle tiles of the size of a patch, or near it; off: shares of a tile by which their grid is shifted."""
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
    """Shift each image diagonally, off the patch grid, with reflected edges."""
    height, width = view.images.shape[-2:]
    step = max(1, round(_SHIFT * min(height, width)))
    step += step % view.patch[0] == 0 and view.patch[0] > 1
    step = min(step, height - 1, width - 1)
    padded = F.pad(view.images, (step, step, step, step), mode="reflect")
    starts = [(2 * step * down, 2 * step * across) for down in (0, 1) for across in (0, 1)]
    options = [padded[..., top : top + height, left : left + width] for top, left in starts]
    return _chosen(options, view, _PLACE_STREAM)


def shrunk(view: View, _region: Region, _level: float) -> Images:
    """Shrink each image around its centre, with reflected edges."""
    scale = torch.tensor([[1 / _SMALLER, 0, 0], [0, 1 / _SMALLER, 0]], device=view.images.device)
    grid = F.affine_grid(scale.expand(len(view.images), 2, 3), list(view.images.shape), align_corners=False)
    return F.grid_sample(view.images, grid, padding_mode="reflection", align_corners=False).clamp(0, 1)


def contrast_halved(view: View, _region: Region, _level: float) -> Images:
    """Halve the distance of all pixels from the mean luminance."""
    return OPERATIONS["contrast"](view.images, _CONTRAST, view.keys).clamp(0, 1)


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


def _chosen(options: list[Images], view: View, stream: int) -> Images:
    """Return for each image one of several, drawn by its key."""
    drawn = (uniform(view.keys, 1, stream=stream)[:, 0] * len(options)).long()
    return torch.stack(options)[drawn, torch.arange(len(view.images), device=view.images.device)]
