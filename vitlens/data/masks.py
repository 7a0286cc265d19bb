"""A folder of images with masks or boxes of their objects, for the localisation of attribution
maps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlens.data.decode import (
    READ_SUFFIXES,
    TURNS,
    Header,
    UnreadableError,
    displayed_size,
    fit,
    open_image,
    probe,
    quiet_pillow,
    stored_size,
)
from vitlens.data.folder import Listing, has_test, list_classes, read_listing
from vitlens.data.mask_values import read_mask
from vitlens.data.other_data import images_alone
from vitlens.data.parts import role_of
from vitlens.data.registry import DataRequest
from vitlens.data.split import Skipped, Split
from vitlens.data.walk import class_folders, images_below, images_in
from vitlens.errors import DataError
from vitlens.files import read_json
from vitlens.names import imagenet_classes
from vitlens.preprocessing import Preprocessing
from vitlens.typed import between, read_as

_INDEX = "index.json"
_MASKS = "masks"
_BOXES = "annotations.json"
_WHOLE = "images have the model's size already and were taken whole, so that the masks fit"
_BOXED = "objects are given as boxes only: background inside a box counts as the object"
_COCO = 128 << 20  # bytes; COCO's validation part takes a sixth of it
_COCO_FORM = "write COCO's images and annotations with bbox, or put masks/ beside images/"
_INDEX_FORM = "give every image its file and imagenet_class, or take the index away"

_Id: TypeAlias = int | str
_Pixels: TypeAlias = Annotated[int, between(1, 1_000_000)]


@dataclass(frozen=True)
class Object:
    """One image's object before it is drawn.

    size: (height, width) in px of its mask; file: of the mask, or boxes: (x, y, width, height) in
    px; orientation: the EXIF orientation by which the mask is turned as its image is, 1 for none.
    """

    size: tuple[int, int]
    file: Path | None = None
    boxes: Sequence[tuple[float, float, float, float]] = ()
    orientation: int = 1

    def mask(self, preprocessing: Preprocessing) -> Tensor:
        """Return the mask (height, width), preprocessed as its image. Raises UnreadableError."""
        if self.file is None:
            inside = np.zeros(self.size, dtype=bool)
            for x, y, width, height in self.boxes:
                inside[
                    _centres(y, y + height, self.size[0]), _centres(x, x + width, self.size[1])
                ] = True
            if not inside.any():
                raise UnreadableError(
                    "expected a bbox of x, y, width and height in px, found "
                    f"{list(self.boxes[0])}, without a pixel"
                )
        else:
            with open_image(self.file) as image:
                inside = read_mask(image)
        drawn = Image.fromarray((255 * inside).astype(np.uint8)).convert("RGB")
        if self.orientation != 1:
            drawn = drawn.transpose(TURNS[self.orientation])
        black = None if preprocessing.fill is None else (0, 0, 0)  # a border is no object
        return fit(drawn, replace(preprocessing, fill=black))[0] > 127


def _centres(low: float, high: float, side: int) -> slice:
    """Return the pixels with their centres from low to high, in px."""
    return slice(*(min(max(ceil(end - 0.5), 0), side) for end in (low, high)))


@dataclass(frozen=True)
class _CocoImage:
    """An image in COCO's annotations."""

    id: _Id
    file_name: str
    height: _Pixels
    width: _Pixels


@dataclass(frozen=True)
class _CocoBox:
    """An annotation; bbox: x, y, width, height in px."""

    image_id: _Id
    bbox: tuple[float, float, float, float]


@dataclass(frozen=True)
class _Coco:
    """annotations.json, with the fields needed here."""

    images: tuple[_CocoImage, ...]
    annotations: tuple[_CocoBox, ...]


@dataclass(frozen=True)
class _Labelled:
    """An entry of index.json, a list."""

    file: str
    imagenet_class: Annotated[int, between(0, 999)]


def has_objects(root: Path) -> bool:
    """Return True for images/ with masks/ or with COCO's boxes (annotations.json) next to it, and
    for that masks/.
    """
    if root.name == _MASKS and root.parent != root and has_objects(root.parent):
        return True
    if not (root / "images").is_dir() or has_test(root):
        return False
    if images_in(root / "images"):
        return (root / _MASKS).is_dir() or (root / _BOXES).is_file()
    return (root / _MASKS).is_dir() and _are_in_classes(root)


def _are_in_classes(root: Path) -> bool:
    """Return True for images/<class>/ with masks/<class>/."""
    classes = {folder.name for folder in class_folders(root / "images")}
    masked = {folder.name for folder in class_folders(root / _MASKS)}
    return bool(classes & masked) and not any(role_of(name) for name in classes)


def load(request: DataRequest) -> Split:
    """Return the images of a folder with their masks, resized and cropped as the images are.

    The mask of images/NAME.* is masks/NAME.*, of two values, see `read_mask`; images/<class>/ with
    masks/<class>/ have labels, too, and a seeded fifth is held out for test, as of class folders.
    In a folder without masks/, it is the union of the image's boxes in annotations.json (COCO's
    format: images, annotations, bbox as x, y, width, height in px). A mask of the size that a
    turned photograph is stored in is turned with it. An image without a mask, or whose mask is
    damaged, of more than two values or of another size, is left out and listed in `skipped`. Where
    index.json has an `imagenet_class` for every image, these are the labels. Images that already
    have the model's size are not cropped. Raises DataError when no image has a mask, when one has
    two, and for damaged JSON.
    """
    root = request.path
    if root.name == _MASKS and not (root / "images").is_dir():
        raise DataError(
            f"expected images with masks/ next to them, found the masks; name {root.parent}"
        )
    images = root / "images"
    flat = images_in(images)
    if flat:
        classes = Listing(tuple(flat))
    else:
        classes = list_classes(images, part=request.part, seed=request.seed, whole=request.whole)
    paths = classes.paths
    preprocessing = request.preprocessing or stored_size(paths)
    boxed = not (root / _MASKS).is_dir()
    known = _boxes(root / _BOXES) if boxed else {}
    files = (
        {}
        if boxed
        else _mask_files(root / _MASKS, {_stem(path, images) for path in paths}, deep=not flat)
    )
    objects: dict[Path, Object] = {}
    masks: dict[str, Tensor] = {}
    reasons: dict[Path, str] = {}
    with quiet_pillow():
        headers = probe(paths)
        for path, header in zip(paths, headers):
            try:
                objects[path] = _fitting(
                    header, known.get(path.name), files.get(_stem(path, images)), boxed=boxed
                )
            except UnreadableError as why:
                reasons[path] = str(why)
        sizes = {
            header.size
            for path, header in zip(paths, headers)
            if path in objects and isinstance(header, Header)
        }
        whole = preprocessing.is_cropped and sizes == {preprocessing.size}
        preprocessing = preprocessing.at_size(preprocessing.size) if whole else preprocessing
        for path, each in objects.items():
            try:
                masks[_name(path, images)] = each.mask(preprocessing)
            except UnreadableError as why:
                reasons[path] = str(why) if boxed else _damaged(why)
        turned = _unclear_turns(
            [(path, header) for path, header in zip(paths, headers) if path not in reasons]
        )
    skipped = tuple(
        Skipped(_name(path, images), reasons[path]) for path in paths if path in reasons
    )
    if not masks:
        raise DataError(
            f"expected a mask or a box of the name and size of each image in {root}, found none "
            f"({skipped[0].file}: {skipped[0].reason}); try {images_alone(images)} to do without"
        )
    kept = [index for index, path in enumerate(paths) if path not in reasons]
    listing = replace(
        classes,
        paths=tuple(paths[index] for index in kept),
        labels=tuple(classes.labels[index] for index in kept) if classes.labels else (),
    )
    split = read_listing(listing, replace(request, preprocessing=preprocessing))
    names = tuple(_name(root / file, images) for file in split.files or ())
    labels = _labels(root / _INDEX, names)
    if labels is not None:
        split = replace(split, classes=imagenet_classes(), labels=labels)
    return replace(
        split,
        masks=torch.stack([masks[name] for name in names]),
        files=names,
        skipped=skipped + split.skipped,
        notes=split.notes + _notes(whole=whole, boxed=boxed, turned=turned),
    )


def _name(path: Path, images: Path) -> str:
    """Return an image's name below images/, with its class folder where there is one."""
    return path.relative_to(images).as_posix()


def _stem(path: Path, folder: Path) -> str:
    """Return a file's name below a folder, without its suffix: the same for an image and its
    mask."""
    return path.relative_to(folder).with_suffix("").as_posix()


def _mask_files(folder: Path, stems: Collection[str], *, deep: bool) -> dict[str, Path]:
    """Return the masks of images by their names without suffix; deep: those in folders, too.

    Raises DataError where an image has two.
    """
    listed = images_below(folder) if deep else sorted(folder.iterdir())
    files: dict[str, Path] = {}
    for file in listed:
        if file.suffix.lower() not in READ_SUFFIXES:
            continue
        stem = _stem(file, folder)
        if stem in files and stem in stems:
            first, second = (
                path.relative_to(folder.parent).as_posix() for path in (files[stem], file)
            )
            raise DataError(
                f"expected one mask an image in {folder}, found {first} and {second}; move one away"
            )
        files[stem] = file
    return files


def _notes(*, whole: bool, boxed: bool, turned: int) -> tuple[str, ...]:
    notes = []
    if whole:
        notes.append(_WHOLE)
    if boxed:
        notes.append(_BOXED)
    if turned:
        notes.append(
            f"{turned} photographs are turned by their EXIF block, and their size does not show "
            "whether the masks are, too: the masks are taken as drawn on the photographs as "
            "displayed"
        )
    return tuple(notes)


def _unclear_turns(used: Sequence[tuple[Path, Header | UnreadableError]]) -> int:
    """Return the number of turned images whose size is the same before and after the turn."""
    headers = [header for _, header in used if isinstance(header, Header)]
    return sum(header.orientation != 1 and header.size == header.stored_size for header in headers)


def _fitting(
    header: Header | UnreadableError, known: Object | None, file: Path | None, *, boxed: bool
) -> Object:
    """Return the object of an image, whose mask is of the image's size. Raises UnreadableError with
    the reason.
    """
    if isinstance(header, UnreadableError):
        raise header
    if file is not None:
        try:
            with open_image(file) as image:
                known = Object(displayed_size(image), file)
        except UnreadableError as why:
            raise UnreadableError(_damaged(why)) from why
    if known is None:
        where = f"box in {_BOXES}" if boxed else "readable mask of the same name in masks/ itself"
        raise UnreadableError(f"expected a {where}, found none")
    if known.size == header.size:
        return known
    if known.size == header.stored_size:  # drawn on the pixels as they are stored, without the turn
        return replace(known, orientation=header.orientation)
    sizes = (f"{width}x{height}" for height, width in (header.size, known.size))
    raise UnreadableError("expected a mask of {} px, found {}".format(*sizes))


def _damaged(why: UnreadableError) -> str:
    return f"of its mask: {why}"


def _boxes(file: Path) -> Mapping[str, Object]:
    """Return the boxes of every image that has some, by the image's file name. Raises DataError for
    another format.
    """
    content = read_json(file, size=_COCO, error=DataError, hint=_COCO_FORM)
    coco = read_as(_Coco, content, source=str(file), error=DataError, hint=_COCO_FORM)
    by_image: dict[_Id, list[tuple[float, float, float, float]]] = {}
    for row in coco.annotations:
        by_image.setdefault(row.image_id, []).append(row.bbox)
    return {
        Path(row.file_name).name: Object((row.height, row.width), boxes=by_image[row.id])
        for row in coco.images
        if row.id in by_image
    }


def _labels(index: Path, names: Sequence[str]) -> Tensor | None:
    """Return the ImageNet class of each image, where index.json has it for all of them, else None.

    Without any imagenet_class, index.json is ignored. Raises DataError for a damaged file.
    """
    entries = read_json(index, error=DataError, hint=_INDEX_FORM) if index.is_file() else None
    if not isinstance(entries, list) or not any(
        isinstance(row, dict) and "imagenet_class" in row for row in entries
    ):
        return None
    known = read_as(
        tuple[_Labelled, ...], entries, source=str(index), error=DataError, hint=_INDEX_FORM
    )
    classes = {each.file: each.imagenet_class for each in known}
    labels = [classes.get(name, -1) for name in names]
    return torch.tensor(labels) if min(labels) >= 0 else None
