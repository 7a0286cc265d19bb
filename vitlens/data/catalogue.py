"""Load a Split from a name, a folder, a file or pictures in Python; see also the registry."""

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
    displayed_size,
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
    """Return one part of a named set, a folder or an .npz file as a `Split`.

    Every function takes a `Split` for images. Raises UnknownNameError or DataError.

    name: a name that `vitlens data` lists, or a path.
    part: "train" or "test".
    limit: the largest number of images, a seeded subset balanced by class.
    preprocessing: how photographs are resized and cropped (a model's `preprocessing`). Sets of
        small images keep their size, and the model resizes them.
    data_dir: the folder of downloaded sets.
    seed: the seed of the scenes of digits, or of the division of data without a test part.
    canvas: the size of the scenes of digits in pixels.
    scenes: the number of scenes for each source digit. By default, it is 4, or in the test part as
        many of these as the limit needs.
    whole: do not divide data without parts.
    progress: called with (files done, files in all).
    labels: a table (CSV) of the images' file names and labels, for a folder without class folders.

    >>> import vitlens
    >>> digits = vitlens.load_data("digits", limit=16)
    >>> len(digits), digits.size, digits.classes[:3]
    (16, (32, 32), ('0', '1', '2'))
    """
    if part not in get_args(Part):
        raise UnknownNameError("part", str(part), get_args(Part))
    table = None if labels is None else Path(labels).expanduser()
    request = DataRequest(
        name=name,
        part=part,
        preprocessing=preprocessing,
        data_dir=data_dir,
        seed=seed,
        canvas=canvas,
        scenes=scenes,
        whole=whole,
        progress=progress,
        labels=table,
        limit=limit,
    )
    scene_sets = [data_set.name for data_set in SETS.values() if data_set.scenes]
    if name not in scene_sets and (canvas is not None or scenes is not None):
        raise DataError(
            f"expected the data {' or '.join(scene_sets)} for a canvas or a number of scenes, "
            f"found {name!r}"
        )
    # reader_of also raises for a path that cannot be read, so it is called even with a table
    reader = SETS[name].load if name in SETS else reader_of(name, request.path)
    if table is not None:
        reader = "vitlens.data.label_table:load"
    split: Split = resolved(reader)(request)
    return split.limit(limit, seed=seed)


def reader_of(name: str, path: Path) -> str:
    """Return the function that reads a path, as "module:function".

    Raises DataError for data that is not read, UnknownNameError for a name that is no path.
    """
    if name.strip():  # as a path, an empty name would be the current folder
        _require_readable(path)
        with readable(path):
            for layout in LAYOUTS:
                if layout.recognises(path):
                    return layout.load
        if is_medmnist(name):
            return "vitlens.data.arrays:load_medmnist"
        if path.is_file():
            use = by_caller(python="of data", command="for --data")
            raise DataError(
                f"expected a folder, an .npz or a name {use}, found the file {name!r}: "
                f"{describe_file(path)}"
            )
        if "/" in name or os.sep in name:
            raise DataError(
                f"expected a folder or an .npz of data, found nothing at {name!r}; see vitlens data"
            )
    raise UnknownNameError("data", name, SETS, hint="vitlens data")


def _require_readable(path: Path) -> None:
    """Raise DataError for a file or folder without permission to read."""
    permissions = os.R_OK
    if path.is_dir():
        permissions |= os.X_OK
    if path.exists() and not os.access(path, permissions):
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
    """Return images without labels: the files in order, and all images below the folders.

    Raises DataError for a path that does not exist, for a folder without images, and if no image
    can be read.
    """
    files = list_images([Path(path).expanduser() for path in paths])
    return load_files(files, preprocessing, progress=progress)


def read_split(images: object, preprocessing: Preprocessing | None = None) -> Split:
    """Return images in any form as a Split, with labels if a Split or class folders have them.

    The images may be one of these, or a list of all but the first two:

    - A Split.
    - A tensor (n, 3, height, width) of floats in [0, 1].
    - A file, a folder or a pattern of paths ("photos/*.jpg").
    - A PIL image.
    - A uint8 array (height, width), (height, width, 3 or 4) or (n, height, width, 3 or 4).
    - A uint8 tensor (3, height, width) or (n, 3, height, width).

    A single folder with class folders, or with test/ or val/, gives these images with their labels.
    Other folders give all images below them, sorted. Pictures are resized and cropped as by the
    commands. Raises DataError for anything else, and for the first picture that cannot be read.

    preprocessing: that of the model. None means the size that all images share, else 224x224.
    """
    if isinstance(images, Split):
        return images
    if isinstance(images, Tensor) and images.dtype != torch.uint8:
        pixels = require_images(images.detach(), dtype=torch.float32)
        return _split_of_pixels(pixels, name="tensor", title="a tensor")
    if isinstance(images, str | Path):
        path = Path(images).expanduser()
        is_archive = path.suffix.lower() == ".npz"
        if str(images) and (is_archive or (path.is_dir() and holds_classes(path))):
            split = load_data(str(images), preprocessing=preprocessing, whole=True)
        else:
            split = load_images(_expand_patterns([images]), preprocessing=preprocessing)
        return _require_complete(split)
    return _split_of_pixels(read_pictures(images, preprocessing), name="images", title="images")


def _split_of_pixels(pixels: Tensor, *, name: str, title: str) -> Split:
    """Return pixels (n, 3, height, width) as a split without labels."""
    return Split(
        name=name,
        title=title,
        part="test",
        source=InMemory(pixels),
        size=(pixels.shape[2], pixels.shape[3]),
        classes=(),
    )


def read_pictures(pictures: object, preprocessing: Preprocessing | None = None) -> Pixels:
    """Return the pixels (uint8) of pictures, in order.

    pictures: what `read_split` takes, except a Split and floats.
    """
    inputs = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    if not inputs:
        raise DataError(
            "expected at least one picture, found none; give files, folders, PIL images or uint8 "
            "arrays"
        )
    parts: list[Pixels] = []
    # successive files are read together, in parallel; so are successive pictures in memory
    for are_files, group in groupby(inputs, lambda picture: isinstance(picture, str | Path)):
        if are_files:
            files = _expand_patterns([str(path) for path in group])
            split = _require_complete(load_images(files, preprocessing=preprocessing))
            parts.append(split.source.read(torch.arange(len(split))))
        else:
            images: list[Image.Image] = []
            for picture in group:
                images += _as_pil_images(picture)
            parts.append(_decode_all(images, preprocessing))
    sizes = {part.shape[2:] for part in parts}
    if len(sizes) > 1:  # without a model, each part has kept its size: read all at one size
        return read_pictures(pictures, UNSTATED)
    return torch.cat(parts)


def _expand_patterns(names: Sequence[str | Path]) -> list[Path]:
    """Return paths, a pattern replaced by its sorted matches.

    Raises DataError for an empty path and for the name of a data set.
    """
    paths: list[Path] = []
    for name in map(str, names):
        path = Path(name).expanduser()
        if not name:
            raise DataError("expected the path of an image or a folder of images, found ''")
        if name in SETS and not path.exists():
            raise DataError(
                f"expected images, found {name!r}, the name of a data set; load it with "
                f"vitlens.load_data({name!r})"
            )
        matches: list[str] = []
        if not path.exists() and any(wildcard in name for wildcard in "*?["):
            matches = sorted(glob(str(path), recursive=True))  # noqa: PTH207  Path.glob takes no absolute pattern
        paths += [Path(match) for match in matches] or [path]
    return paths


def _require_complete(split: Split) -> Split:
    """Return the split. Raises DataError for the first of its files that could not be read."""
    if split.skipped:
        first = split.skipped[0]
        raise DataError(f"cannot read {first.file}: {first.reason}; repair it or leave it out")
    return split


def _decode_all(images: Sequence[Image.Image], preprocessing: Preprocessing | None) -> Pixels:
    if preprocessing is None:
        sizes = {displayed_size(image) for image in images}
        preprocessing = Preprocessing(size=sizes.pop()) if len(sizes) == 1 else UNSTATED
    with quiet_pillow():
        return torch.stack([_decode_one(image, preprocessing) for image in images])


def _decode_one(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    try:
        pixels, _ = decode(image, preprocessing)
    except UnreadableError as reason:
        name = getattr(image, "filename", "") or f"a picture of {image.width}x{image.height} px"
        raise DataError(f"cannot read {name}: {reason}") from reason
    return pixels


def _as_pil_images(picture: object) -> list[Image.Image]:
    """Return the PIL images in one picture or array of pictures."""
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
    channel_move = "numpy.moveaxis(array, {}, -1)"
    if isinstance(picture, Tensor):
        array = picture.detach().cpu().numpy()
        if array.ndim > 2:
            array = np.moveaxis(array, -3, -1)  # channels last
        form = "a uint8 tensor (3, height, width) or (n, 3, height, width)"
        advice = "torch.stack(images)"
        channel_move = "tensor.movedim({}, -3)"
    if array.dtype != np.uint8:
        raise DataError(
            "expected 8-bit pixels (uint8, 0 to 255) or one float tensor (n, 3, height, width), "
            f"found {array.dtype} in {form.split(' (')[0]}; of pixels in [0, 1] make it with "
            f"{advice}"
        )
    is_colour = array.ndim in (3, 4) and array.shape[-1] in (3, 4)
    is_grey = array.ndim == 2 and not isinstance(picture, Tensor)
    if not (is_colour or is_grey) or 0 in array.shape:
        shape = tuple(picture.shape)
        hint = ""
        if 3 in shape:
            move = channel_move.format(shape.index(3))
            hint = f"; put the channels in their place with {move}"
        raise DataError(f"expected {form}, found {shape}{hint}")
    single_images = array if array.ndim == 4 else (array,)
    return [Image.fromarray(np.ascontiguousarray(pixels)) for pixels in single_images]
