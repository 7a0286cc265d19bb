"""Read cue-conflict images, with the shape of one class and the texture of another.

Their files are named `shape-class/shapeN-textureM.png`.

Layout and stimuli: Geirhos et al., "ImageNet-trained CNNs are biased towards texture" (ICLR 2019).
Their 16 classes are groups of ImageNet's 1000 (`imagenet16.txt`, from the same authors).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from vitlens.data.folder import list_folder, read_listing
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.shapes import Labels

_NOTE = "Each image has the shape of one class and the texture of one: its label is the shape."
_NAME = re.compile(r"^([A-Za-z][A-Za-z_ ]*?)(\d+)-([A-Za-z][A-Za-z_ ]*?)(\d+)$")


@dataclass(frozen=True)
class Cues:
    """The cues of n images.

    shape: the shape of each image, (n,), as an index into the split's classes.
    texture: the texture of each image, (n,), as an index into the split's classes.
    source: the image from which the shape was taken, (n,), as a number.
    """

    shape: Labels
    texture: Labels
    source: Tensor

    @property
    def conflict(self) -> Tensor:
        """Return a mask (n,) of the images whose shape and texture differ."""
        return self.shape != self.texture


def cues_of(split: Split) -> Cues | None:
    """Return the cues in a split's file names; None unless all files have them."""
    index_of_class = {name: index for index, name in enumerate(split.classes)}
    shapes = []
    textures = []
    sources = []
    index_of_source: dict[tuple[str, str], int] = {}
    for file in split.files or ():
        name = _parse(file)
        if name is None:
            return None
        if name.shape not in index_of_class or name.texture not in index_of_class:
            return None
        shapes.append(index_of_class[name.shape])
        textures.append(index_of_class[name.texture])
        source = (name.shape, name.number)
        sources.append(index_of_source.setdefault(source, len(index_of_source)))
    if not shapes:
        return None
    return Cues(torch.tensor(shapes), torch.tensor(textures), torch.tensor(sources))


def is_cue_conflict(root: Path) -> bool:
    """Return True if all files in a folder's class folders are named FOLDERn-TEXTUREm."""
    if not root.is_dir():
        return False
    has_files = False
    for folder in root.iterdir():
        if not folder.is_dir() or folder.name.startswith((".", "__")):
            continue
        for file in folder.iterdir():
            if not file.is_file():
                continue
            name = _parse(file.name)
            if name is None or name.shape != folder.name:
                return False
            has_files = True
    return has_files


def load(request: DataRequest) -> Split:
    """Return all images of a folder of cue conflicts, labelled by shape.

    The classes are the names of shapes and textures together. Images with the same source of shape
    form one group, for clustered intervals. Raises DataError for the training part, as these images
    are for testing only.
    """
    root = request.path
    if request.part == "train":
        raise DataError(
            f"expected images to train on, found cue conflicts in {root}; they are for vitlens "
            "compare"
        )
    listing = list_folder(root, part="test", whole=True)
    names = set(listing.classes)
    for path in listing.paths:
        name = _parse(path.name)
        if name is not None:
            names.add(name.texture)
    classes = tuple(sorted(names))
    labels = tuple(classes.index(listing.classes[label]) for label in listing.labels)
    split = read_listing(replace(listing, classes=classes, labels=labels), request)
    cues = cues_of(split)
    return replace(
        split,
        title=f"{split.title} (cue conflicts)",
        notes=(*split.notes, _NOTE),
        groups=None if cues is None else cues.source,
    )


@cache
def imagenet16() -> Mapping[str, tuple[int, ...]]:
    """Return the 16 classes of the cue conflicts, each with the indices of its ImageNet classes."""
    classes: dict[str, tuple[int, ...]] = {}
    file = Path(__file__).parents[1] / "imagenet16.txt"
    for line in file.read_text(encoding="utf-8").splitlines():
        name, ranges = line.split(" ", 1)
        indices: list[int] = []
        for index_range in ranges.split(","):  # "3,5-7" is 3, 5, 6, 7
            ends = index_range.split("-")
            indices += range(int(ends[0]), int(ends[-1]) + 1)
        classes[name] = tuple(indices)
    return MappingProxyType(classes)


class _FileName(NamedTuple):
    """A file name `shapeN-textureM`.

    number: N, the number of the image from which the shape was taken.
    """

    shape: str
    number: str
    texture: str


def _parse(file: str) -> _FileName | None:
    """Return the parts of a file name; None for another form."""
    match = _NAME.match(Path(file).stem)
    if match is None:
        return None
    return _FileName(shape=match[1], number=match[2], texture=match[3])
