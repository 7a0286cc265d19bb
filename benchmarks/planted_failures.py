"""How often `vitlens.failures` names a cause that was planted in a model, and how often it names another one.

python -m benchmarks.planted_failures [CAUSE ...] [--seeds 10] [--images 450] [--soft] [--no-masks]

A planted model wraps `cnn-digits`: where a condition on the pixels holds, its logits move to the next class. With
--soft they are mixed in proportion to how far the image is beyond the threshold. The condition is computed from the
pixels alone, so that a change of the image can undo it. Every seed draws other scenes. The controls have no cause:
errors that depend on a hash of the pixels, labels that are wrong at random, and the model as it is.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor, nn

import vitlens
from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.diagnosis import Diagnosis, diagnose
from vitlens.data.split import InMemory, Split
from vitlens.models.model import Model

SHARE: Final = 0.09  # of the images for which a condition holds
CALIBRATION: Final = 1000  # the drawing of the scenes from which thresholds are read
SOFTNESS: Final = 0.25  # width of a soft threshold, in standard deviations of what is thresholded
MARKED: Final = 0.12  # of the images
CONFUSED: Final = (3, 8)
Measure = Callable[[Tensor], Tensor]


def luminance(images: Tensor) -> Tensor:
    return torch.einsum("bchw,c->bhw", images, torch.tensor([0.299, 0.587, 0.114]))


def bright_objects(images: Tensor) -> Tensor:
    """Return the largest bright connected region of each image, which is nearly always the digit."""
    planes = luminance(images)
    low = planes.flatten(1).quantile(0.2, dim=1)
    high = planes.flatten(1).quantile(0.98, dim=1)
    bright = planes > ((low + high) / 2)[:, None, None]
    objects = torch.zeros_like(bright)
    for index, region in enumerate(bright.numpy()):
        parts, count = ndimage.label(region, structure=np.ones((3, 3)))
        if count:
            largest = 1 + int(np.argmax(np.bincount(parts.ravel())[1:]))
            objects[index] = torch.from_numpy(parts == largest)
    return objects


def object_area(images: Tensor) -> Tensor:
    return bright_objects(images).float().mean((1, 2))


def distance_from_centre(images: Tensor) -> Tensor:
    objects = bright_objects(images).float()
    total = objects.sum((1, 2)).clamp_min(1)
    height, width = objects.shape[1:]
    down = objects.sum(2) @ (torch.arange(height) + 0.5) / total - height / 2
    across = objects.sum(1) @ (torch.arange(width) + 0.5) / total - width / 2
    return torch.hypot(down, across)


def clutter(images: Tensor) -> Tensor:
    """Return the mean gradient off the object."""
    planes = luminance(images)
    objects = bright_objects(images).float()
    ground = 1 - torch.nn.functional.max_pool2d(objects[:, None], 5, 1, 2)[:, 0]
    edges = torch.zeros_like(planes)
    edges[:, 1:] += planes.diff(dim=1).abs()
    edges[:, :, 1:] += planes.diff(dim=2).abs()
    return (edges * ground).sum((1, 2)) / ground.sum((1, 2)).clamp_min(1)


def object_contrast(images: Tensor) -> Tensor:
    planes = luminance(images)
    objects = bright_objects(images).float()
    ground = 1 - torch.nn.functional.max_pool2d(objects[:, None], 5, 1, 2)[:, 0]
    inside = (planes * objects).sum((1, 2)) / objects.sum((1, 2)).clamp_min(1)
    return inside - (planes * ground).sum((1, 2)) / ground.sum((1, 2)).clamp_min(1)


def corner(images: Tensor) -> Tensor:
    return images[..., :3, :3].amin((1, 2, 3))


@dataclass(frozen=True)
class Plant:
    """One condition. sign: 1 where much of the measure makes the model fail, -1 where little does; names: of the
    properties that are right answers, with and without masks; none where nothing may be named."""

    measure: Measure | None = None
    sign: int = 1
    names: tuple[str, ...] = ()
    blind: bool = True  # whether the cause can be named without masks


PLANTS: Final = {
    "dark": Plant(lambda images: luminance(images).mean((1, 2)), -1, ("brightness",)),
    "low contrast": Plant(object_contrast, -1, ("object_contrast", "contrast")),
    "small": Plant(object_area, -1, ("size",), blind=False),
    "off centre": Plant(distance_from_centre, 1, ("off_centre",), blind=False),
    "clutter": Plant(clutter, 1, ("clutter",), blind=False),
    "mark": Plant(names=("mark",)),
    "pair": Plant(names=("pair",)),
    "random": Plant(),
    "wrong labels": Plant(),
    "no errors": Plant(),
}


class Planted(nn.Module):
    """`cnn-digits`, which fails where the condition of a plant holds."""

    def __init__(self, cause: str, *, soft: bool) -> None:
        super().__init__()
        self.base = vitlens.load("cnn-digits")
        self.cause = cause
        self.soft = soft
        measure = PLANTS[cause].measure
        if measure is not None:
            sign = PLANTS[cause].sign
            values = sign * measure(scenes(CALIBRATION).source.read(torch.arange(450)).float() / 255)
            self.threshold = float(values.quantile(1 - SHARE))
            self.width = SOFTNESS * float(values.std())

    def failing(self, images: Tensor) -> Tensor:
        """Return how much each image fails, 0 to 1."""
        plant = PLANTS[self.cause]
        if plant.measure is not None:
            beyond = plant.sign * plant.measure(images.cpu()) - self.threshold
            return (beyond / self.width).sigmoid() if self.soft else (beyond > 0).float()
        if self.cause == "mark":
            return ((corner(images) - 0.9) / 0.02).sigmoid() if self.soft else (corner(images) > 0.98).float()
        if self.cause == "random":
            return ((images * 255).round().long().flatten(1).sum(1) % 9 == 0).float()
        return torch.zeros(len(images))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.base(images)
        if self.cause == "pair":
            first, second = CONFUSED
            order = list(range(logits.shape[1]))
            order[first], order[second] = second, first
            confused = logits.argmax(1) == first
            if self.soft:  # only those that are not clear
                top = logits.topk(2, dim=1).values
                confused &= top[:, 0] - top[:, 1] < 12
            return torch.where(confused[:, None], logits[:, order], logits)
        share = self.failing(images).to(logits)[:, None]
        return (1 - share) * logits + share * logits.roll(1, -1)


def scenes(drawing: int) -> Split:
    """Return the test digits on other scenes."""
    split = vitlens.load_data("digits")
    assert split.scenes is not None
    drawings = split.scenes.epoch(drawing)
    drawn = drawings.draw(torch.arange(len(split)))
    return replace(split, source=InMemory(drawn.pixels), masks=drawn.masks, scenes=drawings, places=None)


def images_for(cause: str, seed: int, count: int, *, masks: bool) -> Split:
    """Return the images of one seed, with what the cause needs in them."""
    generator = torch.Generator().manual_seed(seed)
    split = scenes(seed + 1)
    split = split.pick(torch.randperm(len(split), generator=generator)[:count].sort().values)
    if cause == "mark":
        pixels = split.source.read(torch.arange(count)).clone()
        marked = torch.rand(count, generator=generator) < MARKED
        pixels[marked, :, :3, :3] = 255
        split = replace(split, source=InMemory(pixels), scenes=None)
    if cause == "wrong labels":
        assert split.labels is not None
        wrong = torch.rand(count, generator=generator) < SHARE
        others = torch.randint(1, len(split.classes), (count,), generator=generator)
        split = replace(split, labels=torch.where(wrong, (split.labels + others) % len(split.classes), split.labels))
    return split if masks else replace(split, masks=None, scenes=None)


def planted(cause: str, *, soft: bool = False) -> Model:
    """Return a model with this cause of errors."""
    return vitlens.wrap(
        Planted(cause, soft=soft).eval(),
        image_size=32,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        classes=[str(digit) for digit in range(10)],
    )


def diagnosis(model: Model, split: Split) -> Diagnosis:
    """Return the diagnosis without maps."""
    return diagnose([Subject(model, split, evaluate(model, split))])


def main() -> None:
    """Print a row for each cause."""
    parser = argparse.ArgumentParser()
    parser.add_argument("causes", nargs="*")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--images", type=int, default=450)
    parser.add_argument("--soft", action="store_true")
    parser.add_argument("--no-masks", action="store_true")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for cause in options.causes or PLANTS:
        start = time.monotonic()
        model = planted(cause, soft=options.soft)
        right = PLANTS[cause].names
        first = named = false = errors = 0
        others: Counter[str] = Counter()
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            split = images_for(cause, seed, options.images, masks=not options.no_masks)
            result = diagnosis(model, split)
            wrong = [name for name in result.causes if name not in right]
            others.update(wrong)
            first += result.causes[:1] != () and result.causes[0] in right
            named += any(name in right for name in result.causes)
            false += bool(wrong)
            errors += result.failures
            if options.verbose:
                print(f"    seed {seed}: {result.failures} errors, {result.causes}", flush=True)
        print(
            f"{cause:13} n {options.images}{' soft' if options.soft else ''}{' no masks' if options.no_masks else ''}: "
            f"{errors / options.seeds:.0f} errors; first {first}, named {named}, false {false} of {options.seeds} "
            f"{dict(others) or ''} ({(time.monotonic() - start) / options.seeds:.1f} s a seed)",
            flush=True,
        )


if __name__ == "__main__":
    main()
