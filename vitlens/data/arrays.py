"""Read images and labels from an .npz, also one of MedMNIST; nothing in it is ever unpickled."""

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vitlens.arrays import read_arrays
from vitlens.data.label_table import zero_note
from vitlens.data.registry import DataRequest
from vitlens.data.split import InMemory, Split, hold_out
from vitlens.errors import DataError, UnknownNameError, by_caller, in_one_line
from vitlens.names import Part
from vitlens.signatures import described

Array = NDArray[np.generic]

MEDMNIST: Final = "medmnist:"
# MedMNIST's two-dimensional sets with one label per image
_MEDMNIST_NAMES: Final = (
    "pathmnist",
    "dermamnist",
    "octmnist",
    "pneumoniamnist",
    "retinamnist",
    "breastmnist",
    "bloodmnist",
    "tissuemnist",
    "organamnist",
    "organcmnist",
    "organsmnist",
)
_MOST_BYTES: Final = 16 << 30  # most bytes of all arrays together
_MOST_CLASSES: Final = 100_000
_PARTS: Final = ("train", "val", "test")


def is_medmnist(name: str) -> bool:
    """Return True for the name of a MedMNIST set, with or without the prefix `medmnist:`.

    Raises UnknownNameError for another name with the prefix.
    """
    short_name = name.removeprefix(MEDMNIST)
    if name.startswith(MEDMNIST) and short_name not in _MEDMNIST_NAMES:
        raise UnknownNameError(
            "MedMNIST set", short_name, _MEDMNIST_NAMES, hint="https://medmnist.com"
        )
    return short_name in _MEDMNIST_NAMES


def medmnist_file(name: str, data_dir: Path) -> Path:
    """Return the path of a MedMNIST set in the data folder."""
    return data_dir / f"{name.removeprefix(MEDMNIST)}.npz"


def load_medmnist(request: DataRequest) -> Split:
    """Return the requested part of NAME.npz in the data folder.

    Raises DataError for a missing file.
    """
    path = medmnist_file(request.name, request.data_dir)
    if not path.is_file():
        data = by_caller(python="the data", command="--data")
        raise DataError(
            f"expected {path.name} of MedMNIST in {request.data_dir}, found none; download it from "
            f"https://medmnist.com and put it there, or name FILE.npz as {data}"
        )
    return load(replace(request, name=str(path)))


def load(request: DataRequest) -> Split:
    """Return one part of an .npz file.

    There are two forms, in which `classes` (strings, in order of label) is optional:

    - `images`, (n, height, width) or (n, height, width, 3) uint8, and `labels`, (n,) integers. A
      seeded fifth of each class is held out for test, unless the request is for the whole set.
    - The parts of MedMNIST: `train_images` and `train_labels`, (n,) or (n, 1), and the same for
      `val` and `test`. The test part is `test`, else `val`. The classes are those of all parts.

    Raises DataError for another file, part, key, shape or type.
    """
    path = request.path
    part = request.part
    parts = _stored_parts(path)
    if parts:
        used_part = _used_part(parts, part, path)
        prefix = f"{used_part}_"
        label_keys = [f"{name}_labels" for name in parts]  # of all parts: they name the classes
    else:  # the first form
        used_part = ""
        prefix = ""
        label_keys = ["labels"]
    image_key = f"{prefix}images"
    arrays = read_arrays(
        path, keys=[image_key, *label_keys, "classes"], most=_MOST_BYTES, error=DataError
    )
    for key in (image_key, *label_keys):
        if key not in arrays:
            raise DataError(
                f"expected separate images and labels of each part in {path}, found no {key!r}"
            )
    images = _require_pixels(arrays[image_key], image_key, path)
    labels_by_key = {}
    for key in label_keys:
        labels_by_key[key] = _as_labels(arrays[key], path, allow_column=bool(parts))
    labels = labels_by_key[f"{prefix}labels"]
    if len(images) != len(labels):
        place = f"the {used_part} part of {path}" if used_part else path
        raise DataError(
            f"expected as many labels as images in {place}, found {len(labels)} and {len(images)}"
        )

    if parts:  # not divided again
        chosen = torch.arange(len(labels))
        notes: tuple[str, ...] = (_parts_note(parts, used_part),)
    else:
        chosen, notes = hold_out(labels, part, seed=request.seed, whole=request.whole)
    all_labels = torch.cat(list(labels_by_key.values()))
    class_count = int(all_labels.max()) + 1
    class_names: Iterable[object] = range(class_count)
    if "classes" in arrays:
        class_names = arrays["classes"].ravel()
    classes = tuple(map(str, class_names))
    if len(classes) < class_count:
        raise DataError(
            f"expected at least {class_count} names in 'classes' of {path}, found {len(classes)}"
        )
    return Split(
        name=str(path),
        title=path.stem,
        part=part,
        source=InMemory(as_pixels(images[chosen.numpy()])),
        size=(images.shape[1], images.shape[2]),
        classes=classes,
        labels=labels[chosen],
        notes=(*notes, *zero_note(int(all_labels.min()))),
    )


def _stored_parts(path: Path) -> list[str]:
    """Return the parts that an .npz holds; [] for a file with one array `images`.

    Raises DataError for a file that is not an .npz.
    """
    if not path.is_file():
        raise DataError(f"expected an .npz file, found nothing at {str(path)!r}")
    kind = described(path)
    if kind and "NumPy" not in kind:
        raise DataError(f"expected an .npz in {path}, found {kind}; save it with numpy.savez")
    with (
        in_one_line(f"an .npz in {path}", "save it with numpy.savez", DataError),
        zipfile.ZipFile(path) as archive,
    ):
        keys = {file_name.removesuffix(".npy") for file_name in archive.namelist()}
    if "images" in keys:
        return []
    return [part for part in _PARTS if f"{part}_images" in keys]


def _used_part(parts: Sequence[str], part: Part, path: Path) -> str:
    """Return the stored part that serves as the requested one. Raises DataError for none."""
    accepted = ("train",) if part == "train" else ("test", "val")  # the first one that is stored
    for candidate in accepted:
        if candidate in parts:
            return candidate
    expected = " or ".join(f"'{candidate}_images'" for candidate in accepted)
    raise DataError(
        f"expected {expected} in {path} for the {part} part, found only that of "
        f"{' and '.join(parts)}"
    )


def _parts_note(parts: Sequence[str], used_part: str) -> str:
    """Return which part the images are, and which part neither training nor test uses."""
    note = f"these images are the {used_part} part of the file"
    test_part = "test" if "test" in parts else "val"
    unused = [part for part in parts if part not in ("train", test_part)]
    if not unused:
        return note
    return f"{note}; its {unused[0]} part is not used for training or testing"


def as_pixels(images: NDArray[np.uint8]) -> torch.Tensor:
    """Return pixels (n, 3, height, width) of grey or colour images.

    images: (n, height, width) or (n, height, width, 3).
    """
    if images.ndim == 3:
        return torch.from_numpy(images)[:, None].repeat(1, 3, 1, 1)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _require_pixels(images: Array, image_key: str, path: Path) -> NDArray[np.uint8]:
    """Return the images, (n, height, width) or (n, height, width, 3) uint8.

    Raises DataError for another shape or type.
    """
    is_grey = images.ndim == 3
    is_colour = images.ndim == 4 and images.shape[3] == 3
    if 0 in images.shape:
        raise DataError(
            f"expected at least one image in {path}, found none: {image_key!r} has the shape "
            f"{images.shape}"
        )
    if not (is_grey or is_colour):
        raise DataError(
            f"expected images of shape (n, height, width) or (n, height, width, 3) in {path}, "
            f"found {images.shape}"
        )
    if images.dtype != np.uint8:
        raise DataError(
            f"expected images of type uint8 (0 to 255) in {path}, found {images.dtype}; "
            f"{_conversion(images, image_key)}"
        )
    return images.astype(np.uint8, copy=False)


def _conversion(images: Array, image_key: str) -> str:
    """Return how to save images of another type as uint8."""
    is_unit = images.dtype.kind == "f" and bool(images.min() >= 0 and images.max() <= 1)
    if images.dtype == np.uint16:
        return f"save them with numpy.savez(..., {image_key}=(images // 257).astype('uint8'))"
    if is_unit:
        return (
            f"save them with numpy.savez(..., {image_key}=(images * 255).round().astype('uint8'))"
        )
    return f"scale them to 0 to 255, and save them with {image_key}=images.astype('uint8')"


def _as_labels(labels: Array, path: Path, *, allow_column: bool) -> torch.Tensor:
    """Return the labels as a tensor (n,) of integers from 0.

    allow_column: accept labels of shape (n, 1). Raises DataError for others.
    """
    if allow_column and labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        advice = (
            "; a class for each image is needed, numpy.savez(..., labels=labels.astype('int64'))"
        )
        if labels.ndim == 2:
            advice = (
                "; one class an image is read, not several (multi-label): for one-hot rows "
                "labels.argmax(1)"
            )
        raise DataError(
            f"expected labels of shape (n,) and an integer type in {path}, found {labels.shape} "
            f"{labels.dtype}{advice}"
        )
    for label in (labels.min(initial=0), labels.max(initial=0)):
        if not 0 <= int(label) < _MOST_CLASSES:
            raise DataError(
                f"expected labels from 0 to {_MOST_CLASSES - 1:,} in {path}, found {int(label):,}"
            )
    return torch.from_numpy(labels.astype(np.int64))
