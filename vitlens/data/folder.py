"""Folders of images: one folder per class, with or without parts, Tiny ImageNet's, or images without labels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

import torch

from vitlens.data.decode import READ_SUFFIXES, load_files
from vitlens.data.other_data import describe_other_data
from vitlens.data.parts import (
    find_parts,
    is_of_images,
    is_unlabelled,
    labelled_folders,
    listed,
    require_classes,
    unwrapped,
)
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split, hold_out
from vitlens.data.walk import class_folders, folders_of_others, images_below, images_in
from vitlens.errors import DataError, in_one_line
from vitlens.names import Part, are_imagenet, imagenet_classes, imagenet_indices, plain_name

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
    """Return one part of a folder; see list_folder for its parts, classes and labels."""
    return read_listing(list_folder(request.path, part=request.part, seed=request.seed, whole=request.whole), request)


def read_listing(listing: Listing, request: DataRequest) -> Split:
    """Return the images of a listing of files in a folder, in its order, without those that cannot be read.

    Raises DataError where none can be read.
    """
    root = request.path
    split = load_files(listing.paths, request.preprocessing, progress=request.progress)
    labels = dict(zip(map(str, listing.paths), listing.labels))
    files = split.files or ()
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
    """Return the image files of a part.

    train/ and test/ (or val/) are the parts, by the usual names in any case, where they hold class folders. With a
    training part alone, or class folders at the top, a seeded fifth of each class is held out for test; `whole` returns
    all images instead (for a model that was not trained on them). Images at the top have no labels and no parts. Class
    folders that are all wnids of ImageNet get its names. Raises DataError for folders that are no classes.
    """
    if not root.is_dir():
        raise DataError(f"expected a folder of images, found no folder {str(root)!r}")
    top = unwrapped(root)
    wrapping = (*_beside(root), f"the folders of {top.relative_to(root)}/ are used") if top != root else ()
    parts = find_parts(top)
    used = [part for part in (parts.train, parts.test) if part is not None]
    searched = [part.parent for part in used if part.parent != top] if used else [root, top]
    wrapping = (*wrapping, *_without_labels(searched))
    if parts.test is not None and parts.train is None and part == "train":
        raise DataError(f"expected train/ in {top}, found {parts.test.relative_to(top)}/ alone; it is for evaluation")
    if parts.test is not None:
        chosen = parts.train if parts.train is not None and part == "train" else parts.test
        listing = _list_classes(chosen, used)
        return replace(listing, notes=(*wrapping, *parts.notes, *listing.notes))
    folder = parts.train or top
    children = labelled_folders(folder)
    if not children:
        return Listing(list_top(root))
    if is_of_images(children) and not images_in(folder):
        return Listing(list_top(children[0]), notes=wrapping)
    listing = list_classes(folder, part=part, seed=seed, whole=whole)
    return replace(listing, notes=(*wrapping, *parts.notes, *listing.notes))


def list_classes(folder: Path, *, part: Part, seed: int, whole: bool) -> Listing:
    """Return the images of a part of the class folders in a folder, of which a seeded fifth is held out for test."""
    every = _list_classes(folder, [folder])
    held, notes = hold_out(torch.tensor(every.labels), part, seed=seed, whole=whole)
    paths = tuple(every.paths[index] for index in held.tolist())
    labels = tuple(every.labels[index] for index in held.tolist())
    return Listing(paths, labels, every.classes, (*every.notes, *notes))


def list_images(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Image files: those given, and all images in the folders given. Raises DataError for none."""
    images: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"expected an image or a folder of images, found nothing at {str(path)!r}")
        images += (list(images_below(path)) or _none(path)) if path.is_dir() else [path]
    return tuple(images)


def list_top(folder: Path) -> tuple[Path, ...]:
    """Return the images of a folder that are in no other folder. Raises DataError for none."""
    return tuple(images_in(folder)) or _none(folder)


def _list_classes(folder: Path, parts: Sequence[Path]) -> Listing:
    """Return the images of the class folders in `folder`; the classes are those of all parts together, by name."""
    for each in parts:
        require_classes(each)
    spelling = _spelling(parts)
    names = sorted(set(spelling.values()))
    labelled = []
    for child in labelled_folders(folder):
        labelled += [(spelling[child.name], path) for path in images_below(child)]
    if not labelled:
        _none(folder)
    labelled.sort(key=lambda pair: pair[0])  # stable: the images of a class stay in order
    classes = tuple(names)
    if are_imagenet(names):
        classes = tuple(imagenet_classes()[imagenet_indices()[name]] for name in names)
    indices = {name: index for index, name in enumerate(names)}
    notes = _beside(folder)
    others = [child.name for child in folders_of_others(folder)]
    if others:
        notes = (*notes, f"not used, as without images: {listed(others)}")
    return Listing(tuple(path for _, path in labelled), tuple(indices[name] for name, _ in labelled), classes, notes)


def _without_labels(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return a note about the folders in some folders that are called unlabeled and not used."""
    names: list[str] = []
    for folder in dict.fromkeys(folders):
        used = labelled_folders(folder)
        names += [child.name for child in class_folders(folder) if child not in used]
    return (f"not used, as without labels: {listed(names)}",) if names else ()


def _beside(folder: Path) -> tuple[str, ...]:
    loose = len(images_in(folder))
    images = "image" if loose == 1 else "images"
    return (f"{loose} {images} beside the class folders of {folder.name}/ left out",) if loose else ()


def _spelling(parts: Sequence[Path]) -> dict[str, str]:
    """Return the class of each folder by its name: parts that write a class in another way share it."""
    names = [[child.name for child in labelled_folders(part)] for part in parts]
    distinct = all(len({plain_name(name) for name in each}) == len(each) for each in names)
    spelling: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in (name for each in names for name in each):
        spelling[name] = first.setdefault(plain_name(name), name) if distinct else name
    return spelling


def holds_classes(root: Path) -> bool:
    """Return True where a folder holds class folders or parts with some, and no images beside these."""
    return not images_in(root) and bool(class_folders(root)) and not is_unlabelled(root)


def has_test(root: Path) -> bool:
    """Return True where a folder has a part for test."""
    return find_parts(root).test is not None


def _none(folder: Path) -> NoReturn:
    hint = describe_other_data(folder)
    if hint:
        raise DataError(f"expected images in {folder}, found {hint}")
    raise DataError(f"expected images ({', '.join(sorted(READ_SUFFIXES))}) in {folder}, found none")


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
    folders = class_folders(root / "train") if (root / "train").is_dir() else []
    train = [folder.name for folder in folders if _WNID.fullmatch(folder.name)]
    if request.part == "train":
        if not train:
            raise DataError(f"expected train/<wnid>/images/ in {root} to train on, found none")
        labelled = [(path, wnid) for wnid in train for path in images_below(root / "train" / wnid)]
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
    paths = tuple(path for path, _ in labelled)
    labels = tuple(number[wnid] for _, wnid in labelled)
    return read_listing(Listing(paths, labels, tuple(classes), (note,)), request)


def _table(file: Path, wnid: int | None = None) -> list[list[str]]:
    """Return the lines of a text file that are not empty, divided at tabs; none where there is no file.

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
