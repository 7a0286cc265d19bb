"""Read which pixels of a mask are the object, and refuse ambiguous masks."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitlens.data.decode import UnreadableError

Pixels = NDArray[Any]
Inside = NDArray[np.bool_]
_LOSSY: Final = ("JPEG", "MPO", "WEBP", "AVIF")  # formats that change values near edges
_JPEG_NOISE: Final = 32  # levels by which JPEG moves a pixel of a mask
_JPEG_RIPPLE: Final = 8  # levels by which neighbours within an area of such a mask may differ
# least difference between the levels of object and background in a mask with soft edges; values
# with a smaller difference are class indices
_LEAST_RANGE: Final = 64
# largest share of areas among the values between object and background; a larger share shows a
# third value, not an edge
_FLAT: Final = 0.2
_ROUNDING: Final = 3  # levels by which a lossy format moves an even area
_AREA: Final = 0.02  # a further level with a larger share of a lossy mask is a third value
_DARKER: Final = 4  # the background must be darker than the object by at least this factor
_MOST_LISTED: Final = 5  # values in a message
_OPAQUE: Final = 255
# colours of a mask up to which two of one grey level are refused; a photograph has more
_FEW_COLOURS: Final = 64
_REMEDY: Final = "write the object as 255 and all else as 0, one mask for each object or class"


def read_mask(image: Image.Image) -> Inside:
    """Return a mask (height, width) of the object: the pixels of the larger of two values.

    In a coloured palette these are the indices. Edges may be soft, from JPEG or anti-aliasing.
    Raises UnreadableError for floating point, transparency, an empty mask, a mask without
    background and one of more than two values (classes, instances, a border to be ignored).
    """
    is_lossy = image.format in _LOSSY
    values = _read_values(ImageOps.exif_transpose(image), exact=not is_lossy)
    low = int(values.min())
    high = int(values.max())
    if low == high:
        if high == 0:
            raise UnreadableError(f"expected a mask with an object, found 0 everywhere; {_REMEDY}")
        return np.ones(values.shape, dtype=bool)
    if low > high // _DARKER:
        raise UnreadableError(
            f"expected 0 for the background of a mask, found {low} to {high}; {_REMEDY}"
        )
    if high - low < _LEAST_RANGE:
        # no soft edges: all values between are class indices
        has_third_value = bool(_between(values, low, high).any())
    elif is_lossy:
        if _has_third_level(values, low, high):
            raise UnreadableError(
                f"expected a mask of two values, found areas of a third; {_REMEDY}"
            )
        between = _between(values, low + _JPEG_NOISE, high - _JPEG_NOISE)
        has_third_value = _has_areas(values, between, _JPEG_RIPPLE)
    else:
        has_third_value = _has_areas(values, _between(values, low, high), ripple=0)
    if has_third_value:
        unique = np.unique(values)
        listed = ", ".join(map(str, unique[:_MOST_LISTED].tolist()))
        if len(unique) > _MOST_LISTED:
            listed += ", ..."
        raise UnreadableError(
            f"expected a mask of two values, found {len(unique)} ({listed}); {_REMEDY}"
        )
    is_object = values.astype(np.int64) * 2 > low + high  # above the middle of the two values
    return np.asarray(is_object)


def _read_values(image: Image.Image, *, exact: bool) -> Pixels:
    """Return the values (height, width) of a mask; exact: True for a lossless format."""
    if image.mode == "F":
        raise UnreadableError(
            "expected a mask of whole numbers, found floating point; save it as PNG"
        )
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        alpha = np.asarray(image.convert("RGBA"))[..., 3]
        if int(alpha.min()) != _OPAQUE:
            raise UnreadableError(
                f"expected a mask without transparency, found an alpha channel; {_REMEDY}"
            )
        image = image.convert("L" if image.mode in ("LA", "La") else "RGB")
    if image.mode == "P":
        return _read_palette(image)
    if image.mode == "1":
        return np.asarray(image.convert("L"))
    if image.mode.startswith("I") or image.mode == "L":
        return np.asarray(image)
    colours = np.asarray(image.convert("RGB"))
    values = np.asarray(image.convert("RGB").convert("L"))
    if not exact:
        return values
    count = _count_colours(colours)
    is_black = ~colours.any(-1)
    if count == 2 and is_black.any():
        # the other colour may be as dark as black in grey levels
        return np.where(is_black, 0, 255)
    if len(np.unique(values)) < count <= _FEW_COLOURS:
        raise UnreadableError(f"expected a mask of two values, found {count} colours; {_REMEDY}")
    return values


def _read_palette(image: Image.Image) -> Pixels:
    """Return grey levels for a palette of greys, else the indices."""
    colours = np.asarray(image.convert("RGB"))
    if (colours == colours[..., :1]).all():
        return np.asarray(image.convert("RGB").convert("L"))
    return np.asarray(image)


def _count_colours(colours: Pixels) -> int:
    """Return the number of different colours."""
    # one number for each colour: red, green and blue as 8 bits each
    packed = colours.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)
    return len(np.unique(packed))


def _between(values: Pixels, low: int, high: int) -> Inside:
    """Return the pixels with values above low and below high."""
    return np.asarray((values > low) & (values < high))


def _has_areas(values: Pixels, between: Inside, ripple: int) -> bool:
    """Return True if the values between object and background fill areas, not only edges.

    ripple: the levels by which neighbours within an area may differ.
    """
    flat = _is_flat(values, ripple)
    return bool((flat & between).sum() > _FLAT * between.sum())


def _has_third_level(values: Pixels, low: int, high: int) -> bool:
    """Return True if a lossy mask has areas of a level between the two, such as a class index."""
    flat_values = values[_is_flat(values, 0)].astype(np.int64)
    is_between = (flat_values > low + _ROUNDING) & (flat_values < high - _ROUNDING)
    between = flat_values[is_between]
    return len(between) > 0 and int(np.bincount(between).max()) > _AREA * values.size


def _is_flat(values: Pixels, tolerance: int) -> Inside:
    """Return the pixels that differ from their four neighbours by no more than a tolerance."""
    wide = np.pad(values.astype(np.int64), 1, mode="edge")
    inner = wide[1:-1, 1:-1]
    # above, below, left and right of each pixel
    neighbours = (wide[:-2, 1:-1], wide[2:, 1:-1], wide[1:-1, :-2], wide[1:-1, 2:])
    is_flat = np.ones(values.shape, dtype=bool)
    for neighbour in neighbours:
        is_flat &= abs(inner - neighbour) <= tolerance
    return is_flat
