"""Detects the kind of a file by its first bytes: images, weights, and common other files."""

import zipfile
from pathlib import Path
from typing import Final

_LENGTH: Final = 512  # number of first bytes that are read
# the bytes with which an image begins, and its format
_IMAGES: Final = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"P5", "PPM"),
    (b"P6", "PPM"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"8BPS", "Photoshop"),
    (b"%!PS", "PostScript"),
    (b"v/1\x01", "OpenEXR"),
    (b"SIMPLE  =", "FITS"),
)
_BRANDS: Final = {  # formats by the four bytes after "ftyp"
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"heif": "HEIC",
    b"hevc": "HEIC",
    b"mif1": "HEIC",
    b"msf1": "HEIC",
}
_OTHERS: Final = (  # offset, the bytes there, a description of the file
    (
        0,
        b"version https://git-lfs",
        "a pointer of git-lfs, not the file: type git lfs pull, or download it again",
    ),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, MATLAB)"),
    (4, b"TFL3", "a TFLite model"),
    (0, b"GGUF", "a GGUF model"),
    (0, b"PAR1", "a Parquet table"),
    (0, b"%PDF", "a PDF"),
    (0, b"\x93NUMPY", "an array of NumPy (.npy)"),
    (0, b"\x1f\x8b", "a gzip archive: unpack it first"),
    (0, b"BZh", "a bzip2 archive: unpack it first"),
    (0, b"\xfd7zXZ", "an xz archive: unpack it first"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (0, b"7z\xbc\xaf", "a 7-Zip archive: unpack it first"),
    (0, b"Rar!", "a RAR archive: unpack it first"),
    (0, b"SQLite format 3", "an SQLite database"),
    (0, b"\x7fELF", "a program"),
    (257, b"ustar", "a tar archive: unpack it first"),
)
_PRINTABLE: Final = frozenset((9, 10, 13, *range(32, 127)))  # bytes of ASCII text
_ENTRIES: Final = 10_000  # most entries of a zip that are examined
_HTML: Final = (b"<!doctype html", b"<html", b"<head")


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, none for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_LENGTH)
    except (OSError, ValueError):
        return b""


def image_format(path: Path) -> str:
    """Return the format of an image by its first bytes, "" for another file."""
    start = first_bytes(path)
    for signature, name in _IMAGES:
        if start.startswith(signature):
            return name
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if start[4:8] == b"ftyp":
        return _BRANDS.get(start[8:12], "")
    if start[128:132] == b"DICM":
        return "DICOM"
    return ""


def described(path: Path) -> str:
    """Return a description of a file, with a remedy if there is one; "" for unknown first bytes."""
    start = first_bytes(path)
    if not start:
        return "an empty file"
    for offset, signature, name in _OTHERS:
        if start[offset:].startswith(signature):
            return name
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if path.name.endswith(".index.json"):
        return (
            "the index of a model in several files: name them all by their folder, hf:FOLDER, "
            "or join them first"
        )
    if text.startswith(_HTML):
        return "a web page (HTML), as of a download that failed: download it again"
    if text.startswith((b"<?xml", b"<svg")):
        return "an SVG drawing or other XML"
    image = image_format(path)
    if image:
        return f"an image ({image})"
    if all(byte in _PRINTABLE for byte in start):
        return "a text file"
    if _is_onnx(start):
        return "an ONNX model"
    # msgpack: a map of 1 to 15 entries, then its first key, a short or a longer text
    is_map = len(start) > 1 and 0x81 <= start[0] <= 0x8F
    if is_map and (0xA0 <= start[1] <= 0xBF or start[1] == 0xD9):
        return "a checkpoint of Flax (JAX, msgpack)"
    if start.startswith(b"PK"):
        return _described_zip(path)
    return ""


def _described_zip(path: Path) -> str:
    """Return a description of a zip by the names in it; "" for torch.save's and unknown ones."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()[:_ENTRIES]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return "the beginning of a file that is not whole: download it again"
    if names and all(name.endswith(".npy") for name in names):
        return "arrays of NumPy (.npz), as JAX stores weights"
    if "model.weights.h5" in names:
        return "a Keras model"
    has_constants = any(name.endswith("/constants.pkl") for name in names)
    if has_constants and any("/code/" in name for name in names):
        return "a TorchScript program"
    if not any(name.endswith("data.pkl") for name in names):
        return "a zip archive: unpack it first"
    return ""


def is_pickle(path: Path) -> bool:
    """Return True for a pickle of protocol 2 or later, and for torch.save's zip with one."""
    start = first_bytes(path)
    return start.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))


def _is_onnx(start: bytes) -> bool:
    """Return True for a protocol buffer that begins with an IR version and a producer's name."""
    # byte 0: the tag of the IR version; 1: the version; 2: the tag of the producer's name; 3: its
    # length; from 4 on: the name. Slices of a file that is too short are empty.
    length = start[3] if len(start) > 3 else 0
    producer = start[4 : 4 + length]
    is_text = 0 < length == len(producer) and all(byte in _PRINTABLE for byte in producer)
    has_tags = start[:1] == b"\x08" and start[2:3] == b"\x12"
    has_low_version = start[1:2] < b"\x20"
    return has_tags and has_low_version and is_text


def is_safetensors(path: Path) -> bool:
    """Return True for a file that begins with the length of a JSON header, and the header."""
    start = first_bytes(path)
    header_length = int.from_bytes(start[:8], "little")
    if len(start) <= 9 or start[8:9] != b"{":
        return False
    return 2 <= header_length <= path.stat().st_size - 8
