"""Accuracy on disturbed images level by level, and the operations that disturb them.

Random numbers depend on an image's own key, not on its index in a batch; a square that is covered at one level is
also covered at higher levels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from vitlens.analysis.answers.classes import reading
from vitlens.analysis.answers.evaluate import accuracy, fitting_batch_size, require_labels
from vitlens.analysis.failures.disturbances import DISTURBANCES, square_offset, square_side
from vitlens.analysis.failures.spectrum import high_pass, low_pass
from vitlens.data.draws import uniform
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import InputError, UnknownNameError
from vitlens.models.model import Model
from vitlens.references import resolved
from vitlens.shapes import Images
from vitlens.uncertainty import Estimate

Keys = Int[Tensor, " batch"]

KINDS = tuple(DISTURBANCES)
Change = Callable[[Images, float, Keys], Tensor]


def without_fine_detail(images: Images, cutoff: float, _keys: Keys) -> Images:
    """Only the frequencies up to the cut-off."""
    return low_pass(images, cutoff=cutoff)


def without_coarse_detail(images: Images, cutoff: float, _keys: Keys) -> Images:
    """Only the frequencies above the cut-off, added to the mean colour."""
    return high_pass(images, cutoff=cutoff)


def in_shuffled_tiles(images: Images, level: float, keys: Keys) -> Images:
    """Shuffled tiles; level: tiles along each side."""
    return shuffled(images, int(level), keys)


def shuffled(images: Images, parts: int, keys: Keys) -> Images:
    """Each image cut into parts x parts equal tiles in random order (a different order for each key).

    Raises InputError when the sides are not multiples of parts.
    """
    tiles = _tiles(images, parts)
    order = uniform(keys.to(images.device), tiles.shape[1], stream=1).argsort(1)
    return _joined(tiles[torch.arange(len(images), device=images.device)[:, None], order], images)


def covered(images: Images, share: float, keys: Keys) -> Images:
    """Each image with that share of its squares filled with its own mean colour, off the grid of a ViT's patches.

    The squares, of `square_side` px, begin `square_offset` px outside the image: squares of the patches' own grid would
    remove whole tokens and leave the others as they are. share: a fraction; the number of squares is rounded, and as
    those at the edges are cut, the share of pixels is this one on average. Raises InputError outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise InputError(f"expected a share of squares from 0 to 1, found {share}")
    size = images.shape[-2], images.shape[-1]
    rows, columns = ((torch.arange(whole) + square_offset(size)) // square_side(size) for whole in size)
    number = (rows[:, None] * (int(columns[-1]) + 1) + columns).to(images.device)
    squares = int(number[-1, -1]) + 1
    rank = uniform(keys.to(images.device), squares, stream=2).argsort(1).argsort(1)
    gone = (rank < round(share * squares))[:, number]
    return torch.where(gone[:, None], images.mean((-2, -1), keepdim=True), images)


def _tiles(images: Images, parts: int) -> Tensor:
    """(batch, parts * parts, 3, rows, columns)."""
    height, width = images.shape[-2:]
    if parts < 1 or height % parts or width % parts:
        raise InputError(f"expected sides that {parts} tiles divide, found images of {height}x{width} px")
    cut = images.unflatten(2, (parts, height // parts)).unflatten(4, (parts, width // parts))
    tiles: Tensor = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    return tiles


def _joined(tiles: Tensor, images: Images) -> Images:
    parts = math.isqrt(tiles.shape[1])
    laid: Tensor = tiles.unflatten(1, (parts, parts)).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    return laid


def correct_after(
    model: Model,
    split: Split,
    changes: Sequence[tuple[Change, float]],
    *,
    keys: Keys,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Bool[Tensor, "changes batch"]:
    """Which images are classified correctly after each change, called as function(images, level, keys), in [0, 1].

    keys: (n,), one per image, which seeds its random numbers, so that all models and processes have the same pixels.
    Images are changed at the split's own size, before the model resizes them. advance: called with the number of passes
    over an image just done. Raises DataError without labels, InputError when the classes do not match.
    """
    truth = require_labels(split).cpu()
    read = reading(model.classes, split.classes).read
    size = batch_size or fitting_batch_size(model)
    right = torch.zeros(len(changes), len(split), dtype=torch.bool)
    with torch.inference_mode(), evaluating(model), autocast(model.device, precision):
        for batch in split.batches(size, device=model.device):
            own = batch.indices.cpu()
            for row, (change, level) in enumerate(changes):
                predicted = read(model(change(batch.images, level, keys[own]).clamp(0, 1))).argmax(-1).cpu()
                right[row, own] = predicted == truth[own]
                advance(len(own))
    return right


@dataclass(frozen=True)
class DisturbedOutcomes:
    """A model's correct predictions under one disturbance.

    kind: a name of DISTURBANCES; levels: in order; correct: (levels, n), which images are classified correctly;
    groups: (n,) of images that share a source, or None.
    """

    kind: str
    levels: tuple[float, ...]
    correct: Tensor
    groups: Tensor | None = None

    def accuracies(self, *, seed: int = 0) -> list[Estimate]:
        """The accuracy at each level, with its interval over images (or over groups of them)."""
        return [accuracy(row, groups=self.groups, seed=seed) for row in self.correct]


def robustness(
    model: Model,
    split: Split,
    *,
    kinds: Sequence[str] = KINDS,
    batch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[DisturbedOutcomes, ...]:
    """The model on a labelled split under each of these disturbances, at each of their levels.

    Images have their index in the split as key. Raises UnknownNameError for an unknown kind, and as `correct_after`.
    """
    for kind in kinds:
        if kind not in DISTURBANCES:
            raise UnknownNameError("disturbance", kind, KINDS)
    levels = [DISTURBANCES[kind].levels(split.size) for kind in kinds]
    changes = [(resolved(DISTURBANCES[kind].function), level) for kind, own in zip(kinds, levels) for level in own]
    right = correct_after(
        model, split, changes, keys=torch.arange(len(split)) + (seed << 20), batch_size=batch_size,
        precision=precision, advance=advance,
    ).split([len(own) for own in levels])  # fmt: skip
    return tuple(DisturbedOutcomes(*each, split.groups) for each in zip(kinds, levels, right))


def passes(split: Split, *, kinds: Sequence[str] = KINDS) -> int:
    """The total number of forward passes over an image, for a progress bar."""
    return len(split) * sum(len(DISTURBANCES[kind].levels(split.size)) for kind in kinds)
