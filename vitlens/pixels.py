"""The check of images in public functions: pixels in [0, 1], else an error that says what to type.

`Model.forward` is not checked, as integrated gradients, SmoothGrad and attacks leave the range intentionally.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from vitlens.errors import DataError
from vitlens.shapes import Images

TOLERANCE: Final = 1e-4  # accepted distance outside [0, 1], by rounding; such pixels are clamped

_LOADER: Final = "make them with vitlens.images(FILES, model)"
_WHITE: Final = 255  # of 8-bit pixels
_DARK: Final = 2  # 8-bit images have a larger maximum

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_images(function: Function) -> Function:
    """Decorator of a public function of (model, images, ...): images are checked, clamped and in the model's dtype.

    Raises DataError where `require_images` does. The caller's images are not changed.
    """

    @wraps(function)
    def checked(model: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        return function(model, require_images(images, dtype=model.mean.dtype), *args, **kwargs)

    return cast(Function, checked)


def require_images(images: object, *, dtype: torch.dtype = torch.float32) -> Images:
    """Images (batch, 3, height, width) in [0, 1] of this dtype; values up to TOLERANCE outside are clamped.

    Raises DataError for anything else.
    """
    if not isinstance(images, Tensor):
        raise DataError(f"expected a tensor of images in [0, 1], found {type(images).__name__}; {_LOADER}")
    _require_shape(images)
    if not images.is_floating_point():
        dtype_name = str(images.dtype).removeprefix("torch.")
        raise DataError(f"expected floating-point images in [0, 1], found {dtype_name}; divide by 255, or {_LOADER}")
    low, high = (bound.item() for bound in images.detach().aminmax())
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):  # also for NaN
        raise DataError(_out_of_range(low, high))
    inside = low >= 0 and high <= 1
    return (images if inside else images.clamp(0, 1)).to(dtype)


def _require_shape(images: Tensor) -> None:
    shape = tuple(images.shape)
    if len(shape) == 4 and shape[1] == 3 and 0 not in shape:
        return
    if len(shape) == 3 and shape[0] == 3:
        advice = "add the batch with images[None]"
    elif len(shape) == 4 and shape[3] == 3 and 0 not in shape:
        advice = "put the channels first with images.permute(0, 3, 1, 2)"
    else:
        advice = _LOADER
    raise DataError(f"expected images (batch, 3, height, width) with batch > 0, found {shape}; {advice}")


def _out_of_range(low: float, high: float) -> str:
    """The error message for pixels from low to high."""
    if not (abs(low) < torch.inf and abs(high) < torch.inf):
        return f"expected images in [0, 1], found NaN or infinity; {_LOADER}"
    message = f"expected images in [0, 1], found {low:.4g} to {high:.4g}"
    if low < 0:
        return f"{message}; leave out the normalisation, which the model does itself, or {_LOADER}"
    advice = "clamp them with images.clamp(0, 1)" if high <= _DARK else "divide by 255"
    return f"{message}; {advice}, or {_LOADER}" if high <= _WHITE else f"{message}; {_LOADER}"
