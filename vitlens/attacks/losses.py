"""The losses that attacks maximise, and when an image counts as misclassified.

A loss is one number per image, computed from its logits.
The DLR losses are positive where the attack succeeds: for an untargeted loss where another class
has the largest logit, for a targeted one where the target class has.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.shapes import Labels, Logits

PerImage = Float[Tensor, " batch"]
Loss = Callable[[Logits, Labels, Labels], PerImage]  # logits, labels, target classes
LossName = Literal["cross-entropy", "dlr"]

# of the largest logit: logits that differ by less may change order in another batch
ROUNDING: Final = 1e-5
_TINY: Final = 1e-12


def cross_entropy(logits: Logits, labels: Labels, _targets: Labels) -> PerImage:
    """Return the log odds against the label, log(1 - p) - log p.

    Cross-entropy is softplus of it. Both have the same gradient direction and the same order, on
    which normalised steps and comparisons depend; but the gradient of the log odds does not vanish
    where the model is confident.
    """
    odds: Tensor = _without(logits, labels).logsumexp(1) - _of(logits, labels)
    return odds


def targeted_cross_entropy(logits: Logits, _labels: Labels, targets: Labels) -> PerImage:
    """Return the log odds for the target class."""
    odds: Tensor = _of(logits, targets) - _without(logits, targets).logsumexp(1)
    return odds


def dlr(logits: Logits, labels: Labels, _targets: Labels) -> PerImage:
    """Return the difference of logits ratio (Croce & Hein 2020, equation 6).

    It is -margin / (first - third logit).
    """
    top = logits.topk(3, dim=1).values
    return -margin(logits, labels) / (top[:, 0] - top[:, 2] + _TINY)


def targeted_dlr(logits: Logits, labels: Labels, targets: Labels) -> PerImage:
    """Return the targeted DLR (Croce & Hein 2020, equation 7).

    The difference is divided by first - (third + fourth) / 2.
    """
    top = logits.topk(4, dim=1).values
    scale = top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + _TINY
    return (_of(logits, targets) - _of(logits, labels)) / scale


def margin(logits: Logits, labels: Labels) -> PerImage:
    """Return the logit of the label minus the largest other logit.

    The label's logit is masked by -inf: a zero would be the largest where all others are negative.
    """
    lead: Tensor = _of(logits, labels) - _without(logits, labels).max(1).values
    return lead


def rounding_error(logits: Logits) -> PerImage:
    """Return the difference below which two logits may change order with the batch size."""
    return ROUNDING * logits.detach().abs().amax(1)


def is_misclassified(logits: Logits, labels: Labels) -> Bool[Tensor, " batch"]:
    """Return whether a class other than the label has the largest logit.

    It must be the largest by more than the rounding error.
    """
    return margin(logits, labels) < -rounding_error(logits)


def is_target(logits: Logits, targets: Labels) -> Bool[Tensor, " batch"]:
    """Return whether the target class has the largest logit, by more than the rounding error."""
    return margin(logits, targets) > rounding_error(logits)


def _of(logits: Logits, classes: Labels) -> PerImage:
    return logits.gather(1, classes[:, None])[:, 0]


def _without(logits: Logits, classes: Labels) -> Logits:
    return logits.scatter(1, classes[:, None], -torch.inf)


LOSSES: Final[Mapping[LossName, Loss]] = MappingProxyType(
    {"cross-entropy": cross_entropy, "dlr": dlr}
)
TARGETED: Final[Mapping[LossName, Loss]] = MappingProxyType(
    {"cross-entropy": targeted_cross_entropy, "dlr": targeted_dlr}
)
FEWEST_CLASSES: Final[Mapping[Loss, int]] = MappingProxyType({dlr: 3, targeted_dlr: 4})
