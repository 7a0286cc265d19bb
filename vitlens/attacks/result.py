"""What an attack gives back."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.shapes import Images


@dataclass(frozen=True)
class AttackResult:
    """Images after an attack.

    images: adversarial where success, else the clean image; success: was right and now is wrong, judged in fp32 on
    exactly these pixels (where targets were handed in: took its target for it); distance: of images from the clean
    ones, in the attack's norm, pixel units; tried: was right before; reached: has the class that was handed in as
    target; forwards, backwards: passes through the model; notes: what must be said beside the numbers.
    """

    images: Images
    success: Bool[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    tried: Bool[Tensor, " batch"]
    reached: Bool[Tensor, " batch"]
    forwards: Int[Tensor, " batch"]
    backwards: Int[Tensor, " batch"]
    notes: tuple[str, ...] = ()

    @property
    def robust_accuracy(self) -> float:
        """The fraction of all images that were right and still are."""
        return (self.tried & ~self.success).float().mean().item()
