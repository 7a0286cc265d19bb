"""torchvision's sets by name: downloaded once, then read as a Split."""

import contextlib
import socket
import sys
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
_FILES: Final = ("_image_files", "_images")  # of a torchvision set: the paths of its images


def load(request: DataRequest) -> Split:
    """Return one part of the set of that name, downloaded to data_dir if needed.

    Sets of images of one small size keep it; the others are resized by `preprocessing` (None:
    224x224). whole: a set without parts is not divided. Raises DataError, within seconds, when it
    is missing and cannot be downloaded.
    """
    data_set = SETS[request.name]
    dataset = _open(data_set, request.part, request.data_dir)
    stored = (
        getattr(dataset, name)
        for name in ("targets", "labels", "_labels")
        if hasattr(dataset, name)
    )
    labels = torch.as_tensor(np.asarray(next(stored)), dtype=torch.long)  # the name differs by set
    whole = request.whole or data_set.parts != "none"
    chosen, notes = hold_out(labels, request.part, seed=request.seed, whole=whole)
    preprocessing = request.preprocessing or UNSTATED
    source: Source
    if hasattr(dataset, "data"):  # all pixels, which fit in memory
        arrays = np.asarray(dataset.data)
        pixels = (
            torch.from_numpy(arrays)
            if arrays.ndim == 4 and arrays.shape[1] == 3
            else as_pixels(arrays)
        )
        source = InMemory(pixels[chosen])
        size = (int(pixels.shape[2]), int(pixels.shape[3]))
    else:
        preprocessing = (
            preprocessing if data_set.size is None else Preprocessing(size=data_set.size)
        )
        size = preprocessing.size
        source = Decoding(
            dataset, chosen, preprocessing, _paths(dataset, chosen) if data_set.size is None else ()
        )
        if len(chosen) * 3 * size[0] * size[1] <= MEMORY_LIMIT:
            source = InMemory(source.read(torch.arange(len(chosen))), source.paths)
    return Split(
        name=request.name,
        title=data_set.title,
        part=request.part,
        source=source,
        size=size,
        classes=tuple(
            getattr(dataset, "classes", None) or (str(index) for index in range(data_set.classes))
        ),
        labels=labels[chosen],
        notes=notes,
    )


def download(name: str, data_dir: Path) -> None:
    """Download both parts of a set where they are missing. Raises DataError where that fails."""
    parts: tuple[Part, ...] = ("train", "test")
    for part in parts:
        _open(SETS[name], part, data_dir)


@dataclass(frozen=True)
class Decoding:
    """Images of a torchvision set that are read from disk and resized on reading.

    paths: their files where the pixels depend on the preprocessing; () where they are always the
    same.
    """

    dataset: Dataset
    chosen: Tensor
    preprocessing: Preprocessing
    paths: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these images."""
        images = (self.dataset[index][0] for index in self.chosen[indices].tolist())
        pixels = [fit(flatten(image), self.preprocessing) for image in images]
        return (
            torch.stack(pixels)
            if pixels
            else torch.empty(0, 3, *self.preprocessing.size, dtype=torch.uint8)
        )


def _paths(dataset: Dataset, chosen: Tensor) -> tuple[Path, ...]:
    """Return the files of these images; () where torchvision does not list them."""
    files = next((getattr(dataset, name) for name in _FILES if hasattr(dataset, name)), ())
    return tuple(Path(files[index]) for index in chosen.tolist()) if files else ()


def _open(data_set: DataSet, part: Part, data_dir: Path) -> Dataset:
    """Return the torchvision object: from data_dir, else downloaded into it."""
    make = getattr(import_without_compiler("torchvision.datasets"), data_set.torchvision)
    options: dict[str, object] = {} if data_set.parts == "none" else {"split": part}
    if data_set.parts == "train":
        options = {"train": part == "train"}
    elif data_set.parts == "trainval" and part == "train":
        options = {"split": "trainval"}
    with contextlib.suppress(
        RuntimeError, OSError
    ):  # torchvision raises these where the files are missing
        return make(str(data_dir), download=False, **options)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)  # torchvision itself sets none
    try:
        with contextlib.redirect_stdout(
            sys.stderr
        ):  # keeps its output out of the results on stdout
            data_dir.mkdir(parents=True, exist_ok=True)
            return make(str(data_dir), download=True, **options)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"expected {data_set.title} in {data_dir} or a network to download it, found neither "
            f"({first_line(error)}); put the files of torchvision.datasets.{data_set.torchvision} "
            "there by hand, or "
            f"choose {by_caller(python='the data', command='--data')} digits or a folder"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
