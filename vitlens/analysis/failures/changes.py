"""Changes of one property of images, with controls that leave it as it is.

Every change returns the changed images and their controls. The size of a change is the mean
absolute distance of the pixels. A control should have the same size: of several possible controls,
an image gets the one with the nearest size.

With masks, a change moves, scales or recolours the object, and fills in the background at its
former place. Without masks it changes the whole image.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.covariates import PerImage, Subject, centroids
from vitlens.analysis.failures.occlusion import grown, margin_of, outlines
from vitlens.analysis.failures.operations import blurred, distance, luminance
from vitlens.analysis.faithfulness.imputation import impute
from vitlens.shapes import Images

Shift = Float[Tensor, "batch 2"]  # down and to the right, in px
Edited = tuple[Images, Images]  # with the property changed, and the control
_CONTRAST: Final = 1.5  # factor of the contrast
_BRIGHTER: Final = 0.15  # change of the luminance, which is from 0 to 1
_ZOOM: Final = 1.25  # factor of the size
_BLUR = 0.01  # standard deviation of a blur, as a share of the shorter side
_LEAST_BLUR = 0.6  # smallest standard deviation of a blur, px
_CLEAR: Final = 1 / 16  # distance that an object is moved off the border, of the shorter side
_GROUND_BLUR: Final = 1 / 8  # standard deviation of a blur of the background, of the shorter side
_ROOM: Final = 1 / 4  # largest shift of an image, as a share of each side
# between the directions of consecutive images (radians), so that all directions are as frequent
_GOLDEN_ANGLE: Final = 2.4
# lengths of the shifts that control a zoom, as multiples of the distance that the zoom moves pixels
_SHIFTS: Final = (0.25, 0.5, 1.0, 1.5)
# size of a light as a share of the change: dark images cannot be lit much with the same mean
_LIGHT: Final = 0.75
_LIGHT_STEPS: Final = 8  # steps that adapt a light to the values it clips
_TINY: Final = 1e-6  # avoids a division by 0


class Pictures:
    """The images at some indices, and their masks if the objects are known.

    subject: the model with all of its images.
    indices: the indices of these images in it.
    split: these images with their masks and scenes.
    images: the pixels.
    masks: True on the object, None if unknown.
    extent: the height and the width in px.
    """

    def __init__(self, subject: Subject, indices: Int[Tensor, " batch"]) -> None:
        self.subject = subject
        self.indices = indices
        self.split = subject.split.pick(indices)
        (batch,) = self.split.batches(len(indices))
        self.images: Images = batch.images
        self.masks = self.split.masks
        self.extent = torch.tensor(self.images.shape[-2:], dtype=torch.float32)

    @cached_property
    def layer(self) -> Float[Tensor, "batch 1 height width"]:
        """Return 1 on the object and its smoothed edge, one pixel wide, and 0 elsewhere.

        It is all 0 if the widened object would cover the whole image.
        """
        assert self.masks is not None
        widened = F.max_pool2d(self.masks[:, None].float(), 3, stride=1, padding=1)
        covers_all = (widened > 0).flatten(1).all(1)[:, None, None, None]
        return widened * ~covers_all

    @cached_property
    def ground(self) -> Images:
        """Return the images with their objects filled in from their surroundings."""
        return impute(self.images, self.layer > 0)

    @cached_property
    def box(self) -> tuple[Float[Tensor, "batch 2"], Float[Tensor, "batch 2"]]:
        """Return the first row and column of each object, and those after its last.

        Without an object they are those of the whole image.
        """
        assert self.masks is not None
        starts = list[Tensor]()
        ends = list[Tensor]()
        for other_axis in (2, 1):  # for rows, then for columns
            occupied = self.masks.any(other_axis)
            is_empty = ~occupied.any(1, keepdim=True)
            occupied = occupied | is_empty
            # argmax returns the first True; from the end, that is the last one
            starts.append(occupied.float().argmax(1))
            ends.append(occupied.shape[1] - occupied.flip(1).float().argmax(1))
        return torch.stack(starts, 1).float(), torch.stack(ends, 1).float()

    def position(self) -> tuple[Shift, Shift, Shift]:
        """Return the object's position from the centre, and the bounds of its shifts.

        Within the lower and the upper bound of each component of a shift, the object stays in the
        image. Without masks, the position is that of the map's centre of mass.
        """
        if self.masks is None:
            rows = self.subject.map_properties["row"][self.indices]
            columns = self.subject.map_properties["column"][self.indices]
            from_centre = (torch.stack([rows, columns], 1) - 0.5) * self.extent
            room = (self.extent * _ROOM).expand_as(from_centre)
            return from_centre.nan_to_num(0.0), -room, room
        low, high = self.box
        from_centre = centroids(self.masks) - self.extent / 2
        return from_centre.nan_to_num(0.0), -low, self.extent - high

    def transform(self, shift: Tensor, scale: Tensor | float = 1.0) -> Images:
        """Return the object, or the image without masks, shifted and scaled around its centre.

        shift: the shift in px, which is rounded to whole pixels.
        """
        shift = shift.round()
        if self.masks is None:
            return _resample(self.images, shift, torch.zeros_like(shift), scale, "reflection")
        low, high = self.box
        middle_from_centre = (low + high - self.extent) / 2
        # three channels of the object's colour, black elsewhere, and one of its opacity
        layers = torch.cat([self.images * self.layer, self.layer], 1)
        layers = _resample(layers, shift, middle_from_centre, scale, "zeros")
        colour = layers[:, :3]
        opacity = layers[:, 3:]
        return (self.ground * (1 - opacity) + colour).clamp(0, 1)


def _resample(
    pixels: Tensor, shift: Shift, pivot: Shift, scale: Tensor | float, padding: str
) -> Tensor:
    """Return images shifted, and scaled around a pivot (px from the centre).

    padding: a mode of F.grid_sample.
    """
    height, width = pixels.shape[-2:]
    half = torch.tensor([height / 2, width / 2])
    # affine_grid needs the inverse map, from the place of a new pixel to that of the old one:
    # the old place is pivot + (new place - pivot - shift) / scale
    inverse = 1 / torch.as_tensor(scale).expand(len(pixels))
    offset = pivot - inverse[:, None] * (pivot + shift)
    matrix = torch.diag_embed(inverse[:, None].expand(-1, 2))
    # it expects x before y, in coordinates from -1 to 1
    theta = torch.cat([matrix, (offset / half).flip(1)[:, :, None]], 2)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode=padding, align_corners=False)


# Place and size


def move_from_centre(pictures: Pictures, sign: int) -> Edited:
    """Move objects twice as far from the centre, or, for a negative sign, to the centre.

    The control is a shift of the same length along a circle around the centre, which keeps the
    distance from it. Of the two directions, the one is taken in which the image's border interferes
    less.
    """
    position, least, most = pictures.position()
    direction = -position if sign < 0 else position
    shift = direction.clamp(least, most).round()
    radius = position.norm(dim=1)
    length = shift.norm(dim=1)
    # the angle of a chord with the length of the shift: length = 2 * radius * sin(angle / 2)
    angle = 2 * torch.asin((length / (2 * radius).clamp_min(_TINY)).clamp(max=1.0))
    options = list[Tensor]()
    misses = list[Tensor]()
    for side in (1, -1):
        # a product of complex numbers adds their angles
        rotation = torch.polar(torch.ones_like(angle), side * angle)
        rotated = torch.view_as_real(torch.view_as_complex(position) * rotation)
        option = (rotated - position).clamp(least, most)
        miss_of_radius = ((position + option).norm(dim=1) - radius).abs()
        miss_of_length = (option.norm(dim=1) - length).abs()
        options.append(option)
        misses.append(miss_of_radius + miss_of_length)
    control = torch.where((misses[0] <= misses[1])[:, None], options[0], options[1])
    return pictures.transform(shift), pictures.transform(control)


def move_off_border(pictures: Pictures, _sign: int) -> Edited:
    """Move objects at the border off it. The control is a shift as far along the border."""
    low, high = pictures.box
    extent = pictures.extent
    clearance = (_CLEAR * extent.amin()).round().clamp_min(1.0)
    # for rows and columns, whether the object touches the first and the last one
    at_start = low <= 0
    at_end = high >= extent
    inwards = torch.where(at_end & ~at_start, -clearance, 0.0)
    inwards = torch.where(at_start & ~at_end, clearance, inwards)
    shift = inwards.clamp(-low, extent - high)
    length = shift.norm(dim=1, keepdim=True).round()
    # the control is the longest shift after which the object still touches the border
    control = torch.zeros_like(shift)
    for direction in ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)):
        option = (length * torch.tensor(direction)).clamp(-low, extent - high)
        touches = ((low + option <= 0) | (high + option >= extent)).any(1, keepdim=True)
        is_farther = (option.norm(dim=1) > control.norm(dim=1))[:, None]
        control = torch.where(touches & is_farther, option, control)
    return pictures.transform(shift), pictures.transform(control)


def change_size(pictures: Pictures, sign: int) -> Edited:
    """Enlarge objects or images, or, for a negative sign, shrink them.

    As a control, an object is moved around the centre, and an image is shifted, by as much on
    average. A rotation would be no control for classes that depend on a direction.
    """
    images = pictures.images
    scale = torch.full((len(images),), _ZOOM if sign > 0 else 1 / _ZOOM)
    shift = torch.zeros(len(images), 2)
    if pictures.masks is None:
        control_shifts = _shifts_of_images(pictures)
    else:
        control_shifts = _shifts_around_centre(pictures)
        # an enlarged object must still fit into the image
        low, high = pictures.box
        largest_scale = (pictures.extent / (high - low).clamp_min(1.0)).amin(1).clamp_min(1.0)
        scale = torch.minimum(scale, largest_scale)
        if sign > 0:
            shift = _shift_into_image(pictures, scale)
    changed = pictures.transform(shift, scale)
    options = [pictures.transform(control_shift) for control_shift in control_shifts]
    return changed, _nearest(images, changed, options)


def _shift_into_image(pictures: Pictures, scale: Float[Tensor, " batch"]) -> Shift:
    """Return the smallest shift after which the scaled box of each object is inside the image."""
    low, high = pictures.box
    half = (high - low) / 2 * scale[:, None]
    middle = (low + high) / 2
    nearest_inside = torch.minimum(torch.maximum(middle, half), pictures.extent - half)
    return nearest_inside - middle


def _shifts_of_images(pictures: Pictures) -> list[Shift]:
    """Return shifts of each image in a direction that depends on its index."""
    diagonal = float(pictures.extent.norm())
    # the root mean square over the image of the distance that a zoom moves pixels: a coordinate
    # that is uniform over a side has the standard deviation side / sqrt(12)
    zoom_length = (_ZOOM - 1) * diagonal / math.sqrt(12)
    angle = pictures.indices * _GOLDEN_ANGLE
    direction = torch.stack([angle.sin(), angle.cos()], 1)
    return [multiple * zoom_length * direction for multiple in _SHIFTS]


def _shifts_around_centre(pictures: Pictures) -> list[Shift]:
    """Return shifts of each object along a circle around the centre, inside the image."""
    position, least, most = pictures.position()
    low, high = pictures.box
    # the distance that a zoom moves the corners of the object's box
    zoom_length = (_ZOOM - 1) * (high - low).norm(dim=1, keepdim=True) / 2
    tangent = torch.stack([-position[:, 1], position[:, 0]], 1)
    to_the_right = torch.tensor([0.0, 1.0]).expand_as(tangent)  # for an object at the centre
    tangent = torch.where(tangent.norm(dim=1, keepdim=True) > 0, tangent, to_the_right)
    tangent = tangent / tangent.norm(dim=1, keepdim=True)
    shifts = list[Shift]()
    for multiple in _SHIFTS:
        for side in (1, -1):
            shifts.append((multiple * side * zoom_length * tangent).clamp(least, most))
    return shifts


# Light


def change_contrast(pictures: Pictures, sign: int) -> Edited:
    """Raise the contrast, or, for a negative sign, lower it.

    With masks it is the contrast between an object and its surroundings, else that of the image.
    The control is another brightness of the whole image, by as much. It has the direction in which
    the change moves the mean.
    """
    images = pictures.images
    planes = luminance(images)
    if pictures.masks is None:
        region = torch.ones_like(images[:, :1])
        reference = region
    else:
        region = pictures.masks[:, None].float()
        reference = 1 - region
    pixels = reference.sum((2, 3), keepdim=True).clamp_min(1.0)
    # the contrast is the distance from the mean luminance of the reference: of the surroundings, or
    # of the image
    reference_mean = (planes[:, None] * reference).sum((2, 3), keepdim=True) / pixels
    factor = _CONTRAST if sign > 0 else 1 / _CONTRAST
    changed = reference_mean + factor * (images - reference_mean)
    changed = torch.where(region > 0, changed, images).clamp(0, 1)
    is_brighter = (changed - images).mean((1, 2, 3)) >= 0
    step = torch.where(is_brighter, 1.0, -1.0) * distance(images, changed)
    control = (images + step[:, None, None, None]).clamp(0, 1)
    return changed, control


def change_brightness(pictures: Pictures, sign: int) -> Edited:
    """Brighten or darken images. The control is light from one side, which keeps the mean."""
    images = pictures.images
    changed = (images + sign * _BRIGHTER).clamp(0, 1)
    return changed, _light_from_a_side(images, changed)


def change_sharpness(pictures: Pictures, sign: int) -> Edited:
    """Sharpen (unsharp masking) or blur images. The control is light from one side."""
    images = pictures.images
    smooth = blurred(images, max(_LEAST_BLUR, _BLUR * min(images.shape[-2:])))
    sharp = 2 * images - smooth
    changed = (sharp if sign > 0 else smooth).clamp(0, 1)
    return changed, _light_from_a_side(images, changed)


def _light_from_a_side(images: Images, changed: Images) -> Images:
    """Return the images lit from one side, nearly as much as the change, with the same mean.

    Of the four sides, the one with the size nearest to that of the change is taken.
    """
    target = _LIGHT * distance(images, changed)
    options = list[Images]()
    for axis in (2, 3):
        shape = [1, 1, 1, 1]
        shape[axis] = images.shape[axis]
        for brightest_end in (1, -1):  # the last row or column, or the first
            gradient = torch.linspace(-brightest_end, brightest_end, shape[axis])
            options.append(_add_light(images, gradient.view(shape), target))
    return _nearest(images, changed, options)


def _add_light(images: Images, pattern: Tensor, target: PerImage) -> Images:
    """Add a pattern of light, with the strength that changes images by the target distance.

    Clipping reduces the distance and moves the mean luminance, so strength and offset are adapted
    in some steps.
    """
    mean = luminance(images).mean((1, 2))
    strength = 2 * target
    offset = torch.zeros_like(target)
    light = torch.zeros_like(images)
    lit = images
    for _ in range(_LIGHT_STEPS):
        light = strength[:, None, None, None] * pattern + offset[:, None, None, None]
        lit = (images + light).clamp(0, 1)
        # both are corrected by the light of this step, and applied in the next
        offset = offset + mean - luminance(lit).mean((1, 2))
        ratio = target / distance(images, lit).clamp_min(_TINY)
        strength = strength * ratio.clamp(0.5, 2.0)
    # the last light, moved once more: the mean is kept even if the distance is not yet the target
    last_offset = mean - luminance(lit).mean((1, 2))
    return (images + light + last_offset[:, None, None, None]).clamp(0, 1)


# Other objects


def uncover(pictures: Pictures, _sign: int) -> Edited:
    """Fill in everything that touches or covers the object.

    As a control, as much of it is put next to the object.
    """
    images = pictures.images
    assert pictures.masks is not None
    outline = outlines(luminance(images), pictures.masks)
    holes = grown(outline.cover, 2 * margin_of(images)) & ~pictures.masks
    covers_all = holes.flatten(1).all(1)[:, None, None]
    holes &= ~covers_all  # an image without any pixel left cannot be filled in
    changed = impute(images, holes[:, None])
    removed_part = images - changed
    off_object = ~(outline.near | outline.ring)[:, None]
    height, width = images.shape[-2:]
    options = list[Images]()
    # the removed part, moved by quarters of the sides
    for quarters_down, quarters_across in product(range(4), range(4)):
        if quarters_down == quarters_across == 0:
            continue
        offset = (height * quarters_down // 4, width * quarters_across // 4)
        step = removed_part.roll(offset, (2, 3)) * off_object
        options.append((images + step).clamp(0, 1))
    return changed, _nearest(images, changed, options)


def remove_clutter(pictures: Pictures, _sign: int) -> Edited:
    """Remove distractors from the background if the scene is known, else blur the background.

    The control is another background, or the same one moved or mirrored.
    """
    images = pictures.images
    scenes = pictures.split.scenes
    if scenes is not None:
        changed = scenes.redrawn("without distractors").float() / 255
        other = scenes.redrawn("other ground").float() / 255
        return changed, _from_the_left(images, other, distance(images, changed))
    smooth = blurred(pictures.ground, _GROUND_BLUR * min(images.shape[-2:]))
    on_object = pictures.layer > 0
    changed = torch.where(on_object, images, smooth)
    grounds = [pictures.ground.roll(pixels, 3) for pixels in (1, 2, 4)]  # px to the right
    grounds.append(pictures.ground.flip(3))
    options = [torch.where(on_object, images, ground) for ground in grounds]
    return changed, _nearest(images, changed, options)


def _from_the_left(images: Images, other: Images, size: PerImage) -> Images:
    """Replace columns from the left by those of other images, up to a mean absolute distance.

    A blend of both images would have fewer edges.
    """
    # the distance that the replacement of each column adds (batch, columns)
    by_column = (other - images).abs().mean((1, 2)) / images.shape[3]
    is_replaced = by_column.cumsum(1) <= size[:, None]
    return torch.where(is_replaced[:, None, None], other, images)


def fill_mark(pictures: Pictures, _sign: int) -> Edited:
    """Fill in a place from its surroundings. The control changes another place by as much."""
    images = pictures.images
    mark = pictures.subject.mark
    assert mark is not None
    top, left, bottom, right = mark.box
    holes = torch.zeros_like(images[:, :1], dtype=torch.bool)
    holes[..., top:bottom, left:right] = True
    changed = impute(images, holes)
    height, width = images.shape[-2:]
    options = list[Images]()
    for offset in ((height // 2, width // 2), (height // 2, 0), (0, width // 2)):
        step = (changed - images).roll(offset, (2, 3))
        options += [(images + step).clamp(0, 1), (images - step).clamp(0, 1)]
    return changed, _nearest(images, changed, options)


def _nearest(images: Images, changed: Images, options: Sequence[Images]) -> Images:
    """Return the control of each image with the size nearest to that of the change, as a ratio."""
    target = distance(images, changed).clamp_min(_TINY).log()
    misses = list[Tensor]()
    for option in options:
        log_size = distance(images, option).clamp_min(_TINY).log()
        misses.append((log_size - target).abs())
    best = torch.stack(misses).argmin(0)  # the number of the best option of each image
    return torch.stack(list(options))[best, torch.arange(len(images))]


# the change of each property, from the images and the sign of the change
CHANGES: Final[Mapping[str, Callable[[Pictures, int], Edited]]] = MappingProxyType(
    {
        "off_centre": move_from_centre,
        "size": change_size,
        "object_contrast": change_contrast,
        "border": move_off_border,
        "contrast": change_contrast,
        "brightness": change_brightness,
        "sharpness": change_sharpness,
        "clutter": remove_clutter,
        "occlusion": uncover,
        "map_off_centre": move_from_centre,
        "map_size": change_size,
        "mark": fill_mark,
    }
)
