"""Robust accuracy over epsilon: intervals, medians, transfer, and changes of blocks' outputs.

One number per image determines the curve: the smallest epsilon that broke the image. An image is
robust at epsilon if the model predicts it correctly and no attempt up to epsilon changed that. So
an image that is broken at one epsilon is broken at every larger one, and no curve rises.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size
from vitlens.devices import evaluating
from vitlens.errors import InputError
from vitlens.lens.stages import watching_blocks
from vitlens.models.model import Model
from vitlens.shapes import Images
from vitlens.uncertainty import Estimate, median_of

ROUNDING = 1e-6  # largest difference of a stored epsilon from the one tried, in pixel units
HALFWAY = 0.5  # a change is halfway at this part of the distance between different images
_EQUAL = 1e-6  # images at a smaller distance (1 - cosine) are equal
_OUTPUTS_HELD = 4  # a batch is smaller by this factor while the outputs of all blocks are held

CorrectByModel = Bool[Tensor, "models batch"]
ByDepth = Float[Tensor, "depth batch"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attack on one model and n images.

    name: the attack with its norm, e.g. "pgd-linf".
    alias: the alias of the model.
    epsilons: the epsilons that were tried, ascending, in the attack's norm and pixel units. For a
        patch, the share of the image that it covers.
    clean: True for images that the model predicts correctly before the attack.
    broken_at: the smallest epsilon at which each image is predicted wrongly. 0 for images that were
        wrong before, infinite for images on which all attempts failed.
    distance: the length of the smallest perturbation. 0 and infinite as in `broken_at`.
    zero_gradients: True for images with gradients that were all exactly 0.
    forwards, backwards: the numbers of passes through the model.
    seconds: the duration of the attack.
    notes: caveats of the numbers.
    groups (n,): the source of each image, None if images are independent.
    """

    name: str
    alias: str
    epsilons: tuple[float, ...]
    clean: Bool[Tensor, " batch"]
    broken_at: Float[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    zero_gradients: Bool[Tensor, " batch"]
    forwards: int
    backwards: int
    seconds: float
    notes: tuple[str, ...] = ()
    groups: Tensor | None = None

    def robust(self, epsilon: float) -> Bool[Tensor, " batch"]:
        """Return True for images that are predicted correctly on all attempts up to epsilon."""
        return self.clean & (self.broken_at > epsilon + ROUNDING)

    def accuracies(self) -> list[Estimate]:
        """Return the robust accuracy at each epsilon, with its interval over images or groups."""
        return [accuracy(self.robust(epsilon), groups=self.groups) for epsilon in self.epsilons]

    def median_distance(self, *, unit: float = 1.0) -> Estimate | None:
        """Return the median epsilon that breaks an image, over correctly predicted images.

        It is None if no image is predicted correctly. It is also None if at least half of them are
        never broken, because the median then lies beyond all epsilons that were tried. An end of
        the interval beyond these is None.
        """
        distances = self.broken_at[self.clean].double().numpy()
        if not len(distances):
            return None
        is_broken = np.isfinite(distances)
        finite = [*self.epsilons, *distances[is_broken].tolist()]
        # a finite number for robust images, more than twice as large as any other
        beyond = 1 + 2 * max(finite, default=1.0)
        groups = None if self.groups is None else self.groups[self.clean].numpy()
        median = median_of(np.where(is_broken, distances, beyond), groups=groups, unit="")
        # An even number of images has a median between two: the mean of a broken and a robust image
        # is at least beyond / 2, and any epsilon of a broken image is below.
        if median.value >= beyond / 2:
            return None

        def in_units(end: float | None) -> float | None:
            if end is None or end >= beyond:
                return None
            return end / unit

        return replace(
            median,
            value=median.value / unit,
            low=in_units(median.low),
            high=in_units(median.high),
        )


def halving_epsilon(outcomes: Sequence[Outcome]) -> float:
    """Return the smallest epsilon at which every model has lost half of its clean accuracy.

    If there is none, it is the largest epsilon.
    """
    epsilons = outcomes[0].epsilons
    for epsilon in epsilons:
        is_halved = [
            2 * int(outcome.robust(epsilon).sum()) <= int(outcome.clean.sum())
            for outcome in outcomes
        ]
        if all(is_halved):
            return epsilon
    return epsilons[-1]


@dataclass(frozen=True)
class Transfer:
    """The predictions of one model (target) on the images of an attack on another (source).

    source, target: the numbers of the models.
    rate: the share of images that fool the target. It counts images that fool the source, if the
        target predicts the clean image correctly. None without such images.
    accuracy: the accuracy of the target on all images of the source, which are clean if the attack
        failed.
    clean: the accuracy of the target on the clean images.
    """

    source: int
    target: int
    rate: Estimate | None
    accuracy: Estimate
    clean: Estimate


def transfers(
    clean: CorrectByModel,
    adversarial: Sequence[CorrectByModel],
    fooled: CorrectByModel,
    *,
    groups: Tensor | None = None,
) -> Iterator[Transfer]:
    """Yield the transfer of every model's images to every model.

    clean (models, n): True if a model predicts a clean image correctly.
    adversarial (models, n): for each source, the same for its adversarial images.
    fooled (models, n): True if an adversarial image fools its source.
    groups (n,): the source of each image, None if images are independent.
    """
    clean_accuracies = [accuracy(correct, groups=groups) for correct in clean]
    for source, target in product(range(len(clean)), repeat=2):
        correct = adversarial[source][target]
        is_counted = fooled[source] & clean[target]
        rate = None
        if bool(is_counted.any()):
            counted_groups = None if groups is None else groups[is_counted]
            rate = accuracy(~correct[is_counted], groups=counted_groups)
        robust_accuracy = accuracy(correct, groups=groups)
        yield Transfer(source, target, rate, robust_accuracy, clean_accuracies[target])


def cosines(
    model: Model, images: Images, others: Mapping[str, Tensor], *, batch_size: int | None = None
) -> dict[str, ByDepth]:
    """Return the cosine between each block's outputs for an image and its counterpart.

    A block's whole output counts, all tokens or the whole map. The result is (blocks, n) for each
    name in `others`.

    images (n, 3, height, width): images in [0, 1].
    others (n, 3, height, width): the counterparts by name, in the same order.

    Raises InputError for a model without blocks.
    """
    size = batch_size or max(1, fitting_batch_size(model) // _OUTPUTS_HELD)
    parts: dict[str, list[Tensor]] = {name: [] for name in others}

    def outputs_of(batch: Images) -> list[Tensor]:
        """Return each block's output (batch, numbers) in order."""
        outputs: dict[int, Tensor] = {}

        def take(block: int, output: Tensor) -> None:
            # without a row per image, an output cannot be compared
            if output.dim() > 1 and len(output) == len(batch):
                outputs[block] = output.flatten(1).float()

        with evaluating(model), torch.no_grad(), watching_blocks(model, take):
            model(batch.to(model.device))
        return [outputs[block] for block in sorted(outputs)]

    for start in range(0, len(images), size):
        clean = outputs_of(images[start : start + size])
        if not clean:
            raise InputError(
                f"expected blocks whose outputs can be compared, found none in {model.alias}"
            )
        for name, counterparts in others.items():
            changed = outputs_of(counterparts[start : start + size])
            by_block = [
                F.cosine_similarity(block_clean, block_changed, dim=1).cpu()
                for block_clean, block_changed in zip(clean, changed)
            ]
            parts[name].append(torch.stack(by_block))
    return {name: torch.cat(batches, 1) for name, batches in parts.items()}


def halfway_block(changed: ByDepth, another: ByDepth) -> int | None:
    """Return the first block where an image and its change are half as far apart as two images.

    Means over images are compared. The result is None if there is no such block, or if different
    images have equal outputs.

    changed: the cosine of each image with its changed version, by block.
    another: the cosine of each image with a different image, by block.
    """
    distance = 1 - changed.double().mean(1)
    between_images = 1 - another.double().mean(1)
    share = torch.where(between_images > _EQUAL, distance / between_images.clamp_min(_EQUAL), 0.0)
    blocks = (share >= HALFWAY).nonzero().flatten()
    return int(blocks[0]) if len(blocks) else None
