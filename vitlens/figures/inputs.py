"""What a figure accepts: numpy arrays, torch tensors or lists, checked before anything is drawn."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitlens.errors import InputError

Array = NDArray[np.float64]


def as_array(values: ArrayLike, *, name: str, axes: Sequence[str]) -> Array:
    """Numbers as float64 with the named axes.

    A tensor may be on any device, in any precision, with or without gradient. Raises InputError when the number of
    axes differs, when there is nothing in it, or when a number is NaN or infinite.
    """
    detach = getattr(values, "detach", None)  # a torch tensor, without importing torch
    array: Array = np.asarray(values if detach is None else detach().cpu().double(), dtype=np.float64)
    if array.ndim != len(axes) or array.size == 0:
        raise InputError(f"expected {name} of shape ({', '.join(axes)}), none of them 0, found {array.shape}")
    wrong = int(np.count_nonzero(~np.isfinite(array)))
    if wrong:
        raise InputError(
            f"expected finite numbers in {name}, found {wrong} of {array.size} NaN or infinite; "
            "check the weights and the images that they come from"
        )
    return array


def as_image(values: ArrayLike, *, name: str = "image") -> Array:
    """One image (3, height, width) in [0, 1]; raises InputError for another shape or range."""
    array = as_array(values, name=name, axes=("3", "height", "width"))
    picture: Array = as_images(array[None], name=name)[0]
    return picture


def as_images(values: ArrayLike, *, name: str = "images") -> Array:
    """Images (batch, 3, height, width) in [0, 1]; raises InputError for another shape or range."""
    array = as_array(values, name=name, axes=("batch", "3", "height", "width"))
    if array.shape[1] != 3:
        raise InputError(f"expected {name} of shape (batch, 3, height, width), found {array.shape}")
    low, high = float(array.min()), float(array.max())
    if low < -1e-3 or high > 1 + 1e-3:
        raise InputError(
            f"expected {name} in [0, 1], found {low:.3g} to {high:.3g}; give them before the model's normalisation"
        )
    return np.clip(array, 0.0, 1.0)


def require_length(found: int, expected: int, *, name: str, of: str) -> None:
    """Raise InputError unless there are as many of name as of the other."""
    if found != expected:
        raise InputError(f"expected {expected} {name}, one for each of {of}, found {found}")
