"""Windows put back into image coordinates: un-windowed, un-shifted, padding left out (Swin)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlens.lens.site import Windows


def window_index(windows: Windows) -> Int[Tensor, "count inside"]:
    """Which patch of the map (row by row) stands at each place of each window; -1 where there is only padding."""
    (rows, columns), (height, width) = windows.resolution, windows.window
    down, across = -rows % height, -columns % width
    shift = tuple(
        0 if window >= size else step  # one window covers all: nothing is shifted
        for window, size, step in zip(windows.window, (rows + down, columns + across), windows.shift)
    )
    index = torch.arange(rows * columns).view(rows, columns)
    if windows.pad_first:
        index = torch.nn.functional.pad(index, (0, across, 0, down), value=-1)
        index = index.roll((-shift[0], -shift[1]), (0, 1))
    else:
        index = torch.nn.functional.pad(index.roll((-shift[0], -shift[1]), (0, 1)), (0, across, 0, down), value=-1)
    blocks = index.unfold(0, height, height).unfold(1, width, width)  # (down, across, height, width)
    return blocks.reshape(-1, height * width)


def unwindow(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads patches patches"]:
    """The weights between all patches of the map, zero where two patches share no window; rows sum to 1 as before,
    less the mass that lies on padding.

    Windows of an image stand one after another in `calls`. The result has patches², so ask it for few images.
    """
    index = window_index(windows).to(weights.device)
    count, patches = len(index), windows.resolution[0] * windows.resolution[1]
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)  # (batch, heads, count, inside, inside)
    # padding goes to a row and column of its own, which is cut off at the end
    place = index.masked_fill(index < 0, patches)
    full = weights.new_zeros(*split.shape[:2], patches + 1, patches + 1)
    full[:, :, place[:, :, None], place[:, None, :]] = split
    return full[:, :, :patches, :patches]


def received(
    weights: Float[Tensor, "calls heads inside inside"], windows: Windows
) -> Float[Tensor, "batch heads rows columns"]:
    """How much each patch is looked at, mean over the patches of its window, in image coordinates.

    The window's, masked or not: so even attention gives an even map, also where a shifted window is cut in parts.
    """
    index = window_index(windows).to(weights.device)
    count, patches = len(index), windows.resolution[0] * windows.resolution[1]
    looks = (index >= 0).to(weights.dtype)  # padding does not look
    split = weights.unflatten(0, (-1, count)).transpose(1, 2)  # (batch, heads, count, inside, inside)
    mean = torch.einsum("bhcqk,cq->bhck", split, looks) / looks.sum(-1, keepdim=True)
    place = index.masked_fill(index < 0, patches).flatten()
    full = weights.new_zeros(*mean.shape[:2], patches + 1)
    full[:, :, place] = mean.flatten(2)
    maps: Tensor = full[:, :, :patches].unflatten(-1, windows.resolution)
    return maps
