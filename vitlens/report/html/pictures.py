"""Pictures inside the page: small WebP data URIs."""

from base64 import b64encode
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

MOST: Final = 448  # px of the longer side of a photograph on the page
# the description in the PNG of a figure without images, which a dark page may invert
CHART: Final = "chart without images"
_WIDEST: Final = 1400  # px of the longer side of a figure
_DENSITY: Final = 1.15  # px of a figure for each CSS pixel
_DOTS: Final = 200.0  # px per inch of a figure that does not state its resolution
_COLOURS: Final = 256  # of a palette
_VISIBLE: Final = 2.5  # a palette is visible above this root mean square error, on a scale to 255
_TINY: Final = 64  # px of the longer side up to which a photograph is kept exactly
_INCH: Final = 96  # CSS pixels per inch
_ENLARGED: Final = 1.1  # factor on the size of figures, which have small type


@dataclass(frozen=True)
class Embedded:
    """A picture as a data URI.

    uri: the picture.
    width, height: its size on the page in CSS pixels.
    is_chart: True if it has no images, so that a dark page may invert it.
    """

    uri: str
    width: int
    height: int
    is_chart: bool = False


def figure(path: Path) -> Embedded:
    """Return a figure from its file.

    It is lossless with a palette if that makes no visible difference, else lossy.
    """
    from PIL import Image

    with Image.open(path) as opened:
        dots = float(opened.info.get("dpi", (_DOTS, _DOTS))[0]) or _DOTS
        picture = _on_white(opened)
        is_chart = opened.info.get("Description") == CHART
    width, height = (max(1, round(side / dots * _INCH * _ENLARGED)) for side in picture.size)
    picture = _at_most(picture, min(_WIDEST, round(_DENSITY * max(width, height))))
    with_palette = picture.quantize(
        _COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
    ).convert("RGB")
    difference = np.asarray(with_palette, np.float32) - np.asarray(picture, np.float32)
    if float(np.sqrt(np.mean(difference**2))) <= _VISIBLE:
        uri = _uri(with_palette, lossless=True, quality=20, method=3)
    else:
        uri = _uri(picture, quality=60, method=4)
    return Embedded(uri, width, height, is_chart)


def photograph(pixels: NDArray[np.uint8], *, most: int = MOST) -> Embedded:
    """Return pixels (height, width, 3) as a picture of at most `most` px a side.

    A tiny picture is kept exactly.
    """
    from PIL import Image

    picture = _at_most(Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8)), most)
    if max(picture.size) <= _TINY:
        uri = _uri(picture, lossless=True, quality=50)
    else:
        uri = _uri(picture, quality=80, method=4)
    return Embedded(uri, *picture.size)


def _at_most(picture: "Image", most: int) -> "Image":
    """Return a picture, scaled down if its longer side has more than `most` pixels."""
    longer = max(picture.size)
    if longer <= most:
        return picture
    # the shorter side of a very long picture would otherwise be no pixel at all
    width, height = (max(1, round(side * most / longer)) for side in picture.size)
    return picture.resize((width, height), reducing_gap=3.0)


def _on_white(picture: "Image") -> "Image":
    from PIL import Image

    if picture.mode not in ("RGBA", "LA", "PA") and "transparency" not in picture.info:
        return picture.convert("RGB")
    picture = picture.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")


def _uri(picture: "Image", **settings: Any) -> str:
    content = BytesIO()
    picture.save(content, "WEBP", **settings)
    return f"data:image/webp;base64,{b64encode(content.getvalue()).decode()}"
