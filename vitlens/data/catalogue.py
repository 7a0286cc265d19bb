"""From a name, a folder, a file or pictures in Python to a Split; the registry says what
there is."""

import os
from collections.abc import Sequence
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlens.data.arrays import is_medmnist
from vitlens.data.decode import (
    UNSTATED,
    Progress,
    UnreadableError,
    decode,
    load_files,
    quiet_pillow,
)
from vitlens.data.folder import holds_classes, list_images
from vitlens.data.other_data import describe_file
from vitlens.data.registry import LAYOUTS, SETS, DataRequest
from vitlens.data.split import InMemory, Split
from vitlens.data.walk import readable
from vitlens.errors import DataError, UnknownNameError, by_caller
from vitlens.names import Part
from vitlens.pixels import require_images
from vitlens.preprocessing import Preprocessing
from vitlens.references import resolved
from vitlens.shapes import Pixels


def load_data(
    name: str,
    *,
    part: Part = "test",
    limit: int | None = None,
    preprocessing: Preprocessing | None = None,
    data_dir: Path = Path("data"),
    seed: int = 0,
    canvas: int | None = None,
    scenes: int | None = None,
    whole: bool = False,
    progress: Progress | None = None,
    labels: str | Path | None = None,
) -> Split:
    """Return one part of a named set, a folder or an .npz file, as a `Split`, which every function
    takes for images.

    name: as `vitlens data` lists them, or a path; limit: at most so many images, a seeded subset
    balanced by class; preprocessing: how photographs are resized and cropped (a model's
    `preprocessing`); sets of small images keep their size (the model resizes them). seed: of the
    scenes of digits, or of the division where there is no test part. canvas (px) and scenes (for
    each source digit: 4, or for test as many of these as the limit needs) are for digits only.
    whole: data without parts is not divided. progress: called with (files done, files in all).
    labels: a table (CSV) of the images' file names and labels, for a folder without class folders.
    Raises UnknownNameError or DataError.

    >>> import vitlens
    >>> digits = vitlens.load_data("digits", limit=16)
    >>> len(digits), digits.size, digits.classes[:3]
    (16, (32, 32), ('0', '1', '2'))
    """
    if part not in get_args(Part):
        raise UnknownNameError("part", str(part), get_args(Part))
    table = None if labels is None else Path(labels).expanduser()
    request = DataRequest(
        name, part, preprocessing, data_dir, seed, canvas, scenes, whole, progress, table, limit
    )
    in_scenes = [data_set.name for data_set in SETS.values() if data_set.scenes]
    if name not in in_scenes and (canvas is not None or scenes is not None):
        raise DataError(
            f"expected the data {' or '.join(in_scenes)} for a canvas or a number of scenes, found "
            f"{name!r}"
        )
    reader = SETS[name].load if name in SETS else reader_of(name, request.path)
    if table is not None:
        reader = "vitlens.data.label_table:load"
    split: Split = resolved(reader)(request)
    return split.limit(limit, seed=seed)


def reader_of(name: str, path: Path) -> str:
    """Return the function that reads a path, as module:function. Raises DataError and
    UnknownNameError.
    """
    if name.strip():  # as a path, an empty one would be the current folder
        _require_readable(path)
        with readable(path):
            for layout in LAYOUTS:
                if layout.recognises(path):
                    return layout.load
        if is_medmnist(name):
            return "vitlens.data.arrays:load_medmnist"
        if path.is_file():
            raise DataError(
                "expected a folder, an .npz or a name "
                f"{by_caller(python='of data', command='for --data')}, found the "
                f"file {name!r}: {describe_file(path)}"
            )
        if "/" in name or os.sep in name:
            raise DataError(
                f"expected a folder or an .npz of data, found nothing at {name!r}; see vitlens data"
            )
    raise UnknownNameError("data", name, SETS, hint="vitlens data")


def _require_readable(path: Path) -> None:
    """Raise DataError for a file or folder that must not be read."""
    needed = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
    if path.exists() and not os.access(path, needed):
        raise DataError(
            f"expected data that can be read at {path}, found: Permission denied; check its "
            "permissions"
        )


def load_images(
    paths: Sequence[str | Path],
    *,
    preprocessing: Preprocessing | None = None,
    progress: Progress | None = None,
) -> Split:
    """Images without labels: files in the order given, and all images below the folders given.

    Raises DataError for a path that does not exist, a folder without images, or when none can be
    read.
    """
    return load_files(
        list_images([Path(path).expanduser() for path in paths]), preprocessing, progress=progress
    )


def read_split(given: object, preprocessing: Preprocessing | None = None) -> Split:
    """Images as a Split, with labels where they lie in class folders or the Split has them.

    given: a Split; a tensor (n, 3, height, width) in [0, 1]; or one or a list of files, folders,
    patterns of paths ("photos/*.jpg"), PIL images, uint8 arrays (height, width), (height, width, 3
    or 4) or (n, height, width, 3 or 4), and uint8 tensors (3, height, width) or (n, 3, height,
    width). Of one folder with class folders, or with test/ or val/, those images are given with
    their labels; of others all images below, sorted. Pictures are resized and cropped as by the
    commands; preprocessing: of the model (None: the size that all share, else 224x224). Raises
    DataError for anything else, and for the first picture that cannot be read.
    """
    if isinstance(given, Split):
        return given
    if isinstance(given, Tensor) and given.dtype != torch.uint8:
        pixels = require_images(given.detach(), dtype=torch.float32)
        return Split(
            "tensor",
            "test",
            InMemory(pixels),
            (pixels.shape[2], pixels.shape[3]),
            (),
            title="a tensor",
        )
    if isinstance(given, str | Path):
        path = Path(given).expanduser()
        if str(given) and (
            path.suffix.lower() == ".npz" or (path.is_dir() and holds_classes(path))
        ):
            return _complete(load_data(str(given), preprocessing=preprocessing, whole=True))
        return _complete(load_images(_paths([given]), preprocessing=preprocessing))
    pixels = read_pictures(given, preprocessing)
    return Split(
        "images", "test", InMemory(pixels), (pixels.shape[2], pixels.shape[3]), (), title="images"
    )


def read_pictures(given: object, preprocessing: Preprocessing | None = None) -> Pixels:
    """Return the pixels of pictures, uint8, in the order given, for whatever `read_split` takes but
    a Split and floats.
    """
    inputs = list(given) if isinstance(given, list | tuple) else [given]
    if not inputs:
        raise DataError(
            "expected at least one picture, found none; give files, folders, PIL images or uint8 "
            "arrays"
        )
    parts: list[Pixels] = []
    for are_files, group in groupby(inputs, lambda picture: isinstance(picture, str | Path)):
        if are_files:
            split = _complete(
                load_images(_paths([str(path) for path in group]), preprocessing=preprocessing)
            )
            parts.append(split.source.read(torch.arange(len(split))))
        else:
            opened = [image for picture in group for image in _opened(picture)]
            parts.append(_decoded(opened, preprocessing))
    if (
        len({part.shape[2:] for part in parts}) > 1
    ):  # without a model, files and arrays of sizes of their own
        return read_pictures(given, UNSTATED)
    return torch.cat(parts)


def _paths(given: Sequence[str | Path]) -> list[Path]:
    """Paths, with the matches of a pattern in its place, sorted. Raises DataError for what is
    none."""
    paths: list[Path] = []
    for each in map(str, given):
        path = Path(each).expanduser()
        if not each:
            raise DataError("expected the path of an image or a folder of images, found ''")
        if each in SETS and not path.exists():
            raise DataError(
                f"expected images, found {each!r}, the name of a data set; load it with "
                f"vitlens.load_data({each!r})"
            )
        wild = not path.exists() and any(mark in each for mark in "*?[")
        matches = sorted(glob(str(path), recursive=True)) if wild else []  # noqa: PTH207  Path.glob: no absolute ones
        paths += [Path(match) for match in matches] or [path]
    return paths


def _complete(split: Split) -> Split:
    """Return the split. Raises DataError for the first of its files that could not be read."""
    for skipped in split.skipped:
        raise DataError(f"cannot read {skipped.file}: {skipped.reason}; mend it or leave it out")
    return split


def _decoded(opened: Sequence[Image.Image], preprocessing: Preprocessing | None) -> Pixels:
    """Pixels of PIL images, in order."""
    sizes = {(image.height, image.width) for image in opened}
    fitted = preprocessing or (Preprocessing(size=sizes.pop()) if len(sizes) == 1 else UNSTATED)
    with quiet_pillow():
        return torch.stack([_pixels(image, fitted) for image in opened])


def _pixels(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    try:
        return decode(image, preprocessing)[0]
    except UnreadableError as reason:
        name = getattr(image, "filename", "") or f"a picture of {image.width}x{image.height} px"
        raise DataError(f"cannot read {name}: {reason}") from reason


def _opened(picture: object) -> list[Image.Image]:
    """Return the PIL images of one argument."""
    if isinstance(picture, Image.Image):
        return [picture]
    if not isinstance(picture, np.ndarray | Tensor):
        raise DataError(
            f"expected files, folders, PIL images or uint8 arrays, found {type(picture).__name__}; "
            "e.g. vitlens.images('cat.jpg', model)"
        )
    array = picture
    form = "an array (height, width), (height, width, 3 or 4) or (n, height, width, 3 or 4)"
    advice = "(255 * pixels).round().astype('uint8')"
    moved = "numpy.moveaxis(array, {}, -1)"
    if isinstance(picture, Tensor):
        array = picture.detach().cpu().numpy()
        array = np.moveaxis(array, -3, -1) if array.ndim > 2 else array
        form = "a uint8 tensor (3, height, width) or (n, 3, height, width)"
        advice = "torch.stack(images)"
        moved = "tensor.movedim({}, -3)"
    if array.dtype != np.uint8:
        raise DataError(
            "expected 8-bit pixels (uint8, 0 to 255) or one float tensor (n, 3, height, width), "
            f"found {array.dtype} in {form.split(' (')[0]}; of pixels in [0, 1] make it with "
            f"{advice}"
        )
    coloured = array.ndim in (3, 4) and array.shape[-1] in (3, 4)
    grey = array.ndim == 2 and not isinstance(picture, Tensor)
    if not (coloured or grey) or 0 in array.shape:
        found = tuple(picture.shape)
        turned = (
            f"; put the channels in their place with {moved.format(found.index(3))}"
            if 3 in found
            else ""
        )
        raise DataError(f"expected {form}, found {found}{turned}")
    return [
        Image.fromarray(np.ascontiguousarray(pixels))
        for pixels in (array if array.ndim == 4 else (array,))
    ]
