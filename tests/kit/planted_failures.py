"""Scenes and models with known causes of errors: the stripes of a square show its class.

The class is read off the luminance's gradients, so that neither moving nor tinting changes it.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn
from torch.nn import functional as F

import vitlens
from tests.kit.planted_methods import planted_methods
from tests.kit.splits import split_of
from vitlens.analysis.evaluation.evaluate import Evaluation
from vitlens.analysis.failures.changes import Pictures
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.operations import luminance
from vitlens.analysis.failures.rows import QuarterRow
from vitlens.analysis.failures.separation import separation
from vitlens.commands.audit.measure import subject_of
from vitlens.commands.audit.plan import MAPPED
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.resampling import Numbers
from vitlens.uncertainty import Estimate

SIDE = 32
CLASSES = ("across", "down")
GROUND = 0.3


@cache
def squares(count: int = 300, *, seed: int = 0, masks: bool = True, dots: int = 40) -> Split:
    """Draw squares of any contrast, a third of them at the border, among up to 40 bright pixels.

    dots: the number of bright pixels. The split is shared: do not change it.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> list[float]:
        return (low + (high - low) * torch.rand(count, generator=generator)).tolist()

    labels = torch.randint(0, 2, (count,), generator=generator)
    images = GROUND + 0.02 * torch.rand(count, 3, SIDE, SIDE, generator=generator)
    objects = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    # of each image, drawn in this order
    sides = draw(9, 14)
    rows = draw(0, 1)
    columns = draw(0, 1)
    borders = draw(0, 1)
    contrasts = draw(0.12, 0.5)
    dot_counts = draw(0, dots + 1)
    for index in range(count):
        side = int(sides[index])
        top = 2 + int(rows[index] * (SIDE - side - 3))
        left = 2 + int(columns[index] * (SIDE - side - 3))
        if borders[index] < 1 / 6:
            top = 0
        elif borders[index] < 1 / 3:
            left = SIDE - side
        down = slice(top, top + side)
        across = slice(left, left + side)
        objects[index, down, across] = True
        # at least two pixels from the square
        near = F.max_pool2d(objects[index][None].float(), 5, 1, 2)[0].bool()
        free = (~near).nonzero()
        order = torch.randperm(len(free), generator=generator)
        for y, x in free[order[: int(dot_counts[index])]].tolist():
            images[index, :, y, x] = 1.0
        stripes = contrasts[index] * ((torch.arange(side) // 2) % 2 == 0).float()
        is_across = labels[index] == 0
        images[index, :, down, across] += stripes[:, None] if is_across else stripes[None, :]
    return split_of(images.clamp(0, 1), labels, CLASSES, masks=objects if masks else None)


class Planted(nn.Module):
    """Reads the direction of the stripes, and errs where the rule holds."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, images: Tensor) -> Tensor:
        planes = luminance(images)
        stripes = planes.clamp(max=0.85)  # without the bright pixels
        down = F.pad(stripes.diff(dim=1).abs(), (0, 0, 0, 1))
        across = F.pad(stripes.diff(dim=2).abs(), (0, 1))
        local = F.avg_pool2d((down - across)[:, None], 7, 1, 3)[:, 0]
        strongest = local.flatten(1).abs().argmax(1, keepdim=True)
        score = 30 * local.flatten(1).gather(1, strongest)[:, 0]
        wrong = self.rule(planes, local)
        score = torch.where(wrong, -score, score)
        return torch.stack([score, -score], 1)


def low_contrast(_planes: Tensor, local: Tensor) -> Tensor:
    """Return images with faint stripes."""
    return local.flatten(1).abs().amax(1) < 0.12


def at_border(planes: Tensor, _local: Tensor) -> Tensor:
    """Return True for images in which a stripe reaches the edge."""
    edge = torch.cat([planes[:, 0], planes[:, -1], planes[:, :, 0], planes[:, :, -1]], 1)
    # brighter than the ground, darker than a dot
    return ((edge > 0.36) & (edge < 0.85)).any(1)


def cluttered(planes: Tensor, _local: Tensor) -> Tensor:
    """Return True for images with many bright pixels."""
    return (planes > 0.9).flatten(1).sum(1) > 28


def at_random(planes: Tensor, _local: Tensor) -> Tensor:
    """Return answers that no property explains."""
    return (1e5 * planes.mean((1, 2))).sin() > 0.6


def marked(planes: Tensor, _local: Tensor) -> Tensor:
    """Return True for images with a white square in the upper left corner."""
    return planes[:, :3, :3].flatten(1).amin(1) > 0.98


class Confusing(nn.Module):
    """`cnn-digits`, which calls threes eights, or else a ninth of all images the next class."""

    def __init__(self, only_threes: bool) -> None:
        super().__init__()
        self.base = vitlens.load("cnn-digits")
        self.only_threes = only_threes

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.base(images)
        if self.only_threes:
            swapped = logits[:, [0, 1, 2, 8, 4, 5, 6, 7, 3, 9]]  # 3 and 8
            return torch.where((logits.argmax(1) == 3)[:, None], swapped, logits)
        # the sum of the pixels is as good as random
        is_confused = (images * 255).round().long().flatten(1).sum(1) % 9 == 0
        return torch.where(is_confused[:, None], logits.roll(1, -1), logits)


def model(rule: Callable[[Tensor, Tensor], Tensor], alias: str = "planted") -> Model:
    return vitlens.wrap(
        Planted(rule),
        alias=alias,
        image_size=SIDE,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        classes=CLASSES,
    )


def boxes(*places: tuple[int, int, int, int], side: int = 16, masks: bool = True) -> Split:
    """Draw white rectangles (top, left, height, width) on grey of 100, of two classes in turn."""
    pixels = torch.full((len(places), 3, side, side), 100, dtype=torch.uint8)
    objects = torch.zeros(len(places), side, side, dtype=torch.bool)
    for at, (top, left, height, width) in enumerate(places):
        objects[at, top : top + height, left : left + width] = True
        pixels[at][:, objects[at]] = 200
    return split_of(
        pixels, torch.arange(len(places)) % 2, CLASSES, masks=objects if masks else None
    )


def pictures_of(split: Split, maps: Tensor | None = None) -> Pictures:
    """Return all images of a split and their maps, as a change of one property takes them."""
    evaluation = Evaluation("made", split.classes, torch.zeros(len(split), 2), split.labels)
    return Pictures(Subject(None, split, evaluation, maps), torch.arange(len(split)))


def even(_model: Model, images: Tensor, _targets: Tensor) -> Tensor:
    """Return uniform maps."""
    return torch.ones(len(images), 4, 4)


def properties(split: Split, maps: Tensor | None = None) -> dict[str, Tensor]:
    """Return the properties that differ between the images of a split with these maps."""
    method = even if maps is None else lambda _model, images, _targets: maps[: len(images)]
    with planted_methods({"saliency": method}):
        return dict(vitlens.failures(model(at_border), split, method="saliency").values[0])


def failures_of(
    rules: Mapping[str, Callable[[Tensor, Tensor], Tensor]],
    split: Split,
    maps: Tensor | None = None,
    indices: Tensor | None = None,
) -> dict[str, Any]:
    """Return the record's tables on why these models fail; maps: of the images at these indices."""
    models = [model(rule, alias) for alias, rule in rules.items()]
    subjects = [
        Subject(subject, split, vitlens.evaluate(subject, split), maps, indices)
        for subject in models
    ]
    return failure_fields(subjects, quiet=True)


def chance_tests(
    property_of: Callable[[Generator], Numbers], draws: int
) -> list[tuple[Estimate, float | None]]:
    """Return the tests of a property of 450 images with 20 errors at random."""
    generator = np.random.default_rng(0)
    results = []
    for _ in range(draws):
        wrong = np.zeros(450, bool)
        wrong[generator.choice(450, 20, replace=False)] = True
        results.append(separation(property_of(generator), wrong))
    return results


def chance_tests_by_source(size: int, draws: int) -> list[float | None]:
    """Return the p-value of a property of 8 % of 60 sources, 12 of which fail.

    All images of a source are alike.
    """
    generator = np.random.default_rng(0)
    results = []
    groups = torch.arange(60).repeat_interleave(size)
    for _ in range(draws):
        has = generator.random(60) < 0.08
        fails = np.zeros(60, bool)
        fails[generator.choice(60, 12, replace=False)] = True
        _, p = separation(np.repeat(has, size).astype(float), np.repeat(fails, size), groups=groups)
        results.append(p)
    return results


def audited(rule: Callable[[Tensor, Tensor], Tensor], split: Split) -> tuple[QuarterRow, ...]:
    """Return the accuracies by quarters that an audit of such a model records."""
    settings = SimpleNamespace(seed=0, batch_size=None)
    passes = {"batch_size": None, "precision": "fp32"}
    run = SimpleNamespace(model=model(rule), split=split, run_options=settings, passes=passes)
    quarters: tuple[QuarterRow, ...] = failure_fields([subject_of(run, MAPPED)], quiet=True)[
        "quarters"
    ]
    return quarters
