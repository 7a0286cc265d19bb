"""Folders of images: one folder per class, with or without parts, Tiny ImageNet's, or images
without labels.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

import torch

from vitlens.data.decode import READ_SUFFIXES, load_files
from vitlens.data.other_data import describe_other_data
from vitlens.data.parts import (
    Parts,
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
    """Image files in order, before any is opened; labels and classes are empty for images without
    labels.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(request: DataRequest) -> Split:
    """Return one part of a folder; see list_folder for its parts, classes and labels."""
    return read_listing(
        list_folder(request.path, part=request.part, seed=request.seed, whole=request.whole),
        request,
    )


def read_listing(listing: Listing, request: DataRequest) -> Split:
    """Read the images of a listing of files in a folder, in its order, without those that cannot be
    read.

    Raises DataError if none can be read.
    """
    root = request.path
    split = load_files(listing.paths, request.preprocessing, progress=request.progress)
    files = split.files or ()
    labels = None
    if listing.labels:
        label_of_file = dict(zip(map(str, listing.paths), listing.labels))
        labels = torch.tensor([label_of_file[file] for file in files])
    return replace(
        split,
        name=str(root),
        title=root.resolve().name,
        part=request.part,
        classes=listing.classes,
        labels=labels,
        files=tuple(str(Path(file).relative_to(root)) for file in files),
        notes=listing.notes + split.notes,
    )


def list_folder(root: Path, *, part: Part, seed: int = 0, whole: bool = False) -> Listing:
    """List the image files of a part.

    train/ and test/ (or val/) are the parts, by the usual names in any case, if they hold class
    folders. With a training part only, or class folders at the top, a seeded fifth of each class is
    held out for test; `whole` returns all images instead (for a model that was not trained on
    them). Images at the top have no labels and no parts. Class folders that are all wnids of
    ImageNet get its names. Raises DataError for folders that are no classes.
    """
    if not root.is_dir():
        raise DataError(f"expected a folder of images, found no folder {str(root)!r}")
    top = unwrapped(root)
    parts = find_parts(top)
    notes = _notes_on_folders(root, top, parts)
    if parts.test is not None:
        listing = _list_part(top, parts, part)
        return replace(listing, notes=(*notes, *parts.notes, *listing.notes))
    folder = parts.train or top
    children = labelled_folders(folder)
    if not children:
        return Listing(list_top(root))
    if is_of_images(children) and not images_in(folder):
        return Listing(list_top(children[0]), notes=notes)
    listing = list_classes(folder, part=part, seed=seed, whole=whole)
    return replace(listing, notes=(*notes, *parts.notes, *listing.notes))


def _list_part(top: Path, parts: Parts, part: Part) -> Listing:
    """List the images of a part of a folder that has a part for test."""
    assert parts.test is not None
    if parts.train is None:
        if part == "train":
            raise DataError(
                f"expected train/ in {top}, found {parts.test.relative_to(top)}/ alone; it is for "
                "evaluation"
            )
        return _list_classes(parts.test, [parts.test])
    return _list_classes(parts.train if part == "train" else parts.test, [parts.train, parts.test])


def _notes_on_folders(root: Path, top: Path, parts: Parts) -> tuple[str, ...]:
    """Return notes about a folder within the folder that is used, and about folders without labels
    that are not.
    """
    notes: list[str] = []
    if top != root:
        notes += [*_note_on_loose_images(root), f"the folders of {top.relative_to(root)}/ are used"]
    used = [folder for folder in (parts.train, parts.test) if folder is not None]
    searched = [root, top]
    if used:
        searched = [folder.parent for folder in used if folder.parent != top]
    return (*notes, *_note_on_unlabelled(searched))


def list_classes(folder: Path, *, part: Part, seed: int, whole: bool) -> Listing:
    """List the images of a part of the class folders in a folder, of which a seeded fifth is held
    out for test.
    """
    listing = _list_classes(folder, [folder])
    chosen, notes = hold_out(torch.tensor(listing.labels), part, seed=seed, whole=whole)
    indices = chosen.tolist()
    return Listing(
        paths=tuple(listing.paths[index] for index in indices),
        labels=tuple(listing.labels[index] for index in indices),
        classes=listing.classes,
        notes=(*listing.notes, *notes),
    )


def list_images(paths: Sequence[Path]) -> tuple[Path, ...]:
    """List the given image files, and all images in the given folders. Raises DataError for
    none."""
    images: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(
                f"expected an image or a folder of images, found nothing at {str(path)!r}"
            )
        if path.is_dir():
            images += list(images_below(path)) or _refuse_empty(path)
        else:
            images.append(path)
    return tuple(images)


def list_top(folder: Path) -> tuple[Path, ...]:
    """List the images of a folder that are in no other folder. Raises DataError for none."""
    return tuple(images_in(folder)) or _refuse_empty(folder)


def _list_classes(folder: Path, parts: Sequence[Path]) -> Listing:
    """List the images of the class folders in `folder`; the classes are those of all parts
    together, by name.
    """
    for part in parts:
        require_classes(part)
    class_of_folder = _class_of_folder(parts)
    names = sorted(set(class_of_folder.values()))
    labelled = []
    for child in labelled_folders(folder):
        labelled += [(class_of_folder[child.name], path) for path in images_below(child)]
    if not labelled:
        _refuse_empty(folder)
    labelled.sort(key=lambda pair: pair[0])  # stable: the images of a class stay in order
    classes = tuple(names)
    if are_imagenet(names):
        classes = tuple(imagenet_classes()[imagenet_indices()[name]] for name in names)
    indices = {name: index for index, name in enumerate(names)}
    notes = _note_on_loose_images(folder)
    others = [child.name for child in folders_of_others(folder)]
    if others:
        notes = (*notes, f"not used, as without images: {listed(others)}")
    return Listing(
        paths=tuple(path for _, path in labelled),
        labels=tuple(indices[name] for name, _ in labelled),
        classes=classes,
        notes=notes,
    )


def _note_on_unlabelled(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return a note about folders within these that are called unlabeled and not used."""
    names: list[str] = []
    for folder in dict.fromkeys(folders):
        used = labelled_folders(folder)
        names += [child.name for child in class_folders(folder) if child not in used]
    return (f"not used, as without labels: {listed(names)}",) if names else ()


def _note_on_loose_images(folder: Path) -> tuple[str, ...]:
    """Return a note about images next to class folders, which are not used."""
    count = len(images_in(folder))
    if not count:
        return ()
    images = "image" if count == 1 else "images"
    return (f"{count} {images} next to the class folders of {folder.name}/ left out",)


def _class_of_folder(parts: Sequence[Path]) -> dict[str, str]:
    """Return the class of each folder by its name; names that differ only in spelling between parts
    are one class.
    """
    names_by_part = [[child.name for child in labelled_folders(part)] for part in parts]
    is_distinct = all(len(set(map(plain_name, names))) == len(names) for names in names_by_part)
    classes: dict[str, str] = {}
    first_spelling: dict[str, str] = {}
    for names in names_by_part:
        for name in names:
            classes[name] = (
                first_spelling.setdefault(plain_name(name), name) if is_distinct else name
            )
    return classes


def holds_classes(root: Path) -> bool:
    """Return True if a folder holds class folders, or parts with class folders, and no images next
    to these.
    """
    return not images_in(root) and bool(class_folders(root)) and not is_unlabelled(root)


def has_test(root: Path) -> bool:
    """Return True if a folder has a part for test."""
    return find_parts(root).test is not None


def _refuse_empty(folder: Path) -> NoReturn:
    hint = describe_other_data(folder)
    if hint:
        raise DataError(f"expected images in {folder}, found {hint}")
    raise DataError(f"expected images ({', '.join(sorted(READ_SUFFIXES))}) in {folder}, found none")


def load_tiny_imagenet(request: DataRequest) -> Split:
    """Return a part of Tiny ImageNet as it is distributed.

    It holds train/<wnid>/images/, val/images/ with val_annotations.txt, wnids.txt and words.txt.
    Its test/ has no labels, so val/ is the test part. The classes are those of wnids.txt, train/
    and val_annotations.txt together, in order of wnid; their names are the first words in
    words.txt, else ImageNet's names, else the wnids. Raises DataError for lines of another form,
    and for a part without images.
    """
    root = request.path
    annotated = {row[0]: row[1] for row in _table(root / "val" / _ANNOTATIONS, wnid=1)}
    folders = class_folders(root / "train") if (root / "train").is_dir() else []
    train = [folder.name for folder in folders if _WNID.fullmatch(folder.name)]
    if request.part == "train":
        labelled = _tiny_training_images(root, train)
        note = "train/ is used; val/ is the test part"
    else:
        labelled, note = _tiny_validation_images(root, annotated)
    in_list = [row[0] for row in _table(root / "wnids.txt", wnid=0)]
    wnids = sorted({*in_list, *train, *annotated.values()})
    indices = {wnid: index for index, wnid in enumerate(wnids)}
    listing = Listing(
        paths=tuple(path for path, _ in labelled),
        labels=tuple(indices[wnid] for _, wnid in labelled),
        classes=_tiny_class_names(root, wnids),
        notes=(note,),
    )
    return read_listing(listing, request)


def _tiny_training_images(root: Path, wnids: Sequence[str]) -> list[tuple[Path, str]]:
    """Return the files of train/ with their wnids."""
    if not wnids:
        raise DataError(f"expected train/<wnid>/images/ in {root} to train on, found none")
    labelled: list[tuple[Path, str]] = []
    for wnid in wnids:
        labelled += [(path, wnid) for path in images_below(root / "train" / wnid)]
    return labelled


def _tiny_validation_images(
    root: Path, annotated: Mapping[str, str]
) -> tuple[list[tuple[Path, str]], str]:
    """Return the files of val/ with their wnids, and a note. annotated: wnid by file name."""
    files = list_images([root / "val" / "images"])
    labelled = [(path, annotated[path.name]) for path in files if path.name in annotated]
    if not labelled:
        raise DataError(
            f"expected the images of {root}/val/images in {_ANNOTATIONS}, found none of "
            f"{len(files)}"
        )
    note = f"val/ is used as the test part, with the labels of {_ANNOTATIONS}; test/ has no labels"
    left_out = len(files) - len(labelled)
    if left_out:
        note = f"{note}; {left_out} images without a line in {_ANNOTATIONS} were left out"
    return labelled, note


def _tiny_class_names(root: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each wnid; names that occur twice carry their wnid."""
    words = {}
    for row in _table(root / "words.txt"):
        if len(row) > 1:
            words[row[0]] = row[1].split(",")[0].strip()
    imagenet = {wnid: imagenet_classes()[index] for wnid, index in imagenet_indices().items()}
    names = [words.get(wnid) or imagenet.get(wnid, wnid) for wnid in wnids]
    counts = Counter(names)
    classes = []
    for name, wnid in zip(names, wnids):
        classes.append(name if counts[name] == 1 else f"{name} ({wnid})")
    return tuple(classes)


def _table(file: Path, wnid: int | None = None) -> list[list[str]]:
    """Return the lines of a text file that are not empty, divided at tabs; nothing without a file.

    wnid: the column that must be one. Raises DataError for a line of another form.
    """
    if not file.is_file():
        return []
    with in_one_line(f"a text file at {file}", "take another copy", DataError):
        lines = file.read_text(encoding="utf-8").splitlines()
    rows = []
    for line in lines:
        if line.strip():
            rows.append([cell.strip() for cell in line.split("\t")])
    for number, row in enumerate(rows, start=1):
        if wnid is not None and not _WNID.fullmatch(row[wnid] if wnid < len(row) else ""):
            raise DataError(
                f"expected a wnid (n01440764) in column {wnid + 1}, after a tab each, in line "
                f"{number} of {file}, found {' '.join(row)[:60]!r}"
            )
    return rows
