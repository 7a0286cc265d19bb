"""Hashes of a split's images, together and one by one, independent of file names."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens.data.decode import Files
from vitlens.data.split import Source, Split
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
        for file_digest in _file_digests([source.paths[index] for index in indices.tolist()]):
            digest.update(file_digest.encode())
    else:
        for pixels in _pixels(source, indices):
            digest.update(pixels.tobytes())
    return digest.hexdigest()


def image_numbers(split: Split) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """A number for each image, (n,): the first 8 bytes of the SHA-256 of its file, or of its pixels where it has none.

    Copied, moved or renamed files keep their number, with any preprocessing; changed files do not.
    """
    if split.files is None:
        digests = _pixel_digests(split)
    else:  # in its folder, or in its images/ where it has masks
        places = [(Path(split.name, file), Path(split.name, "images", file)) for file in split.files]
        digests = _file_digests([path if path.exists() else other for path, other in places])
    return np.array([int(digest[:16], 16) for digest in digests], np.uint64)


def sources(split: Split) -> Tensor:
    """Which photograph each image is, (n,): its group; without groups one number for images of equal pixels, as one
    photograph may be stored twice, for two of its objects."""
    if split.groups is not None:
        return split.groups
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(digest, len(numbers)) for digest in _pixel_digests(split)])


def _file_digests(paths: Sequence[Path]) -> Iterator[str]:
    with ThreadPoolExecutor(cpu_count() or 1) as threads:
        yield from threads.map(sha256, paths)


def _pixel_digests(split: Split) -> Iterator[str]:
    for part in _pixels(split.source, torch.arange(len(split))):
        for pixels in part:
            yield hashlib.sha256(str(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def _pixels(source: Source, indices: Tensor) -> Iterator[np.ndarray]:
    for part in indices.split(_AT_ONCE):
        yield source.read(part).cpu().contiguous().numpy()
