"""What the engine is to try, and what becomes of each image."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.shapes import Labels


@dataclass(frozen=True)
class AttackPlan:
    """What is to be tried.

    levels: epsilons in ascending order; limits: for each image how many of them, from the smallest (0: none);
    restarts: tries at each; targets: the classes to reach, or None; keep: how many of the adversarial images to keep,
    those of the first rows; downwards: from the largest epsilon down to the first at which an image is robust, and not
    from the smallest up to the first at which it breaks.
    """

    levels: Sequence[float]
    limits: Int[Tensor, " batch"]
    restarts: int = 1
    targets: Labels | None = None
    seed: int = 0
    batch_size: int = 32
    precision: str = "fp32"
    keep: int = 0
    downwards: bool = False


@dataclass(frozen=True)
class AttackOutcome:
    """What became of each image.

    level: the place of the epsilon at which it broke, -1 where it is robust or was not tried; distance: of the
    adversarial image, infinite where there is none; forwards, backwards: passes it took; zero_gradients: gradients were
    taken, all of them exactly 0; adversarial: images by row.
    """

    level: Int[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    forwards: Int[Tensor, " batch"]
    backwards: Int[Tensor, " batch"]
    zero_gradients: Bool[Tensor, " batch"]
    adversarial: dict[int, Tensor]
