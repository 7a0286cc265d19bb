"""Low and high frequencies of images, separated by a circle in the Fourier plane.

Frequencies are given as shares of Nyquist's (half a cycle a pixel): 1 is the highest along an axis, sqrt(2) the highest
of all (along the diagonal). As in the discrete Fourier transform, the image is treated as periodic.
"""

import torch
from jaxtyping import Float
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
    if not cutoff >= 0:
        raise InputError(f"expected a cut-off of 0 or more (a share of Nyquist's frequency), found {cutoff}")
    size = images.shape[-2], images.shape[-1]
    inside = radius(size, device=images.device) <= cutoff + 1e-6  # also components on the circle, despite rounding
    low: Tensor = torch.fft.irfft2(torch.fft.rfft2(images.float()) * inside, s=size)
    return low, images - low
