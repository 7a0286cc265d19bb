"""A folder of images whose objects are known, by masks beside them or by boxes: where explanations should point."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlens.data.decode import SUFFIXES, Header, UnreadableError, fit, open_image, quiet_pillow
from vitlens.data.reading import MEMORY_LIMIT, Progress, load_files, probe
from vitlens.data.split import Skipped, Split
from vitlens.errors import DataError
from vitlens.labels import imagenet_classes
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing

INDEX = "index.json"
BOXES = "annotations.json"
_WHOLE = "images have the model's size already and were taken whole, so that the masks fit"
_BOXED = "objects are known by their boxes alone: what lies in a box beside the object counts as the object"

Inside = NDArray[np.bool_]  # (height, width), True on the object


@dataclass(frozen=True)
class Known:
    """One image's object before it is drawn: size (height, width) in px, draw: the mask."""

    size: tuple[int, int]
    draw: Callable[[], Inside]


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

    paths: the image files. The mask of images/NAME.* is masks/NAME.*, True above half of its largest value; or, in a
    folder without masks/, the boxes that annotations.json (COCO's form: images, annotations, bbox as x, y, width,
    height in px) gives it, together. An image without, or whose mask has another size, is left out and named in
    `skipped`. Where index.json gives every image its `imagenet_class` these are the labels. Images that have the
    model's size already are taken whole. Raises DataError when no image has a mask.
    """
    boxed = not (root / "masks").is_dir()
    with quiet_pillow():
        known = _boxes(root / BOXES) if boxed else _mask_files(root / "masks", paths)
    headers = probe(paths)
    reasons = {path: _unfit(header, known.get(path.name), boxed) for path, header in zip(paths, headers)}
    fitting = [path for path in paths if not reasons[path]]
    skipped = tuple(Skipped(path.name, why) for path, why in reasons.items() if why)
    if not fitting:
        raise DataError(
            f"expected a mask or a box of the name and size of each image in {root}, found none ({skipped[0].file}: "
            f"{skipped[0].reason}); try --images {root / 'images'} to do without"
        )
    sizes = {header.size for header, path in zip(headers, paths) if isinstance(header, Header) and not reasons[path]}
    whole = preprocessing.resize is not None and sizes == {preprocessing.size}
    preprocessing = replace(preprocessing, resize=None) if whole else preprocessing
    loaded = load_files(fitting, preprocessing, memory=memory, progress=progress)
    kept = [fitting[index] for index in loaded.kept]
    with quiet_pillow():
        found = torch.stack([_fitted(known[path.name].draw(), preprocessing) for path in kept])
    labels = _labels(root / INDEX, kept)
    return Split(
        name=str(root),
        title=root.resolve().name,
        part=part,
        source=loaded.source,
        size=preprocessing.size,
        classes=imagenet_classes() if labels is not None else (),
        labels=labels,
        masks=found,
        files=tuple(path.name for path in kept),
        skipped=skipped + loaded.skipped,
        notes=loaded.notes + ((_WHOLE,) if whole else ()) + ((_BOXED,) if boxed else ()),
    )


def _unfit(header: Header | UnreadableError, known: Known | None, boxed: bool) -> str:
    """Why an image cannot be used with its mask; empty where it can."""
    if isinstance(header, UnreadableError):
        return str(header)
    if known is None:
        where = f"box in {BOXES}" if boxed else "readable mask of the same name in masks/"
        return f"expected a {where}, found none"
    if known.size == header.size:
        return ""
    return f"expected a mask of {header.size[1]}x{header.size[0]} px, found {known.size[1]}x{known.size[0]}"


def _mask_files(folder: Path, paths: Sequence[Path]) -> dict[str, Known]:
    """The mask of every image that has a readable one, by the image's name."""
    masks = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES}
    found = {}
    for path in paths:
        mask = masks.get(path.stem)
        try:
            if mask is not None:
                with open_image(mask) as image:
                    found[path.name] = Known((image.height, image.width), partial(_read, mask))
        except UnreadableError:
            continue  # said as an image without a readable mask
    return found


def _read(path: Path) -> Inside:
    with open_image(path) as image:
        values = np.asarray(image if image.mode.startswith("I") else image.convert("L"))
    return np.asarray(values > values.max() / 2)


def _boxes(file: Path) -> dict[str, Known]:
    """The boxes of every image that has some, by the image's file name. Raises DataError for another form."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        by_image: dict[Any, list[Sequence[float]]] = {}
        for row in content["annotations"]:
            by_image.setdefault(row["image_id"], []).append([float(side) for side in row["bbox"]])
        return {
            Path(row["file_name"]).name: _box_known(row, by_image[row["id"]])
            for row in content["images"]
            if row["id"] in by_image
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"expected COCO's images and annotations with bbox in {file}, found: {error!r}") from error


def _box_known(row: Mapping[str, Any], boxes: Sequence[Sequence[float]]) -> Known:
    size = int(row["height"]), int(row["width"])
    return Known(size, partial(_drawn, size, boxes))


def _drawn(size: tuple[int, int], boxes: Sequence[Sequence[float]]) -> Inside:
    """The pixels whose centres lie in a box."""
    inside = np.zeros(size, dtype=bool)
    rows, columns = np.arange(size[0]) + 0.5, np.arange(size[1]) + 0.5
    for x, y, width, height in boxes:
        inside |= ((rows >= y) & (rows < y + height))[:, None] & ((columns >= x) & (columns < x + width))
    return inside


def _fitted(inside: Inside, preprocessing: Preprocessing) -> Tensor:
    """One mask (height, width) as the model sees its image."""
    drawn = Image.fromarray((255 * inside).astype(np.uint8)).convert("RGB")
    return fit(drawn, preprocessing)[0] > 127


def _labels(index: Path, kept: Sequence[Path]) -> Tensor | None:
    """ImageNet's class of each image, where an index says it of all of them."""
    if not index.is_file():
        return None
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))
        classes = {entry["file"]: int(entry["imagenet_class"]) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError):
        return None  # an index of something else
    found = [classes.get(path.name, -1) for path in kept]
    return torch.tensor(found) if min(found) >= 0 else None
