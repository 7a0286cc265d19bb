"""Robust accuracy over epsilon, from the smallest epsilon that broke each image: intervals,
medians, transfer.

One number per image determines all of these: an image is robust at epsilon if the model predicts it
correctly and no attempt up to epsilon changed that. So an image broken at one epsilon is broken at
every larger one, and no curve rises. And how much an attack changes the outputs of each block.
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

ROUNDING = 1e-6  # pixel units: by how much a stored epsilon may differ from the one tried
HALFWAY = 0.5  # of the distance (1 - cosine) between different images

CorrectByModel = Bool[Tensor, "models batch"]
ByDepth = Float[Tensor, "depth batch"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attack on one model and n images.

    name: the attack with its norm ("pgd-linf"); epsilons: those tried, ascending, in the attack's
    norm, pixel units (for a patch the share of the image covered); clean: which images the model
    predicts correctly before the attack; broken_at: the smallest epsilon at which each is predicted
    wrongly, 0 where it was wrong before, infinite where all failed; distance: of the smallest
    perturbation found, 0 and infinite as broken_at; zero_gradients: images all of whose gradients
    were exactly 0; forwards, backwards: passes through the model; seconds; notes: caveats that
    belong to the numbers; groups: (n,) what images share, or None.
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
        """Return which images are predicted correctly up to this epsilon; at 0, those that are
        before the attack.
        """
        return self.clean & (self.broken_at > epsilon + ROUNDING)

    def accuracies(self) -> list[Estimate]:
        """Robust accuracy at each epsilon, with its interval over images (or over groups of
        them)."""
        return [accuracy(self.robust(epsilon), groups=self.groups) for epsilon in self.epsilons]

    def median_distance(self, *, unit: float = 1.0) -> Estimate | None:
        """Return the median, over the images predicted correctly before, of the smallest epsilon
        that broke each; in units.

        None where no image is predicted correctly, or at least half of them are never broken: the
        median then lies beyond all epsilons tried. An upper end beyond these is left out.
        """
        distances = self.broken_at[self.clean].double().numpy()
        if not len(distances):
            return None
        beyond = 1 + 2 * max(
            [*self.epsilons, *distances[np.isfinite(distances)].tolist()], default=1.0
        )
        groups = None if self.groups is None else self.groups[self.clean].numpy()
        middle = median_of(
            np.where(np.isfinite(distances), distances, beyond), groups=groups, unit=""
        )
        if (
            middle.value >= beyond / 2
        ):  # also where it lies between a broken image and one that was never broken
            return None
        ends = [
            None if end is None or end >= beyond else end / unit
            for end in (middle.low, middle.high)
        ]
        return replace(middle, value=middle.value / unit, low=ends[0], high=ends[1])


def halving_epsilon(outcomes: Sequence[Outcome]) -> float:
    """Return the smallest epsilon at which the robust accuracy of every model is at most half its
    clean accuracy; the largest epsilon where there is none.
    """
    epsilons = outcomes[0].epsilons
    halved = (
        epsilon
        for epsilon in epsilons
        if all(2 * int(each.robust(epsilon).sum()) <= int(each.clean.sum()) for each in outcomes)
    )
    return next(halved, epsilons[-1])


@dataclass(frozen=True)
class Transfer:
    """How one model (target) predicts the images of an attack on another (source), both by their
    numbers.

    rate: the share that fool the target, of the images that fool the source and whose clean version
    the target predicts right; None where there is no such image; accuracy: of the target on all
    images of the source, clean ones where its attack failed; clean: its accuracy on the clean
    images.
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
    """Yield every model on the images of every model's attack. clean: (models, n), which model
    predicts which clean image correctly; adversarial: for each source (models, n), the same for its
    images; fooled: (models, n), which images fool their own source; groups: (n,) what images share.
    """
    of_clean = [accuracy(correct, groups=groups) for correct in clean]
    for source, target in product(range(len(clean)), repeat=2):
        correct = adversarial[source][target]
        counted = fooled[source] & clean[target]
        own = None if groups is None else groups[counted]
        rate = accuracy(~correct[counted], groups=own) if bool(counted.any()) else None
        yield Transfer(source, target, rate, accuracy(correct, groups=groups), of_clean[target])


def cosines(
    model: Model, images: Images, others: Mapping[str, Tensor], *, batch_size: int | None = None
) -> dict[str, ByDepth]:
    """Return the cosine between each block's output for an image and for its counterpart: (blocks,
    n) by name of others. images, others: (n, 3, height, width) in [0, 1], the counterparts in the
    same order.

    A block's whole output counts, all tokens or the whole map. Raises InputError for a model
    without blocks.
    """
    size = batch_size or max(1, fitting_batch_size(model) // 4)
    parts: dict[str, list[Tensor]] = {name: [] for name in others}

    def outputs_of(images: Images) -> list[Tensor]:
        """Return each block's output (batch, numbers) in order."""
        outputs: dict[int, Tensor] = {}

        def take(block: int, output: Tensor) -> None:
            if output.dim() > 1 and len(output) == len(images):
                outputs[block] = output.flatten(1).float()

        with evaluating(model), torch.no_grad(), watching_blocks(model, take):
            model(images.to(model.device))
        return [outputs[block] for block in sorted(outputs)]

    for start in range(0, len(images), size):
        clean = outputs_of(images[start : start + size])
        if not clean:
            raise InputError(
                f"expected blocks whose outputs can be compared, found none in {model.alias}"
            )
        for name, counterparts in others.items():
            changed = outputs_of(counterparts[start : start + size])
            parts[name].append(
                torch.stack(
                    [F.cosine_similarity(*pair, dim=1).cpu() for pair in zip(clean, changed)]
                )
            )
    return {name: torch.cat(rows, 1) for name, rows in parts.items()}


def halfway_block(changed: ByDepth, another: ByDepth) -> int | None:
    """Return the first block whose outputs for an image and its changed version are half as far
    apart as for two images. changed: cosines with the changed image, another: with a different one;
    means over images are compared.

    None where there is no such block, or where different images have equal outputs.
    """
    distance = 1 - changed.double().mean(1)
    between_images = 1 - another.double().mean(1)
    share = torch.where(between_images > 1e-6, distance / between_images.clamp_min(1e-6), 0.0)
    blocks = (share >= HALFWAY).nonzero().flatten()
    return int(blocks[0]) if len(blocks) else None
