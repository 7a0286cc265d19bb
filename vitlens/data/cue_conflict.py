"""Images whose shape is one class and whose texture is another: `shape-class/shapeN-textureM.png`, read as data.

Layout and stimuli: Geirhos et al., "ImageNet-trained CNNs are biased towards texture" (ICLR 2019). Their 16 classes
are groups of ImageNet's 1000 (`imagenet16.txt`, from the same authors).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from vitlens.data.folder import list_folder, read_listing
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.shapes import Labels

_LABELLED = "Each image has the shape of one class and the texture of one: its label is the shape."
_NAME = re.compile(r"^([A-Za-z][A-Za-z_ ]*?)(\d+)-([A-Za-z][A-Za-z_ ]*?)(\d+)$")


@dataclass(frozen=True)
class Cues:
    """The cues of n images: shape, texture: (n,) indices into the split's classes; source: (n,) the image from which
    the shape was taken."""

    shape: Labels
    texture: Labels
    source: Tensor

    @property
    def conflict(self) -> Tensor:
        """Return whether shape and texture differ, (n,)."""
        return self.shape != self.texture


def cues_of(split: Split) -> Cues | None:
    """Return the cues in a split's file names, or None where not all have some. The label is the shape."""
    parsed = [_parsed(file) for file in split.files or ()]
    place = {name: index for index, name in enumerate(split.classes)}
    if not parsed or any(cues is None or not {cues[0], cues[2]} <= place.keys() for cues in parsed):
        return None
    named = [cues for cues in parsed if cues is not None]
    sources = {source: index for index, source in enumerate(dict.fromkeys((shape, n) for shape, n, _ in named))}
    return Cues(
        torch.tensor([place[shape] for shape, _, _ in named]),
        torch.tensor([place[texture] for _, _, texture in named]),
        torch.tensor([sources[shape, number] for shape, number, _ in named]),
    )


def is_cue_conflict(root: Path) -> bool:
    """Return True if the images in a folder's class folders are all named shapeN-textureM, the shape being the
    folder."""
    if not root.is_dir():
        return False
    folders = [child for child in root.iterdir() if child.is_dir() and not child.name.startswith((".", "__"))]
    names = [(folder.name, _parsed(file.name)) for folder in folders for file in folder.iterdir() if file.is_file()]
    return bool(names) and all(cues is not None and cues[0] == folder for folder, cues in names)


def load(request: DataRequest) -> Split:
    """Return all images of such a folder, labelled by shape; classes are the names of shapes and textures together.

    Images with the same source of shape form one group, for clustered intervals. Raises DataError for the training
    part: these images are for testing only.
    """
    root = request.path
    if request.part == "train":
        raise DataError(f"expected images to train on, found cue conflicts in {root}; they are for vitlens compare")
    listing = list_folder(root, part="test", whole=True)
    textures = {cues[2] for path in listing.paths if (cues := _parsed(path.name)) is not None}
    classes = tuple(sorted({*listing.classes, *textures}))
    labels = tuple(classes.index(listing.classes[label]) for label in listing.labels)
    split = read_listing(replace(listing, classes=classes, labels=labels), request)
    found = cues_of(split)
    title = f"{split.title} (cue conflicts)"
    notes = (*split.notes, _LABELLED)
    return replace(split, title=title, notes=notes, groups=None if found is None else found.source)


@cache
def imagenet16() -> Mapping[str, tuple[int, ...]]:
    """Return the 16 classes of the cue conflicts, each with the indices of its ImageNet classes."""
    classes: dict[str, tuple[int, ...]] = {}
    for line in (Path(__file__).parents[1] / "imagenet16.txt").read_text(encoding="utf-8").splitlines():
        name, ranges = line.split(" ", 1)  # "3,5-7" is 3, 5, 6, 7
        ends = [part.split("-") for part in ranges.split(",")]
        classes[name] = tuple(index for pair in ends for index in range(int(pair[0]), int(pair[-1]) + 1))
    return MappingProxyType(classes)


def _parsed(file: str) -> tuple[str, str, str] | None:
    """Shape, the number of its source, and texture in a file name; None for a name of another form."""
    match = _NAME.match(Path(file).stem)
    return None if match is None else (match[1], match[2], match[3])
