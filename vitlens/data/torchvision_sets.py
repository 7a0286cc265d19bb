"""Read torchvision's data sets by name, downloaded once, as a Split."""

import contextlib
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.data.arrays import as_pixels
from vitlens.data.decode import MEMORY_LIMIT, UNSTATED, fit, flatten
from vitlens.data.registry import SETS, DataRequest, DataSet
from vitlens.data.split import InMemory, Source, Split, hold_out
from vitlens.errors import DataError, by_caller, first_line
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing
from vitlens.references import import_without_compiler
from vitlens.shapes import Pixels

TIMEOUT = 10.0  # seconds to wait for a server that does not respond
Dataset = Any  # torchvision has no types
# attributes of torchvision's sets, which differ between them
_LABELS: Final = ("targets", "labels", "_labels")
_FILES: Final = ("_image_files", "_images")  # paths of the images


def load(request: DataRequest) -> Split:
    """Return one part of the set of that name, downloaded to data_dir if needed.

    Sets of images of one small size keep it. Others are resized by the request's preprocessing,
    without one to 224x224. If the request is for the whole set, a set without parts is not divided.
    Raises DataError, within seconds, if the set is missing and cannot be downloaded.
    """
    data_set = SETS[request.name]
    dataset = _open(data_set, request.part, request.data_dir)
    labels = torch.as_tensor(np.asarray(_attribute(dataset, _LABELS)), dtype=torch.long)
    whole = request.whole or data_set.parts != "none"
    chosen, notes = hold_out(labels, request.part, seed=request.seed, whole=whole)
    source: Source
    if hasattr(dataset, "data"):  # all pixels, which fit in memory
        pixels = _stored_pixels(np.asarray(dataset.data))[chosen]
        source = InMemory(pixels)
        size = (int(pixels.shape[2]), int(pixels.shape[3]))
    else:
        source = _decoded_source(dataset, chosen, data_set, request.preprocessing)
        size = source.preprocessing.size
        if len(chosen) * 3 * size[0] * size[1] <= MEMORY_LIMIT:
            source = InMemory(source.read(torch.arange(len(chosen))), source.paths)
    # not all of torchvision's sets name their classes
    classes = getattr(dataset, "classes", None) or map(str, range(data_set.classes))
    return Split(
        name=request.name,
        title=data_set.title,
        part=request.part,
        source=source,
        size=size,
        classes=tuple(classes),
        labels=labels[chosen],
        notes=notes,
    )


def _attribute(dataset: Dataset, names: Sequence[str]) -> Any:
    """Return the first of these attributes that a torchvision set has; () for none."""
    for name in names:
        if hasattr(dataset, name):
            return getattr(dataset, name)
    return ()


def _stored_pixels(arrays: np.ndarray[Any, Any]) -> Tensor:
    """Return the pixels (n, 3, height, width) of arrays with channels first, last or absent."""
    if arrays.ndim == 4 and arrays.shape[1] == 3:
        return torch.from_numpy(arrays)
    return as_pixels(arrays)


def _decoded_source(
    dataset: Dataset, chosen: Tensor, data_set: DataSet, preprocessing: Preprocessing | None
) -> "Decoding":
    """Return the source of a set's image files; those of one size keep it."""
    if data_set.size is not None:
        return Decoding(dataset, chosen, Preprocessing(size=data_set.size))
    files = _attribute(dataset, _FILES)
    paths = tuple(Path(files[index]) for index in chosen.tolist()) if files else ()
    return Decoding(dataset, chosen, preprocessing or UNSTATED, paths)


def download(name: str, data_dir: Path) -> None:
    """Download the missing parts of a set. Raises DataError if that fails."""
    parts: tuple[Part, ...] = ("train", "test")
    for part in parts:
        _open(SETS[name], part, data_dir)


@dataclass(frozen=True)
class Decoding:
    """Images of a torchvision set that are read from disk and resized when they are read.

    dataset: torchvision's object.
    chosen: the indices of the images in it.
    preprocessing: how they are resized.
    paths: their files if the pixels depend on the preprocessing, else ().
    """

    dataset: Dataset
    chosen: Tensor
    preprocessing: Preprocessing
    paths: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, indices: Tensor) -> Pixels:
        """Return the pixels of these images."""
        pixels = torch.empty(len(indices), 3, *self.preprocessing.size, dtype=torch.uint8)
        for row, index in enumerate(self.chosen[indices].tolist()):
            image, _ = self.dataset[index]
            pixels[row] = fit(flatten(image), self.preprocessing)
        return pixels


def _open(data_set: DataSet, part: Part, data_dir: Path) -> Dataset:
    """Return the torchvision object: from data_dir, else downloaded into it."""
    dataset_class = getattr(import_without_compiler("torchvision.datasets"), data_set.torchvision)
    options: dict[str, object] = {}
    if data_set.parts == "train":
        options["train"] = part == "train"
    elif data_set.parts == "trainval":
        options["split"] = "trainval" if part == "train" else "test"
    elif data_set.parts == "split":
        options["split"] = part
    # torchvision raises these errors if the files are missing
    with contextlib.suppress(RuntimeError, OSError):
        return dataset_class(str(data_dir), download=False, **options)
    previous_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)  # torchvision itself sets none
    try:
        # stdout is only for results
        with contextlib.redirect_stdout(sys.stderr):
            data_dir.mkdir(parents=True, exist_ok=True)
            return dataset_class(str(data_dir), download=True, **options)
    except (OSError, RuntimeError) as error:
        data = by_caller(python="the data", command="--data")
        raise DataError(
            f"expected {data_set.title} in {data_dir} or a network to download it, found neither "
            f"({first_line(error)}); put the files of torchvision.datasets.{data_set.torchvision} "
            f"there by hand, or choose {data} digits or a folder"
        ) from error
    finally:
        socket.setdefaulttimeout(previous_timeout)
