"""Read folders of images: with class folders, with parts, Tiny ImageNet's, or without labels."""

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
    list_names,
    require_classes,
    unwrap_folder,
)
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split, hold_out
from vitlens.data.walk import (
    class_folders,
    folders_of_others,
    hidden_folders,
    images_below,
    images_in,
)
from vitlens.errors import DataError, in_one_line
from vitlens.names import Part, are_imagenet, imagenet_classes, imagenet_indices, plain_name

_ANNOTATIONS: Final = "val_annotations.txt"  # of Tiny ImageNet
_WNID: Final = re.compile(r"n\d{8}")


@dataclass(frozen=True)
class Listing:
    """Image files in order, before any is opened.

    paths: the files.
    labels: the label of each file, or () without labels.
    classes: the names of the classes, or () without labels.
    notes: notes for the report.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(request: DataRequest) -> Split:
    """Return one part of a folder; see list_folder for its parts, classes and labels."""
    listing = list_folder(request.path, part=request.part, seed=request.seed, whole=request.whole)
    return read_listing(listing, request)


def read_listing(listing: Listing, request: DataRequest) -> Split:
    """Return the readable images of a listing, in its order. Raises DataError for none."""
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
    folders. If there is only a training part, or if class folders are at the top, a seeded fifth of
    each class is held out for test. Images at the top have no labels and no parts. If all class
    folders are wnids of ImageNet, the classes get its names. Raises DataError for folders that are
    no classes.

    whole: return all images, without holding any out. It is for a model that was not trained on
        them.
    """
    if not root.is_dir():
        raise DataError(f"expected a folder of images, found no folder {str(root)!r}")
    top = unwrap_folder(root)
    parts = find_parts(top)
    notes = _notes_on_folders(root, top, parts)
    if parts.test is not None:
        listing = _list_part(top, parts, part)
        return replace(listing, notes=(*notes, *parts.notes, *listing.notes))
    folder = parts.train or top
    children = labelled_folders(folder)
    if not children:  # images without labels
        return Listing(list_top(root))
    if is_of_images(children) and not images_in(folder):  # images without labels, in images/
        return Listing(list_top(children[0]), notes=notes)
    listing = list_classes(folder, part=part, seed=seed, whole=whole)
    return replace(listing, notes=(*notes, *parts.notes, *listing.notes))


def _list_part(top: Path, parts: Parts, part: Part) -> Listing:
    """List the images of a part of a folder that has a part for test."""
    assert parts.test is not None
    if parts.train is None:
        if part == "train":
            raise DataError(
                f"expected train/ in {top}, found only {parts.test.relative_to(top)}/; it is for "
                "evaluation"
            )
        return _list_classes(parts.test, [parts.test])
    folder = parts.train if part == "train" else parts.test
    return _list_classes(folder, [parts.train, parts.test])


def _notes_on_folders(root: Path, top: Path, parts: Parts) -> tuple[str, ...]:
    """Return notes on a used folder below the root, and on unused folders without labels."""
    notes: list[str] = []
    if top != root:
        notes += [*_note_on_loose_images(root), f"the folders of {top.relative_to(root)}/ are used"]
    used = [folder for folder in (parts.train, parts.test) if folder is not None]
    searched = [root, top]
    if used:
        # the folders next to the used ones; those at the top are parts
        searched = [folder.parent for folder in used if folder.parent != top]
    return (*notes, *_note_on_unlabelled(searched))


def list_classes(folder: Path, *, part: Part, seed: int, whole: bool) -> Listing:
    """List the images of a part of class folders, of which a seeded fifth is held out for test."""
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
    """List image files, and all images in folders. Raises DataError for none."""
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
    """List the images of the class folders in `folder`; the classes are those of all parts."""
    for part in parts:
        require_classes(part)
    class_of_folder = _class_of_folder(parts)
    class_names = sorted(set(class_of_folder.values()))
    indices = {name: index for index, name in enumerate(class_names)}
    paths_by_label: dict[int, list[Path]] = {}
    for child in labelled_folders(folder):
        label = indices[class_of_folder[child.name]]
        paths_by_label.setdefault(label, []).extend(images_below(child))
    if not any(paths_by_label.values()):
        _refuse_empty(folder)
    paths: list[Path] = []
    labels: list[int] = []
    for label in sorted(paths_by_label):
        paths += paths_by_label[label]
        labels += [label] * len(paths_by_label[label])
    notes = _note_on_loose_images(folder)
    without_images = [child.name for child in folders_of_others(folder)]
    if without_images:
        notes = (*notes, f"not used, because they have no images: {list_names(without_images)}")
    hidden = [child.name for child in hidden_folders(folder)]
    if hidden:
        notes = (*notes, f"not used, because their names begin with a dot: {list_names(hidden)}")
    return Listing(tuple(paths), tuple(labels), readable_classes(class_names), notes)


def readable_classes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes, as ImageNet's names if all of them are its wnids."""
    if not are_imagenet(names):
        return tuple(names)
    return tuple(imagenet_classes()[imagenet_indices()[name]] for name in names)


def _note_on_unlabelled(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return a note on unused folders within these that are called unlabeled."""
    names: list[str] = []
    for folder in dict.fromkeys(folders):
        used = labelled_folders(folder)
        names += [child.name for child in class_folders(folder) if child not in used]
    return (f"not used, because they have no labels: {list_names(names)}",) if names else ()


def _note_on_loose_images(folder: Path) -> tuple[str, ...]:
    """Return a note on images next to class folders, which are not used."""
    count = len(images_in(folder))
    if not count:
        return ()
    images = "image" if count == 1 else "images"
    return (f"left out {count} {images} next to the class folders of {folder.name}/",)


def _class_of_folder(parts: Sequence[Path]) -> dict[str, str]:
    """Return the class of each folder by its name.

    Names that differ between parts only in their spelling are one class. If two names of one part
    differ only in their spelling, every name is a class.
    """
    names: list[str] = []
    merges_spellings = True
    for part in parts:
        part_names = [child.name for child in labelled_folders(part)]
        spellings = {plain_name(name) for name in part_names}
        if len(spellings) < len(part_names):
            merges_spellings = False
        names += part_names
    if not merges_spellings:
        return {name: name for name in names}
    first_spelling: dict[str, str] = {}
    class_of_folder = {}
    for name in names:
        class_of_folder[name] = first_spelling.setdefault(plain_name(name), name)
    return class_of_folder


def holds_classes(root: Path) -> bool:
    """Return True if a folder holds class folders, maybe within parts, and no images at the top."""
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
    and val_annotations.txt together, in order of wnid. Their names are the first words in
    words.txt; without these, ImageNet's names; without both, the wnids. Raises DataError for lines
    of another form, and for a part without images.
    """
    root = request.path
    wnid_of_file = {}
    for row in _read_table(root / "val" / _ANNOTATIONS, wnid_column=1):
        wnid_of_file[row[0]] = row[1]
    train_folders = class_folders(root / "train") if (root / "train").is_dir() else []
    train_wnids = [folder.name for folder in train_folders if _WNID.fullmatch(folder.name)]
    if request.part == "train":
        wnid_of_path = _tiny_training_images(root, train_wnids)
        note = "train/ is used; val/ is the test part"
    else:
        wnid_of_path, note = _tiny_validation_images(root, wnid_of_file)
    listed_wnids = [row[0] for row in _read_table(root / "wnids.txt", wnid_column=0)]
    wnids = sorted({*listed_wnids, *train_wnids, *wnid_of_file.values()})
    indices = {wnid: index for index, wnid in enumerate(wnids)}
    listing = Listing(
        paths=tuple(wnid_of_path),
        labels=tuple(indices[wnid] for wnid in wnid_of_path.values()),
        classes=_tiny_class_names(root, wnids),
        notes=(note,),
    )
    return read_listing(listing, request)


def _tiny_training_images(root: Path, wnids: Sequence[str]) -> dict[Path, str]:
    """Return the wnid of each file of train/."""
    if not wnids:
        raise DataError(f"expected train/<wnid>/images/ in {root} to train on, found none")
    wnid_of_path = {}
    for wnid in wnids:
        for path in images_below(root / "train" / wnid):
            wnid_of_path[path] = wnid
    return wnid_of_path


def _tiny_validation_images(
    root: Path, wnid_of_file: Mapping[str, str]
) -> tuple[dict[Path, str], str]:
    """Return the wnid of each annotated file of val/, and a note."""
    paths = list_images([root / "val" / "images"])
    wnid_of_path = {path: wnid_of_file[path.name] for path in paths if path.name in wnid_of_file}
    if not wnid_of_path:
        raise DataError(
            f"expected the images of {root}/val/images in {_ANNOTATIONS}, found none of "
            f"{len(paths)}"
        )
    note = f"val/ is used as the test part, with the labels of {_ANNOTATIONS}; test/ has no labels"
    left_out = len(paths) - len(wnid_of_path)
    if left_out:
        note = f"{note}; {left_out} images without a line in {_ANNOTATIONS} were left out"
    return wnid_of_path, note


def _tiny_class_names(root: Path, wnids: Sequence[str]) -> tuple[str, ...]:
    """Return a name for each wnid; names that occur twice carry their wnid."""
    words = {}
    for row in _read_table(root / "words.txt"):
        if len(row) > 1:
            words[row[0]] = row[1].split(",")[0].strip()
    imagenet = {wnid: imagenet_classes()[index] for wnid, index in imagenet_indices().items()}
    names = [words.get(wnid) or imagenet.get(wnid, wnid) for wnid in wnids]
    counts = Counter(names)
    classes = []
    for name, wnid in zip(names, wnids):
        classes.append(name if counts[name] == 1 else f"{name} ({wnid})")
    return tuple(classes)


def _read_table(file: Path, wnid_column: int | None = None) -> list[list[str]]:
    """Return the non-empty lines of a text file, divided at tabs, or [] if the file is missing.

    Raises DataError for a line without a wnid.

    wnid_column: the column that must hold a wnid; None allows any cells.
    """
    if not file.is_file():
        return []
    with in_one_line(f"a text file at {file}", "take another copy", DataError):
        lines = file.read_text(encoding="utf-8").splitlines()
    rows = []
    for line in lines:
        if line.strip():
            rows.append([cell.strip() for cell in line.split("\t")])
    if wnid_column is None:
        return rows
    for number, row in enumerate(rows, start=1):
        if wnid_column >= len(row) or not _WNID.fullmatch(row[wnid_column]):
            raise DataError(
                "expected columns separated by tabs, with a wnid (n01440764) in column "
                f"{wnid_column + 1}, in line {number} of {file}, found "
                f"{' '.join(row)[:60]!r}"
            )
    return rows
