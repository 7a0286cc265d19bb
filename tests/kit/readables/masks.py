"""Masks of objects, by example."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageFilter

from tests.kit.readables.example import OBJECT, SIZE, Example


def _masked(
    values: np.ndarray | Image.Image, *, suffix: str = ".png", turned: int = 1
) -> Callable[[Path], None]:
    """Return a function that writes an image with a bright object, and a mask.

    turned: the image's EXIF orientation; 1 is upright.
    """

    def make(root: Path) -> None:
        for place in ("images", "masks"):
            (root / place).mkdir(parents=True)
        pixels = np.zeros((*SIZE, 3), np.uint8)
        pixels[OBJECT] = 255
        exif = Image.Exif()
        exif[0x0112] = turned  # the tag of the orientation
        Image.fromarray(pixels).save(root / "images" / "a.png", exif=exif.tobytes())
        image = values if isinstance(values, Image.Image) else Image.fromarray(values)
        image.save(root / "masks" / f"a{suffix}")

    return make


def levels(inside: int = 255, outside: int = 0) -> np.ndarray:
    """Return a mask of two values."""
    mask = np.full(SIZE, outside, np.uint8)
    mask[OBJECT] = inside
    return mask


def _more(*values: int) -> np.ndarray:
    """Return a mask of several values: the first in the object, the others in strips below it."""
    mask = levels(values[0])
    for number, value in enumerate(values[1:]):
        mask[32 + 4 * number : 36 + 4 * number] = value
    return mask


def _palette(mask: np.ndarray, colours: Mapping[int, tuple[int, int, int]]) -> Image.Image:
    """Return a mask whose values are indices of colours (red, green, blue)."""
    greys = Image.fromarray(mask).convert("L")
    image = Image.frombytes("P", greys.size, greys.tobytes())
    table = [0] * 768  # three numbers for each of 256 colours
    for index, colour in colours.items():
        table[3 * index : 3 * index + 3] = colour
    image.putpalette(table)
    return image


def _transparent() -> Image.Image:
    image = Image.new("RGBA", SIZE[::-1])
    image.putalpha(Image.fromarray(levels()))
    return image


_VOC: Final = {5: (128, 0, 128), 255: (224, 224, 192)}
_RED: Final = {0: (0, 0, 0), 1: (128, 0, 0)}
_INVERSE: Final = {0: (255, 255, 255), 1: (0, 0, 0)}
_TURNED: Final = Image.fromarray(levels()).transpose(Image.Transpose.ROTATE_270)


def _in_classes(root: Path) -> None:
    """Write the image and the mask into a class's folder, and the same names into another."""
    _masked(levels())(root / "made")
    for place in ("images", "masks"):
        for name in ("cat", "dog"):
            (root / place).mkdir(exist_ok=True)
            shutil.copytree(root / "made" / place, root / place / name)
    shutil.rmtree(root / "made")


def _two_masks(root: Path) -> None:
    _masked(levels())(root)
    shutil.copy(root / "masks" / "a.png", root / "masks" / "a.bmp")


MASKS: Final = (
    Example("`images/<class>/` with `masks/<class>/`", _in_classes, "read", "masks and labels"),
    Example("two masks of one image (`a.png`, `a.bmp`)", _two_masks, "refused", "move one away"),
    Example("0 and 255", _masked(levels()), "read", "the larger value"),
    Example("0 and 1", _masked(levels(1)), "read", "the larger value"),
    Example("1 bit", _masked(Image.fromarray(levels()).convert("1")), "read", "white"),
    Example("JPEG", _masked(levels(), suffix=".jpg"), "read", "the brighter half"),
    Example(
        "soft edges",
        _masked(Image.fromarray(levels()).filter(ImageFilter.GaussianBlur(0.7))),
        "read",
        "the brighter half",
    ),
    Example("16 bits", _masked(levels().astype(np.uint16) * 257), "read", "the larger value"),
    Example("a palette of two colours", _masked(_palette(levels(1), _RED)), "read", "index 1"),
    Example(
        "a palette of greys",
        _masked(_palette(np.where(levels() > 0, 0, 1).astype(np.uint8), _INVERSE)),
        "read",
        "white",
    ),
    Example(
        "a colour on black",
        _masked(_palette(levels(1), {1: (0, 0, 1)}).convert("RGB")),
        "read",
        "the colour",
    ),
    Example(
        "opaque RGBA",
        _masked(Image.fromarray(levels()).convert("RGBA")),
        "read",
        "the larger value",
    ),
    Example(
        "a turned photograph (EXIF), the mask as stored",
        _masked(levels(), turned=6),
        "read",
        "turned with it",
    ),
    Example(
        "a turned photograph (EXIF), the mask as displayed",
        _masked(_TURNED, turned=6),
        "read",
        "as it is",
    ),
    Example(
        "a palette of classes with a border of 255 (VOC)",
        _masked(_palette(_more(5, 255), _VOC)),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example("class indices", _masked(_more(1, 2)), "refused", "one mask an object, of 0 and 255"),
    Example(
        "instances", _masked(_more(100, 200, 255)), "refused", "one mask an object, of 0 and 255"
    ),
    Example(
        "a wide unknown border (trimap)",
        _masked(_more(255, 128)),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example(
        "three colours",
        _masked(_palette(_more(1, 2), {1: (0, 150, 0), 2: (150, 0, 0)}).convert("RGB")),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example(
        "class indices with a border of 255, in WebP",
        _masked(_more(5, 255), suffix=".webp"),
        "refused",
        "one mask an object, of 0 and 255",
    ),
    Example("WebP of two values", _masked(levels(), suffix=".webp"), "read", "the brighter half"),
    Example("nothing but 0", _masked(levels(0)), "refused", "a mask with an object"),
    Example("1 and 2", _masked(levels(2, 1)), "refused", "0 for the background"),
    Example(
        "two colours without black",
        _masked(_palette(levels(1), {0: (255, 0, 0), 1: (0, 255, 0)}).convert("RGB")),
        "refused",
        "0 for the background",
    ),
    Example("an alpha channel", _masked(_transparent()), "refused", "a mask without transparency"),
)
