"""Captions of images, generated for embedded scenes or read from a folder's captions.csv.

A generated caption names the class and, half of the time, the place and size of the object: "an
image of a small star at the top left". It depends only on the image's number and the epoch. Some
wordings are held out: no generated caption has them.
"""

from dataclasses import dataclass
from io import StringIO
from pathlib import Path, PurePath
from typing import Final

from torch import Tensor

from vitlens.data import draws
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError, by_caller
from vitlens.files import csv_rows, read_csv_text

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
PROMPTS: Final = (*WORDINGS[:3], *HELD_OUT)  # for zero-shot classification
CAPTIONS_FILE: Final = "captions.csv"
_LARGEST: Final = 1 << 28  # most bytes of that file
# an object that is further from the middle, as a fraction of the canvas, is at a side
_OFF_CENTRE: Final = 1 / 16
# an object is small or large from this difference to the mean size on, as a fraction of the range
_OFF_SIZE: Final = 1 / 6
_DETAILED: Final = 0.5  # share of the captions with size and place
_STREAM: Final = 20  # of random numbers, different from those of the scenes


def with_name(wording: str, name: str) -> str:
    """Return the wording with {} replaced by a name. Raises InputError for one without {}."""
    if "{}" not in wording:
        raise InputError(
            f"expected {{}} in a wording for the class, found {wording!r}; e.g. {WORDINGS[0]!r}"
        )
    return wording.replace("{}", name)


@dataclass(frozen=True, eq=False)
class Captions:
    """The captions of a split's images.

    split: the images.
    written: one caption for each image, or None for generated ones.
    """

    split: Split
    written: tuple[str, ...] | None = None

    def __call__(self, keys: Tensor, epoch: int) -> list[str]:
        """Return the captions of some images in an epoch (from 0).

        keys: the keys of the images: the index of each in the split, plus the length of the split
            for each further view of it (see training/feed.py).
        """
        indices = keys.cpu() % len(self.split)
        if self.written is not None:
            return [self.written[index] for index in indices.tolist()]
        drawn_split = self.split.epoch(epoch).pick(indices)
        places = drawn_split.drawn_places
        assert drawn_split.labels is not None
        assert places is not None
        # by the image's number in the whole data set: it has the same caption in every subset
        image_numbers = self.split.subset.indices[indices]
        numbers = draws.uniform(draws.keys(epoch, image_numbers), 2, stream=_STREAM)
        wording_indices = (numbers[:, 0] * len(WORDINGS)).long()
        is_detailed = numbers[:, 1] < _DETAILED
        captions = []
        for row, label in enumerate(drawn_split.labels.tolist()):
            text = drawn_split.classes[label]
            if is_detailed[row]:
                size, across, down = places[row].tolist()
                text = _with_details(text, size, across, down)
            captions.append(with_name(WORDINGS[int(wording_indices[row])], text))
        return captions

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Return texts with every word of the captions; one of them is as long as any caption."""
        if self.written is not None:
            return self.written
        names = []
        for name in self.split.classes:
            names.append(_with_details(name, size=0, across=0, down=0))
            names.append(_with_details(name, size=1, across=1, down=1))
        return tuple(with_name(wording, name) for wording in WORDINGS for name in names)


def _with_details(name: str, size: float, across: float, down: float) -> str:
    """Return a name with its size and place; values near the middle are not mentioned.

    size, across, down: numbers in [0, 1], 0 for small, left and top.
    """

    def choose(value: float, *, margin: float, low: str, high: str) -> str:
        if value < 0.5 - margin:
            return low
        if value > 0.5 + margin:
            return high
        return ""

    size_word = choose(size, margin=_OFF_SIZE, low="small", high="large")
    vertical = choose(down, margin=_OFF_CENTRE, low="top", high="bottom")
    horizontal = choose(across, margin=_OFF_CENTRE, low="left", high="right")
    text = f"{size_word} {name}" if size_word else name
    place = f"{vertical} {horizontal}".strip()
    return f"{text} at the {place}" if place else text


def captions_of(split: Split) -> Captions:
    """Return the captions of a split: generated for scenes, else from its folder's captions.csv.

    The first column of the file has the images' names, with or without their folders, the second
    their captions. Raises DataError for a split without captions or an image without one.
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
    text = read_csv_text(file, _LARGEST, what="captions", error=DataError)
    caption_of_file: dict[str, str] = {}
    for row in csv_rows(StringIO(text), file, error=DataError):
        if len(row) > 1:
            caption_of_file[PurePath(row[0].strip()).as_posix()] = row[1].strip()
    captions = []
    without_caption = []
    for name in split.files:
        path = PurePath(name)
        caption = caption_of_file.get(path.as_posix()) or caption_of_file.get(path.name)
        if caption:
            captions.append(caption)
        else:
            without_caption.append(name)
    if without_caption:
        raise DataError(
            f"expected a caption of every image in {file}, found none of {len(without_caption)} "
            f"images (first {without_caption[0]!r}); add a line FILE,CAPTION for each"
        )
    return Captions(split, tuple(captions))
