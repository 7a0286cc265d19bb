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
_REMEMBERED: Final = 1 << 20  # digests of files that are kept while the files do not change
# Of drawn images, the pixels of so many are hashed. The others follow from their subjects and
# numbers, which are hashed, too.
_RENDERED: Final = 32


def split_fingerprint(split: Split) -> str:
    """Return a SHA-256 of the images in their order. Labels, names and masks are left out.

    Images that are decoded when they are read are hashed by file content and preprocessing, without
    decoding. Others are hashed by their pixels. The two give different hashes.
    """
    # of a subset, the source that decodes or holds the images decides
    source = split.subset.source
    indices = split.subset.indices
    digest = hashlib.sha256(str((len(split), split.size)).encode())
    if isinstance(source, Files):
        digest.update(repr(source.preprocessing).encode())
        for file_digest in _file_digests([source.paths[index] for index in indices.tolist()]):
            digest.update(file_digest.encode())
    else:
        for pixels in _read_batches(source, indices):
            digest.update(pixels.tobytes())
    return digest.hexdigest()


def image_numbers(split: Split) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Return a number that identifies each image, (n,).

    It is the first 8 bytes of the SHA-256 of the image's file, or of its pixels if it has none.
    Copied, moved or renamed files keep their number, with any preprocessing; changed files do not.
    """
    paths = _files_of(split)
    digests = _file_digests(paths) if paths else _pixel_digests(split)
    return np.array([int(digest[:16], 16) for digest in digests], np.uint64)  # 16 hex digits


def images_fingerprint(split: Split) -> str:
    """Return a SHA-256 of the images in their order, the same with any preprocessing.

    It is that of their files, or of their pixels if there are none. Of drawn images, it is that of
    what they are drawn from, and of the pixels of the first ones. Labels, names and masks are
    left out.
    """
    subset = split.subset
    if not isinstance(subset.source, Drawings):
        return hashlib.sha256(image_numbers(split).tobytes()).hexdigest()
    drawings = subset.source.pick(subset.indices)
    digest = hashlib.sha256(drawings.subjects.cpu().numpy().tobytes())
    digest.update(drawings.numbers.cpu().numpy().tobytes())
    for pixels in _read_batches(drawings, torch.arange(min(len(drawings), _RENDERED))):
        digest.update(pixels.tobytes())
    return digest.hexdigest()


def labels_fingerprint(split: Split) -> str:
    """Return a SHA-256 of the label of each image, by the name of its class; "" without labels."""
    if split.labels is None:
        return ""
    labels = split.labels.tolist()
    if split.classes:
        names = [plain_name(name) for name in split.classes]
        labels = [names[label] for label in labels]
    return hashlib.sha256(repr(labels).encode()).hexdigest()


def fingerprints_of(splits: Mapping[str, Split]) -> dict[str, str]:
    """Return the fingerprints of the images and labels of parts: "test", "test labels"."""
    fingerprints: dict[str, str] = {}
    for part, split in splits.items():
        fingerprints[part] = images_fingerprint(split)
        labels = labels_fingerprint(split)
        if labels:
            fingerprints[f"{part}{LABELS}"] = labels
    return fingerprints


def _files_of(split: Split) -> tuple[Path, ...]:
    """Return the images' files; () if they have none."""
    subset = split.subset
    paths: tuple[Path, ...] = getattr(subset.source, "paths", ())
    if not paths:
        return ()
    return tuple(paths[index] for index in subset.indices.tolist())


def sources(split: Split) -> Tensor:
    """Return a number for the photograph of each image, (n,).

    It is the image's group. Without groups, images of equal pixels have the same number, as one
    photograph may be stored twice, for two of its objects.
    """
    if split.groups is not None:
        return split.groups
    number_of_digest: dict[str, int] = {}
    numbers = []
    for digest in _pixel_digests(split):
        numbers.append(number_of_digest.setdefault(digest, len(number_of_digest)))
    return torch.tensor(numbers)


def _file_digests(paths: Sequence[Path]) -> Iterator[str]:
    with ThreadPoolExecutor(cpu_count() or 1) as threads:
        yield from threads.map(_digest, paths)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, which is remembered while its size and time stay the same."""
    status = path.stat()
    return _digest_of_state(path.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(_REMEMBERED)
def _digest_of_state(path: Path, _size: int, _modified: int) -> str:
    """Return the digest of a file; with another size or time, it is computed again."""
    return sha256(path)


def _pixel_digests(split: Split) -> Iterator[str]:
    """Yield the SHA-256 of the shape and the pixels of each image of a split."""
    for batch in _read_batches(split.source, torch.arange(len(split))):
        for pixels in batch:
            yield hashlib.sha256(str(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def _read_batches(source: Source, indices: Tensor) -> Iterator[np.ndarray]:
    for batch in indices.split(_AT_ONCE):
        yield source.read(batch).cpu().contiguous().numpy()
