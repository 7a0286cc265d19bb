"""What an attack makes larger: one number an image, from its logits; and when a prediction counts as turned.

Each is positive where the image is fooled: for an untargeted loss where another class has the largest logit, for a
targeted one where the class aimed at has.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.shapes import Labels, Logits

PerImage = Float[Tensor, " batch"]
Loss = Callable[[Logits, Labels, Labels], PerImage]  # logits, labels, classes aimed at
LossName = Literal["cross-entropy", "dlr"]

SURE: Final = 1e-5  # of the largest logit: two logits nearer than this may change places in another batch
_TINY: Final = 1e-12


def cross_entropy(logits: Logits, labels: Labels, _targets: Labels) -> PerImage:
    """Cross-entropy as the logarithm of the odds against the label, log(1 - p) - log p.

    Cross-entropy is softplus of it, so both rise in the same direction and rank images in the same order, which is all
    that a normalised step and a comparison see; but this one does not go flat where the model is sure.
    """
    odds: Tensor = _without(logits, labels).logsumexp(1) - _of(logits, labels)
    return odds


def targeted_cross_entropy(logits: Logits, _labels: Labels, targets: Labels) -> PerImage:
    """The logarithm of the odds for the class aimed at."""
    odds: Tensor = _of(logits, targets) - _without(logits, targets).logsumexp(1)
    return odds


def dlr(logits: Logits, labels: Labels, _targets: Labels) -> PerImage:
    """Difference of logits ratio (Croce & Hein 2020, equation 6): the margin over the first to the third logit."""
    top = logits.topk(3, dim=1).values
    return -margin(logits, labels) / (top[:, 0] - top[:, 2] + _TINY)


def targeted_dlr(logits: Logits, labels: Labels, targets: Labels) -> PerImage:
    """The targeted DLR (Croce & Hein 2020, equation 7): over the first logit to the mean of the third and fourth."""
    top = logits.topk(4, dim=1).values
    scale = top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + _TINY
    return (_of(logits, targets) - _of(logits, labels)) / scale


def margin(logits: Logits, labels: Labels) -> PerImage:
    """The label's logit less the largest other (the label is masked out, not multiplied by zero)."""
    lead: Tensor = _of(logits, labels) - _without(logits, labels).max(1).values
    return lead


def grain(logits: Logits) -> PerImage:
    """How much larger a logit must be for another batch size not to turn the order."""
    return SURE * logits.detach().abs().amax(1)


def fooled(logits: Logits, labels: Labels) -> Bool[Tensor, " batch"]:
    """Whether another class than the label has the largest logit, by more than rounding."""
    return margin(logits, labels) < -grain(logits)


def reached(logits: Logits, targets: Labels) -> Bool[Tensor, " batch"]:
    """Whether the class aimed at has the largest logit, by more than rounding."""
    return margin(logits, targets) > grain(logits)


def _of(logits: Logits, classes: Labels) -> PerImage:
    return logits.gather(1, classes[:, None])[:, 0]


def _without(logits: Logits, classes: Labels) -> Logits:
    return logits.scatter(1, classes[:, None], -torch.inf)


LOSSES: Final[Mapping[LossName, Loss]] = MappingProxyType({"cross-entropy": cross_entropy, "dlr": dlr})
TARGETED: Final[Mapping[LossName, Loss]] = MappingProxyType(
    {"cross-entropy": targeted_cross_entropy, "dlr": targeted_dlr}
)
FEWEST_CLASSES: Final[Mapping[Loss, int]] = MappingProxyType({dlr: 3, targeted_dlr: 4})
