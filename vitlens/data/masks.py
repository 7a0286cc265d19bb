"""A folder of images with masks or boxes of their objects, for the localisation of attribution maps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlens.data.decode import SUFFIXES, Header, UnreadableError, fit, open_image, quiet_pillow
from vitlens.data.reading import MEMORY_LIMIT, Progress, load_files, probe
from vitlens.data.split import Skipped, Split
from vitlens.errors import DataError
from vitlens.files import read_json
from vitlens.labels import imagenet_classes
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing
from vitlens.typed import between, read_as

INDEX = "index.json"
BOXES = "annotations.json"
_WHOLE = "images have the model's size already and were taken whole, so that the masks fit"
_BOXED = "objects are given as boxes only: background inside a box counts as the object"

_COCO = 128 << 20  # COCO's validation part takes a sixth of it
_COCO_FORM = "write COCO's images and annotations with bbox, or put masks/ beside images/"
_INDEX_FORM = "give every image its file and imagenet_class, or take the index away"

Inside = NDArray[np.bool_]  # (height, width), True on the object
_Id: TypeAlias = int | str
_Pixels: TypeAlias = Annotated[int, between(1, 1_000_000)]


@dataclass(frozen=True)
class ObjectMask:
    """One image's object before it is drawn: size (height, width) in px, draw: the mask."""

    size: tuple[int, int]
    draw: Callable[[], Inside]


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
    """An entry of index.json."""

    file: str
    imagenet_class: Annotated[int, between(0, 999)]


@dataclass(frozen=True)
class _Index:
    """index.json, a list."""

    entries: tuple[_Labelled, ...]


def has_objects(root: Path) -> bool:
    """Whether a folder is images/ with masks/ or with COCO's boxes (annotations.json) beside it."""
    return (root / "images").is_dir() and ((root / "masks").is_dir() or (root / BOXES).is_file())


def load_masked_folder(
    root: Path,
    paths: Sequence[Path],
    *,
    part: Part,
    preprocessing: Preprocessing,
    memory: int = MEMORY_LIMIT,
    progress: Progress | None = None,
) -> Split:
    """The images of a folder with their masks, resized and cropped as the images are.

    paths: the image files. The mask of images/NAME.* is masks/NAME.*, True above half of its largest value; in a folder
    without masks/, it is the union of the image's boxes in annotations.json (COCO's format: images, annotations, bbox
    as x, y, width, height in px). An image without a mask, or whose mask is damaged or of another size, is left out and
    listed in `skipped`. Where index.json has an `imagenet_class` for every image, these are the labels. Images that
    already have the model's size are not cropped. Raises DataError when no image has a mask, and for damaged JSON.
    """
    boxed = not (root / "masks").is_dir()
    known: Mapping[str, ObjectMask | UnreadableError]
    with quiet_pillow():
        known = _boxes(root / BOXES) if boxed else _mask_files(root / "masks", paths)
    headers = probe(paths)
    reasons = {path: _unfit(header, known.get(path.name), boxed) for path, header in zip(paths, headers)}
    sizes = {header.size for header, path in zip(headers, paths) if isinstance(header, Header) and not reasons[path]}
    whole = preprocessing.resize is not None and sizes == {preprocessing.size}
    preprocessing = replace(preprocessing, resize=None) if whole else preprocessing
    masks = dict(_masks([path for path in paths if not reasons[path]], known, preprocessing, reasons))
    fitting = [path for path in paths if not reasons[path]]
    skipped = tuple(Skipped(path.name, why) for path, why in reasons.items() if why)
    if not fitting:
        raise DataError(
            f"expected a mask or a box of the name and size of each image in {root}, found none ({skipped[0].file}: "
            f"{skipped[0].reason}); try --images {root / 'images'} to do without"
        )
    loaded = load_files(fitting, preprocessing, memory=memory, progress=progress)
    readable = [fitting[index] for index in loaded.readable]
    labels = _labels(root / INDEX, readable)
    return Split(
        name=str(root),
        title=root.resolve().name,
        part=part,
        source=loaded.source,
        size=preprocessing.size,
        classes=imagenet_classes() if labels is not None else (),
        labels=labels,
        masks=torch.stack([masks[path] for path in readable]),
        files=tuple(path.name for path in readable),
        skipped=skipped + loaded.skipped,
        notes=loaded.notes + ((_WHOLE,) if whole else ()) + ((_BOXED,) if boxed else ()),
    )


def _masks(
    paths: Sequence[Path],
    known: Mapping[str, ObjectMask | UnreadableError],
    preprocessing: Preprocessing,
    reasons: dict[Path, str],
) -> Iterator[tuple[Path, Tensor]]:
    """Each image's mask, preprocessed as its image; `reasons` is filled for a mask that cannot be decoded."""
    with quiet_pillow():
        for path in paths:
            try:
                mask = known[path.name]
                assert isinstance(mask, ObjectMask)
                yield path, _fitted(mask.draw(), preprocessing)
            except UnreadableError as why:
                reasons[path] = _damaged(why)


def _damaged(why: UnreadableError) -> str:
    return f"expected a readable mask, found a damaged one ({why})"


def _unfit(header: Header | UnreadableError, known: ObjectMask | UnreadableError | None, boxed: bool) -> str:
    """Why an image cannot be used with its mask; empty where it can."""
    if isinstance(header, UnreadableError):
        return str(header)
    if known is None:
        where = f"box in {BOXES}" if boxed else "readable mask of the same name in masks/"
        return f"expected a {where}, found none"
    if isinstance(known, UnreadableError):
        return _damaged(known)
    if known.size == header.size:
        return ""
    return f"expected a mask of {header.size[1]}x{header.size[0]} px, found {known.size[1]}x{known.size[0]}"


def _mask_files(folder: Path, paths: Sequence[Path]) -> dict[str, ObjectMask | UnreadableError]:
    """The mask of every image that has one, or the reason why it is unreadable, by the image's name."""
    masks = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES}
    objects: dict[str, ObjectMask | UnreadableError] = {}
    for path in paths:
        mask = masks.get(path.stem)
        try:
            if mask is not None:
                with open_image(mask) as image:
                    objects[path.name] = ObjectMask((image.height, image.width), partial(_read, mask))
        except UnreadableError as why:
            objects[path.name] = why
    return objects


def _read(path: Path) -> Inside:
    with open_image(path) as image:
        if image.mode == "F":
            raise UnreadableError("expected a mask of whole numbers, found floating point; save it as PNG")
        values = np.asarray(image if image.mode.startswith("I") else image.convert("L"))
    return np.asarray(values > values.max() / 2)


def _boxes(file: Path) -> dict[str, ObjectMask]:
    """The boxes of every image that has some, by the image's file name. Raises DataError for another format."""
    content = read_json(file, size=_COCO, error=DataError, hint=_COCO_FORM)
    coco = read_as(_Coco, content, source=str(file), error=DataError, hint=_COCO_FORM)
    by_image: dict[_Id, list[Sequence[float]]] = {}
    for row in coco.annotations:
        by_image.setdefault(row.image_id, []).append(row.bbox)
    return {
        Path(row.file_name).name: ObjectMask(
            (row.height, row.width), partial(_drawn, (row.height, row.width), by_image[row.id])
        )
        for row in coco.images
        if row.id in by_image
    }


def _drawn(size: tuple[int, int], boxes: Sequence[Sequence[float]]) -> Inside:
    """The pixels with their centres in a box."""
    inside = np.zeros(size, dtype=bool)
    for x, y, width, height in boxes:
        rows, columns = _centres(y, y + height, size[0]), _centres(x, x + width, size[1])
        inside[rows, columns] = True
    return inside


def _centres(low: float, high: float, side: int) -> slice:
    """The pixels with their centres from low to high, in px."""
    ends = (min(max(ceil(end - 0.5), 0), side) for end in (low, high))
    return slice(*ends)


def _fitted(inside: Inside, preprocessing: Preprocessing) -> Tensor:
    """One mask (height, width), preprocessed as its image."""
    drawn = Image.fromarray((255 * inside).astype(np.uint8)).convert("RGB")
    return fit(drawn, preprocessing)[0] > 127


def _labels(index: Path, paths: Sequence[Path]) -> Tensor | None:
    """The ImageNet class of each image, where index.json has it for all of them, else None.

    Without any imagenet_class, index.json is ignored. Raises DataError for a damaged file.
    """
    if not index.is_file():
        return None
    entries = read_json(index, error=DataError, hint=_INDEX_FORM)
    if not isinstance(entries, list) or not any(
        isinstance(entry, dict) and "imagenet_class" in entry for entry in entries
    ):
        return None
    table = read_as(_Index, {"entries": entries}, source=str(index), error=DataError, hint=_INDEX_FORM)
    classes = {entry.file: entry.imagenet_class for entry in table.entries}
    labels = [classes.get(path.name, -1) for path in paths]
    return torch.tensor(labels) if min(labels) >= 0 else None
