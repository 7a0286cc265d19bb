"""Hashes of a split's images, together and one by one, independent of file names."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens.data.decode import Files
from vitlens.data.split import Split
from vitlens.files import sha256

_AT_ONCE = 256  # images read at a time


def split_fingerprint(split: Split) -> str:
    """SHA-256 of the images in their order. Labels, names and masks are left out.

    Images that are decoded on reading are hashed by file content and preprocessing, without decoding; others by their
    pixels. The two give different hashes.
    """
    source, indices = split.subset.source, split.subset.indices
    digest = hashlib.sha256(str((len(split), split.size)).encode())
    if isinstance(source, Files):
        digest.update(repr(source.preprocessing).encode())
        paths = [source.paths[index] for index in indices.tolist()]
        with ThreadPoolExecutor(cpu_count() or 1) as threads:
            for file_digest in threads.map(sha256, paths):
                digest.update(file_digest.encode())
    else:
        for part in indices.split(_AT_ONCE):
            digest.update(source.read(part).contiguous().numpy().tobytes())
    return digest.hexdigest()


def image_numbers(split: Split) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """A number for each image, (n,): the first 8 bytes of the SHA-256 of its file, or of its pixels where it has none.

    Copied, moved or renamed files keep their number, with any preprocessing; changed files do not.
    """
    if split.files is not None:
        with ThreadPoolExecutor(cpu_count() or 1) as threads:
            digests = list(threads.map(sha256, (_path(split, file) for file in split.files)))
        return np.array([int(digest[:16], 16) for digest in digests], np.uint64)
    return np.array([int.from_bytes(digest[:8], "big") for digest in _pixel_digests(split)], np.uint64)


def sources(split: Split) -> Tensor:
    """Which photograph each image is, (n,): its group; without groups one number for images of equal pixels, as one
    photograph may be stored twice, for two of its objects."""
    if split.groups is not None:
        return split.groups
    numbers: dict[bytes, int] = {}
    return torch.tensor([numbers.setdefault(digest, len(numbers)) for digest in _pixel_digests(split)])


def _pixel_digests(split: Split) -> Iterator[bytes]:
    for part in torch.arange(len(split)).split(_AT_ONCE):
        for pixels in split.source.read(part).cpu().contiguous().numpy():
            yield hashlib.sha256(str(pixels.shape).encode() + pixels.tobytes()).digest()


def _path(split: Split, file: str) -> Path:
    """The path of a split's file: in its folder, or in its images/ where it has masks."""
    path = Path(split.name, file)
    return path if path.exists() else Path(split.name, "images", file)
