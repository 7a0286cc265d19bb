"""Low and high frequencies of images, separated by a circle in the Fourier plane.

Frequencies are given as shares of Nyquist's (half a cycle a pixel): 1 is the highest along an axis, sqrt(2) the highest
of all (along the diagonal). As in the discrete Fourier transform, the image is treated as periodic.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.errors import InputError
from vitlens.shapes import Images

Plane = Float[Tensor, "height half_width"]  # of torch.fft.rfft2: not negative along the width


def radius(size: tuple[int, int], *, device: torch.device | None = None) -> Plane:
    """The frequency of each of rfft2's components for images of this size (height, width), a share of Nyquist's.

    The same number of cycles a pixel has the same radius along and across, also where the image is not square.
    """
    height, width = size
    down = 2 * torch.fft.fftfreq(height, device=device)
    across = 2 * torch.fft.rfftfreq(width, device=device)
    fine: Tensor = (down[:, None].square() + across[None].square()).sqrt()
    return fine


def frequency_bands(images: Images, *, cutoff: float) -> tuple[Images, Images]:
    """The images' low (up to the cut-off) and high frequencies; their sum is the image. The mean is in the low part.

    cutoff: share of Nyquist's frequency, 0 or more. Values are not clipped; the high part has mean 0.
    """
    low = _filtered(images, radius((images.shape[-2], images.shape[-1]), device=images.device) <= _checked(cutoff))
    return low, images - low


def low_pass(images: Images, *, cutoff: float) -> Images:
    """The images without frequencies above the cut-off, clipped to [0, 1]; from sqrt(2) on, the images themselves."""
    low, _ = frequency_bands(images, cutoff=cutoff)
    return low.clamp(0, 1)


def high_pass(images: Images, *, cutoff: float) -> Images:
    """The images without frequencies up to the cut-off, plus their mean colour, clipped to [0, 1].

    A cut-off of 0 changes nothing, as the mean is added again.
    """
    _, high = frequency_bands(images, cutoff=cutoff)
    return (high + images.mean((-2, -1), keepdim=True)).clamp(0, 1)


def _filtered(images: Images, inside: Bool[Tensor, "height half_width"]) -> Images:
    components = torch.fft.rfft2(images.float()) * inside
    filtered: Tensor = torch.fft.irfft2(components, s=images.shape[-2:])
    return filtered


def _checked(cutoff: float) -> float:
    if not cutoff >= 0:
        raise InputError(f"expected a cut-off of 0 or more (a share of Nyquist's frequency), found {cutoff}")
    return cutoff + 1e-6  # components on the circle are inside despite rounding
