"""The values of a mask: which pixels are the object, and which masks are refused, as they do not
say so.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitlens.data.decode import UnreadableError

Pixels = NDArray[Any]
Inside = NDArray[np.bool_]
_LOSSY: Final = ("JPEG", "MPO", "WEBP", "AVIF")  # formats that change values near edges
_JPEG_NOISE: Final = 32  # levels by which JPEG moves a pixel of a mask
# levels between object and background of a mask with soft edges; fewer are class indices
_LEAST_RANGE: Final = 64
# share of the values between that may be areas; more are a third value, not an edge
_FLAT: Final = 0.2
_ROUNDING: Final = 3  # levels by which a lossy format moves an even area
_AREA: Final = 0.02  # share of a lossy mask above which one further level is a third value
_SHOWN: Final = 5  # values in a message
_REMEDY: Final = "write the object as 255 and all else as 0, one mask for each object or class"


def read_mask(image: Image.Image) -> Inside:
    """Return the object's pixels (height, width): those of the larger of two values, by index in a
    coloured palette.

    Edges may be soft, as JPEG and anti-aliasing make them. Raises UnreadableError for floating
    point, transparency, an empty mask, a mask without background and one of more than two values
    (classes, instances, a border to be ignored).
    """
    soft = image.format in _LOSSY
    values = _values(ImageOps.exif_transpose(image), exact=not soft)
    low = int(values.min())
    high = int(values.max())
    if low == high:
        if high == 0:
            raise UnreadableError(f"expected a mask with an object, found 0 everywhere; {_REMEDY}")
        return np.ones(values.shape, dtype=bool)
    if low > high // 4:
        raise UnreadableError(
            f"expected 0 for the background of a mask, found {low} to {high}; {_REMEDY}"
        )
    noise = _JPEG_NOISE if soft and high - low >= _LEAST_RANGE else 0
    if noise and _has_third_level(values, low, high):
        raise UnreadableError(f"expected a mask of two values, found areas of a third; {_REMEDY}")
    between = (values > low + noise) & (values < high - noise)
    if between.any() and (high - low < _LEAST_RANGE or _has_areas(values, between, noise)):
        found = np.unique(values)
        shown = ", ".join(map(str, found[:_SHOWN].tolist())) + (
            ", ..." if len(found) > _SHOWN else ""
        )
        raise UnreadableError(
            f"expected a mask of two values, found {len(found)} ({shown}); {_REMEDY}"
        )
    return np.asarray(values.astype(np.int64) * 2 > low + high)


def _values(image: Image.Image, *, exact: bool) -> Pixels:
    """Return the values (height, width) of a mask; exact: of a format that keeps them."""
    if image.mode == "F":
        raise UnreadableError(
            "expected a mask of whole numbers, found floating point; save it as PNG"
        )
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        alpha = np.asarray(image.convert("RGBA"))[..., 3]
        if int(alpha.min()) != 255:
            raise UnreadableError(
                f"expected a mask without transparency, found an alpha channel; {_REMEDY}"
            )
        image = image.convert("L" if image.mode in ("LA", "La") else "RGB")
    if image.mode == "P":
        return _of_palette(image)
    if image.mode.startswith("I") or image.mode in ("1", "L"):
        return np.asarray(image.convert("L") if image.mode == "1" else image)
    colours = np.asarray(image.convert("RGB"))
    values = np.asarray(image.convert("RGB").convert("L"))
    if not exact:
        return values
    count = _count(colours)
    if count == 2 and not colours.min((0, 1)).any():
        return np.where(
            colours.any(-1), 255, 0
        )  # black and one colour, which may be as dark in grey
    if len(np.unique(values)) < count <= 64:
        raise UnreadableError(f"expected a mask of two values, found {count} colours; {_REMEDY}")
    return values


def _of_palette(image: Image.Image) -> Pixels:
    """Return grey levels for a palette of greys, else the indices."""
    indices = np.asarray(image)
    colours = np.asarray(image.convert("RGB"))
    grey = (colours == colours[..., :1]).all()
    return np.asarray(image.convert("RGB").convert("L")) if grey else indices


def _count(colours: Pixels) -> int:
    """Return the number of different colours."""
    packed = colours.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    return len(np.unique(packed))


def _has_areas(values: Pixels, between: Inside, noise: int) -> bool:
    """Return True where the values between object and background fill areas, and are not only
    edges.
    """
    flat = _is_flat(values, noise // 4)
    return bool((flat & between).sum() > _FLAT * between.sum())


def _has_third_level(values: Pixels, low: int, high: int) -> bool:
    """Return True where a lossy mask has areas of one level that is near neither end, as of a class
    index.
    """
    level = values[_is_flat(values, 0)].astype(np.int64)
    inner = level[(level > low + _ROUNDING) & (level < high - _ROUNDING)]
    return len(inner) > 0 and int(np.bincount(inner).max()) > _AREA * values.size


def _is_flat(values: Pixels, tolerance: int) -> Inside:
    """Return the pixels that differ from their four neighbours by no more than a tolerance."""
    wide = np.pad(values.astype(np.int64), 1, mode="edge")
    inner = wide[1:-1, 1:-1]
    neighbours = (wide[:-2, 1:-1], wide[2:, 1:-1], wide[1:-1, :-2], wide[1:-1, 2:])
    return np.asarray(
        np.logical_and.reduce([abs(inner - each) <= tolerance for each in neighbours])
    )
