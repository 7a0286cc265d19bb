"""Interventions on cues.

Each takes a view, a region and a level, and returns changed images in [0, 1]. cues.py names them,
and measure.py calls them. `disturb` is called for interventions that are a level of a disturbance.

Of a view, `layer` is what stays if the background is exchanged, `cutout` what is moved with the
object, `ground` the image with the cutout filled in, and `flat` the object and its surroundings in
one colour each.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.failures.operations import OPERATIONS, blurred, frequency_bands, shuffle_tiles
from vitlens.analysis.reliance.colour import (
    OPPOSITE,
    luminance_of,
    mean_hue,
    rotate_hue,
    with_chroma,
)
from vitlens.analysis.reliance.cues import Region
from vitlens.analysis.reliance.views import View
from vitlens.data.draws import uniform
from vitlens.shapes import Images

_SHIFT = 1 / 8  # length of a shift, as a share of the shorter side
_SMALLER = 0.75  # factor of the size
_CONTRAST = 0.5  # factor of the contrast
_BRIGHTER = 0.15  # change of the luminance, which is from 0 to 1
_BORDER = 1 / 16  # width of the border, as a share of the shorter side
_GROUND_BLUR = 1 / 8  # standard deviation of a blur, as a share of the shorter side
_MIDDLE_GREY = 0.5  # an image with a smaller mean luminance is dark
# streams of random numbers of an image
_HUE_STREAM = 21  # the angle of its hue, if it or its partner has no colour
_DIRECTION_STREAM = 22  # the direction of its shift


# Colour


def remove_colour(view: View, region: Region, _level: float) -> Images:
    """Replace each pixel by its luminance."""
    grey = luminance_of(view.images).expand_as(view.images)
    return replace_region(view, grey, region)


def turn_hue(view: View, region: Region, _level: float) -> Images:
    """Turn the hue of each pixel to its opposite."""
    angles = torch.full((len(view.images),), OPPOSITE, device=view.images.device)
    return replace_region(view, rotate_hue(view.images, angles), region)


def exchange_hue(view: View, region: Region, _level: float) -> Images:
    """Turn all hues of an image by one angle, so that their mean is that of its partner.

    The angle is random if one of the two images has no colour.
    """
    hue, chroma = mean_hue(view.images, view.region(region))
    partner_hue, partner_chroma = mean_hue(view.partner.images, view.partner.region(region))
    random_angles = 2 * OPPOSITE * uniform(view.keys, 1, stream=_HUE_STREAM)[:, 0].to(hue)
    have_colour = (chroma > 0) & (partner_chroma > 0)
    angles = torch.where(have_colour, partner_hue - hue, random_angles)
    return replace_region(view, rotate_hue(view.images, angles), region)


# Background


def exchange_background(view: View, _region: Region, _level: float) -> Images:
    """Put the object on the background of its partner, with the partner's object removed."""
    return torch.where(view.layer > 0, view.images, view.partner.ground)


def blur_background(view: View, _region: Region, _level: float) -> Images:
    """Blur the surroundings of the object. The blur does not include the object itself."""
    sigma = _GROUND_BLUR * min(view.images.shape[-2:])
    smooth = blurred(view.ground, sigma).clamp(0, 1)
    return torch.where(view.layer > 0, view.images, smooth)


# Detail


def disturb(view: View, kind: str, level: float) -> Images:
    """Apply a disturbance, a key of DISTURBANCES, at a level.

    The level of shuffled tiles becomes the nearest number that divides the sides.
    """
    if kind == "shuffle":
        level = _nearest_tile_count(view, level)
    operation = OPERATIONS[DISTURBANCES[kind].operation]
    return operation(view.images, level, view.keys).clamp(0, 1)


def pixelate(view: View, _region: Region, offset: float) -> Images:
    """Replace blocks of the size of a patch by their mean, but keep the outline of the object.

    Without the outline, small objects would grow to whole blocks.

    offset: the shift of the grid, in blocks.
    """
    height, width = view.images.shape[-2:]
    rows, columns = view.patch
    # padding, so that the shifted grid has whole blocks: below and right, as much as is missing
    top = round(offset * rows)
    left = round(offset * columns)
    bottom = -(height + top) % rows
    right = -(width + left) % columns
    padded = F.pad(view.images - view.flat, (left, right, top, bottom), mode="replicate")
    means = F.avg_pool2d(padded, view.patch)
    blocks = means.repeat_interleave(rows, 2).repeat_interleave(columns, 3)
    detail = blocks[..., top : top + height, left : left + width]
    return (view.flat + detail).clamp(0, 1)


def remove_fine_detail(view: View, _region: Region, cutoff: float) -> Images:
    """Remove high frequencies, but keep the outline of the object.

    cutoff: the highest frequency that is kept, as a share of Nyquist's frequency.
    """
    low, _ = frequency_bands(view.images - view.flat, cutoff=cutoff)
    return (view.flat + low).clamp(0, 1)


# Layout, position and size


def shuffle_patches(view: View, _region: Region, offset: float) -> Images:
    """Shuffle tiles of about the size of a patch.

    offset: the shift of the grid, in tiles.
    """
    height, width = view.images.shape[-2:]
    patches_a_side = min(height // view.patch[0], width // view.patch[1])
    tiles = _nearest_tile_count(view, patches_a_side)
    down = round(offset * height / tiles)
    across = round(offset * width / tiles)
    moved = view.images.roll((-down, -across), (2, 3))
    return shuffle_tiles(moved, tiles, view.keys).roll((down, across), (2, 3))


def _nearest_tile_count(view: View, count: float) -> float:
    """Return the number of tiles along a side that divides the sides, nearest to a count."""
    height, width = view.images.shape[-2:]
    counts = DISTURBANCES["shuffle"].at((height, width))
    return min(counts, key=lambda candidate: abs(candidate - count))


def shift_image(view: View, _region: Region, _level: float) -> Images:
    """Shift each image diagonally, off the patch grid.

    An object stays inside the image if it has room.
    """
    objects = shift_pixels(view, _object_layers(view), "constant")
    return _compose(objects, shift_pixels(view, view.ground, "reflect"))


def shrink_image(view: View, _region: Region, _level: float) -> Images:
    """Shrink each image around its object, which keeps its place, or around its centre."""
    objects = shrink_pixels(view, _object_layers(view), "zeros")
    return _compose(objects, shrink_pixels(view, view.ground, "reflection"))


def shift_pixels(view: View, pixels: Tensor, padding: str, *, back: bool = False) -> Tensor:
    """Shift pixels (batch, channels, height, width) as `shift_image` does, or back.

    padding: a mode of F.pad.
    """
    height, width = pixels.shape[-2:]
    step = max(1, round(_SHIFT * min(height, width)))
    sides = [side for side in view.patch if side > 1]  # every step is on a grid of pixels
    while any(step % side == 0 for side in sides):
        step += 1
    step = min(step, height - 1, width - 1)  # F.pad reflects less than a side
    padded = F.pad(pixels, (step, step, step, step), mode=padding)
    # A crop from the start of an axis moves the pixels towards its end. So the indices are 0 for
    # down and right, 1 for down and left, 2 for up and right, 3 for up and left.
    shifted = list[Tensor]()
    for top in (0, 2 * step):
        for start in (0, 2 * step):
            shifted.append(padded[..., top : top + height, start : start + width])
    # a number from 0 to 3, of which each binary digit is a direction along one axis
    drawn = (uniform(view.keys, 1, stream=_DIRECTION_STREAM)[:, 0] * len(shifted)).long()
    drawn = drawn.to(pixels.device)
    occupied_rows = view.cutout.amax((1, 3)) > 0
    occupied_columns = view.cutout.amax((1, 2)) > 0
    # 1 for up or left, 0 for down or right
    up = _direction_with_room(occupied_rows, step, drawn // 2)
    left = _direction_with_room(occupied_columns, step, drawn % 2)
    if back:
        up = 1 - up
        left = 1 - left
    images = torch.arange(len(pixels), device=pixels.device)
    return torch.stack(shifted)[2 * up + left, images]


def _direction_with_room(
    occupied: Bool[Tensor, "batch places"], step: int, drawn: Int[Tensor, " batch"]
) -> Int[Tensor, " batch"]:
    """Return the drawn direction of each image, or the other one if only that has room.

    1 is towards the start of an axis, 0 towards its end.

    occupied: True for places of the axis where an object has pixels.
    drawn: the drawn directions.
    """
    has_room_at_start = ~occupied[:, :step].any(1)
    has_room_at_end = ~occupied[:, -step:].any(1)
    return torch.where(has_room_at_start == has_room_at_end, drawn, has_room_at_start.long())


def shrink_pixels(view: View, pixels: Tensor, padding: str) -> Tensor:
    """Shrink pixels (batch, channels, height, width) around each object.

    padding: a mode of F.grid_sample.
    """
    return _scale_around(view.centre, pixels, _SMALLER, padding)


def enlarge_pixels(view: View, pixels: Tensor) -> Tensor:
    """Enlarge shrunk pixels to their former size, without the detail that was lost."""
    return _scale_around(view.centre, pixels, 1 / _SMALLER, "reflection")


def _scale_around(centre: Tensor, pixels: Tensor, scale: float, padding: str) -> Tensor:
    """Scale the pixels of each image around a centre (batch, 2), down and across from -1 to 1."""
    theta = torch.zeros(len(pixels), 2, 3).to(pixels)
    # affine_grid needs x before y, and the place that each new pixel is read from
    theta[:, 0, 0] = 1 / scale
    theta[:, 1, 1] = 1 / scale
    theta[:, :, 2] = centre.flip(1) * (1 - 1 / scale)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode=padding, align_corners=False)


def _object_layers(view: View) -> Tensor:
    """Return each object on black, and its opacity as a fourth channel."""
    return torch.cat([view.images * view.cutout, view.cutout], 1)


def _compose(objects: Tensor, ground: Images) -> Images:
    """Put objects, with their opacity as a fourth channel, on a background."""
    colour = objects[:, :3]  # black where the object is not
    opacity = objects[:, 3:]
    return (ground * (1 - opacity) + colour).clamp(0, 1)


# Light and border


def halve_contrast(view: View, _region: Region, _level: float) -> Images:
    """Halve the distance of each pixel's luminance from the mean, and keep its colour."""
    luminance = luminance_of(view.images)
    mean = luminance.mean((2, 3), keepdim=True)
    return with_chroma(mean + _CONTRAST * (luminance - mean), view.images - luminance)


def change_brightness(view: View, _region: Region, _level: float) -> Images:
    """Brighten dark images and darken bright ones."""
    step = _BRIGHTER * direction(view.images, view.region("image"))
    return (view.images + step).clamp(0, 1)


def cover_border(view: View, _region: Region, _level: float) -> Images:
    """Fill the border with the mean colour of the image."""
    width = max(1, round(_BORDER * min(view.images.shape[-2:])))
    mean = view.images.mean((2, 3), keepdim=True)
    changed = mean.expand_as(view.images).clone()
    changed[..., width:-width, width:-width] = view.images[..., width:-width, width:-width]
    return changed


# Shared with the controls


def replace_region(view: View, changed: Images, region: Region) -> Images:
    """Return the images with the changed pixels in a region, and their original ones elsewhere."""
    return torch.where(view.region(region) > 0, changed, view.images)


def direction(images: Images, region: Tensor) -> Tensor:
    """Return 1 for images that are dark within a region, else -1, (batch, 1, 1, 1)."""
    area = region.sum((1, 2, 3), keepdim=True).clamp_min(1)
    mean = (luminance_of(images) * region).sum((1, 2, 3), keepdim=True) / area
    return torch.where(mean < _MIDDLE_GREY, 1.0, -1.0).to(images.dtype)
