"""The losses that attacks maximise, and the tests of success.

A loss is one number per image, computed from its logits. The DLR loss is positive if the attack
succeeds: if another class has the largest logit. A targeted one is positive if the logit of the
target class is above that of the label, as it is if the attack succeeds.
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

# Logits that differ by less than this part of the largest may change their order in another batch.
ROUNDING: Final = 1e-5
_TINY: Final = 1e-12  # avoids a division by 0


def cross_entropy(logits: Logits, labels: Labels, _targets: Labels) -> PerImage:
    """Return the log odds against the label, log(1 - p) - log p.

    Cross-entropy is its softplus. Both order images in the same way and have the same direction of
    the gradient, and attacks use nothing else. But the gradient of the log odds does not vanish if
    the model is confident.
    """
    log_odds: Tensor = _others(logits, labels).logsumexp(1) - _logit_of(logits, labels)
    return log_odds


def targeted_cross_entropy(logits: Logits, _labels: Labels, targets: Labels) -> PerImage:
    """Return the log odds for the target class."""
    log_odds: Tensor = _logit_of(logits, targets) - _others(logits, targets).logsumexp(1)
    return log_odds


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
    return (_logit_of(logits, targets) - _logit_of(logits, labels)) / scale


def margin(logits: Logits, labels: Labels) -> PerImage:
    """Return the logit of the label minus the largest other logit."""
    lead: Tensor = _logit_of(logits, labels) - _others(logits, labels).max(1).values
    return lead


def rounding_error(logits: Logits) -> PerImage:
    """Return the difference below which two logits may change order with the batch size."""
    return ROUNDING * logits.detach().abs().amax(1)


def is_misclassified(logits: Logits, labels: Labels) -> Bool[Tensor, " batch"]:
    """Return True if a class other than the label has the largest logit.

    It must be larger than the label's by more than the rounding error.
    """
    return margin(logits, labels) < -rounding_error(logits)


def is_target(logits: Logits, targets: Labels) -> Bool[Tensor, " batch"]:
    """Return True if the target class has the largest logit, by more than the rounding error."""
    return margin(logits, targets) > rounding_error(logits)


def _logit_of(logits: Logits, classes: Labels) -> PerImage:
    return logits.gather(1, classes[:, None])[:, 0]


def _others(logits: Logits, classes: Labels) -> Logits:
    """Return the logits with -inf for the class of each image.

    0 would be wrong: it is the largest if all other logits are negative.
    """
    return logits.scatter(1, classes[:, None], -torch.inf)


LOSSES: Final[Mapping[LossName, Loss]] = MappingProxyType(
    {"cross-entropy": cross_entropy, "dlr": dlr}
)
TARGETED: Final[Mapping[LossName, Loss]] = MappingProxyType(
    {"cross-entropy": targeted_cross_entropy, "dlr": targeted_dlr}
)
FEWEST_CLASSES: Final[Mapping[Loss, int]] = MappingProxyType({dlr: 3, targeted_dlr: 4})
