"""torchvision's sets by name: downloaded once, then read as a Split."""

import contextlib
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlens.data.arrays import as_pixels
from vitlens.data.decode import fit, flatten
from vitlens.data.folder import UNSTATED
from vitlens.data.holdout import describe_hold_out, hold_out
from vitlens.data.reading import MEMORY_LIMIT
from vitlens.data.registry import SETS, DataRequest, DataSet
from vitlens.data.split import InMemory, Source, Split
from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing
from vitlens.references import import_without_compiler
from vitlens.shapes import Pixels

TIMEOUT = 10.0  # seconds to wait for a server that does not respond

Dataset = Any  # torchvision has no types
Options = Mapping[str, object]


def load(request: DataRequest) -> Split:
    """One part of the set of that name."""
    return load_torchvision(
        request.name,
        part=request.part,
        data_dir=request.data_dir,
        preprocessing=request.preprocessing,
        seed=request.seed,
        whole=request.whole,
    )


def load_torchvision(
    name: str,
    *,
    part: Part,
    data_dir: Path,
    preprocessing: Preprocessing | None = None,
    seed: int = 0,
    whole: bool = False,
) -> Split:
    """One part of a torchvision set, downloaded to data_dir if needed.

    Sets of images of one small size keep it; the others are resized by `preprocessing` (None: 224x224). whole: a set
    without parts is not divided. Raises DataError, within seconds, when it is missing and cannot be downloaded.
    """
    data_set = SETS[name]
    dataset = _open(data_set, options_of(data_set, part), data_dir)
    labels = _labels(dataset)
    undivided = whole or data_set.parts != "none"
    chosen = torch.arange(len(labels)) if undivided else hold_out(labels, part, seed=seed)
    source, size = _source(dataset, chosen, data_set, preprocessing or UNSTATED)
    return Split(
        name=name,
        title=data_set.title,
        part=part,
        source=source,
        size=size,
        classes=tuple(getattr(dataset, "classes", None) or (str(index) for index in range(data_set.classes))),
        labels=labels[chosen],
        notes=() if undivided else (describe_hold_out(seed),),
    )


def options_of(data_set: DataSet, part: Part) -> Options:
    """The arguments of torchvision's class for a part."""
    if data_set.parts == "none":
        return {}
    if data_set.parts == "train":
        return {"train": part == "train"}
    return {"split": "trainval" if data_set.parts == "trainval" and part == "train" else part}


@dataclass(frozen=True)
class Decoding:
    """Images of a torchvision set that are read from disk and resized on reading."""

    dataset: Dataset
    chosen: Tensor
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these images."""
        images = (self.dataset[index][0] for index in self.chosen[indices].tolist())
        pixels = [fit(flatten(image), self.preprocessing) for image in images]
        return torch.stack(pixels) if pixels else torch.empty(0, 3, *self.preprocessing.size, dtype=torch.uint8)


def _open(data_set: DataSet, options: Options, data_dir: Path) -> Dataset:
    """The torchvision object: from data_dir, else downloaded into it."""
    make = getattr(import_without_compiler("torchvision.datasets"), data_set.torchvision)
    with contextlib.suppress(RuntimeError, OSError):  # torchvision raises these where the files are missing
        return make(str(data_dir), download=False, **options)
    try:
        with _with_timeout(), contextlib.redirect_stdout(sys.stderr):  # keeps its output out of the results on stdout
            data_dir.mkdir(parents=True, exist_ok=True)
            return make(str(data_dir), download=True, **options)
    except (OSError, RuntimeError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"expected {data_set.title} in {data_dir} or a network to download it, found neither ({why}); put the "
            f"files of torchvision.datasets.{data_set.torchvision} there by hand, or choose --data digits or a folder"
        ) from error


@contextlib.contextmanager
def _with_timeout() -> Iterator[None]:
    """Inside, connections have a timeout: torchvision itself sets none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _labels(dataset: Dataset) -> Tensor:
    for attribute in ("targets", "labels", "_labels"):  # the name differs by set
        if hasattr(dataset, attribute):
            return torch.as_tensor(np.asarray(getattr(dataset, attribute)), dtype=torch.long)
    raise DataError(
        f"expected labels in torchvision's {type(dataset).__name__}, found none; torchvision may be too new"
    )


def _source(
    dataset: Dataset, chosen: Tensor, data_set: DataSet, preprocessing: Preprocessing
) -> tuple[Source, tuple[int, int]]:
    """The pixels in memory where they fit, else a source that decodes on reading; and their size."""
    if hasattr(dataset, "data"):
        arrays = np.asarray(dataset.data)
        pixels = torch.from_numpy(arrays) if arrays.ndim == 4 and arrays.shape[1] == 3 else as_pixels(arrays)
        return InMemory(pixels[chosen]), (int(pixels.shape[2]), int(pixels.shape[3]))
    if data_set.size is not None:
        preprocessing = Preprocessing(size=data_set.size)
    decoding = Decoding(dataset, chosen, preprocessing)
    height, width = preprocessing.size
    if len(chosen) * 3 * height * width > MEMORY_LIMIT:
        return decoding, preprocessing.size
    return InMemory(decoding.read(torch.arange(len(chosen)))), preprocessing.size
