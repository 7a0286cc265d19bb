"""Draw scenes: a handwritten digit on a coloured, textured canvas among strokes.

Place, size and contrast of the digit are random. In half of the scenes, a bar of the background
hides part of the digit.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.data.drawing import (
    REFERENCE,
    Plane,
    add_grain,
    colour,
    gradient,
    in_chunks,
    paint,
    pixel_axes,
    pure_hue,
)
from vitlens.data.draws import uniform
from vitlens.data.split import Drawn

STROKES = 6  # largest number of distractors in a scene
HUES = 10  # equally spaced hues of backgrounds
_TURN = 12  # degrees: the largest rotation of a digit
_GROUND = (0.22, 0.42)  # luminance of the background, without its texture
_TEXTURE = 0.14  # range of the texture: it changes the luminance by at most half of it
# the channels of a background keep this distance from 0 and 1, so that texture and grain are not
# clipped
_HEADROOM = 0.1
_LATTICE = 6  # side of the coarse noise that is upsampled to clouds
_JITTER = 9  # degrees of hue around one of the HUES, a quarter of their spacing
_BAR_WIDTH = (0.12, 0.22)  # fractions of the digit's height
_BAR_OFFSET = 0.1  # largest distance of the bar from the digit's centre, over the digit's height
_EDGE = 0.42  # fraction of ink at which the digit's outline is drawn
# assumed rise of that fraction per source pixel at the outline: it turns ink into a distance
_SLOPE = 0.9
_CLEARANCE = 8  # strokes are hidden from 1/8 of ink on
_STROKE_CONTRAST = (0.3, 1.0)  # fractions of the digit's contrast
# Streams of random numbers: 1 place, 2 colours, 3 strokes, 4 grain, 5 ground, 6 clouds, 7 factors,
# 8 bar, 9 jitter of the hue.
_OTHER = 100  # added to a stream for another ground


@dataclass(frozen=True)
class Difficulty:
    """Limits of the factors that decide how hard a digit is to read.

    height: the smallest and largest height of a digit, as a fraction of the canvas.
    contrast: the smallest and largest luminance of the ink minus that of the background. It is
        always positive: with random polarity, vit-mini was at chance after 10,240 images, and at 65
        % with light ink.
    bar_share: the share of the scenes in which a bar hides part of the digit.
    """

    height: tuple[float, float]
    contrast: tuple[float, float]
    bar_share: float


HARD: Final = Difficulty(height=(0.35, 0.8), contrast=(0.12, 0.55), bar_share=0.5)
# a ViT of 0.2 M parameters learns these within minutes on one core
CLEAR: Final = Difficulty(height=(0.55, 0.8), contrast=(0.4, 0.55), bar_share=0.0)


@dataclass(frozen=True)
class SceneFactors:
    """The factors that generate each scene, except its texture and grain: tensors (batch,).

    height: the height of the digit, as a fraction of the canvas.
    across: the horizontal place of the digit's centre, as a fraction of the canvas.
    down: the vertical place of the digit's centre, as a fraction of the canvas.
    turn: the rotation of the digit in degrees.
    contrast: the luminance of the ink minus that of the background.
    luminance: the luminance of the background.
    hue: the hue of the background, an index into HUES.
    strokes: the number of strokes.
    bar: the width of the bar that hides part of the digit, as a fraction of the digit's height; 0
        without a bar.
    """

    height: Tensor
    across: Tensor
    down: Tensor
    turn: Tensor
    contrast: Tensor
    luminance: Tensor
    hue: Tensor
    strokes: Tensor
    bar: Tensor


def factors_of(
    keys: Int[Tensor, " batch"], hues: Int[Tensor, " batch"], difficulty: Difficulty = HARD
) -> SceneFactors:
    """Return the factors of the scenes with these keys and hues."""
    # random shares of the range of each factor, (batch,)
    height_share, turn_share, down_share, across_share = uniform(keys, 4, stream=1).unbind(1)
    contrast_share, luminance_share, stroke_share, presence_of_bar, bar_share = uniform(
        keys, 5, stream=7
    ).unbind(1)
    height = _between(difficulty.height, height_share)
    turn = (2 * turn_share - 1) * _TURN
    angle = torch.deg2rad(turn)
    rotated_side = height * (angle.cos() + angle.sin().abs())  # of the rotated square's bounds
    room = (1 - rotated_side).clamp(min=0)  # the centre can move by this much
    has_bar = presence_of_bar < difficulty.bar_share
    bar = torch.where(has_bar, _between(_BAR_WIDTH, bar_share), 0.0)
    return SceneFactors(
        height=height,
        across=0.5 + (across_share - 0.5) * room,
        down=0.5 + (down_share - 0.5) * room,
        turn=turn,
        contrast=_between(difficulty.contrast, contrast_share),
        luminance=_between(_GROUND, luminance_share),
        hue=hues,
        strokes=1 + (stroke_share * STROKES).long(),
        bar=bar,
    )


def _between(limits: tuple[float, float], share: Tensor) -> Tensor:
    """Return the values at a share, 0 to 1, of the way between two limits."""
    low, high = limits
    return low + (high - low) * share


def render(
    glyphs: Float[Tensor, "batch 8 8"],
    keys: Int[Tensor, " batch"],
    hues: Int[Tensor, " batch"],
    canvas: int = REFERENCE,
    strokes: int = STROKES,
    ground: int = 0,
    difficulty: Difficulty = HARD,
) -> Drawn:
    """Draw one scene for each glyph; it depends only on its key and its hue.

    glyphs: the fraction of ink in each source pixel.
    canvas: the side of the square canvas in pixels.
    strokes: the largest number of strokes.
    ground: 0 for the scene's texture, 1 for another one of the same luminance and hue.
    """
    draw = partial(_draw, size=canvas, strokes=strokes, ground=ground, difficulty=difficulty)
    return in_chunks(draw, canvas, glyphs, keys, hues)


def _draw(
    glyphs: Tensor,
    keys: Tensor,
    hues: Tensor,
    *,
    size: int,
    strokes: int,
    ground: int,
    difficulty: Difficulty,
) -> Drawn:
    """Draw the background, then strokes around the digit, then the digit outside the bar."""
    factors = factors_of(keys, hues, difficulty)
    ink_share, source_pixel = _place_glyphs(glyphs, factors, size)
    # ink above the edge / ink per pixel = pixels inside the outline; + 0.5 centres the ramp on it,
    # so that the outline is smoothed over one or two pixels
    digit_cover = ((ink_share - _EDGE) * (source_pixel / _SLOPE) + 0.5).clamp(0, 1)
    digit_cover = digit_cover * (1 - _bar(keys, factors, size))
    # 0 near the ink, 1 elsewhere: a stroke that touches the ink could change the class
    away_from_ink = 1 - (ink_share * _CLEARANCE).clamp(0, 1)
    ink_luminance = factors.luminance + factors.contrast
    # random colours, (batch, digit and strokes, 3)
    colours = uniform(keys, 3 * (1 + STROKES), stream=2).reshape(-1, 1 + STROKES, 3)

    canvas = _draw_ground(keys, factors, size, stream_offset=_OTHER * ground)
    stroke_draws = uniform(keys, 6 * STROKES, stream=3).reshape(-1, STROKES, 6)
    for index in range(strokes):
        tone = stroke_draws[:, index, 5]
        contrast = _between(_STROKE_CONTRAST, tone) * factors.contrast
        is_present = (index < factors.strokes)[:, None, None]
        cover = _stroke(stroke_draws[:, index], size) * away_from_ink * is_present
        stroke_colour = colour(colours[:, 1 + index], factors.luminance + contrast)
        canvas = paint(canvas, stroke_colour, cover)
    canvas = paint(canvas, colour(colours[:, 0], ink_luminance), digit_cover)
    return add_grain(canvas, keys, digit_cover >= 0.5, stream=4 + _OTHER * ground)


def _place_glyphs(glyphs: Tensor, factors: SceneFactors, canvas: int) -> tuple[Plane, Tensor]:
    """Return the glyph's ink on the canvas, and the size of its source pixels in px (batch, 1, 1).

    The bicubic interpolation has no aliasing: 8 source pixels become 11 or more on the canvas.
    """
    across, down = _from_centre(factors, torch.deg2rad(factors.turn), canvas)
    half_height = (factors.height * canvas / 2)[:, None, None]
    # (batch, height, width, 2): x and y from -1 to 1 over the glyph, as grid_sample takes them
    grid = torch.stack((across / half_height, down / half_height), dim=-1)
    ink_share = F.grid_sample(
        glyphs[:, None], grid, mode="bicubic", padding_mode="zeros", align_corners=False
    )[:, 0]
    return ink_share, half_height / 4  # four source pixels are half of the glyph


def _from_centre(factors: SceneFactors, angle: Tensor, canvas: int) -> tuple[Plane, Plane]:
    """Return coordinates across and down from the digit's centre in px, rotated by an angle."""
    y, x = pixel_axes(canvas, angle.device)
    y = y - (factors.down * canvas)[:, None, None]
    x = x - (factors.across * canvas)[:, None, None]
    cos = angle.cos()[:, None, None]
    sin = angle.sin()[:, None, None]
    return cos * x + sin * y, cos * y - sin * x


def _bar(keys: Tensor, factors: SceneFactors, canvas: int) -> Plane:
    """Return the coverage of each pixel by the bar, 0 in a scene without one."""
    angle_share, offset_share = uniform(keys, 2, stream=8).unbind(1)
    _, down = _from_centre(factors, angle_share * math.pi, canvas)
    height = (factors.height * canvas)[:, None, None]
    offset = (2 * offset_share[:, None, None] - 1) * _BAR_OFFSET * height
    distance = (down - offset).abs()  # from the bar's centre line
    half_width = factors.bar[:, None, None] * height / 2
    cover = (half_width - distance + 0.5).clamp(0, 1)
    return cover * (half_width > 0)


def whereabouts(
    keys: Int[Tensor, " batch"], difficulty: Difficulty = HARD
) -> Float[Tensor, "batch 3"]:
    """Return the size and centre of each scene's digit, as `Drawings.place` does."""
    factors = factors_of(keys, torch.zeros_like(keys), difficulty)
    low, high = difficulty.height
    return torch.stack(((factors.height - low) / (high - low), factors.across, factors.down), 1)


def _draw_ground(
    keys: Tensor, factors: SceneFactors, canvas: int, *, stream_offset: int
) -> Float[Tensor, "batch 3 height width"]:
    """Return a gradient between two shades of one hue and luminance, with clouds and stripes.

    The texture of clouds and stripes changes the luminance by at most _TEXTURE / 2.
    """
    draws = uniform(keys, 5, stream=5 + stream_offset)
    gradient_turn = draws[:, 0]
    # (batch, 1, 1): the direction, the frequency and the phase of the stripes, and their share
    slant_share, period_share, phase, stripe_share = draws[:, 1:, None, None].unbind(1)
    y, x = pixel_axes(canvas, keys.device)
    jitter = (2 * uniform(keys, 2, stream=9) - 1) * _JITTER / 360
    hue = factors.hue / HUES
    first = colour(pure_hue(hue + jitter[:, 0]), factors.luminance, _HEADROOM)
    second = colour(pure_hue(hue + jitter[:, 1]), factors.luminance, _HEADROOM)
    colours = gradient(first, second, gradient_turn, canvas)

    lattice_draws = uniform(keys, _LATTICE**2, stream=6 + stream_offset)
    lattice = lattice_draws.reshape(-1, 1, _LATTICE, _LATTICE) - 0.5
    clouds = F.interpolate(lattice, size=(canvas, canvas), mode="bicubic", align_corners=True)
    clouds = clouds[:, 0].clamp(-0.5, 0.5)
    slant = slant_share * math.pi
    across = slant.cos() * x / canvas + slant.sin() * y / canvas
    periods = 2 + 4 * period_share  # of the stripes across the canvas
    stripes = (2 * math.pi * (across * periods + phase)).sin() / 2
    texture = clouds + stripe_share * (stripes - clouds)  # from -0.5 to 0.5
    return colours + _TEXTURE * texture[:, None]


def _stroke(draws: Float[Tensor, "batch 6"], canvas: int) -> Plane:
    """Return the coverage of each pixel by a short straight stroke.

    draws: numbers in [0, 1) for the centre's y and x, the angle, the length, the thickness and
        the tone, which is not used here.
    """
    unit = canvas / REFERENCE  # px for a px of the reference canvas, for which sizes are stated
    centre_y, centre_x, angle, length, thickness, _ = (
        value[:, None, None] for value in draws.unbind(1)
    )
    y, x = pixel_axes(canvas, draws.device)
    y = y - centre_y * canvas
    x = x - centre_x * canvas
    cos = (angle * math.pi).cos()
    sin = (angle * math.pi).sin()
    half_length = (1.5 + 2.5 * length) * unit
    half_width = (0.5 + 0.4 * thickness) * unit
    beyond_end = ((cos * x + sin * y).abs() - half_length).clamp(min=0)
    distance = (beyond_end**2 + (cos * y - sin * x) ** 2).sqrt()  # from the stroke's centre line
    return (half_width - distance + 0.5).clamp(0, 1)
