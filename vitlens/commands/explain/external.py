"""Maps that were made elsewhere, from the .npz files of --maps; nothing in them is unpickled."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.external import require_maps
from vitlens.arrays import read_arrays
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.options import ALL, AUTO, NONE
from vitlens.commands.explain.record import SEARCH
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.shapes import Labels, Maps

_ARRAYS_BY_MAP: Final = ("files", "targets")  # optional arrays of a file, one value for each map
_MOST_BYTES: Final = 2 << 30  # of a file, in any type
_MOST_VALUES: Final = 1 << 28  # of all its maps, in memory as float32: 5,349 maps of 224x224 px
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}"
_TAKEN: Final = (*BASELINES, SEARCH, ALL, AUTO, NONE)
_SAVE: Final = "save them with numpy.savez(FILE, maps=maps, files=names)"


@dataclass(frozen=True)
class MapsFile:
    """The maps of one file, as they are stored.

    name: of the maps in tables.
    files: the name of each map's image, or None.
    targets: the class that each explains, or None.
    """

    name: str
    path: Path
    maps: NDArray[np.generic]
    files: tuple[str, ...] | None = None
    targets: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class ExternalMaps:
    """The maps of one file for the images of a run, in their order.

    by_name: True if they were matched by the names of the images, False if by their order.
    """

    name: str
    source: str
    maps: Maps
    targets: Labels | None
    by_name: bool


def require_name(name: object, *, hint: str = "") -> None:
    """Raise InputError for a name of maps that is malformed or taken.

    hint: what to type, as the end of the message.
    """
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise InputError(
            "expected a name of at most 40 letters, digits, '.', '_' and '-' for maps, found "
            f"{name!r}{hint}"
        )
    if name in ATTRIBUTIONS:
        raise InputError(
            f"expected a name for maps that no method of vitlens has, found {name!r}{hint}"
        )
    if name in _TAKEN:
        raise InputError(
            f"expected a name for maps other than {', '.join(_TAKEN)}, found {name!r}{hint}"
        )


def read_maps_files(texts: Sequence[str]) -> tuple[MapsFile, ...]:
    """Return the files of --maps, each FILE or NAME=FILE.

    Raises InputError for a name that is malformed, taken or given twice, and for a file without
    maps.
    """
    files = []
    for text in texts:
        name, path = _parse(text)
        require_name(name, hint=f"; write --maps NAME={path}")
        files.append(_read(name, path))
    for name, count in Counter(file.name for file in files).items():
        if count > 1:
            raise InputError(
                f"expected a name for each file of maps, found {name!r} {count} times; write "
                "--maps NAME=FILE"
            )
    return tuple(files)


def _parse(text: str) -> tuple[str, Path]:
    """Return the name and the path of FILE or NAME=FILE."""
    match = re.fullmatch(rf"({_NAME})=(.+)", text)
    is_file = Path(text).expanduser().exists()  # a path may contain "=", too
    if match and not is_file:
        return match[1], Path(match[2]).expanduser()
    path = Path(text).expanduser()
    return path.stem, path


def _read(name: str, path: Path) -> MapsFile:
    """Return the arrays of a file. Raises InputError for arrays of another form."""
    if not path.is_file():
        raise InputError(f"expected maps in an .npz, found no file at {path}; {_SAVE}")
    arrays = read_arrays(path, keys=("maps", *_ARRAYS_BY_MAP), most=_MOST_BYTES)
    if "maps" not in arrays:
        raise InputError(f"expected an array 'maps' in {path}, found none; {_SAVE}")
    if arrays["maps"].size > _MOST_VALUES:
        raise InputError(
            f"expected at most {_MOST_VALUES:,} values in 'maps' of {path}, found "
            f"{arrays['maps'].size:,}; save maps of a lower resolution"
        )
    count = 0  # of an array without axes, which `require_maps` refuses later
    if arrays["maps"].ndim:
        count = len(arrays["maps"])
    for key in _ARRAYS_BY_MAP:
        if key in arrays and arrays[key].shape != (count,):
            raise InputError(
                f"expected '{key}' of shape ({count},), one per map, in {path}, found "
                f"{arrays[key].shape}"
            )
    files = None
    if "files" in arrays:
        files = _as_names(arrays["files"], path)
    targets = None
    if "targets" in arrays:
        if arrays["targets"].dtype.kind not in "iu":
            raise InputError(
                f"expected 'targets' of class indices in {path}, found {arrays['targets'].dtype}"
            )
        targets = arrays["targets"].astype(np.int64)
    return MapsFile(name=name, path=path, maps=arrays["maps"], files=files, targets=targets)


def _as_names(values: NDArray[np.generic], path: Path) -> tuple[str, ...]:
    """Return the names of files. Raises InputError for other values, and a name that is twice."""
    if values.dtype.kind != "U":
        raise InputError(f"expected 'files' of strings in {path}, found {values.dtype}")
    names = tuple(map(str, values.tolist()))
    if not names:
        return names
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise InputError(f"expected each image once in 'files' of {path}, found {name!r} twice")
    return names


def match_maps(file: MapsFile, model: Model, split: Split, limit: int | None) -> ExternalMaps:
    """Return the maps of a file for the images of a split, in their order.

    They are matched by the names of the images, or by order if the file has none.

    limit: the limit of the number of images; None if there is none. With a limit, the file may have
        maps of further images.

    Raises InputError for maps that do not fit the images or the model.
    """
    count = len(split)
    what = f"maps in {file.path}"
    targets = None
    if file.targets is not None:
        targets = _require_classes(torch.from_numpy(file.targets), file, model)
    if file.files is None:
        if file.maps.ndim == 3 and len(file.maps) != count:
            raise InputError(
                f"expected {what} for {count} images, found {len(file.maps)}; add the names of the "
                "images as 'files' to match them"
            )
        maps = require_maps(file.maps, model, count, what=what)
        return ExternalMaps(file.name, file.path.name, maps, targets, by_name=False)
    all_maps = require_maps(file.maps, model, len(file.files), what=what)
    order = torch.tensor(_order(file, split, limited=limit is not None))
    if targets is not None:
        targets = targets[order]
    return ExternalMaps(file.name, file.path.name, all_maps[order], targets, by_name=True)


def _order(file: MapsFile, split: Split, *, limited: bool) -> list[int]:
    """Return the index of the map of each image of a split in a file.

    Names are compared as they are, then without folders where these names are unique.

    limited: True if the file may have maps of further images.
    """
    assert file.files is not None
    index_by_name = {name: index for index, name in enumerate(file.files)}
    counts_in_file = Counter(map(_without_folders, file.files))
    index_by_unique_name = {}
    for name, index in index_by_name.items():
        if counts_in_file[_without_folders(name)] == 1:
            # the name without its folders, which no other file has
            index_by_unique_name[_without_folders(name)] = index
    counts_in_split = Counter(map(_without_folders, split.names))
    order: list[int] = []
    for name in split.names:
        matched = index_by_name.get(name)
        if matched is None and counts_in_split[_without_folders(name)] == 1:
            matched = index_by_unique_name.get(_without_folders(name))
        if matched is None:
            raise InputError(f"expected a map of {name} in 'files' of {file.path}, found none")
        order.append(matched)
    unused = sorted(set(range(len(file.files))) - set(order))
    if unused and not limited:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise InputError(
            f"expected maps of the {len(split)} images in {file.path}, found one of "
            f"{file.files[unused[0]]!r}{more}, which is not among them"
        )
    return order


def _without_folders(name: str) -> str:
    return PurePath(name).name


def _require_classes(targets: Labels, file: MapsFile, model: Model) -> Labels:
    """Return class indices of the model. Raises InputError for others."""
    model.require_classifier()
    last = len(model.classes) - 1
    if bool(((targets < 0) | (targets > last)).any()):
        raise InputError(
            f"expected 'targets' from 0 to {last} in {file.path}, found "
            f"{int(targets.min())} to {int(targets.max())}"
        )
    return targets


def targets_of(maps: Sequence[ExternalMaps], chosen: Tensor | None, split: Split) -> Tensor | None:
    """Return the classes to explain: those that the files say, else the chosen ones.

    chosen: the classes of --target, None for the predicted ones.

    Raises InputError if two files, or a file and --target, say different classes of an image.
    """
    targets = chosen
    source = "--target"
    for external in maps:
        if external.targets is None:
            continue
        if targets is not None:
            different = (targets.cpu() != external.targets).nonzero().flatten().tolist()
            if different:
                first = different[0]
                raise InputError(
                    f"expected the same classes as {source} in 'targets' of {external.source}, "
                    f"found others for {len(different)} of {len(split)} images "
                    f"({split.names[first]}: {int(external.targets[first])}, not "
                    f"{int(targets[first])})"
                )
        targets = external.targets
        source = external.source
    return targets
