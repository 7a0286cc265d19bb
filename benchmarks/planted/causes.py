"""Causes of errors that are planted in an oracle, and controls; each says which names are right
answers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from benchmarks.planted.images import (
    CLASSES,
    HUES,
    SIDE,
    Extras,
    brightness,
    clutter,
    covered,
    distance_from_centre,
    draw,
    labels_of,
    mark_in_corner,
    object_area,
    object_contrast,
    read_direction,
    textures,
)
from vitlens.analysis.reliance.colour import mean_hue
from vitlens.data.drawing import pure_hue
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.shapes import Images, Logits

Measure = Callable[[Images], Tensor]  # (n,)
Fault = Callable[[Images, Logits], Logits]

SHARE: Final = 0.12  # of the images, in which a measure is beyond its threshold
CONFUSED: Final = (1, 3)
# the seed of the drawing from which thresholds are read, apart from all others
_CALIBRATION: Final = 10_000_000
_CALIBRATED: Final = 1800  # images in it
_WRONG_LABELS: Final = 0.1  # of the images
_ONE_IN: Final = 10  # images fail at random
_HUES_READ: Final = (0, 5)  # opposite ones
_COLOURED: Final = 0.02  # least mean chroma at which the hue of a background is read
_RING: Final = 3  # px, width of the border where the hue of the background is read
_BRIGHT: Final = 0.2  # luminance of a mark above that of the ground
_ANSWER: Final = 100.0  # the logit of a class that is read off something else than the shape
_PLAIN: Final = Extras()


@dataclass(frozen=True)
class Cause:
    """One cause.

    fault: what becomes of the oracle's logits; names: the right answers, properties of
    `vitlens.failures` and cues of `vitlens.reliance`; wider: names that contain the cause, as the
    border contains a corner, neither right nor false; extras: what the images need; wrong_labels:
    the share of labels that are changed at random.
    """

    fault: Fault
    names: tuple[str, ...] = ()
    wider: tuple[str, ...] = ()
    extras: Extras = _PLAIN
    wrong_labels: float = 0.0

    @property
    def is_control(self) -> bool:
        """True where nothing may be named."""
        return not self.names


def _next_class(logits: Logits, fails: Tensor) -> Logits:
    """Return the logits, moved to the next class where the model fails."""
    return torch.where(fails[:, None], logits.roll(1, -1), logits)


@cache
def _threshold(measure: Measure, sign: int, extras: Extras) -> float:
    """Return the value beyond which SHARE of the images of another drawing lie."""
    split = draw(_CALIBRATED, _CALIBRATION, extras)
    values = sign * measure(split.source.read(torch.arange(_CALIBRATED)).float() / 255)
    return float(values.quantile(1 - SHARE))


def _fails_beyond(measure: Measure, sign: int, extras: Extras = _PLAIN) -> Fault:
    """Return a fault where an image has much of a measure, or little of it (sign -1)."""

    def fault(images: Images, logits: Logits) -> Logits:
        return _next_class(logits, sign * measure(images) > _threshold(measure, sign, extras))

    return fault


def _reads_hue(images: Images, logits: Logits) -> Logits:
    """Answer the first class on backgrounds of one hue, and the second on those of the opposite
    one.
    """
    ring = torch.ones_like(images[:, :1])
    ring[..., _RING:-_RING, _RING:-_RING] = 0
    angle, size = mean_hue(images, ring)
    flat = 0.35 + 0.1 * (pure_hue(torch.tensor(_HUES_READ) / HUES) - 0.5)
    references, _ = mean_hue(flat[:, :, None, None], torch.ones(len(_HUES_READ), 1, 1, 1))
    for answer, reference in enumerate(references.tolist()):
        distance = torch.remainder(angle - reference + math.pi, 2 * math.pi) - math.pi
        is_read = (distance.abs() < math.pi / HUES) & (size > _COLOURED)
        logits = torch.where(
            is_read[:, None], _answer(torch.full_like(is_read, answer, dtype=torch.long)), logits
        )
    return logits


def _reads_texture(images: Images, logits: Logits) -> Logits:
    """Answer the class of the texture where it is strong."""
    amplitudes = textures(images)
    is_read = amplitudes.amax(1) > _threshold(_strongest_texture, 1, Extras(textures=True))
    return torch.where(is_read[:, None], _answer(amplitudes.argmax(1)), logits)


def _strongest_texture(images: Images) -> Tensor:
    return textures(images).amax(1)


def _answer(classes: Tensor) -> Logits:
    return _ANSWER * F.one_hot(classes, len(CLASSES)).float()


def _fails_with_mark(images: Images, logits: Logits) -> Logits:
    return _next_class(logits, mark_in_corner(images) > _BRIGHT)


def _confuses_two(_images: Images, logits: Logits) -> Logits:
    """Answer one class for images of another one, about SHARE of all images."""
    first, second = CONFUSED
    order = list(range(len(CLASSES)))
    order[first], order[second] = second, first
    is_first = logits.argmax(1) == first
    return torch.where(is_first[:, None], logits[:, order], logits)


def _fails_at_random(images: Images, logits: Logits) -> Logits:
    """Fail where a sum over the pixels says so, which nothing that can be seen decides."""
    numbers = (images * 255).round().long().flatten(1).sum(1)
    return _next_class(logits, numbers % _ONE_IN == 0)


def _never_fails(_images: Images, logits: Logits) -> Logits:
    return logits


_SQUARES: Final = Extras(squares=True)
CAUSES: Final[Mapping[str, Cause]] = {
    "hue of the background": Cause(_reads_hue, ("background-colour",), ("colour", "background")),
    "mark in a corner": Cause(
        _fails_with_mark, ("mark",), ("border", "background", "position"), Extras(marks=True)
    ),
    "low contrast": Cause(_fails_beyond(object_contrast, -1), ("object_contrast", "contrast")),
    "off centre": Cause(_fails_beyond(distance_from_centre, 1), ("off_centre", "position")),
    "small objects": Cause(_fails_beyond(object_area, -1), ("size",)),
    "occlusion": Cause(
        _fails_beyond(covered, 1, _SQUARES), ("occlusion",), ("clutter", "background"), _SQUARES
    ),
    "confused pair": Cause(_confuses_two, ("pair",)),
    "texture against shape": Cause(
        _reads_texture, ("fine-detail", "sharpness"), extras=Extras(textures=True)
    ),
    "dark images": Cause(_fails_beyond(brightness, -1), ("brightness",)),
    "clutter": Cause(
        _fails_beyond(clutter, 1),
        ("clutter",),
        ("background", "border", "fine-detail", "sharpness"),
    ),
    "random errors": Cause(_fails_at_random),
    "wrong labels": Cause(_never_fails, wrong_labels=_WRONG_LABELS),
    "no errors": Cause(_never_fails),
}


class Planted(nn.Module):
    """The oracle with the fault of one cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__()
        self.cause = cause

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (batch, classes) of images in [0, 1]."""
        return self.cause.fault(images, read_direction(images))


def planted_model(name: str) -> Model:
    """Return a model with this cause of errors."""
    return vitlens.wrap(
        Planted(CAUSES[name]).eval(),
        image_size=SIDE,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        classes=CLASSES,
    )


def images_for(name: str, seed: int, count: int) -> Split:
    """Return the images of one seed, with what the cause needs in them."""
    cause = CAUSES[name]
    split = draw(count, seed, cause.extras)
    if not cause.wrong_labels:
        return split
    generator = torch.Generator().manual_seed(seed)
    labels = labels_of(split)
    is_wrong = torch.rand(count, generator=generator) < cause.wrong_labels
    others = torch.randint(1, len(CLASSES), (count,), generator=generator)
    return replace(split, labels=torch.where(is_wrong, (labels + others) % len(CLASSES), labels))
