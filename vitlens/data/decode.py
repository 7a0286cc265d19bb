"""Image files -> uint8 RGB pixels, decoded once and kept where they fit in memory, else decoded on
reading.

EXIF rotation, transparency, bit depth and colour space are converted.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features
from torch import Tensor

from vitlens.data.split import InMemory, Skipped, Source, Split
from vitlens.errors import DataError, first_line
from vitlens.preprocessing import CropOffset, Preprocessing
from vitlens.shapes import Pixels
from vitlens.signatures import described, image_format

# most pixels of a file, and of a resized image; a small file can claim any number
PIXEL_LIMIT = 64_000_000
MEMORY_LIMIT = 1 << 30  # bytes of decoded pixels that are kept in memory
UNSTATED: Final = Preprocessing(
    size=(224, 224), resize=256
)  # for images of different sizes without a model
# Pillow supports more formats, one of them (EPS) by running a program
FORMATS = (
    "JPEG",
    "PNG",
    "GIF",
    "BMP",
    "TIFF",
    "WEBP",
    "PPM",
    *(("AVIF",) if features.check("avif") else ()),
)
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp", ".mpo")
_OTHER_SUFFIXES = (".png", ".apng", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp", ".avif")
_PNM_SUFFIXES = (".ppm", ".pgm", ".pbm", ".pnm")
READ_SUFFIXES = frozenset((*_JPEG_SUFFIXES, *_OTHER_SUFFIXES, *_PNM_SUFFIXES))
# of images that are not read: they are counted and named, so that no class is lost without a word
_PHOTO_SUFFIXES = (
    ".heic",
    ".heif",
    ".jp2",
    ".j2k",
    ".jpx",
    ".jxl",
    ".dng",
    ".cr2",
    ".cr3",
    ".nef",
    ".arw",
)
_RARE_SUFFIXES = (".svg", ".tga", ".psd", ".exr", ".hdr", ".dcm", ".fits", ".nii")
_UNREAD_SUFFIXES = frozenset((*_PHOTO_SUFFIXES, *_RARE_SUFFIXES))
SUFFIXES = READ_SUFFIXES | _UNREAD_SUFFIXES
_DEEP_GREY = ("I", "I;16", "I;16B", "I;16L", "I;16N")
TURNS = {  # what is done to the pixels, by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ACROSS = (5, 6, 7, 8)  # those that exchange height and width
_BATCH = 64  # files a thread takes at a time
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}  # near the end of a complete file

OnePicture = UInt8[Tensor, "3 height width"]
Progress = Callable[[int, int], None]  # called with (files done, files in all)


class UnreadableError(DataError):
    """An image that cannot be used; the message is the reason, without the file's name."""


class Header(NamedTuple):
    """The header of a readable file.

    size: (height, width) as displayed, after the turn that its EXIF orientation asks for; note: for
    the report, or None; orientation: of the EXIF block, 1 for an image that is stored as it is
    displayed.
    """

    size: tuple[int, int]
    note: str | None
    orientation: int = 1

    @property
    def stored_size(self) -> tuple[int, int]:
        """Return the size (height, width) before the turn."""
        height, width = self.size
        return (width, height) if self.orientation in _ACROSS else (height, width)


def decode(given: Path | Image.Image, preprocessing: Preprocessing) -> tuple[OnePicture, Header]:
    """Pixels of one image, resized and cropped for a model, and its header; call it inside
    `quiet_pillow`.

    Of an image given by Pillow no more is read than its pixels: its file may be closed, its pixels
    edited. Raises UnreadableError with the reason: missing, no image, truncated, too large.
    """
    with open_image(given) as image:
        pixels = fit(flatten(image), preprocessing)
        whole = isinstance(given, Image.Image)
        return pixels, Header((image.height, image.width), None) if whole else _header_of(image)


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Inside, Pillow's warnings are not printed, as errors and notes replace them. Enter it outside
    threads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def open_image(given: Path | Image.Image) -> Iterator[Image.Image]:
    """Yield an open image of acceptable size; raise UnreadableError with the reason for every
    failure inside.
    """
    most = f"expected at most {PIXEL_LIMIT // 1_000_000} megapixels, found "
    try:
        with (
            nullcontext(given)
            if isinstance(given, Image.Image)
            else Image.open(given, formats=FORMATS) as image
        ):
            if image.width * image.height > PIXEL_LIMIT:
                raise UnreadableError(f"{most}{image.width}x{image.height}; make it smaller first")
            yield image
    except UnreadableError:
        raise
    except FileNotFoundError as error:
        raise UnreadableError("expected an image file, found nothing there") from error
    except UnidentifiedImageError as error:
        raise UnreadableError(_other_than_image(given)) from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UnreadableError(f"{most}more") from error
    except Exception as error:  # a damaged file makes Pillow's decoders raise nearly anything
        raise UnreadableError(first_line(error)) from error


def _other_than_image(given: Path | Image.Image) -> str:
    """Return why a file that Pillow does not know is no image that can be used."""
    kind = image_format(given) if isinstance(given, Path) else ""
    if kind and kind not in FORMATS:
        found = f"{kind}, which is not read; save it as PNG or JPEG"
    elif isinstance(given, Path) and not kind:
        found = described(given) or "something else"
    else:
        found = "something else"
    return f"expected an image ({', '.join(FORMATS)}), found {found}"


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, 1 where it has none or a broken one."""
    with suppress(Exception):  # a broken EXIF block does not affect the pixels
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
        return orientation if 1 < orientation <= 8 else 1
    return 1


def displayed_size(image: Image.Image) -> tuple[int, int]:
    """Return the size (height, width) of an image after the turn that its EXIF orientation asks
    for.
    """
    if orientation_of(image) in _ACROSS:
        return image.width, image.height
    return image.height, image.width


def flatten(image: Image.Image) -> Image.Image:
    """Return the first frame as RGB: rotated by its EXIF orientation, transparency on white, 16 bit
    scaled to 8.
    """
    image.load()
    with suppress(Exception):  # a broken EXIF block does not affect the pixels
        if orientation_of(image) != 1:
            image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _DEEP_GREY:
        deep = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray(((deep + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise UnreadableError(
            "expected integer pixels, found floating point, whose range is unknown; save it as PNG"
        )
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, "white")
        return Image.alpha_composite(white, clear).convert("RGB")
    return image.convert("RGB")


def fit(image: Image.Image, preprocessing: Preprocessing) -> OnePicture:
    """Return the pixels of an RGB image, resized and cropped or padded to a model's input size.

    Raises UnreadableError for a strip that is too thin to be resized in proportion.
    """
    resized_size = _resized_size(image.size, preprocessing)
    if resized_size[0] * resized_size[1] > PIXEL_LIMIT:
        raise UnreadableError(
            f"expected an image that is not a thin strip, found {image.width}x{image.height}"
        )
    if image.size != resized_size:
        image = image.resize(resized_size, Image.Resampling[preprocessing.interpolation.upper()])
    return torch.from_numpy(np.array(_centre(image, preprocessing))).permute(2, 0, 1)


def _resized_size(image_size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    """Return the (width, height) to which an image of a (width, height) is resized before the
    crop."""
    height, width = preprocessing.size
    image_width, image_height = image_size
    resize = preprocessing.resize
    box = preprocessing.box
    if resize is not None:
        short, long = sorted(image_size)
        scaled = int(resize * long / short)  # truncated, as in torchvision's Resize
        size = (resize, scaled) if image_width <= image_height else (scaled, resize)
    elif box is None:
        return width, height
    elif preprocessing.crop_mode == "squash":
        size = (box[1], box[0])
    else:  # rounded, as in timm's ResizeKeepRatio
        ratios = (image_height / box[0], image_width / box[1])
        ratio = max(ratios) if preprocessing.crop_mode == "border" else min(ratios)
        size = (max(1, round(image_width / ratio)), max(1, round(image_height / ratio)))
    if preprocessing.fill is None and (size[0] < width or size[1] < height):
        scale = max(width / image_width, height / image_height)
        size = (max(width, round(image_width * scale)), max(height, round(image_height * scale)))
    return size


def _centre(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Return the centre of an image at the input's size, with a border where the image is
    smaller."""
    height, width = preprocessing.size
    left = _offset(image.width - width, preprocessing.crop_offset)
    top = _offset(image.height - height, preprocessing.crop_offset)
    if left >= 0 and top >= 0:
        return image.crop((left, top, left + width, top + height))
    canvas = Image.new("RGB", (width, height), preprocessing.fill or 0)
    canvas.paste(image, (-left, -top))
    return canvas


def _offset(surplus: int, rounding: CropOffset) -> int:
    """Return the first pixel of a centre crop along one axis; below 0, the pixels of the border
    before the image.
    """
    if surplus < 0:
        return -(
            -surplus // 2
        )  # the smaller half of the border is before the image, as in torchvision's CenterCrop
    return surplus // 2 if rounding == "floor" else round(surplus / 2)


def _header_of(image: Image.Image) -> Header:
    """Return an open image's header, with a note where it has more than one frame."""
    # a camera's MPO holds a preview beside the photograph
    animated = image.format != "MPO" and getattr(image, "is_animated", False)
    orientation = orientation_of(image)
    return Header(
        displayed_size(image),
        "more than one frame, of which the first is used" if animated else None,
        orientation,
    )


@dataclass(frozen=True)
class Files:
    """Image files that are decoded when they are read, in parallel; safe in the workers of a
    DataLoader.
    """

    paths: tuple[Path, ...]
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these files. Raises DataError when one of them has become unreadable."""
        chosen = [self.paths[index] for index in indices.tolist()]
        pixels = _room(len(chosen), self.preprocessing)
        for path, result in zip(chosen, _decode_into(pixels, chosen, self.preprocessing)):
            if isinstance(result, UnreadableError):
                raise DataError(f"cannot read {path}: {result}; repair or remove it")
        return pixels


def load_files(
    paths: Sequence[Path],
    preprocessing: Preprocessing | None = None,
    *,
    progress: Progress | None = None,
) -> Split:
    """Image files without labels; unreadable ones are left out and listed.

    preprocessing: None keeps the size that all images share, else 224x224. Up to MEMORY_LIMIT bytes
    of pixels are decoded now and kept as uint8. Above that, only each file's header and end are
    checked now, and pixels are decoded on reading. Raises DataError when no file can be read.
    """
    preprocessing = preprocessing or stored_size(paths)
    height, width = preprocessing.size
    eager = len(paths) * 3 * height * width <= MEMORY_LIMIT
    pixels = _room(len(paths) if eager else 0, preprocessing)
    results = (
        _decode_into(pixels, paths, preprocessing, progress) if eager else probe(paths, progress)
    )
    headers = {index: header for index, header in enumerate(results) if isinstance(header, Header)}
    faults = [(path, why) for path, why in zip(paths, results) if isinstance(why, UnreadableError)]
    if not headers:
        first = f" among {len(faults)}: {faults[0][0]}: {faults[0][1]}" if faults else ""
        raise DataError(f"expected readable images, found none{first}")
    readable = tuple(paths[index] for index in headers)
    source: Source = Files(readable, preprocessing)
    if eager:
        source = InMemory(pixels if not faults else pixels[list(headers)], readable)
    counts = Counter(header.note for header in headers.values() if header.note)
    return Split(
        name="images",
        title="images",
        part="test",
        source=source,
        size=preprocessing.size,
        classes=(),
        files=tuple(map(str, readable)),
        skipped=tuple(Skipped(str(path), str(why)) for path, why in faults),
        notes=tuple(
            f"{count} of {len(headers)} images have {note}" for note, count in counts.items()
        ),
    )


def stored_size(paths: Sequence[Path]) -> Preprocessing:
    """Return the size that all images share, else 224x224."""
    sizes = {header.size for header in probe(paths) if isinstance(header, Header)}
    return Preprocessing(size=sizes.pop()) if len(sizes) == 1 else UNSTATED


def probe(
    paths: Sequence[Path], progress: Progress | None = None
) -> list[Header | UnreadableError]:
    """Return each file's header, or why it cannot be read.

    Pixels are decoded only where the end of the file is missing, or where its format has no end
    marker.
    """

    def header(_: int, path: Path) -> Header:
        with open_image(path) as image:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 64))
                end = _ENDS.get(str(image.format))
                whole = end is not None and end in file.read()
            if not whole:
                image.load()
            return _header_of(image)

    return _for_each(header, paths, progress)


def _decode_into(
    pixels: Pixels,
    paths: Sequence[Path],
    preprocessing: Preprocessing,
    progress: Progress | None = None,
) -> list[Header | UnreadableError]:
    """Decode file i into pixels[i]."""

    def into(index: int, path: Path) -> Header:
        pixels[index], header = decode(path, preprocessing)
        return header

    return _for_each(into, paths, progress)


def _for_each(
    work: Callable[[int, Path], Header], paths: Sequence[Path], progress: Progress | None
) -> list[Header | UnreadableError]:
    """work(index, path) of every path, or its reason; one thread per core (Pillow releases the GIL
    as it decodes).
    """

    def batch(start: int) -> list[Header | UnreadableError]:
        done: list[Header | UnreadableError] = []
        for index in range(start, min(start + _BATCH, len(paths))):
            try:
                done.append(work(index, paths[index]))
            except UnreadableError as reason:
                done.append(reason)
        return done

    results: list[Header | UnreadableError] = []
    pool = ThreadPoolExecutor(cpu_count() or 1)
    try:
        with quiet_pillow():
            for part in pool.map(batch, range(0, len(paths), _BATCH)):
                results += part
                if progress is not None:
                    progress(len(results), len(paths))
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _room(count: int, preprocessing: Preprocessing) -> Pixels:
    with torch.inference_mode(False):  # threads write to it, which do not inherit inference mode
        return torch.empty(count, 3, *preprocessing.size, dtype=torch.uint8)
