"""An .npz of images and labels; nothing in it is ever unpickled."""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens.archives import Bounds, read_archive
from vitlens.data.holdout import describe_hold_out, hold_out
from vitlens.data.registry import DataRequest
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.names import Part

Array = NDArray[np.generic]

_BOUNDS = Bounds(16 << 30)  # bytes of all arrays
_CLASSES = 100_000


def load_arrays(path: Path, *, part: Part, seed: int = 0, whole: bool = False) -> Split:
    """One part of an .npz: `images` (n, height, width) or (n, height, width, 3) uint8, `labels` (n,) integers.

    `classes` (strings, in order of label) is optional. A seeded fifth of each class is held out for test; `whole`
    gives all of them. An .npz with `train_images`, `train_labels` (n,) or (n, 1), and the same for `test` or `val`, as
    MedMNIST has them, has parts of its own. Raises DataError for a file, key, shape or type that is not so.
    """
    own = _own_part(path, part)
    if own is not None:
        return _load_own(path, own, part)
    arrays = _read(path)
    images, labels = _images(arrays, path), _labels(arrays, path)
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
        classes=_classes(arrays, targets, path),
        labels=targets[chosen],
        notes=(describe_hold_out(seed),) if len(chosen) < len(targets) else (),
    )


def is_arrays(path: Path) -> bool:
    """Whether a path names an .npz."""
    return path.suffix.lower() == ".npz"


def load(request: DataRequest) -> Split:
    """The part that was asked for."""
    return load_arrays(request.path, part=request.part, seed=request.seed, whole=request.whole)


@dataclass(frozen=True)
class _OwnPart:
    """A part that an .npz names: which is used, and all that there are ("train", "val", "test")."""

    used: str
    all: tuple[str, ...]


def _own_part(path: Path, part: Part) -> _OwnPart | None:
    """Which of an .npz's own parts is meant; None where it has `images` or no parts. Raises DataError without one."""
    keys = _keys(path)
    parts = tuple(name for name in ("train", "val", "test") if f"{name}_images" in keys)
    if "images" in keys or not parts:
        return None
    wanted = ("train",) if part == "train" else ("test", "val")
    used = next((name for name in wanted if name in parts), None)
    if used is None:
        named = " or ".join(f"'{name}_images'" for name in wanted)
        found = " and ".join(f"'{name}_images'" for name in parts)
        raise DataError(f"expected {named} in {path} for the {part} part, found {found} alone")
    return _OwnPart(used, parts)


def _load_own(path: Path, own: _OwnPart, part: Part) -> Split:
    """One of an .npz's own parts, whole; its classes are those of all parts together."""
    labels = {name: _labels(_part_of(path, name, "labels"), path) for name in own.all}
    images = _images(_part_of(path, own.used, "images"), path)
    if len(images) != len(labels[own.used]):
        raise DataError(
            f"expected as many labels as images in the {own.used} part of {path}, found {len(labels[own.used])} and "
            f"{len(images)}"
        )
    every = torch.from_numpy(np.concatenate(list(labels.values())).astype(np.int64))
    others = [name for name in own.all if name != own.used]
    rest = f"; its {' and '.join(others)} part{'s are' if len(others) > 1 else ' is'} not" if others else ""
    return Split(
        name=str(path),
        title=path.stem,
        part=part,
        source=InMemory(as_pixels(images)),
        size=(images.shape[1], images.shape[2]),
        classes=_classes(_read(path), every, path),
        labels=torch.from_numpy(labels[own.used].astype(np.int64)),
        notes=(f"the file's own {own.used} part is used{rest}",),
    )


def _part_of(path: Path, part: str, what: str) -> dict[str, Array]:
    """The images or labels of one part under the name they have without parts; labels (n, 1) as (n,)."""
    key = f"{part}_{what}"
    arrays = _read(path, (key,))
    if key not in arrays:
        raise DataError(f"expected {key!r} beside the other part's arrays in {path}, found none")
    array = arrays[key]
    return {what: array[:, 0] if what == "labels" and array.ndim == 2 and array.shape[1] == 1 else array}


def as_pixels(images: NDArray[np.uint8]) -> torch.Tensor:
    """Grey (n, height, width) or colour (n, height, width, 3) as pixels (n, 3, height, width)."""
    if images.ndim == 3:
        return torch.from_numpy(images)[:, None].repeat(1, 3, 1, 1)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _keys(path: Path) -> tuple[str, ...]:
    """The names of an .npz's arrays, of which none is read. Raises DataError for another file."""
    _read(path, ())  # refuses what is no .npz
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(name.removesuffix(".npy") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"expected an .npz as numpy.savez writes it in {path}, found: {error}") from error


def _read(path: Path, keys: Sequence[str] = ("images", "labels", "classes")) -> dict[str, Array]:
    """The arrays of the keys we know."""
    if not path.is_file():
        raise DataError(f"expected an .npz file, found nothing at {str(path)!r}")
    if not zipfile.is_zipfile(path):
        raise DataError(f"expected an .npz as numpy.savez writes it, found something else in {path}")
    return read_archive(path, keys=keys, bounds=_BOUNDS, error=DataError)


def _images(arrays: dict[str, Array], path: Path) -> NDArray[np.uint8]:
    images = _key(arrays, "images", path)
    plain = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if not plain or 0 in images.shape:
        raise DataError(
            f"expected images of shape (n, height, width) or (n, height, width, 3) in {path}, found {images.shape}"
        )
    if images.dtype != np.uint8:
        raise DataError(f"expected images of type uint8 (0 to 255) in {path}, found {images.dtype}")
    return images.astype(np.uint8, copy=False)


def _labels(arrays: dict[str, Array], path: Path) -> Array:
    labels = _key(arrays, "labels", path)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"expected labels of shape (n,) and an integer type in {path}, found {labels.shape} {labels.dtype}"
        )
    for label in (labels.min(initial=0), labels.max(initial=0)):
        if not 0 <= int(label) < _CLASSES:
            raise DataError(f"expected labels from 0 to {_CLASSES - 1:,} in {path}, found {int(label):,}")
    return labels


def _classes(arrays: dict[str, Array], labels: torch.Tensor, path: Path) -> tuple[str, ...]:
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
