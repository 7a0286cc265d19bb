"""Read folders of images with masks or boxes of objects, to localise attribution maps.

There are three layouts:

- images/NAME.* with masks/NAME.*: a mask of two values for each image (see `read_mask`).
- images/<class>/NAME.* with masks/<class>/NAME.*: the images have labels, too. As for class
  folders, a seeded fifth is held out for test.
- images/NAME.* with annotations.json, in COCO's format (images, annotations, bbox as x, y, width,
  height in px): the mask is the union of the image's boxes.

In the first and the last layout, index.json may give every image an `imagenet_class`. These are
then the labels.
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
from vitlens.data.mask_values import Inside, read_mask
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
_WHOLE = "images already have the model's size and were not cropped, so that the masks fit"
_BOXED = "objects are given as boxes only: background inside a box counts as the object"
_HALF = 127  # a resized pixel above this level is mostly object
_COCO_BYTES = 128 << 20  # most bytes; COCO's validation part takes a sixth of it
_COCO_FORM = "write COCO's images and annotations with bbox, or put masks/ next to images/"
_INDEX_FORM = "give every image its file and imagenet_class, or remove the index"

Box: TypeAlias = tuple[float, float, float, float]
_Id: TypeAlias = int | str
_Pixels: TypeAlias = Annotated[int, between(1, 1_000_000)]


@dataclass(frozen=True)
class Object:
    """The object of one image before it is drawn.

    size: the (height, width) of its mask in pixels.
    file: the file of the mask, or None for boxes.
    boxes: the boxes as (x, y, width, height) in pixels.
    orientation: the EXIF orientation by which the mask is rotated like its image; 1 means none.
    """

    size: tuple[int, int]
    file: Path | None = None
    boxes: Sequence[Box] = ()
    orientation: int = 1

    def mask(self, preprocessing: Preprocessing) -> Tensor:
        """Return the mask (height, width), preprocessed as its image. Raises UnreadableError."""
        if self.file is None:
            is_object = self._draw_boxes()
        else:
            with open_image(self.file) as image:
                is_object = read_mask(image)
        drawn = Image.fromarray((255 * is_object).astype(np.uint8)).convert("RGB")
        if self.orientation != 1:
            drawn = drawn.transpose(TURNS[self.orientation])
        if preprocessing.fill is not None:
            preprocessing = replace(preprocessing, fill=(0, 0, 0))  # a border is no object
        pixels = fit(drawn, preprocessing)  # (3, height, width), 0 to 255
        return pixels[0] > _HALF

    def _draw_boxes(self) -> Inside:
        """Return a mask of the pixels in any box. Raises UnreadableError if there is none."""
        is_object = np.zeros(self.size, dtype=bool)
        for x, y, width, height in self.boxes:
            rows = _pixels_between(y, y + height, self.size[0])
            columns = _pixels_between(x, x + width, self.size[1])
            is_object[rows, columns] = True
        if not is_object.any():
            raise UnreadableError(
                "expected a bbox of x, y, width and height in px, found "
                f"{list(self.boxes[0])}, which covers no pixel"
            )
        return is_object


def _pixels_between(low: float, high: float, side: int) -> slice:
    """Return the pixels of a side with a centre between low and high, all in pixels."""
    start = min(max(ceil(low - 0.5), 0), side)
    stop = min(max(ceil(high - 0.5), 0), side)
    return slice(start, stop)


@dataclass(frozen=True)
class _CocoImage:
    """An image in COCO's annotations."""

    id: _Id
    file_name: str
    height: _Pixels
    width: _Pixels


@dataclass(frozen=True)
class _CocoBox:
    """An annotation of an image.

    bbox: x, y, width, height in px.
    """

    image_id: _Id
    bbox: Box


@dataclass(frozen=True)
class _Coco:
    """annotations.json, with the fields needed here."""

    images: tuple[_CocoImage, ...]
    annotations: tuple[_CocoBox, ...]


@dataclass(frozen=True)
class _IndexEntry:
    """An entry of index.json, a list."""

    file: str
    imagenet_class: Annotated[int, between(0, 999)]


def has_objects(root: Path) -> bool:
    """Return True for a folder of images/ with masks/ or annotations.json, and for such masks/.

    `load` refuses masks/ with the name of the folder to give instead.
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
    """Return the images of a folder with their masks, resized and cropped like the images.

    The layouts are those at the top of this module. Images without a mask are left out and listed
    in `skipped`. So are those with a damaged mask, or one of more than two values or another size.
    A mask drawn on the unrotated pixels of a photograph is rotated with it, by its EXIF
    orientation. Images that already have the model's size are not cropped. Raises DataError if no
    image has a mask, if one has two, and for damaged JSON.
    """
    root = request.path
    if root.name == _MASKS and not (root / "images").is_dir():
        raise DataError(
            f"expected images with masks/ next to them, found the masks; name {root.parent}"
        )
    images = root / "images"
    images_at_top = images_in(images)
    if images_at_top:
        listing = Listing(tuple(images_at_top))
    else:
        listing = list_classes(images, part=request.part, seed=request.seed, whole=request.whole)
    preprocessing = request.preprocessing or stored_size(listing.paths)
    has_boxes = not (root / _MASKS).is_dir()
    with quiet_pillow():
        objects = _find_objects(root, listing.paths, in_classes=not images_at_top)
        takes_whole = preprocessing.is_cropped and objects.sizes == {preprocessing.size}
        if takes_whole:
            preprocessing = preprocessing.at_size(preprocessing.size)  # the same size, not cropped
        masks: dict[str, Tensor] = {}
        for path, image_object in objects.by_path.items():
            try:
                masks[_name(path, images)] = image_object.mask(preprocessing)
            except UnreadableError as error:
                # it stays in `by_path`; what has a reason is left out below
                objects.reasons[path] = str(error) if has_boxes else _damaged(error)
    skipped = tuple(
        Skipped(_name(path, images), objects.reasons[path])
        for path in listing.paths
        if path in objects.reasons
    )
    if not masks:
        raise DataError(
            f"expected a mask or a box with the name and size of each image in {root}, "
            f"found none ({skipped[0].file}: {skipped[0].reason}); try "
            f"{images_alone(images)} to use none"
        )
    split = read_listing(
        _without(listing, objects.reasons), replace(request, preprocessing=preprocessing)
    )
    names = tuple(_name(root / file, images) for file in split.files or ())
    labels = _read_labels(root / _INDEX, names)
    if labels is not None:
        split = replace(split, classes=imagenet_classes(), labels=labels)
    notes = _notes(takes_whole, has_boxes, objects.unclear_turns())
    return replace(
        split,
        masks=torch.stack([masks[name] for name in names]),
        files=names,
        skipped=skipped + split.skipped,
        notes=split.notes + notes,
    )


@dataclass
class _Objects:
    """The objects of images.

    An image is in the first two, or in the last. One whose mask turns out to be damaged is in all.

    by_path: the object of each image.
    headers: the headers of these images.
    reasons: why images are left out.
    """

    by_path: dict[Path, Object]
    headers: dict[Path, Header]
    reasons: dict[Path, str]

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Return the sizes (height, width) of the images with an object."""
        return {header.size for header in self.headers.values()}

    def unclear_turns(self) -> int:
        """Return the number of turned images with the same size before and after the turn."""
        count = 0
        for path, header in self.headers.items():
            is_turned = header.orientation != 1
            if path not in self.reasons and is_turned and header.size == header.stored_size:
                count += 1
        return count


def _find_objects(root: Path, paths: Sequence[Path], *, in_classes: bool) -> _Objects:
    """Return the object of each image, from masks/ or from annotations.json."""
    images = root / "images"
    box_objects: Mapping[str, Object] = {}
    mask_files: Mapping[str, Path] = {}
    has_boxes = not (root / _MASKS).is_dir()
    if has_boxes:
        box_objects = _read_boxes(root / _BOXES)
    else:
        stems = {_stem(path, images) for path in paths}
        mask_files = _list_masks(root / _MASKS, stems, in_folders=in_classes)
    objects = _Objects(by_path={}, headers={}, reasons={})
    for path, header in zip(paths, probe(paths)):
        if isinstance(header, UnreadableError):
            objects.reasons[path] = str(header)
            continue
        try:
            if has_boxes:
                image_object = _object_of_boxes(box_objects.get(path.name))
            else:
                image_object = _object_of_mask(mask_files.get(_stem(path, images)))
            objects.by_path[path] = _turn_to_fit(image_object, header)
        except UnreadableError as error:
            objects.reasons[path] = str(error)
        else:
            objects.headers[path] = header
    return objects


def _without(listing: Listing, left_out: Collection[Path]) -> Listing:
    """Return a listing without these images."""
    indices = [index for index, path in enumerate(listing.paths) if path not in left_out]
    labels: tuple[int, ...] = ()
    if listing.labels:
        labels = tuple(listing.labels[index] for index in indices)
    return replace(listing, paths=tuple(listing.paths[index] for index in indices), labels=labels)


def _name(path: Path, images: Path) -> str:
    """Return an image's name below images/, with its class folder if there is one."""
    return path.relative_to(images).as_posix()


def _stem(path: Path, folder: Path) -> str:
    """Return a file's name below a folder without suffix, the same for an image and its mask."""
    return path.relative_to(folder).with_suffix("").as_posix()


def _list_masks(folder: Path, stems: Collection[str], *, in_folders: bool) -> dict[str, Path]:
    """Return the masks of images by name without suffix; in_folders: also those in class folders.

    Raises DataError for an image with two masks.
    """
    files = images_below(folder) if in_folders else sorted(folder.iterdir())
    mask_of_stem: dict[str, Path] = {}
    for file in files:
        if file.suffix.lower() not in READ_SUFFIXES:
            continue
        stem = _stem(file, folder)
        if stem in mask_of_stem and stem in stems:
            first = mask_of_stem[stem].relative_to(folder.parent).as_posix()
            second = file.relative_to(folder.parent).as_posix()
            raise DataError(
                f"expected one mask an image in {folder}, found {first} and {second}; move one away"
            )
        mask_of_stem[stem] = file
    return mask_of_stem


def _notes(takes_whole: bool, has_boxes: bool, unclear_turns: int) -> tuple[str, ...]:
    """Return the notes of a split; unclear_turns: see `_Objects`."""
    notes = []
    if takes_whole:
        notes.append(_WHOLE)
    if has_boxes:
        notes.append(_BOXED)
    if unclear_turns:
        notes.append(
            f"{unclear_turns} photographs are rotated by their EXIF data, and their size "
            "does not show if the masks are rotated, too. The masks are taken to fit "
            "the photographs as displayed"
        )
    return tuple(notes)


def _object_of_mask(file: Path | None) -> Object:
    """Return the object of a mask file. Raises UnreadableError with the reason."""
    if file is None:
        raise UnreadableError(
            "expected a readable mask of the same name in masks/ itself, found none"
        )
    try:
        with open_image(file) as image:
            return Object(displayed_size(image), file)
    except UnreadableError as error:
        raise UnreadableError(_damaged(error)) from error


def _object_of_boxes(boxes: Object | None) -> Object:
    """Return the object of an image's boxes. Raises UnreadableError for an image without any."""
    if boxes is None:
        raise UnreadableError(f"expected a box in {_BOXES}, found none")
    return boxes


def _turn_to_fit(image_object: Object, header: Header) -> Object:
    """Return an object, rotated if its mask has the size of the image before its EXIF rotation.

    Raises UnreadableError for another size.
    """
    if image_object.size == header.size:
        return image_object
    if image_object.size == header.stored_size:  # the mask was drawn on the unrotated pixels
        return replace(image_object, orientation=header.orientation)
    height, width = header.size
    mask_height, mask_width = image_object.size
    raise UnreadableError(
        f"expected a mask of {width}x{height} px, found {mask_width}x{mask_height}"
    )


def _damaged(error: UnreadableError) -> str:
    return f"of its mask: {error}"


def _read_boxes(file: Path) -> Mapping[str, Object]:
    """Return the boxes of every image that has some, by the image's file name.

    Raises DataError for another format than COCO's.
    """
    content = read_json(file, size=_COCO_BYTES, error=DataError, hint=_COCO_FORM)
    coco = read_as(_Coco, content, source=str(file), error=DataError, hint=_COCO_FORM)
    boxes_by_id: dict[_Id, list[Box]] = {}
    for annotation in coco.annotations:
        boxes_by_id.setdefault(annotation.image_id, []).append(annotation.bbox)
    objects = {}
    for image in coco.images:
        if image.id in boxes_by_id:
            size = (image.height, image.width)
            objects[Path(image.file_name).name] = Object(size, boxes=boxes_by_id[image.id])
    return objects


def _read_labels(index: Path, names: Sequence[str]) -> Tensor | None:
    """Return the ImageNet class of each image, or None unless index.json has it for all of them.

    Without any imagenet_class, index.json is ignored. Raises DataError for a damaged file.
    """
    entries = read_json(index, error=DataError, hint=_INDEX_FORM) if index.is_file() else None
    if not isinstance(entries, list):
        return None
    if not any(isinstance(entry, dict) and "imagenet_class" in entry for entry in entries):
        return None
    index_entries = read_as(
        tuple[_IndexEntry, ...], entries, source=str(index), error=DataError, hint=_INDEX_FORM
    )
    class_of_file = {entry.file: entry.imagenet_class for entry in index_entries}
    if any(name not in class_of_file for name in names):
        return None
    return torch.tensor([class_of_file[name] for name in names])
