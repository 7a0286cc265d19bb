"""The controls of interventions: images that change as much, by mean absolute distance, and keep
the cue.

Most add a pattern to the images, whose amplitude is found by bisection for each image. Clipping to
[0, 1] may leave a control too weak, which the report then says.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.failures.operations import frequency_bands
from vitlens.analysis.reliance.cues import Region
from vitlens.analysis.reliance.edits import direction, enlarge, shift, shrink, within
from vitlens.analysis.reliance.views import View, distance
from vitlens.data.draws import uniform
from vitlens.shapes import Images

_STEPS = 12  # of the bisection: to 0.2 % of the amplitude's range
_MOST = 8.0  # times the amplitude that would suffice without clipping
_THINNED = 64  # pixels along the shorter side of what amplitudes and angles are chosen on
_NOISE_STREAM = 23
_SIDE_STREAM = 24
_SQUARE_STREAM = 25
_SQUARES = 8  # along a side
_ANGLES = (
    0.05,
    -0.05,
    0.1,
    -0.1,
    0.2,
    -0.2,
)  # radians: a larger turn destroys what depends on a direction
_TINY = 1e-6


def with_pattern(
    view: View, changed: Images, pattern: Tensor, base: Images | None = None
) -> Images:
    """Add a pattern to each image, so that its distance is that of the changed one as far as [0, 1]
    allows.

    base: to which it is added in place of the image; it may be farther from the image than the
    changed one.
    """
    images = view.images
    base = images if base is None else base
    target = distance(images, changed)
    pattern = _of_size_one(pattern.expand_as(images))
    stride = _stride(images)
    few = images[..., ::stride, ::stride]
    few_of_base = base[..., ::stride, ::stride]
    few_of_pattern = pattern[..., ::stride, ::stride]
    low = torch.zeros_like(target)
    high = _MOST * target
    for _ in range(_STEPS):
        middle = (low + high) / 2
        tried = (few_of_base + middle[:, None, None, None] * few_of_pattern).clamp(0, 1)
        is_small = distance(few, tried) < target
        low = torch.where(is_small, middle, low)
        high = torch.where(is_small, high, middle)
    return (base + high[:, None, None, None] * pattern).clamp(0, 1)


def _of_size_one(pattern: Tensor) -> Tensor:
    """Return patterns of mean absolute value 1; one that is 0 everywhere stays so."""
    size = pattern.abs().mean((1, 2, 3), keepdim=True)
    return torch.where(size > _TINY, pattern / size.clamp_min(_TINY), 0.0)


def other_luminance(view: View, changed: Images, region: Region, _level: float) -> Images:
    """Brighten or darken a region, with its chroma as it is."""
    place = view.region(region)
    return with_pattern(view, changed, place * direction(view.images, place))


def other_brightness(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Brighten or darken the whole image, whichever region is changed.

    Contrasts stay as they are, as after a change of colour. A change of luminance in the background
    only would hide or reveal the object, and confuse a model that ignores colour.
    """
    whole = view.region("image")
    return with_pattern(view, changed, direction(view.images, whole))


def other_luminance_there(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Brighten or darken what is changed."""
    place = ((changed - view.images).abs().amax(1, keepdim=True) > 0).to(view.images)
    return with_pattern(view, changed, place * direction(view.images, place))


def coarse_noise(view: View, changed: Images, region: Region, cutoff: float) -> Images:
    """Add noise without frequencies above the cut-off, equal in all channels and of mean 0."""
    low, _ = frequency_bands(_noise(view), cutoff=cutoff)
    return within(view, with_pattern(view, changed, low * view.region(region)), region)


def noise_of_blocks(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Add noise as coarse as blocks of the size of a patch."""
    low, _ = frequency_bands(_noise(view), cutoff=1 / min(view.patch))
    return with_pattern(view, changed, low)


def fine_noise(view: View, changed: Images, _region: Region, cutoff: float) -> Images:
    """Add noise without frequencies up to the cut-off, equal in all channels."""
    _, high = frequency_bands(_noise(view), cutoff=cutoff)
    return with_pattern(view, changed, high)


def rolled(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Move each image by whole patches, around its edges: all parts keep their neighbours but at
    one seam a direction.

    Of several steps the one whose distance is nearest to the change's.
    """
    rows, columns = view.patch
    height, width = view.images.shape[-2:]
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
    ]
    steps += [(2 * down, 0), (0, 2 * across), (2 * down, 2 * across)]
    stride = _stride(view.images)
    options = [_rolled_few(view.images, step, stride) for step in steps]
    best = _index_of_nearest(
        view.images[..., ::stride, ::stride], changed[..., ::stride, ::stride], options
    )
    result = torch.empty_like(view.images)
    for index, step in enumerate(steps):
        chosen = best == index
        result[chosen] = view.images[chosen].roll(step, (2, 3))
    return result


def _rolled_few(images: Images, step: tuple[int, int], stride: int) -> Images:
    """Return every so many rows and columns of the images as they are when rolled."""
    height, width = images.shape[-2:]
    rows = (torch.arange(0, height, stride) - step[0]) % height
    columns = (torch.arange(0, width, stride) - step[1]) % width
    return images[..., rows[:, None], columns]


def shifted_back(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shift each image there and back, and turn it a little: it loses the same edges, and stays
    where it was.
    """
    return _turned_a_little(
        view, changed, shift(view, shift(view, view.images, "reflect"), "reflect", back=True)
    )


def enlarged_back(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shrink each image, enlarge it again, and turn it a little: it loses the same detail, and
    stays as large.
    """
    return _turned_a_little(view, changed, enlarge(view, shrink(view, view.images, "reflection")))


def _turned_a_little(view: View, changed: Images, base: Images) -> Images:
    """Turn images around their centre by the angle of the nearest distance; the rest of it is a
    change of brightness.

    The angle is chosen on smaller copies of large images.
    """
    images, small_changed, small_base = (_smaller(each) for each in (view.images, changed, base))
    options = [
        _turned(small_base, view.centre, torch.full((len(images),), angle)) for angle in _ANGLES
    ]
    best = _nearest_index(images, small_changed, options)
    turned = _turned(base, view.centre, torch.tensor(_ANGLES)[best.cpu()])
    return with_pattern(view, changed, direction(view.images, view.region("image")), base=turned)


def _smaller(images: Images) -> Images:
    """Return images reduced to about _THINNED pixels along the shorter side."""
    factor = max(1, min(images.shape[-2:]) // _THINNED)
    return F.avg_pool2d(images, factor) if factor > 1 else images


def _turned(images: Images, middle: Tensor, angle: Tensor) -> Images:
    """Turn images around places (batch, 2), down and across from -1 to 1, by an angle each."""
    height, width = images.shape[-2:]
    cos = angle.cos().to(images)
    sin = angle.sin().to(images)
    down, across = middle.unbind(1)
    ratio = height / width
    theta = torch.zeros(len(images), 2, 3).to(images)
    theta[:, 0, 0] = cos
    theta[:, 0, 1] = -sin * ratio
    theta[:, 0, 2] = across - cos * across + sin * ratio * down
    theta[:, 1, 0] = sin / ratio
    theta[:, 1, 1] = cos
    theta[:, 1, 2] = down - sin / ratio * across - cos * down
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False).clamp(0, 1)


def surroundings_shifted(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shift what surrounds the object, which stays in its place, and brighten or darken the image
    for the rest.
    """
    return _around(view, changed, view.images, shift(view, view.ground, "reflect"))


def surroundings_shrunk(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Shrink what surrounds the object, and brighten or darken the image for the rest of the
    distance.

    The object keeps its size, but not the detail that is lost when it is shrunk.
    """
    coarse = enlarge(view, shrink(view, view.images, "reflection"))
    return _around(view, changed, coarse, shrink(view, view.ground, "reflection"))


def _around(view: View, changed: Images, images: Images, ground: Images) -> Images:
    """Set the objects of images on a ground, and change the brightness so that the distance is that
    of the change.
    """
    base = torch.where(view.cutout > 0, images, ground)
    return with_pattern(view, changed, direction(view.images, view.region("image")), base=base)


def background_moved(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Move the background, with its colours and its texture, and light it differently."""
    place = (view.layer == 0).to(view.images)
    height, width = view.images.shape[-2:]
    options = [
        view.ground.roll((height // 4, width // 4), (2, 3)),
        view.ground.flip(3),
        view.ground.flip(2),
    ]
    moved = nearest(
        view, changed, [torch.where(place > 0, option, view.images) for option in options]
    )
    return with_pattern(view, changed, place * direction(view.images, place), base=moved)


def lit(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Light each image from one side, drawn by its key; the mean stays as far as nothing is
    clipped.
    """
    height, width = view.images.shape[-2:]
    down = torch.linspace(-1, 1, height, device=view.images.device)[:, None].expand(height, width)
    across = torch.linspace(-1, 1, width, device=view.images.device).expand(height, width)
    sides = torch.stack([down, -down, across, -across])
    drawn = (uniform(view.keys, 1, stream=_SIDE_STREAM)[:, 0] * len(sides)).long()
    return with_pattern(view, changed, sides[drawn][:, None])


def covered_inside(view: View, changed: Images, _region: Region, _level: float) -> Images:
    """Move random squares off the border towards the mean colour: as many pixels as the
    intervention changes.

    They leave out the object, where what surrounds it has room for them.
    """
    height, width = view.images.shape[-2:]
    border = (changed - view.images).abs().amax((0, 1)) > 0
    rows = torch.arange(height, device=view.images.device) * _SQUARES // height
    columns = torch.arange(width, device=view.images.device) * _SQUARES // width
    number = rows[:, None] * _SQUARES + columns
    rank = uniform(view.keys, _SQUARES**2, stream=_SQUARE_STREAM)[:, number]
    count = min(int(border.sum()), border.numel() - int(border.sum()))
    if count == 0:
        return view.images
    free = ~border & (view.cutout[:, 0] == 0)
    has_room = free.sum((1, 2)) >= count
    free = torch.where(has_room[:, None, None], free, ~border)
    rank = torch.where(free, rank, 2.0).flatten(1)
    limit = rank.kthvalue(count, 1).values
    inside = ((rank <= limit[:, None]) & (rank < 2)).view(-1, 1, height, width)
    mean = view.images.mean((2, 3), keepdim=True)
    return with_pattern(view, changed, (mean - view.images) * inside)


def nearest(view: View, changed: Images, options: list[Images]) -> Images:
    """Return for each image the option whose distance from it is nearest to the change's."""
    best = _nearest_index(view.images, changed, options)
    return torch.stack(options)[best, torch.arange(len(best), device=best.device)]


def _nearest_index(images: Images, changed: Images, options: list[Images]) -> Tensor:
    """Return for each image which option is nearest to the change in distance, by some pixels of
    large images.
    """
    stride = _stride(images)
    few = [each[..., ::stride, ::stride] for each in (images, changed, *options)]
    return _index_of_nearest(few[0], few[1], few[2:])


def _index_of_nearest(images: Images, changed: Images, options: list[Images]) -> Tensor:
    """Return for each image which option is nearest to the change in distance."""
    wanted = distance(images, changed).clamp_min(_TINY).log()
    found = [distance(images, option).clamp_min(_TINY).log() for option in options]
    return torch.stack([(each - wanted).abs() for each in found]).argmin(0)


def _stride(images: Images) -> int:
    """Return the step between the rows and columns on which amplitudes and options are chosen."""
    return max(1, min(images.shape[-2:]) // _THINNED)


def _noise(view: View) -> Tensor:
    """Return noise (batch, 1, height, width) of mean 0, drawn by each image's key."""
    height, width = view.images.shape[-2:]
    drawn = uniform(view.keys, height * width, stream=_NOISE_STREAM).view(-1, 1, height, width)
    noise = drawn.to(view.images) - 0.5
    return noise - noise.mean((1, 2, 3), keepdim=True)
