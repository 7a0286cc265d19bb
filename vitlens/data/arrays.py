"""An .npz of images and labels; nothing in it is ever unpickled."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens.archives import read_archive
from vitlens.data.holdout import describe_hold_out, hold_out
from vitlens.data.registry import DataRequest
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.names import Part

Array = NDArray[np.generic]

_SIZE = 16 << 30  # bytes of all arrays
_CLASSES = 100_000  # most classes


def load_arrays(path: Path, *, part: Part, seed: int = 0, whole: bool = False) -> Split:
    """One part of an .npz: `images` (n, height, width) or (n, height, width, 3) uint8, `labels` (n,) integers.

    `classes` (strings, in order of label) is optional. A seeded fifth of each class is held out for test; `whole`
    returns all images. Raises DataError for another file, key, shape or type.
    """
    arrays = read_named(path)
    images, labels = require_images(arrays, path), require_labels(arrays, path)
    if len(images) != len(labels):
        raise DataError(f"expected as many labels as images in {path}, found {len(labels)} and {len(images)}")
    targets = torch.from_numpy(labels.astype(np.int64))
    chosen = torch.arange(len(targets)) if whole else hold_out(targets, part, seed=seed)
    return Split(
        name=str(path),
        title=path.stem,
        part=part,
        source=InMemory(as_pixels(images[chosen.numpy()])),
        size=(images.shape[1], images.shape[2]),
        classes=class_names(arrays, targets, path),
        labels=targets[chosen],
        notes=(describe_hold_out(seed),) if len(chosen) < len(targets) else (),
    )


def is_arrays(path: Path) -> bool:
    """Whether a path names an .npz."""
    return path.suffix.lower() == ".npz"


def load(request: DataRequest) -> Split:
    """The requested part."""
    return load_arrays(request.path, part=request.part, seed=request.seed, whole=request.whole)


def as_pixels(images: NDArray[np.uint8]) -> torch.Tensor:
    """Grey (n, height, width) or colour (n, height, width, 3) as pixels (n, 3, height, width)."""
    if images.ndim == 3:
        return torch.from_numpy(images)[:, None].repeat(1, 3, 1, 1)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def read_named(path: Path, keys: Sequence[str] = ("images", "labels", "classes")) -> dict[str, Array]:
    """The arrays of an .npz under these names. Raises DataError for another file."""
    if not path.is_file():
        raise DataError(f"expected an .npz file, found nothing at {str(path)!r}")
    if not zipfile.is_zipfile(path):
        raise DataError(f"expected an .npz as numpy.savez writes it, found something else in {path}")
    return read_archive(path, keys=keys, most=_SIZE, error=DataError)


def require_images(arrays: dict[str, Array], path: Path) -> NDArray[np.uint8]:
    """The images, (n, height, width) or (n, height, width, 3) uint8. Raises DataError for others."""
    images = _key(arrays, "images", path)
    plain = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if not plain or 0 in images.shape:
        raise DataError(
            f"expected images of shape (n, height, width) or (n, height, width, 3) in {path}, found {images.shape}"
        )
    if images.dtype != np.uint8:
        raise DataError(f"expected images of type uint8 (0 to 255) in {path}, found {images.dtype}")
    return images.astype(np.uint8, copy=False)


def require_labels(arrays: dict[str, Array], path: Path) -> Array:
    """The labels, (n,) integers from 0. Raises DataError for others."""
    labels = _key(arrays, "labels", path)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"expected labels of shape (n,) and an integer type in {path}, found {labels.shape} {labels.dtype}"
        )
    for label in (labels.min(initial=0), labels.max(initial=0)):
        if not 0 <= int(label) < _CLASSES:
            raise DataError(f"expected labels from 0 to {_CLASSES - 1:,} in {path}, found {int(label):,}")
    return labels


def class_names(arrays: dict[str, Array], labels: torch.Tensor, path: Path) -> tuple[str, ...]:
    """The names in `classes`, else the labels' numbers. Raises DataError for too few names."""
    count = int(labels.max()) + 1
    if "classes" not in arrays:
        return tuple(str(index) for index in range(count))
    names = tuple(str(name) for name in arrays["classes"].ravel())
    if len(names) < count:
        raise DataError(f"expected at least {count} names in 'classes' of {path}, found {len(names)}")
    return names


def _key(arrays: dict[str, Array], key: str, path: Path) -> Array:
    if key not in arrays:
        raise DataError(f"expected the keys 'images' and 'labels' in {path}, found no {key!r}")
    return arrays[key]
