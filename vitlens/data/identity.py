"""Hashes of a split's images, together and one by one, independent of file names."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from os import cpu_count
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vitlens.data.decode import Files
from vitlens.data.split import Drawings, Source, Split
from vitlens.files import sha256
from vitlens.names import LABELS, plain_name

_AT_ONCE = 256  # images read at a time
_KNOWN: Final = 1 << 20  # files whose digest is remembered while they do not change
# drawn images whose pixels are hashed; the others follow from their subjects and numbers
_RENDERED: Final = 32


def split_fingerprint(split: Split) -> str:
    """SHA-256 of the images in their order. Labels, names and masks are left out.

    Images that are decoded on reading are hashed by file content and preprocessing, without
    decoding; others by their pixels. The two give different hashes.
    """
    source = split.subset.source
    indices = split.subset.indices
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
    """Return a number for each image, (n,): the first 8 bytes of the SHA-256 of its file, or of its
    pixels where it has none.

    Copied, moved or renamed files keep their number, with any preprocessing; changed files do not.
    """
    paths = _paths(split)
    digests = _file_digests(paths) if paths else _pixel_digests(split)
    return np.array([int(digest[:16], 16) for digest in digests], np.uint64)


def images_fingerprint(split: Split) -> str:
    """Return a SHA-256 of the images in their order, the same with any preprocessing.

    It is that of their files, or of their pixels where there are none. Labels, names and masks are
    left out.
    """
    drawn = split.subset
    if not isinstance(drawn.source, Drawings):
        return hashlib.sha256(image_numbers(split).tobytes()).hexdigest()
    source = drawn.source.pick(drawn.indices)
    digest = hashlib.sha256(
        source.subjects.cpu().numpy().tobytes() + source.numbers.cpu().numpy().tobytes()
    )
    for pixels in _pixels(source, torch.arange(min(len(source), _RENDERED))):
        digest.update(pixels.tobytes())
    return digest.hexdigest()


def labels_fingerprint(split: Split) -> str:
    """Return a SHA-256 of the label of each image, by the name of its class; "" without labels."""
    if split.labels is None:
        return ""
    names = [plain_name(name) for name in split.classes] or None
    labels = split.labels.tolist()
    return hashlib.sha256(
        repr([names[label] for label in labels] if names else labels).encode()
    ).hexdigest()


def fingerprints_of(splits: Mapping[str, Split]) -> dict[str, str]:
    """Return the fingerprints of the images of parts, and of their labels, by name: "test", "test
    labels".
    """
    fingerprints: dict[str, str] = {}
    for part, split in splits.items():
        fingerprints[part] = images_fingerprint(split)
        labels = labels_fingerprint(split)
        if labels:
            fingerprints[f"{part}{LABELS}"] = labels
    return fingerprints


def _paths(split: Split) -> tuple[Path, ...]:
    """Return the images' files; () where they have none."""
    inner = split.subset
    paths: tuple[Path, ...] = getattr(inner.source, "paths", ())
    return tuple(paths[index] for index in inner.indices.tolist()) if paths else ()


def sources(split: Split) -> Tensor:
    """Return which photograph each image is, (n,): its group; without groups one number for images
    of equal pixels, as one photograph may be stored twice, for two of its objects.
    """
    if split.groups is not None:
        return split.groups
    numbers: dict[str, int] = {}
    return torch.tensor(
        [numbers.setdefault(digest, len(numbers)) for digest in _pixel_digests(split)]
    )


def _file_digests(paths: Sequence[Path]) -> Iterator[str]:
    with ThreadPoolExecutor(cpu_count() or 1) as threads:
        yield from threads.map(_digest, paths)


def _digest(path: Path) -> str:
    state = path.stat()
    return _unchanged_digest(path.resolve(), state.st_size, state.st_mtime_ns)


@lru_cache(_KNOWN)
def _unchanged_digest(path: Path, _size: int, _changed: int) -> str:
    return sha256(path)


def _pixel_digests(split: Split) -> Iterator[str]:
    for part in _pixels(split.source, torch.arange(len(split))):
        for pixels in part:
            yield hashlib.sha256(str(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def _pixels(source: Source, indices: Tensor) -> Iterator[np.ndarray]:
    for part in indices.split(_AT_ONCE):
        yield source.read(part).cpu().contiguous().numpy()
