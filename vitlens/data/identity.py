"""Hashes of a split's images, together and one by one, that do not depend on file names."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens.data.reading import Files
from vitlens.data.split import Chosen, Source, Split
from vitlens.files import sha256

_AT_ONCE = 256  # images read at a time


def split_fingerprint(split: Split) -> str:
    """SHA-256 of the images in their order. Labels, names and masks are left out.

    Images that are decoded when read are hashed by their files' content and by how they are decoded, so that nothing
    need be decoded; others by their pixels. The two give different hashes.
    """
    source, indices = _innermost(split.source, torch.arange(len(split)))
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

    Files that were copied, moved or renamed keep their number, however they are decoded; changed ones do not.
    """
    if split.files is not None:
        with ThreadPoolExecutor(cpu_count() or 1) as threads:
            digests = list(threads.map(sha256, (_path(split, file) for file in split.files)))
        return np.array([int(digest[:16], 16) for digest in digests], np.uint64)
    numbers = []
    for part in torch.arange(len(split)).split(_AT_ONCE):
        for pixels in split.source.read(part).cpu().contiguous().numpy():
            digest = hashlib.sha256(str(pixels.shape).encode() + pixels.tobytes()).digest()
            numbers.append(int.from_bytes(digest[:8], "big"))
    return np.array(numbers, np.uint64)


def _path(split: Split, file: str) -> Path:
    """Where a split's file lies: in its folder, or in images/ there where it has masks."""
    path = Path(split.name, file)
    return path if path.exists() else Path(split.name, "images", file)


def _innermost(source: Source, indices: Tensor) -> tuple[Source, Tensor]:
    """The source below all choices, and which of its images they are."""
    if isinstance(source, Chosen):
        return _innermost(source.source, source.indices[indices])
    return source, indices
