"""Decode image files to uint8 RGB pixels, which are kept if they fit in memory.

Larger sets are decoded when they are read. EXIF rotation, transparency, bit depth and colour space
are converted.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features
from torch import Tensor

from vitlens.data.split import InMemory, Skipped, Source, Split
from vitlens.errors import DataError, first_line
from vitlens.preprocessing import CropOffset, Preprocessing
from vitlens.shapes import Pixels
from vitlens.signatures import described, image_format

# most pixels of a file, and of a resized image; a small file can claim any number
PIXEL_LIMIT = 64_000_000
SIDE_LIMIT = 65_535  # px, the largest of JPEG; Pillow needs much memory for each row of an image
MEMORY_LIMIT = 1 << 30  # most bytes of decoded pixels that are kept in memory
# the preprocessing of images of different sizes without a model
UNSTATED: Final = Preprocessing(size=(224, 224), resize=256)
# Pillow supports more formats, one of them (EPS) by running a program
FORMATS = (
    "JPEG",
    "PNG",
    "GIF",
    "BMP",
    "TIFF",
    "WEBP",
    "PPM",
    # a Pillow before 11.3 does not know the name, and warns
    *(("AVIF",) if "avif" in features.modules and features.check("avif") else ()),
)
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".pjp", ".mpo")
_OTHER_SUFFIXES = (".png", ".apng", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".webp", ".avif")
_PNM_SUFFIXES = (".ppm", ".pgm", ".pbm", ".pnm")
READ_SUFFIXES = frozenset((*_JPEG_SUFFIXES, *_OTHER_SUFFIXES, *_PNM_SUFFIXES))
# suffixes of images that are not read; they are counted and listed, so that no class is silently
# lost
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
_DEEP_GREY = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes with 16 bits
_WHITE_16: Final = 65_535
_WHITE_12: Final = 4095
_BITS_TAG: Final = 258  # BitsPerSample of TIFF
TURNS = {  # the transposition of the stored pixels, by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ACROSS = (5, 6, 7, 8)  # orientations that exchange height and width
_BATCH = 64  # files that a thread takes at a time
# a marker near the end of a complete file, by format
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
_TAIL = 64  # the marker is searched among so many last bytes

OnePicture = UInt8[Tensor, "3 height width"]
Progress = Callable[[int, int], None]  # called with (files done, files in all)


class UnreadableError(DataError):
    """An image that cannot be used; the message is the reason, without the file's name."""


class Header(NamedTuple):
    """The header of a readable file.

    size: the (height, width) as displayed, after the rotation of the EXIF orientation.
    note: a note for the report, or None.
    orientation: the EXIF orientation, 1 for an image that is stored as it is displayed.
    """

    size: tuple[int, int]
    note: str | None
    orientation: int = 1

    @property
    def stored_size(self) -> tuple[int, int]:
        """Return the (height, width) before the rotation."""
        height, width = self.size
        return (width, height) if self.orientation in _ACROSS else (height, width)


def decode(picture: Path | Image.Image, preprocessing: Preprocessing) -> tuple[OnePicture, Header]:
    """Return the pixels of one image, resized and cropped for a model, and its header.

    Call it inside `quiet_pillow`. Of an open Pillow image, only the pixels and the EXIF orientation
    are used, because its file may be closed and its pixels edited. Raises UnreadableError with the
    reason: the file is missing, truncated, too large or no image.
    """
    with open_image(picture) as image:
        pixels = fit(flatten(image), preprocessing)
        if isinstance(picture, Image.Image):
            header = Header(displayed_size(image), None, orientation_of(image))
        else:
            header = _header_of(image)
    return pixels, header


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Suppress Pillow's warnings, which errors and notes replace. Enter it outside threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def open_image(picture: Path | Image.Image) -> Iterator[Image.Image]:
    """Yield an open image of acceptable size.

    Every failure inside becomes an UnreadableError with the reason.
    """
    limit = f"expected at most {PIXEL_LIMIT // 1_000_000} megapixels, found "
    try:
        if isinstance(picture, Image.Image):
            opened: AbstractContextManager[Image.Image] = nullcontext(picture)
        else:
            if picture.exists() and not picture.is_file():  # reading a pipe might never end
                raise UnreadableError("expected an image file, found no plain file")
            opened = Image.open(picture, formats=FORMATS)
        with opened as image:
            if image.width * image.height > PIXEL_LIMIT:
                raise UnreadableError(f"{limit}{image.width}x{image.height}; make it smaller first")
            if max(image.size) > SIDE_LIMIT:
                raise UnreadableError(
                    f"expected sides of at most {SIDE_LIMIT} px, found "
                    f"{image.width}x{image.height}; cut it into parts"
                )
            yield image
    except UnreadableError:
        raise
    except FileNotFoundError as error:
        raise UnreadableError("expected an image file, found no such file") from error
    except UnidentifiedImageError as error:
        raise UnreadableError(_unidentified_message(picture)) from error
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UnreadableError(f"{limit}more") from error
    except Exception as error:  # a damaged file makes Pillow's decoders raise nearly anything
        raise UnreadableError(first_line(error)) from error


def _unidentified_message(picture: Path | Image.Image) -> str:
    """Return the message for a file that Pillow cannot identify."""
    content = "something else"
    if isinstance(picture, Path):
        kind = image_format(picture)
        if not kind:
            content = described(picture) or content
        elif kind not in FORMATS:
            content = f"{kind}, which is not read; save it as PNG or JPEG"
    return f"expected an image ({', '.join(FORMATS)}), found {content}"


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, 1 if it has none or a broken one."""
    with suppress(Exception):  # a broken EXIF block does not affect the pixels
        orientation = int(image.getexif().get(ExifTags.Base.Orientation, 1))
        if orientation in TURNS:
            return orientation
    return 1


def displayed_size(image: Image.Image) -> tuple[int, int]:
    """Return the size (height, width) of an image after the turn of its EXIF orientation."""
    if orientation_of(image) in _ACROSS:
        return image.width, image.height
    return image.height, image.width


def flatten(image: Image.Image) -> Image.Image:
    """Return the first frame of an image as RGB with 8 bits per channel.

    It is rotated by its EXIF orientation, transparent pixels are put on white, and 12 or 16 bits
    are scaled to 8. Raises UnreadableError for pixels whose range is unknown: of floating point, of
    32 bits, or signed.
    """
    image.load()
    stored_format = image.format  # the turned image has none
    bits = getattr(image, "tag_v2", {}).get(_BITS_TAG)
    with suppress(Exception):  # a broken EXIF block does not affect the pixels
        if orientation_of(image) != 1:
            image = ImageOps.exif_transpose(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in _DEEP_GREY:
        return Image.fromarray(_levels(image, stored_format, bits)).convert("RGB")
    if image.mode == "F":
        raise UnreadableError(
            "expected integer pixels, found floating point, whose range is unknown; save it as PNG"
        )
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, "white")
        return Image.alpha_composite(white, clear).convert("RGB")
    return image.convert("RGB")


def _levels(image: Image.Image, stored_format: str | None, bits: object) -> NDArray[np.uint8]:
    """Return the pixels of a grey image of 12 or 16 bits, scaled to 8.

    bits: those of the channels of a TIFF, as it states them. Raises UnreadableError for pixels
    whose range is unknown.
    """
    # in this mode, the other formats hold unsigned 16 bits
    if image.mode == "I" and stored_format == "TIFF":
        raise UnreadableError(
            "expected unsigned pixels of 8 or 16 bits, found signed ones or 32 bits, whose range "
            "is unknown; save it as PNG"
        )
    deep = np.asarray(image).astype(np.int64)
    if deep.min() < 0 or deep.max() > _WHITE_16:
        raise UnreadableError(
            f"expected pixels from 0 to {_WHITE_16}, found {deep.min()} to {deep.max()}; scale "
            "them to 0 to 255"
        )
    white = _WHITE_12 if bits == (12,) else _WHITE_16
    return ((255 * deep + white // 2) // white).astype(np.uint8)  # rounded to the nearest level


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
    """Return the size to which an image is resized before the crop; sizes are (width, height)."""
    height, width = preprocessing.size
    image_width, image_height = image_size
    resize = preprocessing.resize  # of the shorter side
    box = preprocessing.box  # (height, width) into which the image is fitted
    if resize is not None:  # the shorter side is given
        short, long = sorted(image_size)
        scaled = int(resize * long / short)  # truncated, as in torchvision's Resize
        size = (resize, scaled) if image_width <= image_height else (scaled, resize)
    elif box is None:  # squashed to the input
        return width, height
    elif preprocessing.crop_mode == "squash":  # to the box
        size = (box[1], box[0])
    else:  # rounded, as in timm's ResizeKeepRatio
        ratios = (image_height / box[0], image_width / box[1])
        # the whole image within the box, or the box filled
        ratio = max(ratios) if preprocessing.crop_mode == "border" else min(ratios)
        size = (max(1, round(image_width / ratio)), max(1, round(image_height / ratio)))
    # Without a border, the resized image must cover the crop. One that does not, after squashing or
    # rounding, is enlarged in proportion.
    if preprocessing.fill is None and (size[0] < width or size[1] < height):
        scale = max(width / image_width, height / image_height)
        size = (max(width, round(image_width * scale)), max(height, round(image_height * scale)))
    return size


def _centre(image: Image.Image, preprocessing: Preprocessing) -> Image.Image:
    """Return the centre of an image at the input size, with a border if the image is smaller."""
    height, width = preprocessing.size
    left = _offset(image.width - width, preprocessing.crop_offset)
    top = _offset(image.height - height, preprocessing.crop_offset)
    if left >= 0 and top >= 0:
        return image.crop((left, top, left + width, top + height))
    canvas = Image.new("RGB", (width, height), preprocessing.fill or 0)
    canvas.paste(image, (-left, -top))
    return canvas


def _offset(surplus: int, rounding: CropOffset) -> int:
    """Return the first pixel of a centre crop along one axis.

    surplus: the length of the image minus that of the crop. If it is negative, the result is minus
    the width of the border before the image.
    """
    if surplus < 0:
        # the smaller half of the border is before the image, as in torchvision's CenterCrop
        border = (-surplus) // 2
        return -border
    return surplus // 2 if rounding == "floor" else round(surplus / 2)


def _header_of(image: Image.Image) -> Header:
    """Return an open image's header, with a note on more than one frame."""
    note = None
    # a camera's MPO holds a preview next to the photograph
    if image.format != "MPO" and getattr(image, "is_animated", False):
        note = "more than one frame, of which the first is used"
    return Header(displayed_size(image), note, orientation_of(image))


@dataclass(frozen=True)
class Files:
    """Image files, decoded in parallel when they are read; safe in the workers of a DataLoader."""

    paths: tuple[Path, ...]
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Tensor) -> Pixels:
        """Return the pixels of these files. Raises DataError if one has become unreadable."""
        chosen = [self.paths[index] for index in indices.tolist()]
        pixels = _empty_pixels(len(chosen), self.preprocessing)
        results = _decode_into(pixels, chosen, self.preprocessing)
        for path, result in zip(chosen, results):
            if isinstance(result, UnreadableError):
                raise DataError(f"cannot read {path}: {result}; repair or remove it")
        return pixels


def load_files(
    paths: Sequence[Path],
    preprocessing: Preprocessing | None = None,
    *,
    progress: Progress | None = None,
) -> Split:
    """Return image files without labels as a split; unreadable ones are left out and listed.

    Up to MEMORY_LIMIT bytes of pixels are decoded now and kept as uint8. Above that, only the
    header and the end of each file are checked now, and pixels are decoded when they are read.
    Raises DataError if no file can be read.

    preprocessing: None keeps the size that all images share; if they share none, it is 224x224.
    """
    preprocessing = preprocessing or stored_size(paths)
    height, width = preprocessing.size
    fits_in_memory = len(paths) * 3 * height * width <= MEMORY_LIMIT
    pixels = _empty_pixels(len(paths) if fits_in_memory else 0, preprocessing)
    if fits_in_memory:
        results = _decode_into(pixels, paths, preprocessing, progress)
    else:
        results = probe(paths, progress)

    readable = []
    skipped = []
    note_counts: Counter[str] = Counter()
    for index, result in enumerate(results):
        if isinstance(result, UnreadableError):
            skipped.append(Skipped(str(paths[index]), str(result)))
            continue
        readable.append(index)
        if result.note:
            note_counts[result.note] += 1
    if not readable:
        first = ""
        if skipped:
            first = f" among {len(skipped)}: {skipped[0].file}: {skipped[0].reason}"
        raise DataError(f"expected readable images, found none{first}")
    files = tuple(paths[index] for index in readable)
    source: Source = Files(files, preprocessing)
    if fits_in_memory:
        kept_pixels = pixels[readable] if skipped else pixels  # without a copy if all are kept
        source = InMemory(kept_pixels, files)
    notes = []
    for note, count in note_counts.items():
        notes.append(f"{count} of {len(readable)} images have {note}")
    return Split(
        name="images",
        title="images",
        part="test",
        source=source,
        size=preprocessing.size,
        classes=(),
        files=tuple(map(str, files)),
        skipped=tuple(skipped),
        notes=tuple(notes),
    )


def stored_size(paths: Sequence[Path]) -> Preprocessing:
    """Return a preprocessing that keeps the size that all images share, else 224x224."""
    sizes = {header.size for header in probe(paths) if isinstance(header, Header)}
    return Preprocessing(size=sizes.pop()) if len(sizes) == 1 else UNSTATED


def probe(
    paths: Sequence[Path], progress: Progress | None = None
) -> list[Header | UnreadableError]:
    """Return each file's header, or the reason why it cannot be read.

    Pixels are decoded only if the end marker is missing, or if the format has none.
    """

    def read_header(_: int, path: Path) -> Header:
        with open_image(path) as image:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL))
                end = _ENDS.get(str(image.format))
                is_complete = end is not None and end in file.read()
            if not is_complete:
                image.load()
            return _header_of(image)

    return _for_each(read_header, paths, progress)


def _decode_into(
    pixels: Pixels,
    paths: Sequence[Path],
    preprocessing: Preprocessing,
    progress: Progress | None = None,
) -> list[Header | UnreadableError]:
    """Decode file i into pixels[i]."""

    def decode_one(index: int, path: Path) -> Header:
        pixels[index], header = decode(path, preprocessing)
        return header

    return _for_each(decode_one, paths, progress)


def _for_each(
    read: Callable[[int, Path], Header], paths: Sequence[Path], progress: Progress | None
) -> list[Header | UnreadableError]:
    """Return read(index, path) for every path, or the error that it raised.

    There is one thread for each core, as Pillow releases the GIL while it decodes.
    """

    def read_batch(start: int) -> list[Header | UnreadableError]:
        batch: list[Header | UnreadableError] = []
        for index in range(start, min(start + _BATCH, len(paths))):
            try:
                batch.append(read(index, paths[index]))
            except UnreadableError as reason:
                batch.append(reason)
        return batch

    results: list[Header | UnreadableError] = []
    pool = ThreadPoolExecutor(cpu_count() or 1)
    try:
        with quiet_pillow():
            for batch in pool.map(read_batch, range(0, len(paths), _BATCH)):
                results += batch
                if progress is not None:
                    progress(len(results), len(paths))
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _empty_pixels(count: int, preprocessing: Preprocessing) -> Pixels:
    with torch.inference_mode(False):  # threads write to it, which do not inherit inference mode
        return torch.empty(count, 3, *preprocessing.size, dtype=torch.uint8)
