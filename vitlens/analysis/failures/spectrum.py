"""Low and high frequencies of images, told apart by a circle in the Fourier plane.

Frequencies are given as shares of Nyquist's (half a cycle a pixel): 1 is the finest grating along an axis, sqrt(2) the
finest there is (along the diagonal). The image is taken as periodic, as the discrete Fourier transform takes it.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.errors import InputError
from vitlens.shapes import Images

Plane = Float[Tensor, "height half_width"]  # of torch.fft.rfft2: not negative along the width


def radius(size: tuple[int, int], *, device: torch.device | None = None) -> Plane:
    """How fine each of rfft2's components is for images of this size (height, width): a share of Nyquist's frequency.

    The same number of cycles a pixel has the same radius along and across, also where the image is not square.
    """
    height, width = size
    down = 2 * torch.fft.fftfreq(height, device=device)
    across = 2 * torch.fft.rfftfreq(width, device=device)
    fine: Tensor = (down[:, None].square() + across[None].square()).sqrt()
    return fine


def divided(images: Images, *, cutoff: float) -> tuple[Images, Images]:
    """The images' parts up to the cut-off and above it; their sum is the image. The mean is in the low part.

    cutoff: share of Nyquist's frequency, 0 or more. Values are not clipped: the high part is about 0.
    """
    low = _kept(images, radius((images.shape[-2], images.shape[-1]), device=images.device) <= _checked(cutoff))
    return low, images - low


def low_pass(images: Images, *, cutoff: float) -> Images:
    """The images without what is finer than the cut-off, clipped to [0, 1]; from sqrt(2) on, the images themselves."""
    low, _ = divided(images, cutoff=cutoff)
    return low.clamp(0, 1)


def high_pass(images: Images, *, cutoff: float) -> Images:
    """The images without what is as coarse as the cut-off, around their own mean colour, clipped to [0, 1].

    A cut-off of 0 takes nothing away, as the mean is put back.
    """
    _, high = divided(images, cutoff=cutoff)
    return (high + images.mean((-2, -1), keepdim=True)).clamp(0, 1)


def power(planes: Float[Tensor, "batch height width"]) -> Float[Tensor, "batch height half_width"]:
    """The energy of each component of rfft2, those that stand for two counted twice, the mean (component 0, 0) left 0.

    Its sum is height x width x the sum of squared deviations from the mean (Parseval).
    """
    width = planes.shape[-1]
    energy = torch.fft.rfft2(planes.double()).abs().square()
    twice = torch.full((energy.shape[-1],), 2.0, dtype=torch.float64, device=planes.device)
    twice[0] = 1.0
    if width % 2 == 0:
        twice[-1] = 1.0
    energy = energy * twice
    energy[..., 0, 0] = 0.0
    found: Tensor = energy.to(planes.dtype)
    return found


def _kept(images: Images, inside: Bool[Tensor, "height half_width"]) -> Images:
    components = torch.fft.rfft2(images.float()) * inside
    kept: Tensor = torch.fft.irfft2(components, s=images.shape[-2:])
    return kept


def _checked(cutoff: float) -> float:
    if not cutoff >= 0:
        raise InputError(f"expected a cut-off of 0 or more (a share of Nyquist's frequency), found {cutoff}")
    return cutoff + 1e-6  # a component that lies on the circle is inside, whatever the rounding
