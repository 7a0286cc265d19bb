"""Folders of images: one folder per class, with or without parts, or images without labels."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitlens.data.decode import SUFFIXES, Header
from vitlens.data.holdout import describe_hold_out, hold_out
from vitlens.data.masks import has_objects, load_masked_folder
from vitlens.data.reading import MEMORY_LIMIT, Progress, load_files, probe
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split
from vitlens.errors import DataError
from vitlens.labels import are_imagenet, imagenet_classes, imagenet_indices
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing

TRAIN_FOLDERS = ("train", "training")
TEST_FOLDERS = ("test", "val", "valid", "validation")  # the first that exists
MANY = 100_000  # other files and folders, after which a folder is refused as not one of images
UNSTATED = Preprocessing(size=(224, 224), resize=256)  # for images of different sizes without a model


@dataclass(frozen=True)
class Listing:
    """Image files, sorted, before any is opened; labels and classes are empty for images without labels."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def is_folder(path: Path) -> bool:
    """Whether a path is a folder."""
    return path.is_dir() and path.suffix.lower() != ".npz"


def load(request: DataRequest) -> Split:
    """The requested part."""
    return load_folder(
        request.path,
        part=request.part,
        preprocessing=request.preprocessing,
        seed=request.seed,
        whole=request.whole,
        progress=request.progress,
    )


def load_folder(
    root: Path,
    *,
    part: Part,
    preprocessing: Preprocessing | None = None,
    seed: int = 0,
    whole: bool = False,
    memory: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> Split:
    """One part of a folder; see list_folder for its parts, classes and labels.

    preprocessing: None keeps the size that all images share, else 224x224. Images with masks/ or COCO's boxes are
    loaded with their masks (see load_masked_folder). Raises DataError for a folder without readable images.
    """
    listing = list_folder(root, part=part, seed=seed, whole=whole)
    if root / "images" == listing.paths[0].parent and has_objects(root):
        preprocessing = preprocessing or _stored_size(listing.paths)
        return load_masked_folder(
            root, listing.paths, part=part, preprocessing=preprocessing, memory=memory, progress=progress
        )
    split = load_listing(listing, part=part, preprocessing=preprocessing, memory=memory, progress=progress)
    title = root.resolve().name
    return replace(split, name=str(root), title=title, files=_relative(split.files or (), root))


def load_listing(
    listing: Listing,
    *,
    part: Part,
    preprocessing: Preprocessing | None = None,
    memory: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> Split:
    """The images of a listing, in its order, without those that cannot be read."""
    preprocessing = preprocessing or _stored_size(listing.paths)
    loaded = load_files(listing.paths, preprocessing, memory=memory, progress=progress)
    return Split(
        name="images",
        title="images",
        part=part,
        source=loaded.source,
        size=preprocessing.size,
        classes=listing.classes,
        labels=torch.tensor([listing.labels[index] for index in loaded.readable]) if listing.labels else None,
        files=tuple(str(listing.paths[index]) for index in loaded.readable),
        skipped=loaded.skipped,
        notes=listing.notes + loaded.notes,
    )


def list_folder(root: Path, *, part: Part, seed: int = 0, whole: bool = False) -> Listing:
    """The image files of a part.

    train/ and test/ (or val/) are the parts. With train/ alone, or class folders at the top, a seeded fifth of each
    class is held out for test; `whole` returns all images instead (for a model that was not trained on them). Images at
    the top, or in images/ beside masks/ or COCO's boxes, have no labels and no parts. Class folders that are all wnids
    of ImageNet get its indices and names.
    """
    if not root.is_dir():
        raise DataError(f"expected a folder of images, found no folder {str(root)!r}")
    train, test = _inside(root, TRAIN_FOLDERS), _inside(root, TEST_FOLDERS)
    if train and test:
        return _list_classes(train if part == "train" else test, (train, test))
    if test:
        if part == "train":
            raise DataError(f"expected train/ in {root}, found {test.name}/ alone; it is for evaluation")
        return _list_classes(test, (test,))
    if has_objects(root):
        return _list_unlabelled(root / "images")
    top = train or root
    listing = _list_classes(top, (top,)) if _class_folders(top) else _list_unlabelled(root)
    if not listing.labels or whole:
        return listing
    chosen = hold_out(torch.tensor(listing.labels), part, seed=seed).tolist()
    held_out = () if len(chosen) == len(listing.paths) else (describe_hold_out(seed),)
    return replace(
        listing,
        paths=tuple(listing.paths[index] for index in chosen),
        labels=tuple(listing.labels[index] for index in chosen),
        notes=listing.notes + held_out,
    )


def list_images(paths: Sequence[Path]) -> Listing:
    """Images without labels: files as given, and all images in the folders given. Raises DataError for none."""
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = list(_images_below(path))
            if not below:
                raise DataError(_no_images(path))
            images += below
        elif path.exists():
            images.append(path)
        else:
            raise DataError(f"expected an image or a folder of images, found nothing at {str(path)!r}")
    return Listing(tuple(images))


def _list_classes(folder: Path, parts: Sequence[Path]) -> Listing:
    """The images of the class folders in `folder`; the classes are those of all parts together, by name."""
    names = sorted({child.name for part in parts for child in _class_folders(part)})
    paths = [(name, path) for name in names for path in _images_below(folder / name)]
    if not paths:
        raise DataError(_no_images(folder))
    indices, classes = {name: index for index, name in enumerate(names)}, tuple(names)
    if are_imagenet(names):
        indices, classes = dict(imagenet_indices()), imagenet_classes()
    loose = sum(1 for child in folder.iterdir() if _is_image(child))
    notes = (f"{loose} images beside the class folders of {folder.name}/ were left out",) if loose else ()
    return Listing(tuple(path for _, path in paths), tuple(indices[name] for name, _ in paths), classes, notes)


def _list_unlabelled(root: Path) -> Listing:
    paths = sorted(child for child in root.iterdir() if _is_image(child))
    if not paths:
        raise DataError(_no_images(root))
    return Listing(tuple(paths))


def holds_classes(root: Path) -> bool:
    """Whether a folder holds class folders, parts, or images beside their masks, and no images beside these."""
    if any(_is_image(child) for child in root.iterdir()):
        return False
    return bool(_inside(root, TEST_FOLDERS) or has_objects(root) or _class_folders(root))


def _class_folders(folder: Path) -> list[Path]:
    """Folders with an image at any depth."""
    return [
        child
        for child in sorted(folder.iterdir())
        if child.is_dir() and not _hidden(child.name) and next(_images_below(child), None) is not None
    ]


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


def _stored_size(paths: Sequence[Path]) -> Preprocessing:
    sizes = {header.size for header in probe(paths) if isinstance(header, Header)}
    return Preprocessing(size=sizes.pop()) if len(sizes) == 1 else UNSTATED


def _relative(files: Sequence[str], root: Path) -> tuple[str, ...]:
    return tuple(str(Path(file).relative_to(root)) for file in files)


def _no_images(folder: Path) -> str:
    return f"expected images ({', '.join(sorted(SUFFIXES))}) in {folder}, found none"
