"""An .npz of images and labels, or of MedMNIST's parts; nothing in it is ever unpickled."""

import zipfile
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
from vitlens.signatures import described

Array = NDArray[np.generic]

MEDMNIST: Final = "medmnist:"
_NAMES: Final = (  # of MedMNIST's sets of one label an image, 2-D
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
_SIZE: Final = 16 << 30  # bytes of all arrays
_CLASSES: Final = 100_000  # most classes


def is_medmnist(name: str) -> bool:
    """Return True if a name is that of a MedMNIST set; with the prefix it is meant to be. Raises
    UnknownNameError.
    """
    if name.startswith(MEDMNIST) and name.removeprefix(MEDMNIST) not in _NAMES:
        raise UnknownNameError(
            "MedMNIST set", name.removeprefix(MEDMNIST), _NAMES, hint="https://medmnist.com"
        )
    return name.removeprefix(MEDMNIST) in _NAMES


def medmnist_file(name: str, data_dir: Path) -> Path:
    """Return the place of a MedMNIST set in the data folder."""
    return data_dir / f"{name.removeprefix(MEDMNIST)}.npz"


def load_medmnist(request: DataRequest) -> Split:
    """Return the requested part of NAME.npz in the data folder. Raises DataError where the file is
    not there.
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
    """Return one part of an .npz: `images` (n, height, width) or (n, height, width, 3) uint8,
    `labels` (n,) integers.

    A seeded fifth of each class is held out for test; `whole` returns all images. A file without
    `images` has the parts of MedMNIST: `train_images`, `train_labels` (n,) or (n, 1), and the same
    for `val` and `test`; the test part is `test`, else `val`, and the classes are those of all
    parts. `classes` (strings, in order of label) is optional. Raises DataError for another file,
    part, key, shape or type.
    """
    path = request.path
    part = request.part
    if not path.is_file():
        raise DataError(f"expected an .npz file, found nothing at {str(path)!r}")
    kind = described(path)
    if kind and "NumPy" not in kind:
        raise DataError(f"expected an .npz in {path}, found {kind}; save it with numpy.savez")
    with (
        in_one_line(f"an .npz in {path}", "save it with numpy.savez", DataError),
        zipfile.ZipFile(path) as archive,
    ):
        names = {name.removesuffix(".npy") for name in archive.namelist()}
    parts = (
        []
        if "images" in names
        else [each for each in ("train", "val", "test") if f"{each}_images" in names]
    )
    used = ""
    if parts:
        accepted = ("train",) if part == "train" else ("test", "val")
        used = next((each for each in accepted if each in parts), "")
        if not used:
            expected = " or ".join(f"'{each}_images'" for each in accepted)
            raise DataError(
                f"expected {expected} in {path} for the {part} part, found that of "
                f"{' and '.join(parts)} alone"
            )
    prefix = f"{used}_" if used else ""
    wanted = [f"{each}_labels" for each in parts] or ["labels"]
    arrays = read_arrays(
        path, keys=[f"{prefix}images", *wanted, "classes"], most=_SIZE, error=DataError
    )
    for key in (f"{prefix}images", *wanted):
        if key not in arrays:
            raise DataError(
                f"expected images and labels, each part's own, in {path}, found no {key!r}"
            )
    images = _images(arrays[f"{prefix}images"], path)
    every = {key: _labels(arrays[key], path, columns=bool(parts)) for key in wanted}
    labels = every[f"{prefix}labels"]
    if len(images) != len(labels):
        of = f"the {used} part of {path}" if used else path
        raise DataError(
            f"expected as many labels as images in {of}, found {len(labels)} and {len(images)}"
        )

    chosen, notes = hold_out(labels, part, seed=request.seed, whole=request.whole or bool(parts))
    if parts:
        others = [each for each in parts if each != used]
        rest = (
            f"; its {' and '.join(others)} part{'s are' if len(others) > 1 else ' is'} not"
            if others
            else ""
        )
        notes = (f"the file's own {used} part is used{rest}",)
    together = torch.cat(list(every.values()))
    count = int(together.max()) + 1
    notes = (*notes, *zero_note(int(together.min())))
    classes = (
        tuple(map(str, arrays["classes"].ravel()))
        if "classes" in arrays
        else tuple(map(str, range(count)))
    )
    if len(classes) < count:
        raise DataError(
            f"expected at least {count} names in 'classes' of {path}, found {len(classes)}"
        )
    return Split(
        name=str(path),
        title=path.stem,
        part=part,
        source=InMemory(as_pixels(images[chosen.numpy()])),
        size=(images.shape[1], images.shape[2]),
        classes=classes,
        labels=labels[chosen],
        notes=notes,
    )


def as_pixels(images: NDArray[np.uint8]) -> torch.Tensor:
    """Grey (n, height, width) or colour (n, height, width, 3) as pixels (n, 3, height, width)."""
    if images.ndim == 3:
        return torch.from_numpy(images)[:, None].repeat(1, 3, 1, 1)
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def _images(images: Array, path: Path) -> NDArray[np.uint8]:
    """Return the images, (n, height, width) or (n, height, width, 3) uint8. Raises DataError for
    others.
    """
    plain = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
    if not plain or 0 in images.shape:
        raise DataError(
            f"expected images of shape (n, height, width) or (n, height, width, 3) in {path}, "
            f"found {images.shape}"
        )
    if images.dtype != np.uint8:
        raise DataError(f"expected images of type uint8 (0 to 255) in {path}, found {images.dtype}")
    return images.astype(np.uint8, copy=False)


def _labels(labels: Array, path: Path, *, columns: bool) -> torch.Tensor:
    """Return the labels, (n,) integers from 0; columns: or (n, 1). Raises DataError for others."""
    if columns and labels.ndim == 2 and labels.shape[1] == 1:
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
        if not 0 <= int(label) < _CLASSES:
            raise DataError(
                f"expected labels from 0 to {_CLASSES - 1:,} in {path}, found {int(label):,}"
            )
    return torch.from_numpy(labels.astype(np.int64))
