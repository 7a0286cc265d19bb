"""The operations of the table of disturbances: function(images, level, keys) returns images of about [0, 1].

Random numbers depend on an image's own key, not on its index in a batch; a square that is covered at one level is also
covered at higher levels. Each corruption is one operation of torchvision (JPEG: of Pillow).
"""

import math
from io import BytesIO

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from vitlens.analysis.failures.spectrum import frequency_bands
from vitlens.data.draws import uniform
from vitlens.errors import InputError
from vitlens.references import import_without_compiler
from vitlens.shapes import Images

transforms = import_without_compiler("torchvision.transforms.v2.functional")

Keys = Int[Tensor, " batch"]
_COVERED = 8  # squares along a side, nearly


def gaussian_noise(images: Images, strength: float, keys: Keys) -> Tensor:
    """Gaussian noise of this standard deviation, drawn by each image's key."""
    count = images[0].numel()
    first, second = (uniform(keys.to(images.device), count, stream=stream).double() for stream in (3, 4))
    normal = (-2 * (1 - first).log()).sqrt() * (2 * torch.pi * second).cos()  # Box and Muller
    return images + strength * normal.view_as(images).to(images.dtype)


def gaussian_blur(images: Images, strength: float, _keys: Keys) -> Tensor:
    """A Gaussian blur whose standard deviation is this share of the shorter side."""
    return blurred(images, max(strength * min(images.shape[-2:]), 1e-3))


def blurred(images: Images, sigma: float) -> Images:
    """A Gaussian blur of this standard deviation, px."""
    most = 2 * ((min(images.shape[-2:]) - 1) // 2) + 1  # the padding must be smaller than the image
    size = min(2 * round(3 * sigma) + 1, most)
    smooth: Tensor = transforms.gaussian_blur(images, [size, size], [sigma, sigma])
    return smooth


def brightness(images: Images, strength: float, _keys: Keys) -> Tensor:
    """Pixels multiplied by 1 + strength."""
    brighter: Tensor = transforms.adjust_brightness(images, 1 + strength)
    return brighter


def contrast(images: Images, strength: float, _keys: Keys) -> Tensor:
    """The contrast multiplied by this share."""
    flatter: Tensor = transforms.adjust_contrast(images, strength)
    return flatter


def jpeg(images: Images, strength: float, _keys: Keys) -> Tensor:
    """Compressed as JPEG of this quality."""
    read = []
    for pixels in (images.cpu() * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy():
        file = BytesIO()
        Image.fromarray(pixels).save(file, format="JPEG", quality=int(strength))
        read.append(torch.from_numpy(np.array(Image.open(file))))
    return torch.stack(read).permute(0, 3, 1, 2).to(images.device, images.dtype) / 255


def pixelate(images: Images, strength: float, _keys: Keys) -> Tensor:
    """Downsampled to this share of each side and enlarged again."""
    height, width = images.shape[-2:]
    small = [max(1, round(side * strength)) for side in (height, width)]
    coarse = transforms.resize(images, small, interpolation=transforms.InterpolationMode.BILINEAR, antialias=True)
    large: Tensor = transforms.resize(coarse, [height, width], interpolation=transforms.InterpolationMode.NEAREST_EXACT)
    return large


def occlusion(images: Images, strength: float, keys: Keys) -> Tensor:
    """A square of this share of the shorter side filled with the mean colour, at a random place by each image's key."""
    height, width = images.shape[-2:]
    side = max(1, round(strength * min(height, width)))
    places = uniform(keys.to(images.device), 2, stream=5).cpu()
    erased = []
    for image, (down, across) in zip(images, places.tolist()):
        top, left = int(down * (height - side + 1)), int(across * (width - side + 1))
        erased.append(transforms.erase(image, top, left, side, side, image.mean((1, 2), keepdim=True)))
    return torch.stack(erased)


def low_pass(images: Images, cutoff: float, _keys: Keys) -> Images:
    """Without frequencies above the cut-off, a share of Nyquist's; from sqrt(2) on, the images themselves."""
    return frequency_bands(images, cutoff=cutoff)[0].clamp(0, 1)


def high_pass(images: Images, cutoff: float, _keys: Keys) -> Images:
    """Without frequencies up to the cut-off, plus the mean colour; a cut-off of 0 changes nothing."""
    return (frequency_bands(images, cutoff=cutoff)[1] + images.mean((-2, -1), keepdim=True)).clamp(0, 1)


def shuffled(images: Images, level: float, keys: Keys) -> Images:
    """Each image cut into level x level equal tiles in random order, which destroys shape before texture.

    Raises InputError when the sides are not multiples of the level.
    """
    parts, (height, width) = int(level), images.shape[-2:]
    if parts < 1 or height % parts or width % parts:
        raise InputError(f"expected sides that {parts} tiles divide, found images of {height}x{width} px")
    cut = images.unflatten(2, (parts, height // parts)).unflatten(4, (parts, width // parts))
    tiles = cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (batch, parts * parts, 3, rows, columns)
    order = uniform(keys.to(images.device), parts * parts, stream=1).argsort(1)
    drawn = tiles[torch.arange(len(images), device=images.device)[:, None], order]
    laid: Tensor = drawn.unflatten(1, (parts, parts)).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    return laid


def covered(images: Images, share: float, keys: Keys) -> Images:
    """Each image with that share of its squares filled with its own mean colour, off the grid of a ViT's patches.

    The squares, about an eighth of a side, begin half a square outside the image, with sides of no divisor in common
    with it (5 px, shifted by 3 px, in images of 32 px; 29 and 15 in 224 px): squares of the patches' own grid would
    remove whole tokens and leave the others as they are. share: a fraction; the number of squares is rounded, and as
    those at the edges are cut, the share of pixels is this one on average. Raises InputError outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise InputError(f"expected a share of squares from 0 to 1, found {share}")
    size = images.shape[-2], images.shape[-1]
    side = _coprime(max(2, -(-min(size) // _COVERED)), size)
    rows, columns = ((torch.arange(whole) + _coprime(side // 2, size)) // side for whole in size)
    number = (rows[:, None] * (int(columns[-1]) + 1) + columns).to(images.device)
    squares = int(number[-1, -1]) + 1
    rank = uniform(keys.to(images.device), squares, stream=2).argsort(1).argsort(1)
    gone = (rank < round(share * squares))[:, number]
    return torch.where(gone[:, None], images.mean((-2, -1), keepdim=True), images)


def _coprime(least: int, size: tuple[int, int]) -> int:
    """The smallest number from `least` on that has no divisor in common with a side, as patches that divide it have."""
    while any(math.gcd(least, whole) > 1 for whole in size):
        least += 1
    return least
