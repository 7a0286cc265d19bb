"""Captions of images: generated from the facts of the embedded scenes, or read from a folder's
captions.csv.

A generated caption names the class and, half of the time, where and how large the object is: "an
image of a small star at the top left". It depends on the image's number and the epoch alone. Some
wordings are held out: no caption has them.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

from torch import Tensor

from vitlens.data import draws
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError, by_caller
from vitlens.files import read_bounded

WORDINGS: Final = (
    "a photo of a {}",
    "an image of a {}",
    "this is a {}",
    "a scene that shows a {}",
    "there is a {} in this image",
    "a picture of a {} on a background",
)
HELD_OUT: Final = (
    "this photo shows a {}",
    "an image that shows a {} on a background",
    "a scene of a {}",
)
PROMPTS: Final = (*WORDINGS[:3], *HELD_OUT)  # of zero-shot classification
CAPTIONS_FILE: Final = "captions.csv"
_LARGEST: Final = 1 << 28  # bytes of that file
_OFF_CENTRE: Final = 1 / 16  # of the canvas: an object further from the middle is at a side
_DETAILED: Final = 0.5  # share of the captions with size and place


def with_name(wording: str, name: str) -> str:
    """Return the wording with a name in the place of {}. Raises InputError where there is none."""
    if "{}" not in wording:
        raise InputError(
            f"expected {{}} in a wording for the class, found {wording!r}; e.g. {WORDINGS[0]!r}"
        )
    return wording.replace("{}", name)


@dataclass(frozen=True, eq=False)
class Captions:
    """The captions of a split's images; written: one an image, None where they are generated."""

    split: Split
    written: tuple[str, ...] | None = None

    def __call__(self, keys: Tensor, epoch: int) -> list[str]:
        """Return the captions of the images with these keys (see training/feed.py) in an epoch,
        from 0.
        """
        indices = keys.cpu() % len(self.split)
        if self.written is not None:
            return [self.written[index] for index in indices.tolist()]
        own = self.split.epoch(epoch).pick(indices)
        places = own.drawn_places
        assert own.labels is not None
        assert places is not None
        names = [own.classes[label] for label in own.labels.tolist()]
        drawn = draws.uniform(draws.keys(epoch, self.split.subset.indices[indices]), 2, stream=20)
        wordings = (drawn[:, 0] * len(WORDINGS)).long().tolist()
        texts = (
            _detailed(name, *place) if share < _DETAILED else name
            for name, place, share in zip(names, places.tolist(), drawn[:, 1].tolist())
        )
        return [with_name(WORDINGS[wording], text) for wording, text in zip(wordings, texts)]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Texts that together hold every word of the captions, the longest among them."""
        if self.written is not None:
            return self.written
        names = [
            _detailed(name, *place)
            for name in self.split.classes
            for place in ((0, 0, 0), (1, 1, 1))
        ]
        return tuple(with_name(wording, name) for wording in WORDINGS for name in names)


def _detailed(name: str, size: float, across: float, down: float) -> str:
    """Return a name with size and place, numbers in [0, 1], where they are clearly below or above
    the middle.
    """

    def word(value: float, low: str, high: str, margin: float) -> str:
        return low if value < 0.5 - margin else high if value > 0.5 + margin else ""

    places = word(down, "top", "bottom", _OFF_CENTRE), word(across, "left", "right", _OFF_CENTRE)
    place = " ".join(filter(None, places))
    sized = " ".join(filter(None, (word(size, "small", "large", 1 / 6), name)))
    return f"{sized} at the {place}" if place else sized


def captions_of(split: Split) -> Captions:
    """Return the captions of a split: generated for scenes, else those of captions.csv in its
    folder.

    The first column of the file has the images' names, relative to the folder or alone, the second
    their captions. Raises DataError where there are no captions, or an image has none.
    """
    if split.labels is not None and split.drawn_places is not None:
        return Captions(split)
    file = Path(split.name).expanduser() / CAPTIONS_FILE
    if split.files is None or not file.is_file():
        raise DataError(
            f"expected captions of the images, found none for {split.name}; give a folder with "
            f"{CAPTIONS_FILE} (file name, caption), or "
            f"{by_caller(python='the data', command='--data')} digits or shapes"
        )
    text = read_bounded(file, _LARGEST, what="captions", error=DataError).decode(
        "utf-8-sig", errors="replace"
    )
    known = {
        PurePath(row[0].strip()).as_posix(): row[1].strip()
        for row in csv.reader(io.StringIO(text))
        if len(row) > 1
    }
    found = [
        known.get(PurePath(name).as_posix()) or known.get(PurePath(name).name)
        for name in split.files
    ]
    lacking = [name for name, caption in zip(split.files, found) if not caption]
    if lacking:
        raise DataError(
            f"expected a caption of every image in {file}, found none of {len(lacking)} images "
            f"(first {lacking[0]!r}); "
            "add a line FILE,CAPTION for each"
        )
    return Captions(split, tuple(caption for caption in found if caption))
