"""Folders of images: one folder per class, with or without parts, Tiny ImageNet's, or images without labels."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

import torch

from vitlens.data.decode import SUFFIXES, load_files
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split, hold_out
from vitlens.errors import DataError, in_one_line
from vitlens.names import Part, are_imagenet, imagenet_classes, imagenet_indices

_TRAIN: Final = ("train", "training")
_TEST: Final = ("test", "val", "valid", "validation")  # the first that exists
MANY = 100_000  # other files and folders, after which a folder is refused as not one of images
_ANNOTATIONS: Final = "val_annotations.txt"  # of Tiny ImageNet
_WNID: Final = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Listing:
    """Image files, sorted, before any is opened; labels and classes are empty for images without labels."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(request: DataRequest) -> Split:
    """One part of a folder; see list_folder for its parts, classes and labels."""
    return read_listing(list_folder(request.path, part=request.part, seed=request.seed, whole=request.whole), request)


def read_listing(listing: Listing, request: DataRequest) -> Split:
    """The images of a listing of files in a folder, in its order, without those that cannot be read.

    Raises DataError where none can be read.
    """
    root = request.path
    split = load_files(listing.paths, request.preprocessing, progress=request.progress)
    labels, files = dict(zip(map(str, listing.paths), listing.labels)), split.files or ()
    return replace(
        split,
        name=str(root),
        title=root.resolve().name,
        part=request.part,
        classes=listing.classes,
        labels=torch.tensor([labels[file] for file in files]) if labels else None,
        files=tuple(str(Path(file).relative_to(root)) for file in files),
        notes=listing.notes + split.notes,
    )


def list_folder(root: Path, *, part: Part, seed: int = 0, whole: bool = False) -> Listing:
    """The image files of a part.

    train/ and test/ (or val/) are the parts. With train/ alone, or class folders at the top, a seeded fifth of each
    class is held out for test; `whole` returns all images instead (for a model that was not trained on them). Images at
    the top have no labels and no parts. Class folders that are all wnids of ImageNet get its indices and names.
    """
    if not root.is_dir():
        raise DataError(f"expected a folder of images, found no folder {str(root)!r}")
    train, test = _inside(root, _TRAIN), _inside(root, _TEST)
    if test and not train and part == "train":
        raise DataError(f"expected train/ in {root}, found {test.name}/ alone; it is for evaluation")
    if test:
        return _list_classes(train if train and part == "train" else test, [train, test] if train else [test])
    top = train or root
    if not _class_folders(top):
        return Listing(list_top(root))
    every = _list_classes(top, [top])
    chosen, notes = hold_out(torch.tensor(every.labels), part, seed=seed, whole=whole)
    paths, labels = (tuple(each[index] for index in chosen.tolist()) for each in (every.paths, every.labels))
    return Listing(paths, labels, every.classes, every.notes + notes)


def list_images(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Image files: those given, and all images in the folders given. Raises DataError for none."""
    images: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"expected an image or a folder of images, found nothing at {str(path)!r}")
        images += (list(_images_below(path)) or _none(path)) if path.is_dir() else [path]
    return tuple(images)


def list_top(folder: Path) -> tuple[Path, ...]:
    """The images of a folder that are in no other folder. Raises DataError for none."""
    return tuple(sorted(child for child in folder.iterdir() if _is_image(child))) or _none(folder)


def _list_classes(folder: Path, parts: Sequence[Path]) -> Listing:
    """The images of the class folders in `folder`; the classes are those of all parts together, by name."""
    names = sorted({child.name for part in parts for child in _class_folders(part)})
    labelled = [(name, path) for name in names for path in _images_below(folder / name)] or _none(folder)
    indices, classes = {name: index for index, name in enumerate(names)}, tuple(names)
    if are_imagenet(names):
        indices, classes = dict(imagenet_indices()), imagenet_classes()
    loose = sum(1 for child in folder.iterdir() if _is_image(child))
    notes = (f"{loose} images beside the class folders of {folder.name}/ were left out",) if loose else ()
    return Listing(tuple(path for _, path in labelled), tuple(indices[name] for name, _ in labelled), classes, notes)


def holds_classes(root: Path) -> bool:
    """Whether a folder holds class folders or parts, and no images beside these."""
    if any(_is_image(child) for child in root.iterdir()):
        return False
    return has_test(root) or bool(_class_folders(root))


def has_test(root: Path) -> bool:
    """Whether a folder has a part for test."""
    return _inside(root, _TEST) is not None


def _class_folders(folder: Path) -> list[Path]:
    """Folders with an image at any depth."""
    children = (child for child in sorted(folder.iterdir()) if child.is_dir() and not _hidden(child.name))
    return [child for child in children if next(_images_below(child), None) is not None]


def _images_below(folder: Path) -> Iterator[Path]:
    """Images at any depth, sorted, without hidden files and folders.

    Raises DataError where only few of MANY files are images (a home folder, a whole disk).
    """
    images = others = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _hidden(name))
        for name in sorted(files):
            path = Path(place, name)
            if _is_image(path):
                images += 1
                yield path
            else:
                others += 1
        others += 1
        if others > MANY and others > 10 * images:
            raise DataError(
                f"expected a folder of images, found {images:,} images among the first {images + others:,} files and "
                f"folders of {folder}; name the folder that holds them"
            )


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not _hidden(path.name) and not path.is_dir()


def _hidden(name: str) -> bool:
    return name.startswith((".", "__"))


def _inside(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _none(folder: Path) -> NoReturn:
    raise DataError(f"expected images ({', '.join(sorted(SUFFIXES))}) in {folder}, found none")


def load_tiny_imagenet(request: DataRequest) -> Split:
    """Tiny ImageNet as it is distributed: train/<wnid>/images/, val/images/ with val_annotations.txt, wnids.txt and
    words.txt; its test/ has no labels, so val/ is the test part.

    The classes are those of wnids.txt, train/ and val_annotations.txt together, in order of wnid; their names are the
    first words in words.txt, else ImageNet's names, else the wnids. Raises DataError for lines of another form, and
    where a part has no images.
    """
    root = request.path
    annotated = {row[0]: row[1] for row in _table(root / "val" / _ANNOTATIONS, wnid=1)}
    listed = [row[0] for row in _table(root / "wnids.txt", wnid=0)]
    folders = _class_folders(root / "train") if (root / "train").is_dir() else []
    train = [folder.name for folder in folders if _WNID.fullmatch(folder.name)]
    if request.part == "train":
        if not train:
            raise DataError(f"expected train/<wnid>/images/ in {root} to train on, found none")
        labelled = [(path, wnid) for wnid in train for path in _images_below(root / "train" / wnid)]
        note = "train/ is used; val/ is the test part"
    else:
        files = list_images([root / "val" / "images"])
        labelled = [(path, annotated[path.name]) for path in files if path.name in annotated]
        if not labelled:
            raise DataError(f"expected the images of {root}/val/images in {_ANNOTATIONS}, found none of {len(files)}")
        lost = len(files) - len(labelled)
        left_out = f"; {lost} images without a line in {_ANNOTATIONS} were left out" if lost else ""
        note = f"val/ is used as the test part, with the labels of {_ANNOTATIONS}; test/ has no labels{left_out}"

    words = {row[0]: row[1].split(",")[0].strip() for row in _table(root / "words.txt") if len(row) > 1}
    imagenet = {wnid: imagenet_classes()[index] for wnid, index in imagenet_indices().items()}
    wnids = sorted({*listed, *train, *annotated.values()})
    names = [words.get(wnid) or imagenet.get(wnid, wnid) for wnid in wnids]
    classes = [name if names.count(name) == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids)]
    number = {wnid: index for index, wnid in enumerate(wnids)}
    paths, labels = tuple(path for path, _ in labelled), tuple(number[wnid] for _, wnid in labelled)
    return read_listing(Listing(paths, labels, tuple(classes), (note,)), request)


def _table(file: Path, wnid: int | None = None) -> list[list[str]]:
    """The lines of a text file that are not empty, divided at tabs; none where there is no file.

    wnid: the column that must be one. Raises DataError for a line of another form.
    """
    if not file.is_file():
        return []
    with in_one_line(f"a text file at {file}", "take another copy", DataError):
        lines = file.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("\t")] for line in lines if line.strip()]
    for number, row in enumerate(rows, start=1):
        if wnid is not None and not _WNID.fullmatch(row[wnid] if wnid < len(row) else ""):
            raise DataError(
                f"expected a wnid (n01440764) in column {wnid + 1}, after a tab each, in line {number} of {file}, "
                f"found {' '.join(row)[:60]!r}"
            )
    return rows
