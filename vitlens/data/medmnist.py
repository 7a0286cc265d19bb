"""MedMNIST's .npz files: `train_images`, `train_labels`, and the same for `val` and `test`."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from vitlens.data.arrays import Array, as_pixels, class_names, is_arrays, read_named, require_images, require_labels
from vitlens.data.registry import DataRequest
from vitlens.data.split import InMemory, Split
from vitlens.errors import DataError
from vitlens.names import Part

_PARTS = ("train", "val", "test")
PREFIX: Final = "medmnist:"
NAMES: Final = (  # of one label an image, 2-D
    "pathmnist", "dermamnist", "octmnist", "pneumoniamnist", "retinamnist", "breastmnist", "bloodmnist", "tissuemnist",
    "organamnist", "organcmnist", "organsmnist",
)  # fmt: skip


def is_medmnist(path: Path) -> bool:
    """Whether a path is an .npz with images by part, and none without a part. Raises DataError for a damaged file."""
    return is_arrays(path) and bool(_parts_in(path))


def is_medmnist_name(name: str) -> bool:
    """Whether a name is that of a MedMNIST set, with or without the prefix "medmnist:"."""
    return name.removeprefix(PREFIX) in NAMES


def load_named(request: DataRequest) -> Split:
    """The requested part of NAME.npz in the data folder. Raises DataError where the file is not there."""
    path = request.data_dir / f"{request.name.removeprefix(PREFIX)}.npz"
    if not path.is_file():
        raise DataError(
            f"expected {path.name} of MedMNIST in {request.data_dir}, found none; download it from "
            "https://medmnist.com and put it there, or name it with --data FILE.npz"
        )
    return load_medmnist(path, part=request.part)


def load(request: DataRequest) -> Split:
    """The requested part."""
    return load_medmnist(request.path, part=request.part)


def load_medmnist(path: Path, *, part: Part) -> Split:
    """One part of the file; the test part is `test`, else `val`. Images as in `load_arrays`, labels (n,) or (n, 1).

    The classes are those of all parts together. Raises DataError for a file without the part, and for other shapes or
    types.
    """
    parts = _chosen_part(path, part)
    labels = {name: require_labels(_part_of(path, name, "labels"), path) for name in parts.all}
    images = require_images(_part_of(path, parts.used, "images"), path)
    if len(images) != len(labels[parts.used]):
        raise DataError(
            f"expected as many labels as images in the {parts.used} part of {path}, found {len(labels[parts.used])} "
            f"and {len(images)}"
        )
    all_labels = torch.from_numpy(np.concatenate(list(labels.values())).astype(np.int64))
    others = [name for name in parts.all if name != parts.used]
    rest = f"; its {' and '.join(others)} part{'s are' if len(others) > 1 else ' is'} not" if others else ""
    return Split(
        name=str(path),
        title=path.stem,
        part=part,
        source=InMemory(as_pixels(images)),
        size=(images.shape[1], images.shape[2]),
        classes=class_names(read_named(path), all_labels, path),
        labels=torch.from_numpy(labels[parts.used].astype(np.int64)),
        notes=(f"the file's own {parts.used} part is used{rest}",),
    )


@dataclass(frozen=True)
class _FileParts:
    """The part of a file that is used, and all of its parts ("train", "val", "test")."""

    used: str
    all: tuple[str, ...]


def _chosen_part(path: Path, part: Part) -> _FileParts:
    """The part of the file for training or test. Raises DataError where it has none."""
    parts = _parts_in(path)
    accepted = ("train",) if part == "train" else ("test", "val")
    used = next((name for name in accepted if name in parts), None)
    if used is None:
        expected = " or ".join(f"'{name}_images'" for name in accepted)
        present = " and ".join(f"'{name}_images'" for name in parts)
        raise DataError(f"expected {expected} in {path} for the {part} part, found {present or 'none'} alone")
    return _FileParts(used, parts)


def _parts_in(path: Path) -> tuple[str, ...]:
    """The parts of an .npz; none where it has `images` without a part."""
    names = _array_names(path)
    return () if "images" in names else tuple(part for part in _PARTS if f"{part}_images" in names)


def _array_names(path: Path) -> tuple[str, ...]:
    """The names of an .npz's arrays, none of which is read. Raises DataError for another file."""
    read_named(path, ())  # raises for a file that is not an .npz
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(name.removesuffix(".npy") for name in archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"expected an .npz as numpy.savez writes it in {path}, found: {error}") from error


def _part_of(path: Path, part: str, name: str) -> dict[str, Array]:
    """The images or labels of one part, under the name without the part; labels (n, 1) as (n,)."""
    key = f"{part}_{name}"
    arrays = read_named(path, (key,))
    if key not in arrays:
        raise DataError(f"expected {key!r} beside the other part's arrays in {path}, found none")
    array = arrays[key]
    return {name: array[:, 0] if name == "labels" and array.ndim == 2 and array.shape[1] == 1 else array}
