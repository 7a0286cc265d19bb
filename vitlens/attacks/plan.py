"""The engine's input, a plan, and its output, the outcome for each image."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.defaults import PRECISION, RESTARTS
from vitlens.names import DEFAULT_SEED
from vitlens.shapes import Labels


@dataclass(frozen=True)
class AttackPlan:
    """What the engine runs.

    levels: epsilons in ascending order; limits: for each image how many of them, from the smallest (0: none);
    restarts: at each level; targets: the target classes, or None; keep: how many of the adversarial images to keep,
    those of the first rows; downwards: from the largest epsilon down to the first at which an image is robust, instead
    of from the smallest up to the first at which the attack succeeds.
    """

    levels: Sequence[float]
    limits: Int[Tensor, " batch"]
    restarts: int = RESTARTS
    targets: Labels | None = None
    seed: int = DEFAULT_SEED
    batch_size: int = 32
    precision: str = PRECISION
    keep: int = 0
    downwards: bool = False


@dataclass(frozen=True)
class AttackOutcome:
    """The outcome for each image.

    level: index of the epsilon at which the attack succeeded, -1 where the image is robust or was not attacked;
    distance: of the adversarial image, infinite where there is none; forwards, backwards: passes; zero_gradients:
    whether gradients were computed and all of them exactly 0; adversarial: images by row.
    """

    level: Int[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    forwards: Int[Tensor, " batch"]
    backwards: Int[Tensor, " batch"]
    zero_gradients: Bool[Tensor, " batch"]
    adversarial: dict[int, Tensor]
