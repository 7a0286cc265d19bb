"""The one notation for shapes; every annotation in vitlens uses these axes.

axis      meaning
batch     images in a batch
height    pixels down; width: pixels across
rows      patches down; columns: patches across
tokens    prefix (CLS, distillation, registers) and then the patches, row by row
heads     heads of one layer; query: tokens that attend; key: tokens that are attended to
dim       width of the residual stream; head_dim: width of one head
classes   logits
"""

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

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

__all__ = [
    "Fused",
    "Heads",
    "Images",
    "Labels",
    "Logits",
    "Maps",
    "Masks",
    "Pixels",
    "Rows",
    "Tokens",
    "Weights",
]
