"""Split: one part of a data set, whether it lies in memory or on disk."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from vitlens.errors import DataError
from vitlens.names import Part
from vitlens.shapes import Images, Pixels

Function = TypeVar("Function", bound=Callable[..., Any])


@runtime_checkable
class Source(Protocol):
    """Where pixels come from: all in memory, or read from disk when asked."""

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Pixels:
        """Pixels (batch, 3, height, width) uint8 of these images."""
        ...


@runtime_checkable
class Renewable(Protocol):
    """A source that can show the same subjects in new images, epoch after epoch."""

    def epoch(self, number: int) -> Source:
        """The source as epoch `number` (from 0) sees it."""
        ...


@dataclass(frozen=True)
class InMemory:
    """Pixels held as uint8 (n, 3, height, width)."""

    pixels: Pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these images."""
        return self.pixels[indices]


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, as it could not be read or lacks its mask, and why."""

    file: str
    reason: str


class Batch(NamedTuple):
    """images (batch, 3, height, width) in [0, 1]; labels (batch,) or None; indices (batch,) within the split."""

    images: Images
    labels: Tensor | None
    indices: Tensor


@dataclass(frozen=True)
class Split:
    """One part of a data set.

    name: as the user gave it ("digits"); title: as a report says it ("CIFAR-10 (JPEG)"); part: "train" or "test";
    size: pixels (height, width); labels: (n,) class indices or None; masks: (n, height, width) True on the object,
    or None; groups: (n,) what the images share (source digit), for clustered intervals, or None; files: one name an
    image, or None; skipped: files left out; notes: what else a report must say of how it was loaded.
    """

    name: str
    part: Part
    source: Source
    size: tuple[int, int]
    classes: tuple[str, ...]
    labels: Tensor | None = None
    masks: Tensor | None = None
    groups: Tensor | None = None
    files: tuple[str, ...] | None = None
    skipped: tuple[Skipped, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, batch_size: int, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """The images in order, as floats in [0, 1] on a device."""
        for start in range(0, len(self), batch_size):
            indices = torch.arange(start, min(start + batch_size, len(self)))
            images = self.source.read(indices).to(device).float().div_(255)
            yield Batch(images, None if self.labels is None else self.labels[indices].to(device), indices)

    def pick(self, indices: Tensor) -> "Split":
        """The split of these images alone, in this order."""
        chosen = indices.tolist()
        return replace(
            self,
            source=Chosen(self.source, indices),
            labels=None if self.labels is None else self.labels[indices],
            masks=None if self.masks is None else self.masks[indices],
            groups=None if self.groups is None else self.groups[indices],
            files=None if self.files is None else tuple(self.files[index] for index in chosen),
        )

    def led_by(self, files: Sequence[str]) -> "Split":
        """The same images with these in front, by file name (with or without its ending).

        Raises DataError for a name that is not there, and where images have no files.
        """
        if not files:
            return self
        if self.files is None:
            raise DataError(
                f"expected images with file names, found {self.name}, whose images have none; leave out --show"
            )
        places = {PurePath(file).name: index for index, file in reversed(list(enumerate(self.files)))}
        places = {PurePath(name).stem: index for name, index in places.items()} | places
        unknown = [name for name in files if name not in places]
        if unknown:
            raise DataError(f"expected names of images in {self.name}, such as {self.files[0]}, found {unknown[0]!r}")
        first = list(dict.fromkeys(places[name] for name in files))
        rest = [index for index in range(len(self)) if index not in set(first)]
        return self.pick(torch.tensor(first + rest))

    def epoch(self, number: int) -> "Split":
        """The split as epoch `number` (from 0) of a training sees it: new images where its source draws them.

        Labels and order stay. Masks are of the first epoch's images, so a renewed split has none.
        """
        source = _renewed(self.source, number)
        return self if source is self.source else replace(self, source=source, masks=None)

    def limit(self, count: int | None, *, seed: int = 0) -> "Split":
        """At most count images: a seeded subset with as equal a number of each class as there is."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise DataError(f"expected --limit of at least 1, found {count}")
        return self.pick(_balanced(len(self), self.labels, count, seed))


def takes_splits(function: Function) -> Function:
    """A public function some of whose parameters are Splits; it raises DataError where it is given something else."""
    parameters = inspect.signature(function).parameters
    named = [name for name, parameter in parameters.items() if parameter.annotation in (Split, Split | None)]

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters, args)), **kwargs}
        for name in named:
            value = given.get(name)
            if value is not None and not isinstance(value, Split):
                raise DataError(
                    f"expected a Split of images and labels for {name}, found {type(value).__name__}; make one with "
                    "vitlens.data.catalogue.load_data(DATA, part='test')"
                )
        return function(*args, **kwargs)

    return cast(Function, checked)


@dataclass(frozen=True)
class Chosen:
    """Some images of another source."""

    source: Source
    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Tensor) -> Pixels:
        """Pixels of these images."""
        return self.source.read(self.indices[indices])


def _renewed(source: Source, number: int) -> Source:
    """The source of another epoch; itself where it has only one set of images."""
    if isinstance(source, Chosen):
        inner = _renewed(source.source, number)
        return source if inner is source.source else replace(source, source=inner)
    return source.epoch(number) if isinstance(source, Renewable) and number else source


def _balanced(total: int, labels: Tensor | None, count: int, seed: int) -> Tensor:
    """Seeded indices, sorted, dealt one class at a time until count is reached."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    if labels is None:
        return order[:count].sort().values
    shuffled = labels[order]
    turn = torch.empty(total, dtype=torch.long)  # the how-manieth of its class each image is
    for label in sorted(set(shuffled.tolist())):
        members = (shuffled == label).nonzero().squeeze(1)
        turn[members] = torch.arange(len(members))
    return order[turn.argsort(stable=True)[:count]].sort().values
