"""Properties of images on which errors may depend: what each image has of them, and changes of one
of them.

Each change has a control that changes an image as much, by the mean absolute distance of its
pixels, and leaves the property as it is. An object with a known mask is moved, scaled and given
another contrast over its own ground, filled in where it stood; without masks the whole image is. Of
several controls the one nearest in size is taken.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.occlusion import grown, margin_of, outlines
from vitlens.analysis.failures.operations import blurred
from vitlens.analysis.failures.patterns import Cells, Mark, Pair, cells_of, find_mark, find_pair
from vitlens.analysis.failures.properties import PROPERTIES
from vitlens.analysis.failures.separation import FEWEST
from vitlens.analysis.faithfulness.maps import AnyMaps, map_shares
from vitlens.analysis.faithfulness.removal import imputed
from vitlens.data.scenes import LUMINANCE
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Logits, Masks

PerImage = Float[Tensor, " batch"]
Plane = Float[Tensor, "batch height width"]
Shift = Float[Tensor, "batch 2"]  # down and to the right, px
Edited = tuple[Images, Images]  # the property changed; the control
_BATCH: Final = 256
_WINDOW: Final = 9  # px: width of the mean filter that blurs an image again (Crete 2007)
_OTHERS: Final = 20  # images of other classes from which on logits are correlated
_CONTRAST: Final = 1.5  # times the contrast
_BRIGHTER: Final = 0.15  # of the range of luminance
_ZOOM: Final = 1.25
# standard deviation: of the shorter side, and at least, px
_BLUR = 0.01
_LEAST_BLUR = 0.6
_CLEAR: Final = 1 / 16  # of the shorter side: how far an object is moved off the border
_GROUND_BLUR: Final = 1 / 8  # of the shorter side
_ROOM: Final = 1 / 4  # of each side: how far an image is shifted at most
_GOLDEN_ANGLE: Final = 2.4  # of consecutive images: all directions alike
_SHIFTS: Final = (0.25, 0.5, 1.0, 1.5)  # times as far as a zoom on average
# of the size of a change: dark images cannot be lit much without a change of their mean
_LIGHT: Final = 0.75
_FITTED: Final = 8  # steps in which a light is adjusted to what is clipped
_TINY: Final = 1e-6


@dataclass(frozen=True)
class Subject:
    """One model with its images and its predictions; maps: of the images at these indices (None: no
    maps).
    """

    model: Model
    split: Split
    evaluation: Evaluation
    maps: AnyMaps | None = None
    indices: Tensor | None = None
    precision: str = "fp32"
    batch_size: int | None = None
    seed: int = 0

    @cached_property
    def mapped(self) -> dict[str, Tensor]:
        """Of every image's map, NaN where it is not known: the centre of mass (row, column), shares
        of the sides; the share on the object; the share of the image that holds half of it, and the
        share off the middle quarter.
        """
        if self.maps is None:
            return {}
        at = torch.arange(len(self.split)) if self.indices is None else self.indices
        grid = (self.maps.shape[-2], self.maps.shape[-1])
        masks = None if self.split.masks is None else self.split.masks[at]
        shares = map_shares(self.maps, size=self.split.size, grid=grid, masks=masks)
        found = {
            "row": shares.row,
            "column": shares.column,
            "half": shares.half,
            "outer": 1 - shares.central,
        }
        if masks is not None and shares.inside is not None:
            found["inside"] = torch.where(masks.flatten(1).any(1), shares.inside, torch.nan)
        for name, values in found.items():
            found[name] = torch.full((len(self.split),), torch.nan)
            found[name][at] = torch.where(shares.usable, values, torch.nan).float()
        return found

    @cached_property
    def independent(self) -> NDArray[np.intp]:
        """Return the indices of all images; of those that share a source, of the first."""
        groups = self.evaluation.groups
        if groups is None:
            return np.arange(len(self.split))
        first: NDArray[np.intp] = np.unique(groups.numpy(), return_index=True)[1]
        return first

    @cached_property
    def _read(self) -> tuple[Mapping[str, PerImage], Cells]:
        """Return the properties that are read off pixels and masks, and the cells in which a mark
        is sought.
        """
        split = self.split
        parts = list[dict[str, Tensor]]()
        cells = list[Cells]()
        for batch in split.batches(_BATCH):
            masks = (
                None
                if split.masks is None
                else split.masks[batch.indices.to(split.masks.device)].cpu()
            )
            parts.append(_of_pixels(luminance(batch.images).cpu(), masks))
            cells.append(cells_of(batch.images).float().cpu())
        return {
            name: torch.cat([part[name].float() for part in parts]) for name in parts[0]
        }, torch.cat(cells)

    @property
    def cells(self) -> Cells:
        """Luminance and colours of places on a grid, without the mean of each image."""
        return self._read[1]

    @cached_property
    def mark(self) -> Mark | None:
        """Return the place at which errors and correct predictions differ most; None of few of
        either.
        """
        if not self._comparable:
            return None
        wrong = ~self.evaluation.correct.numpy()
        return find_mark(self.cells, wrong, self.independent, self.split.size, self.seed)

    @cached_property
    def pair(self) -> Pair | None:
        """Return the two classes that are confused most; None of few errors, or of two classes."""
        if not self._comparable:
            return None
        labels = self.evaluation.labels
        predictions = self.evaluation.predictions
        return find_pair(labels, predictions, self.independent, len(self.evaluation.classes))

    @property
    def _comparable(self) -> bool:
        correct = self.evaluation.correct.numpy()[self.independent]
        return min(int(correct.sum()), int((~correct).sum())) >= FEWEST

    @cached_property
    def values(self) -> Mapping[str, PerImage]:
        """Return every property (n,) that differs between these images, NaN where it is not known.

        Of maps: where the objects are known, how much of each lies on them, else the place and size
        of what it marks.
        """
        split = self.split
        maps = self.mapped
        found = dict(self._read[0])
        if self.mark is not None:
            found["mark"] = self.mark.values
        if self.pair is not None:
            found["pair"] = self.pair.values
        if "inside" in maps:
            found["map_on_object"] = maps["inside"]
        elif maps:
            off = (torch.stack([maps["row"], maps["column"]], 1) - 0.5) * torch.tensor(split.size)
            found |= {"map_off_centre": off.norm(dim=1) / (min(split.size) / 2)}
            found |= {"map_size": maps["half"], "map_outer": maps["outer"]}
        found["look_alike"] = look_alike(self.evaluation.logits, self.evaluation.labels)
        found["confidence"] = self.evaluation.confidence
        varied = [
            name for name, each in found.items() if each.nan_to_num(0.0).std(correction=0) > 1e-6
        ]
        return {name: found[name] for name in PROPERTIES if name in varied}


def _of_pixels(planes: Plane, masks: Masks | None) -> dict[str, Tensor]:
    """Properties of the luminance, and of the object where its mask is known."""
    down, across = (
        F.pad(planes.diff(dim=axis).abs(), pad) for axis, pad in ((1, (0, 0, 0, 1)), (2, (0, 1)))
    )
    edges = down + across
    found = {"brightness": planes.mean((1, 2)), "sharpness": 1 - blur(planes)}
    if masks is None:
        return {
            **found,
            "contrast": planes.flatten(1).std(1, correction=0),
            "clutter": edges.mean((1, 2)),
        }
    inside = masks.float()
    around = 1 - F.max_pool2d(inside[:, None], 5, stride=1, padding=2)[:, 0]
    sides = torch.tensor(masks.shape[-2:])
    edge = torch.stack(
        [masks[:, 0].any(1), masks[:, -1].any(1), masks[:, :, 0].any(1), masks[:, :, -1].any(1)]
    )
    area = inside.mean((1, 2))
    return {
        **found,
        "off_centre": ((centroids(masks) - sides / 2) / (sides.min() / 2)).norm(dim=1),
        "size": torch.where(area > 0, area, torch.nan),
        "object_contrast": (_mean(planes, inside) - _mean(planes, around)).abs(),
        "border": torch.where(area > 0, edge.any(0).float(), torch.nan),
        "occlusion": outlines(planes, masks).share,
        "clutter": _mean(edges, around),
    }


def luminance(images: Images) -> Plane:
    """Luminance (batch, height, width) in [0, 1] of images in [0, 1], without gamma correction."""
    weights = torch.tensor(LUMINANCE, dtype=images.dtype, device=images.device)
    return torch.einsum("bchw,c->bhw", images, weights)


def blur(planes: Plane) -> PerImage:
    """Return how blurred an image is, 0 (sharp) to 1, by how little it changes when it is blurred
    again (Crete 2007).

    Along each axis: the share of the differences between neighbouring pixels that remains after a
    mean over 9 pixels; the larger of the two axes. An image that is constant along an axis counts
    as blurred along it.
    """
    axes = []
    for rows in (planes, planes.transpose(1, 2)):
        window = min(_WINDOW, 2 * ((rows.shape[-1] - 1) // 2) + 1)
        padded = F.pad(rows[:, None], (window // 2, window // 2, 0, 0), mode="replicate")
        again = F.avg_pool2d(padded, (1, window), stride=1)[:, 0]
        before = rows.diff(dim=-1).abs()
        after = again.diff(dim=-1).abs()
        whole = before.sum((1, 2))
        lost = (before - after).clamp_min(0).sum((1, 2))
        axes.append(
            torch.where(whole > 1e-6 * before[0].numel(), 1 - lost / whole.clamp_min(1e-12), 1.0)
        )
    return torch.maximum(*axes)


def _mean(planes: Tensor, weights: Tensor) -> PerImage:
    total = weights.sum((1, 2))
    return torch.where(total > 0, (planes * weights).sum((1, 2)) / total.clamp_min(1e-9), torch.nan)


def centroids(masks: Masks) -> Float[Tensor, "batch 2"]:
    """Return the mean row and column of each object's pixels, px; NaN without an object."""
    inside = masks.float()
    rows, columns = (torch.arange(side) + 0.5 for side in masks.shape[-2:])
    return (
        torch.stack([(inside.sum(2) @ rows), (inside.sum(1) @ columns)], 1)
        / inside.sum((1, 2))[:, None]
    )


def look_alike(logits: Logits, labels: Labels) -> PerImage:
    """Return whether the most probable class other than the label is one of those that resemble the
    label most, 1 or 0.

    Two classes resemble each other if their logits are correlated over the images of other classes
    than the label; the nearest hundredth of the classes counts, at least one. NaN with fewer than 3
    classes or 20 other images.
    """
    found = torch.full((len(labels),), torch.nan)
    classes = logits.shape[1]
    rivals = logits.scatter(1, labels[:, None], -torch.inf).argmax(1)
    for label in labels.unique().tolist() if classes > 2 else ():
        others = logits[labels != label].double()
        if len(others) < _OTHERS:
            continue
        centred = others - others.mean(0)
        scale = centred.square().sum(0).sqrt().clamp_min(1e-12)
        likeness = (centred * centred[:, label, None]).sum(0) / (scale * scale[label])
        likeness[label] = -1.0
        own = labels == label
        found[own] = torch.isin(
            rivals[own], likeness.topk(max(1, round(0.01 * classes))).indices
        ).float()
    return found


class Pictures:
    """The images at some indices, their masks where objects are known, and their extent: height and
    width, px.
    """

    def __init__(self, subject: Subject, indices: Int[Tensor, " batch"]) -> None:
        self.subject = subject
        self.indices = indices
        self.split = subject.split.pick(indices)
        self.images: Images = next(iter(self.split.batches(len(indices)))).images
        self.masks = self.split.masks
        self.extent = torch.tensor(self.images.shape[-2:], dtype=torch.float32)

    @cached_property
    def layer(self) -> Float[Tensor, "batch 1 height width"]:
        """Return the object with its smoothed edge, 1 or 0; nothing where it would be the whole
        image.
        """
        assert self.masks is not None
        edge = F.max_pool2d(self.masks[:, None].float(), 3, stride=1, padding=1)
        return edge * ~(edge > 0).flatten(1).all(1)[:, None, None, None]

    @cached_property
    def ground(self) -> Images:
        """Return the images with their objects filled in from what surrounds them."""
        return imputed(self.images, self.layer > 0)

    @cached_property
    def box(self) -> tuple[Float[Tensor, "batch 2"], Float[Tensor, "batch 2"]]:
        """Return the first row and column of each object, and the ones after its last; without an
        object the whole image.
        """
        assert self.masks is not None
        lines = [self.masks.any(axis) for axis in (2, 1)]
        lines = [line | ~line.any(1, keepdim=True) for line in lines]
        first = torch.stack([line.float().argmax(1) for line in lines], 1)
        last = torch.stack([line.shape[1] - line.flip(1).float().argmax(1) for line in lines], 1)
        return first.float(), last.float()

    def place(self) -> tuple[Shift, Shift, Shift]:
        """Return where the object (without masks: what the map marks) lies from the centre, and the
        ends of its shifts.
        """
        if self.masks is None:
            middle = (
                torch.stack(
                    [self.subject.mapped[name][self.indices] for name in ("row", "column")], 1
                )
                - 0.5
            )
            room = (self.extent * _ROOM).expand_as(middle)
            return (middle * self.extent).nan_to_num(0.0), -room, room
        low, high = self.box
        return (centroids(self.masks) - self.extent / 2).nan_to_num(0.0), -low, self.extent - high

    def placed(self, shift: Tensor, scale: Tensor | float = 1.0) -> Images:
        """Return the object, or the image without masks, shifted (whole px) and scaled around its
        centre.
        """
        whole = shift.round()
        if self.masks is None:
            return _sampled(self.images, whole, torch.zeros_like(whole), scale, "reflection")
        low, high = self.box
        layers = torch.cat([self.images * self.layer, self.layer], 1)
        layers = _sampled(layers, whole, (low + high - self.extent) / 2, scale, "zeros")
        cover = layers[:, 3:]
        return (self.ground * (1 - cover) + layers[:, :3]).clamp(0, 1)


def _sampled(
    pixels: Tensor, shift: Shift, pivot: Shift, scale: Tensor | float, beyond: str
) -> Tensor:
    """Images shifted, and scaled around a pivot (px from the centre); `beyond` the edge: as
    grid_sample.
    """
    height, width = pixels.shape[-2:]
    half = torch.tensor([height / 2, width / 2])
    inverse = 1 / torch.as_tensor(scale).expand(len(pixels))
    offset = pivot - inverse[:, None] * (pivot + shift)
    matrix = torch.diag_embed(inverse[:, None].expand(-1, 2))
    theta = torch.cat([matrix, (offset / half).flip(1)[:, :, None]], 2)  # x before y, from -1 to 1
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode=beyond, align_corners=False)


def around_centre(pictures: Pictures, sign: int) -> Edited:
    """Return objects moved to the centre, or twice as far from it; control: as far around it, at
    the same distance.
    """
    place, least, most = pictures.place()
    shift = (-place if sign < 0 else place).clamp(least, most).round()
    radius = place.norm(dim=1)
    length = shift.norm(dim=1)
    angle = 2 * torch.asin((length / (2 * radius).clamp_min(1e-6)).clamp(max=1.0))
    options = []
    for side in (1, -1):
        turned = torch.view_as_real(
            torch.view_as_complex(place) * torch.polar(torch.ones_like(angle), side * angle)
        )
        options.append((turned - place).clamp(least, most))
    miss = [
        ((place + option).norm(dim=1) - radius).abs() + (option.norm(dim=1) - length).abs()
        for option in options
    ]
    control = torch.where((miss[0] <= miss[1])[:, None], options[0], options[1])
    return pictures.placed(shift), pictures.placed(control)


def off_border(pictures: Pictures, _sign: int) -> Edited:
    """Objects at the border moved off it; control: as far, still at the border."""
    (low, high), extent = pictures.box, pictures.extent
    clear = (_CLEAR * extent.amin()).round().clamp_min(1.0)
    first = low <= 0
    last = high >= extent
    shift = torch.where(first & ~last, clear, torch.where(last & ~first, -clear, 0.0)).clamp(
        -low, extent - high
    )
    length = shift.norm(dim=1, keepdim=True).round()
    best = torch.zeros_like(shift)
    for direction in ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)):
        moved = (length * torch.tensor(direction)).clamp(-low, extent - high)
        touches = ((low + moved <= 0) | (high + moved >= extent)).any(1, keepdim=True)
        best = torch.where(touches & (moved.norm(dim=1) > best.norm(dim=1))[:, None], moved, best)
    return pictures.placed(shift), pictures.placed(best)


def uncovered(pictures: Pictures, _sign: int) -> Edited:
    """Return what touches or covers the object filled in; control: as much of the same set next to
    the object.
    """
    images = pictures.images
    assert pictures.masks is not None
    outline = outlines(luminance(images), pictures.masks)
    holes = grown(outline.cover, 2 * margin_of(images)) & ~pictures.masks
    holes &= ~holes.flatten(1).all(1)[:, None, None]
    changed = imputed(images, holes[:, None])
    apart = ~(outline.near | outline.ring)[:, None]
    height, width = images.shape[-2:]
    places = [
        (height * down // 4, width * across // 4) for down, across in product(range(4), range(4))
    ][1:]
    steps = [(images - changed).roll(place, (2, 3)) * apart for place in places]
    return changed, _nearest(images, changed, [(images + step).clamp(0, 1) for step in steps])


def scaled(pictures: Pictures, sign: int) -> Edited:
    """Shrunk or enlarged; control: an object is moved around the centre, an image shifted, by as
    much on average.

    A turn would be no control of a class that depends on a direction.
    """
    images = pictures.images
    scale = torch.full((len(images),), _ZOOM if sign > 0 else 1 / _ZOOM)
    still = torch.zeros(len(images), 2)
    if pictures.masks is None:
        changed = pictures.placed(still, scale)
        far = (
            (_ZOOM - 1) * float(pictures.extent.norm()) / math.sqrt(12)
        )  # root mean square, of a zoom
        angle = pictures.indices * _GOLDEN_ANGLE
        direction = torch.stack([angle.sin(), angle.cos()], 1)
        return changed, _nearest(
            images, changed, [pictures.placed(part * far * direction) for part in _SHIFTS]
        )
    low, high = pictures.box
    room = (pictures.extent / (high - low).clamp_min(1.0)).amin(1).clamp_min(1.0)
    scale = torch.minimum(scale, room)
    half = (high - low) / 2 * scale[:, None]
    middle = (low + high) / 2
    inside = torch.minimum(torch.maximum(middle, half), pictures.extent - half) - middle
    changed = pictures.placed(inside if sign > 0 else still, scale)
    return changed, _nearest(
        images, changed, [pictures.placed(step) for step in _steps_around(pictures)]
    )


def _steps_around(pictures: Pictures) -> list[Shift]:
    """Return shifts of each object along a circle around the centre, which keep it inside the
    image.
    """
    place, least, most = pictures.place()
    low, high = pictures.box
    far = (
        (_ZOOM - 1) * (high - low).norm(dim=1, keepdim=True) / 2
    )  # how far the corners of an object move in a zoom
    along = torch.stack([-place[:, 1], place[:, 0]], 1)
    upright = torch.tensor([0.0, 1.0]).expand_as(along)
    along = torch.where(along.norm(dim=1, keepdim=True) > 0, along, upright)
    along = along / along.norm(dim=1, keepdim=True)
    return [(part * side * far * along).clamp(least, most) for part in _SHIFTS for side in (1, -1)]


def with_contrast(pictures: Pictures, sign: int) -> Edited:
    """More or less contrast, of an object to its surroundings or of the whole image; control:
    another brightness of the whole image, by as much and in the direction in which its mean
    changes.
    """
    images = pictures.images
    planes = luminance(pictures.images)
    where = (
        torch.ones_like(images[:, :1])
        if pictures.masks is None
        else pictures.masks[:, None].float()
    )
    around = where if pictures.masks is None else 1 - where
    middle = (planes[:, None] * around).sum((2, 3), keepdim=True) / around.sum(
        (2, 3), keepdim=True
    ).clamp_min(1.0)
    changed = middle + (_CONTRAST if sign > 0 else 1 / _CONTRAST) * (images - middle)
    changed = torch.where(where > 0, changed, images).clamp(0, 1)
    brighter = ((changed - images).mean((1, 2, 3)) >= 0)[:, None, None, None]
    step = torch.where(brighter, 1.0, -1.0) * distance(images, changed)[:, None, None, None]
    return changed, (images + step).clamp(0, 1)


def with_brightness(pictures: Pictures, sign: int) -> Edited:
    """Brightened or darkened; control: light from one side, which leaves the mean."""
    images = pictures.images
    changed = (images + sign * _BRIGHTER).clamp(0, 1)
    return changed, _lit(images, changed)


def with_sharpness(pictures: Pictures, sign: int) -> Edited:
    """Sharpened (unsharp masking) or blurred; control: light from one side."""
    images = pictures.images
    smooth = blurred(images, max(_LEAST_BLUR, _BLUR * min(images.shape[-2:])))
    changed = (2 * images - smooth if sign > 0 else smooth).clamp(0, 1)
    return changed, _lit(images, changed)


def without_clutter(pictures: Pictures, _sign: int) -> Edited:
    """Return the ground without distractors, or blurred; control: another ground, or its own moved
    or mirrored.
    """
    images = pictures.images
    scenes = pictures.split.scenes
    if scenes is not None:
        changed, other = (
            scenes.redrawn(how).float() / 255 for how in ("without distractors", "other ground")
        )
        return changed, _from_the_left(images, other, distance(images, changed))
    smooth = blurred(pictures.ground, _GROUND_BLUR * min(images.shape[-2:]))
    on_object = pictures.layer > 0
    changed = torch.where(on_object, images, smooth)
    grounds = [pictures.ground.roll(pixels, 3) for pixels in (1, 2, 4)] + [pictures.ground.flip(3)]
    return changed, _nearest(
        images, changed, [torch.where(on_object, images, ground) for ground in grounds]
    )


def _from_the_left(images: Images, others: Images, size: PerImage) -> Images:
    """As many columns of other images, from the left, as change the pixels by this mean absolute
    distance; a blend of the two would have fewer edges.
    """
    by_column = (others - images).abs().mean((1, 2)) / images.shape[3]
    inside = by_column.cumsum(1) <= size[:, None]
    return torch.where(inside[:, None, None], others, images)


def without_mark(pictures: Pictures, _sign: int) -> Edited:
    """Return a place filled in from what surrounds it; control: another place changed by as
    much."""
    images = pictures.images
    mark = pictures.subject.mark
    assert mark is not None
    top, left, bottom, right = mark.box
    holes = torch.zeros_like(images[:, :1], dtype=torch.bool)
    holes[..., top:bottom, left:right] = True
    changed = imputed(images, holes)
    height, width = images.shape[-2:]
    places = ((height // 2, width // 2), (height // 2, 0), (0, width // 2))
    steps = [
        factor * (changed - images).roll(place, (2, 3))
        for place, factor in product(places, (1, -1))
    ]
    return changed, _nearest(images, changed, [(images + step).clamp(0, 1) for step in steps])


def distance(images: Images, others: Images) -> PerImage:
    """Return the mean absolute distance of the pixels of each image."""
    return (images - others).abs().mean((1, 2, 3))


def _nearest(images: Images, changed: Images, options: Sequence[Images]) -> Images:
    """Of several controls of each image the one whose size is nearest to the change's."""
    wanted = distance(images, changed).clamp_min(_TINY).log()
    miss = torch.stack(
        [(distance(images, option).clamp_min(_TINY).log() - wanted).abs() for option in options]
    )
    return torch.stack(list(options))[miss.argmin(0), torch.arange(len(images))]


def _lit(images: Images, changed: Images) -> Images:
    """Return the images lit from one side, nearly as much as the change, at their own mean
    luminance.

    Of four sides the one whose light comes nearest to the size of the change. What is clipped is
    made up for.
    """
    wanted = _LIGHT * distance(images, changed)
    options = list[Images]()
    before = luminance(images).mean((1, 2))
    for axis, flip in product((2, 3), (False, True)):
        shape = [1, 1, 1, 1]
        shape[axis] = images.shape[axis]
        pattern = torch.linspace(1, -1, shape[axis]) if flip else torch.linspace(-1, 1, shape[axis])
        strength = 2 * wanted
        offset = torch.zeros_like(wanted)
        for _ in range(_FITTED):
            light = (
                strength[:, None, None, None] * pattern.view(shape) + offset[:, None, None, None]
            )
            option = (images + light).clamp(0, 1)
            offset = offset + before - luminance(option).mean((1, 2))
            strength = strength * (wanted / distance(images, option).clamp_min(_TINY)).clamp(
                0.5, 2.0
            )
        options.append(
            (images + light + (before - luminance(option).mean((1, 2)))[:, None, None, None]).clamp(
                0, 1
            )
        )
    return _nearest(images, changed, options)


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
        "occlusion": uncovered,
        "map_off_centre": around_centre,
        "map_size": scaled,
        "mark": without_mark,
    }
)
