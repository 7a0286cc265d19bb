"""The weights of a windowed layer between all patches of the map: what the tests compare windows with."""

from jaxtyping import Float
from torch import Tensor

from vitlens.lens.call import window_index
from vitlens.lens.site import Windows


def unwindow(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads patches patches"]:
    """The weights between all patches of the map, zero where two patches share no window; weights: row by row.

    Rows sum to 1 minus the mass on padding. `calls` holds the windows of each image one after another.
    """
    index = window_index(windows).to(weights.device)
    count, patches = len(index), windows.resolution[0] * windows.resolution[1]
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)  # (batch, heads, count, inside, inside)
    # padding gets an extra row and column, which is cut off at the end
    place = index.masked_fill(index < 0, patches)
    full = weights.new_zeros(*split.shape[:2], patches + 1, patches + 1)
    full[:, :, place[:, :, None], place[:, None, :]] = split
    return full[:, :, :patches, :patches]
