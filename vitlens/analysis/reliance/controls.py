"""Controls of interventions, which change the pixels as much and keep the cue.

Each takes a view, the images after the intervention, a region and a level. cues.py names them, and
measure.py calls them.

Most controls add a pattern to the images. Bisection sets the amplitude for each image, so that the
mean absolute distance of the pixels is that of the intervention. Clipping to [0, 1] may leave a
control too weak, and the report then says so.
"""

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.operations import distance, frequency_bands
from vitlens.analysis.reliance.cues import Region
from vitlens.analysis.reliance.edits import (
    direction,
    enlarge_pixels,
    replace_region,
    shift_pixels,
    shrink_pixels,
)
from vitlens.analysis.reliance.views import View
from vitlens.data.draws import uniform
from vitlens.shapes import Images

_STEPS = 12  # halvings of the range of amplitudes, down to 1/4096 of it
_MOST = 8.0  # largest amplitude, in units of the amplitude that suffices without clipping
# amplitudes and angles are chosen on about so many pixels along the shorter side
_FEW_PIXELS = 64
# streams of random numbers, different for each use
_NOISE_STREAM = 23
_SIDE_STREAM = 24
_SQUARE_STREAM = 25
_SQUARES = 8  # squares along a side
# radians; a larger rotation would destroy cues that depend on a direction
_ANGLES = (0.05, -0.05, 0.1, -0.1, 0.2, -0.2)
_TINY = 1e-6  # avoids a division by 0


def add_pattern(view: View, changed: Images, pattern: Tensor, base: Images | None = None) -> Images:
    """Add a pattern to each image, so strong that the sum is as far from it as the changed image.

    The sum is clipped to [0, 1], so that it can stay nearer.

    base: the images to which the pattern is added (None: those of the view). Distances are those
        from the images of the view.
    """
    images = view.images
    if base is None:
        base = images
    target = distance(images, changed)
    pattern = _of_mean_size_one(pattern.expand_as(images))
    sparse_images = _sparse(images)
    sparse_base = _sparse(base)
    sparse_pattern = _sparse(pattern)
    # The amplitude of each image lies between these two. The pattern has a mean size of 1, so that
    # without clipping the amplitude would be the distance.
    low = torch.zeros_like(target)
    high = _MOST * target
    for _ in range(_STEPS):
        amplitude = (low + high) / 2
        candidate = (sparse_base + amplitude[:, None, None, None] * sparse_pattern).clamp(0, 1)
        is_too_weak = distance(sparse_images, candidate) < target
        low = torch.where(is_too_weak, amplitude, low)
        high = torch.where(is_too_weak, high, amplitude)
    return (base + high[:, None, None, None] * pattern).clamp(0, 1)


def _of_mean_size_one(pattern: Tensor) -> Tensor:
    """Return patterns scaled to a mean absolute value of 1; a pattern of zeros is unchanged."""
    size = pattern.abs().mean((1, 2, 3), keepdim=True)
    return torch.where(size > _TINY, pattern / size.clamp_min(_TINY), 0.0)


def change_luminance(view: View, changed: Images, region: Region, _level: float) -> Images:
    """Brighten or darken a region, and keep its chroma."""
    place = view.region(region)
    return add_pattern(view, changed, place * direction(view.images, place))


def change_brightness(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Brighten or darken the whole image, for a change of any region.

    Contrasts stay as they are, as after a change of colour. If only the luminance of the background
    changed, the object would be hidden or revealed, also for a model that ignores colour.
    """
    return add_pattern(view, changed, direction(view.images, view.region("image")))


def change_luminance_there(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Brighten or darken the pixels that the intervention changes."""
    place = ((changed - view.images).abs().amax(1, keepdim=True) > 0).to(view.images)
    return add_pattern(view, changed, place * direction(view.images, place))


def add_coarse_noise(view: View, changed: Images, region: Region, cutoff: float) -> Images:
    """Add noise without frequencies above the cut-off, equal in all channels and of mean 0."""
    low, _ = frequency_bands(_noise(view), cutoff=cutoff)
    noisy = add_pattern(view, changed, low * view.region(region))
    return replace_region(view, noisy, region)


def add_block_noise(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Add noise as coarse as blocks of the size of a patch."""
    low, _ = frequency_bands(_noise(view), cutoff=1 / min(view.patch))
    return add_pattern(view, changed, low)


def add_fine_noise(view: View, changed: Images, _region: Region, cutoff: float) -> Images:
    """Add noise without frequencies up to the cut-off, equal in all channels."""
    _, high = frequency_bands(_noise(view), cutoff=cutoff)
    return add_pattern(view, changed, high)


def roll_patches(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Move each image by whole patches, around its edges.

    Of several steps, the one with the distance nearest to that of the change is taken. All parts
    keep their neighbours, except along one seam in each direction.
    """
    rows, columns = view.patch
    height, width = view.images.shape[-2:]
    # about a quarter of each side
    down = max(1, height // rows // 4) * rows
    across = max(1, width // columns // 4) * columns
    steps = [
        (rows, 0),
        (0, columns),
        (rows, columns),
        (down, 0),
        (0, across),
        (down, across),
        (-down, across),
        (2 * down, 0),
        (0, 2 * across),
        (2 * down, 2 * across),
    ]
    stride = _stride(view.images)
    options = [_roll_sparse(view.images, step, stride) for step in steps]
    best = _nearest_option(_sparse(view.images), _sparse(changed), options)
    result = torch.empty_like(view.images)
    for index, step in enumerate(steps):
        chosen = best == index
        result[chosen] = view.images[chosen].roll(step, (2, 3))
    return result


def _roll_sparse(images: Images, step: tuple[int, int], stride: int) -> Images:
    """Return the sparse pixels of the rolled images without rolling all pixels; see `_sparse`."""
    height, width = images.shape[-2:]
    rows = (torch.arange(0, height, stride) - step[0]) % height
    columns = (torch.arange(0, width, stride) - step[1]) % width
    return images[..., rows[:, None], columns]


def shift_and_turn(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shift each image there and back, and turn it a little.

    It loses the same edges, and stays in its place.
    """
    shifted = shift_pixels(view, view.images, "reflect")
    restored = shift_pixels(view, shifted, "reflect", back=True)
    return _rotate_slightly(view, changed, restored)


def enlarge_and_turn(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shrink each image, enlarge it again, and turn it a little.

    It loses the same detail, and keeps its size.
    """
    restored = enlarge_pixels(view, shrink_pixels(view, view.images, "reflection"))
    return _rotate_slightly(view, changed, restored)


def _rotate_slightly(view: View, changed: Images, base: Images) -> Images:
    """Turn images around their centre, and change their brightness for the rest of the distance.

    The angle with the nearest distance is chosen on smaller copies of large images.
    """
    images = _smaller(view.images)
    small_base = _smaller(base)
    options = list[Tensor]()
    for angle in _ANGLES:
        options.append(_rotate(small_base, view.centre, torch.full((len(images),), angle)))
    best = _nearest_option_by_sparse_pixels(images, _smaller(changed), options)
    turned = _rotate(base, view.centre, torch.tensor(_ANGLES)[best.cpu()])
    return add_pattern(view, changed, direction(view.images, view.region("image")), base=turned)


def _smaller(images: Images) -> Images:
    """Return images reduced to about _FEW_PIXELS pixels along the shorter side."""
    factor = max(1, min(images.shape[-2:]) // _FEW_PIXELS)
    return F.avg_pool2d(images, factor) if factor > 1 else images


def _rotate(images: Images, centre: Tensor, angle: Tensor) -> Images:
    """Turn each image by an angle around a centre (batch, 2), down and across from -1 to 1."""
    height, width = images.shape[-2:]
    cos = angle.cos().to(images)
    sin = angle.sin().to(images)
    down, across = centre.unbind(1)
    ratio = height / width  # coordinates from -1 to 1 have another length along each side
    # A new pixel is read from the centre plus its rotated distance (x - across, y - down) from the
    # centre. affine_grid takes x before y: a row of theta has the factors of x and of y, and then
    # all that is constant.
    theta = torch.zeros(len(images), 2, 3).to(images)
    theta[:, 0, 0] = cos
    theta[:, 0, 1] = -sin * ratio
    theta[:, 0, 2] = across - cos * across + sin * ratio * down
    theta[:, 1, 0] = sin / ratio
    theta[:, 1, 1] = cos
    theta[:, 1, 2] = down - sin / ratio * across - cos * down
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False).clamp(0, 1)


def shift_surroundings(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shift the surroundings of the object, which stays in its place.

    The brightness changes for the rest of the distance.
    """
    surroundings = shift_pixels(view, view.ground, "reflect")
    return _put_on(surroundings, view.images, view, changed)


def shrink_surroundings(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shrink the surroundings of the object.

    The brightness changes for the rest of the distance. The object keeps its size, but not the
    detail that is lost when it is shrunk.
    """
    coarse = enlarge_pixels(view, shrink_pixels(view, view.images, "reflection"))
    surroundings = shrink_pixels(view, view.ground, "reflection")
    return _put_on(surroundings, coarse, view, changed)


def _put_on(ground: Images, objects: Images, view: View, changed: Images) -> Images:
    """Put objects on a background, and change the brightness for the rest of the distance.

    objects: images in which the objects have their places in the view.
    """
    base = torch.where(view.cutout > 0, objects, ground)
    return add_pattern(view, changed, direction(view.images, view.region("image")), base=base)


def move_background(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Move the background, with its colours and its texture, and light it differently."""
    place = (view.layer == 0).to(view.images)
    height, width = view.images.shape[-2:]
    backgrounds = [
        view.ground.roll((height // 4, width // 4), (2, 3)),
        view.ground.flip(3),
        view.ground.flip(2),
    ]
    options = [torch.where(place > 0, background, view.images) for background in backgrounds]
    best = _nearest_option_by_sparse_pixels(view.images, changed, options)
    moved = torch.stack(options)[best, torch.arange(len(best), device=best.device)]
    return add_pattern(view, changed, place * direction(view.images, place), base=moved)


def light_from_side(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Light each image from one side, drawn by its key.

    The mean stays the same, apart from clipping.
    """
    height, width = view.images.shape[-2:]
    down = torch.linspace(-1, 1, height, device=view.images.device)[:, None].expand(height, width)
    across = torch.linspace(-1, 1, width, device=view.images.device).expand(height, width)
    sides = torch.stack([down, -down, across, -across])
    drawn = (uniform(view.keys, 1, stream=_SIDE_STREAM)[:, 0] * len(sides)).long()
    return add_pattern(view, changed, sides[drawn][:, None])


def cover_inside(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Move random squares off the border towards the mean colour.

    They cover as many pixels as the intervention changes. They leave out the object if its
    surroundings have room for them.
    """
    height, width = view.images.shape[-2:]
    border = (changed - view.images).abs().amax((0, 1)) > 0
    rows = torch.arange(height, device=view.images.device) * _SQUARES // height
    columns = torch.arange(width, device=view.images.device) * _SQUARES // width
    square_of_pixel = rows[:, None] * _SQUARES + columns  # (height, width)
    # one random number from 0 to 1 for each square, so that pixels are covered square by square
    rank = uniform(view.keys, _SQUARES**2, stream=_SQUARE_STREAM)[:, square_of_pixel]
    border_area = int(border.sum())
    count = min(border_area, border.numel() - border_area)  # no more than lie off the border
    if count == 0:
        return view.images
    off_object = ~border & (view.cutout[:, 0] == 0)
    has_room = off_object.sum((1, 2)) >= count
    free = torch.where(has_room[:, None, None], off_object, ~border)
    # the `count` free pixels of lowest rank are covered, or all if there are fewer; pixels that are
    # not free get a rank above all others
    rank = torch.where(free, rank, 2.0).flatten(1)
    limit = rank.kthvalue(count, 1).values
    is_covered = ((rank <= limit[:, None]) & (rank < 2)).view(-1, 1, height, width)
    mean = view.images.mean((2, 3), keepdim=True)
    return add_pattern(view, changed, (mean - view.images) * is_covered)


def _nearest_option_by_sparse_pixels(
    images: Images, changed: Images, options: list[Images]
) -> Int[Tensor, " batch"]:
    """Return `_nearest_option`, with distances of some of the pixels of large images."""
    sparse_options = [_sparse(option) for option in options]
    return _nearest_option(_sparse(images), _sparse(changed), sparse_options)


def _nearest_option(
    images: Images, changed: Images, options: list[Images]
) -> Int[Tensor, " batch"]:
    """Return for each image the index of the option with the distance nearest to the change's."""
    target = _log_distance(images, changed)
    errors = [(_log_distance(images, option) - target).abs() for option in options]
    return torch.stack(errors).argmin(0)


def _log_distance(images: Images, changed: Images) -> Tensor:
    return distance(images, changed).clamp_min(_TINY).log()


def _sparse(pixels: Tensor) -> Tensor:
    """Return some rows and columns of large images, for the choice of amplitudes and options."""
    stride = _stride(pixels)
    return pixels[..., ::stride, ::stride]


def _stride(images: Images) -> int:
    """Return the step between the rows and columns of `_sparse`."""
    return max(1, min(images.shape[-2:]) // _FEW_PIXELS)


def _noise(view: View) -> Tensor:
    """Return noise (batch, 1, height, width) of mean 0, drawn by each image's key."""
    height, width = view.images.shape[-2:]
    drawn = uniform(view.keys, height * width, stream=_NOISE_STREAM).view(-1, 1, height, width)
    noise = drawn.to(view.images) - 0.5
    return noise - noise.mean((1, 2, 3), keepdim=True)
