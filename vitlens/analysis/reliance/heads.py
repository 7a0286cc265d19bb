"""Find the heads that carry a cue, by activation patching.

One head sees the changed image while everything else sees the original one (Vig 2020, Heimersheim
and Nanda 2024). The change of the logits that the head causes is compared with that of the whole
model, image by image. No image is selected by its outcome.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates, mean_test
from vitlens.analysis.reliance.measure import ChangedImages
from vitlens.analysis.reliance.rows import CueHeadRow
from vitlens.errors import InputError
from vitlens.lens.replay import patch
from vitlens.lens.trace import layers
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import holm

_SMALLEST_CHANGE = 1e-6  # the model ignores a change with a smaller mean square of logits


def find_cue_heads(
    model: Model, data: ChangedImages, *, batch_size: int = 64, seed: int = 0
) -> tuple[CueHeadRow, ...]:
    """Return all heads, ordered by the share of a cue's effect that passes through each.

    data: the images, with labels as the model numbers its classes.

    Raises InputError for different numbers of images, and if the logits do not depend on the
    change. Raises UnsupportedError for a model without attention.
    """
    if not len(data.images) == len(data.changed) == len(data.control):
        raise InputError(
            f"expected as many changed and control images as images ({len(data.images)}), found "
            f"{len(data.changed)} and {len(data.control)}"
        )
    places = list[tuple[int, int]]()
    for layer in layers(model):
        places += [(layer.index, head) for head in range(layer.heads)]
    cue_effects = _Effects(model, places)
    control_effects = _Effects(model, places)
    for start in range(0, len(data.images), batch_size):
        batch = slice(start, start + batch_size)
        images = data.images[batch].to(model.device)
        labels = data.labels[batch].to(model.device)
        cue_effects.add(images, data.changed[batch].to(model.device), labels)
        control_effects.add(images, data.control[batch].to(model.device), labels)
    if cue_effects.mean_square < _SMALLEST_CHANGE:
        raise InputError(
            f"expected logits of {model.alias} that depend on the change, found none; try another "
            "cue"
        )
    shares = estimates(cue_effects.shares, groups=data.groups, seed=seed)
    control_shares = estimates(control_effects.shares, groups=data.groups, seed=seed)
    differences = cue_effects.shares - control_effects.shares
    p_values = holm(mean_test(differences, groups=data.groups, seed=seed).tolist())
    gains = estimates(cue_effects.points, groups=data.groups, seed=seed, unit="points")
    rows = list[CueHeadRow]()
    for (layer_index, head), share, control_share, p, gain in zip(
        places, shares, control_shares, p_values, gains, strict=True
    ):
        rows.append(
            CueHeadRow(
                model=model.alias,
                cue=data.cue,
                intervention=data.intervention,
                layer=layer_index,
                head=head,
                share=share,
                control=control_share,
                p_holm=p,
                accuracy=gain,
            )
        )
    return tuple(sorted(rows, key=lambda row: -abs(row.share.value)))


class _Effects:
    """The effects of one change that pass through each head, collected over batches.

    places: the layer and the number of each head.
    """

    def __init__(self, model: Model, places: Sequence[tuple[int, int]]) -> None:
        self._model = model
        self._names = [f"blocks.{layer}.head.{head}" for layer, head in places]
        # by batch: the change by each head times that of the model, and the latter squared
        self._products: list[Float[Tensor, "heads batch"]] = []
        self._squares: list[Float[Tensor, " batch"]] = []
        self._points: list[Float[Tensor, "heads batch"]] = []

    def add(self, images: Images, changed: Images, labels: Labels) -> None:
        """Measure one batch."""
        patched = patch(self._model, images, changed, self._names)
        # logits of the images, of the changed images, and (heads, batch, classes) of each head
        before = _centre_logits(patched.clean)
        model_change = _centre_logits(patched.other) - before
        head_changes = _centre_logits(patched.logits) - before
        self._products.append((head_changes * model_change).sum(-1).cpu())
        self._squares.append((model_change**2).sum(-1).cpu())
        gained = _is_correct(patched.logits, labels) - _is_correct(patched.clean, labels)
        self._points.append(100 * gained.cpu())

    @property
    def mean_square(self) -> float:
        """Return the mean squared change of the logits of the whole model."""
        return float(torch.cat(self._squares).mean())

    @property
    def shares(self) -> Float[Tensor, "heads images"]:
        """Return values of images with the share that passes through a head as their mean.

        The share is a ratio of two means over images. The value of an image is the ratio plus the
        image's first-order contribution to it. So the spread of the values gives the standard error
        of the ratio (Cochran 1977, 6.4).
        """
        products = torch.cat(self._products, dim=1)
        squares = torch.cat(self._squares)
        mean_square = squares.mean().clamp_min(_SMALLEST_CHANGE)
        ratio = products.mean(1, keepdim=True) / mean_square
        return ratio + (products - ratio * squares) / mean_square

    @property
    def points(self) -> Float[Tensor, "heads images"]:
        """Return the change of correctness, 100, 0 or -100 points."""
        return torch.cat(self._points, dim=1)


def _centre_logits(logits: Tensor) -> Float[Tensor, "... classes"]:
    """Return logits minus their mean, in double precision.

    A shift of all logits changes no prediction.
    """
    double = logits.double()
    return double - double.mean(-1, keepdim=True)


def _is_correct(logits: Tensor, labels: Labels) -> Float[Tensor, "... batch"]:
    right: Bool[Tensor, "... batch"] = logits.argmax(-1) == labels
    return right.double()
