"""Tiny ImageNet as it is distributed: train/<wnid>/images/, val/images/ with val_annotations.txt, wnids.txt, words.txt.

Its test/ has no labels, so val/ is the test part here.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vitlens.data.folder import Listing, list_images, load_listing
from vitlens.data.reading import Progress
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.labels import imagenet_classes, imagenet_indices
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing

ANNOTATIONS = "val_annotations.txt"
_WNID = re.compile(r"n\d{8}")


def is_tiny_imagenet(root: Path) -> bool:
    """Whether a folder has val/images/ and beside it the file with their labels."""
    return (root / "val" / ANNOTATIONS).is_file() and (root / "val" / "images").is_dir()


def load(request: DataRequest) -> Split:
    """The requested part."""
    return load_tiny_imagenet(
        request.path, part=request.part, preprocessing=request.preprocessing, progress=request.progress
    )


def load_tiny_imagenet(
    root: Path, *, part: Part, preprocessing: Preprocessing | None = None, progress: Progress | None = None
) -> Split:
    """train/ or, for the test part, val/; see list_tiny_imagenet. Raises DataError."""
    listing = list_tiny_imagenet(root, part=part)
    split = load_listing(listing, part=part, preprocessing=preprocessing, progress=progress)
    files = tuple(str(Path(file).relative_to(root)) for file in split.files or ())
    return replace(split, name=str(root), title=root.resolve().name, files=files)


def list_tiny_imagenet(root: Path, *, part: Part) -> Listing:
    """The image files of a part. The classes are those of wnids.txt, train/ and val_annotations.txt together, in order
    of wnid; their names are the first words in words.txt, else ImageNet's names, else the wnids.

    Raises DataError for lines of another form, and where a part has no images.
    """
    annotated = _annotations(root / "val" / ANNOTATIONS)
    train = _train_folders(root / "train")
    wnids = sorted({*_wnids(root / "wnids.txt"), *train, *annotated.values()})
    if part == "train":
        if not train:
            raise DataError(f"expected train/<wnid>/images/ in {root} to train on, found none")
        labelled = [(path, wnid) for wnid in train for path in list_images([root / "train" / wnid]).paths]
        note = "train/ is used; val/ is the test part"
    else:
        files = list_images([root / "val" / "images"]).paths
        labelled = [(path, annotated[path.name]) for path in files if path.name in annotated]
        if not labelled:
            raise DataError(f"expected the images of {root}/val/images in {ANNOTATIONS}, found none of {len(files)}")
        lost = len(files) - len(labelled)
        left_out = f"; {lost} images without a line in {ANNOTATIONS} were left out" if lost else ""
        note = f"val/ is used as the test part, with the labels of {ANNOTATIONS}; test/ has no labels{left_out}"
    number = {wnid: index for index, wnid in enumerate(wnids)}
    paths, labels = tuple(path for path, _ in labelled), tuple(number[wnid] for _, wnid in labelled)
    return Listing(paths, labels, _named(wnids, _words(root / "words.txt")), (note,))


def _train_folders(train: Path) -> list[str]:
    """The class folders with an image: those whose names are wnids."""
    if not train.is_dir():
        return []
    folders = sorted(child for child in train.iterdir() if child.is_dir() and _WNID.fullmatch(child.name))
    return [folder.name for folder in folders if _has_images(folder)]


def _has_images(folder: Path) -> bool:
    try:
        return bool(list_images([folder]).paths)
    except DataError:
        return False


def _annotations(file: Path) -> Mapping[str, str]:
    """The wnid of each image of val/, by its file name: a line is file, wnid and a box, separated by tabs."""
    wnids = {}
    for number, line in enumerate(_lines(file), start=1):
        fields = line.split("\t")
        if len(fields) < 2 or not _WNID.fullmatch(fields[1].strip()):
            raise DataError(f"expected FILE, tab, WNID in line {number} of {file}, found {line[:60]!r}")
        wnids[fields[0].strip()] = fields[1].strip()
    return wnids


def _wnids(file: Path) -> list[str]:
    wnids = [line.strip() for line in _lines(file)] if file.is_file() else []
    wrong = [wnid for wnid in wnids if not _WNID.fullmatch(wnid)]
    if wrong:
        raise DataError(f"expected one wnid (n01440764) a line in {file}, found {wrong[0][:60]!r}")
    return wnids


def _words(file: Path) -> Mapping[str, str]:
    """The first word of each wnid: a line is wnid, tab, words separated by commas. Other lines are ignored."""
    pairs = (line.partition("\t") for line in _lines(file)) if file.is_file() else ()
    return {wnid.strip(): words.split(",")[0].strip() for wnid, _, words in pairs if words.strip()}


def _named(wnids: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """A name for each wnid; equal names are followed by their wnids."""
    known = {wnid: imagenet_classes()[index] for wnid, index in imagenet_indices().items()}
    names = [words.get(wnid) or known.get(wnid, wnid) for wnid in wnids]
    times = Counter(names)
    return tuple(name if times[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids))


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"expected a text file at {file}, found: {error}") from error
