"""The notation for shapes, and TokenLayout: the positions of CLS, registers and patches.

The axes:

- batch: images in a batch
- height, width: pixels down and across
- rows, columns: patches down and across
- tokens: prefix (CLS, distillation, registers) and then the patches, row by row
- heads: heads of one layer
- query, key: tokens that attend, and tokens that are attended to
- dim, head_dim: width of the residual stream, and of one head
- classes: logits
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from vitlens.errors import InputError

Images = Float[Tensor, "batch 3 height width"]  # pixels in [0, 1]
Pixels = UInt8[Tensor, "batch 3 height width"]  # as stored, 0 to 255
Masks = Bool[Tensor, "batch height width"]  # True where the object is
Labels = Int[Tensor, " batch"]
Logits = Float[Tensor, "batch classes"]
Tokens = Float[Tensor, "batch tokens dim"]
Heads = Float[Tensor, "batch heads tokens head_dim"]
Weights = Float[Tensor, "batch heads query key"]  # after the softmax; rows sum to 1
Rows = Float[Tensor, "batch heads key"]  # one query's weights
Fused = Float[Tensor, "batch query key"]  # weights with the heads fused
Maps = Float[Tensor, "batch rows columns"]  # one number per patch

PrefixKind = Literal["cls", "distillation", "register"]


@dataclass(frozen=True)
class TokenLayout:
    """The order of a sequence: its prefix tokens, then the patches row by row.

    grid: the (rows, columns) of patches.
    patch_size: the (height, width) of a patch in pixels.
    prefix: the kind of each token before the patches, in order.
    """

    grid: tuple[int, int]
    patch_size: tuple[int, int]
    prefix: tuple[PrefixKind, ...] = ()

    @property
    def patches(self) -> int:
        """Return the number of patches."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Return the number of tokens, prefix included."""
        return len(self.prefix) + self.patches

    @property
    def image_size(self) -> tuple[int, int]:
        """Return the pixels (height, width) that the patches cover."""
        return self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1]

    def positions(self, kind: PrefixKind) -> tuple[int, ...]:
        """Return the positions of the prefix tokens of one kind."""
        return tuple(index for index, token in enumerate(self.prefix) if token == kind)

    def as_map(
        self, values: Float[Tensor, "*leading tokens"]
    ) -> Float[Tensor, "*leading rows columns"]:
        """Return one number per token as a map over the patches, without the prefix.

        Raises InputError if the last axis is not this layout's number of tokens.
        """
        if values.shape[-1] != self.tokens:
            raise InputError(
                f"expected {self.tokens} tokens ({len(self.prefix)} prefix, "
                f"{self.grid[0]}x{self.grid[1]} patches), found {values.shape[-1]}"
            )
        patches: Tensor = values[..., len(self.prefix) :]
        return patches.reshape(*patches.shape[:-1], *self.grid)
