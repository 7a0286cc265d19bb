"""Which heads carry a cue: each head sees the changed image while everything else sees the original
one.

The change of the logits that one head causes is compared with the change that the whole model
shows, image by image (activation patching; Vig 2020, Heimersheim and Nanda 2024). No image is
selected by its outcome.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.analysis.evaluation.intervals import estimates, mean_test
from vitlens.errors import InputError
from vitlens.lens.replay import patch
from vitlens.lens.trace import layers
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import Estimate, holm

_SMALLEST_CHANGE = 1e-6  # mean squared logits; below it the model ignores the change


@dataclass(frozen=True)
class CueHead:
    """The part of a cue's effect that passes through one head.

    share: of the change of the logits that the cue's change causes (1: all of it); control: the
    same of the control's change; p_holm: that both are equal, paired over images and corrected for
    all heads. accuracy: points of accuracy gained when only this head sees the changed image, None
    without labels.
    """

    layer: int
    head: int
    share: Estimate
    control: Estimate
    p_holm: float
    accuracy: Estimate | None = None


def find_cue_heads(
    model: Model,
    images: Images,
    changed: Images,
    control: Images,
    *,
    labels: Labels | None = None,
    groups: Tensor | None = None,
    batch_size: int = 64,
    seed: int = 0,
) -> list[CueHead]:
    """Return all heads, ordered by the share of a cue's effect that passes through each.

    images, changed, control: (n, 3, height, width), in one order; changed has the cue removed or
    exchanged, control a matched change that leaves it alone. labels (n,): classes as the model
    numbers them. groups (n,): of images that share a source. Raises InputError for different
    numbers of images, and where the logits do not depend on the change; UnsupportedError for a
    model without attention.
    """
    if not len(images) == len(changed) == len(control):
        raise InputError(
            f"expected as many changed and control images as images ({len(images)}), found "
            f"{len(changed)} and {len(control)}"
        )
    places = [(layer.index, head) for layer in layers(model) for head in range(layer.heads)]
    names = [f"blocks.{layer}.head.{head}" for layer, head in places]
    of_cue = _Effects()
    of_control = _Effects()
    for start in range(0, len(images), batch_size):
        rows = slice(start, start + batch_size)
        batch_labels = None if labels is None else labels[rows]
        of_cue.add(model, images[rows], changed[rows], names, batch_labels)
        of_control.add(model, images[rows], control[rows], names, None)
    if of_cue.size < _SMALLEST_CHANGE:
        raise InputError(
            f"expected logits of {model.alias} that depend on the change, found none; try another "
            "cue"
        )
    shares = estimates(of_cue.shares, groups=groups, seed=seed)
    control_shares = estimates(of_control.shares, groups=groups, seed=seed)
    differences = of_cue.shares - of_control.shares
    p_values = holm(mean_test(differences, groups=groups, seed=seed).tolist())
    gains: Sequence[Estimate | None] = [None] * len(places)
    if labels is not None:
        gains = estimates(of_cue.points, groups=groups, seed=seed, unit="points")
    rows_of_heads = [
        CueHead(layer, head, share, control, p, gain)
        for (layer, head), share, control, p, gain in zip(
            places, shares, control_shares, p_values, gains, strict=True
        )
    ]
    return sorted(rows_of_heads, key=lambda row: -abs(row.share.value))


class _Effects:
    """What each head passes on of one change, collected over batches."""

    def __init__(self) -> None:
        self._passed: list[Float[Tensor, "heads batch"]] = []
        self._whole: list[Float[Tensor, " batch"]] = []
        self._points: list[Float[Tensor, "heads batch"]] = []

    def add(
        self,
        model: Model,
        images: Images,
        changed: Images,
        names: Sequence[str],
        labels: Labels | None,
    ) -> None:
        """Measure one batch."""
        patched = patch(model, images, changed, names)
        before = _centred(patched.clean)
        whole_change = _centred(patched.other) - before
        head_changes = _centred(patched.logits) - before
        self._passed.append((head_changes * whole_change).sum(-1).cpu())
        self._whole.append((whole_change**2).sum(-1).cpu())
        if labels is not None:
            labels = labels.to(patched.clean.device)
            gained = _is_correct(patched.logits, labels) - _is_correct(patched.clean, labels)
            self._points.append(100 * gained.cpu())

    @property
    def size(self) -> float:
        """Return the mean squared change of the logits."""
        return float(torch.cat(self._whole).mean())

    @property
    def shares(self) -> Float[Tensor, "heads images"]:
        """Values of which the mean is the share of the change that passes through each head.

        The share is a ratio of means; each image contributes the first-order term of this ratio
        (Cochran 1977, 6.4).
        """
        passed = torch.cat(self._passed, dim=1)
        whole = torch.cat(self._whole)
        mean_whole = whole.mean().clamp_min(_SMALLEST_CHANGE)
        ratio = passed.mean(1, keepdim=True) / mean_whole
        return ratio + (passed - ratio * whole) / mean_whole

    @property
    def points(self) -> Float[Tensor, "heads images"]:
        """Return the change of correctness, 100, 0 or -100 points."""
        return torch.cat(self._points, dim=1)


def _centred(logits: Tensor) -> Float[Tensor, "... classes"]:
    """Return logits minus their mean, in double precision: a shift of all logits changes no
    prediction.
    """
    double = logits.double()
    return double - double.mean(-1, keepdim=True)


def _is_correct(logits: Tensor, labels: Labels) -> Float[Tensor, "... batch"]:
    right: Bool[Tensor, "... batch"] = logits.argmax(-1) == labels
    return right.double()
