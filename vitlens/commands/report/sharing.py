"""A copy of a run's folder to send on, without weights and without paths of the machine that made it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from vitlens.commands.run.run_place import make_folder, require_plain
from vitlens.display import without_machine_paths
from vitlens.errors import InputError
from vitlens.files import CONFIG, RESULTS, read_any_json, read_arrays, read_run, write_arrays, write_json
from vitlens.safe_paths import inside

_KEPT: Final = ("arrays", "chapters")  # folders of a run; figures and reports are made anew


def share(folder: Path, copy: Path) -> Path:
    """Copy the records and arrays of a run, and of its chapters, to a new folder, absolute paths shortened.

    Only the last two components of a path stay, e.g. "photos/cat.jpg". Returns the new folder, whose report is still to
    be written. Raises InputError where the folder is no run or the copy lies within it, OutputError where the copy
    cannot be made.
    """
    read_run(folder)
    require_plain(folder)
    if folder.resolve() in (copy.resolve(), *copy.resolve().parents):
        raise InputError(f"expected --share with a folder outside {folder}, found {copy}")
    make_folder(copy, overwrite=False)
    try:
        _copy(folder, copy)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)  # nothing half-written looks whole
        raise
    return copy


def _copy(folder: Path, copy: Path) -> None:
    for name in (CONFIG, RESULTS):
        content = read_any_json(inside(folder, name))
        write_json(copy / name, _changed(content, without_machine_paths))
    for place in (inside(folder, name) for name in _KEPT):
        if not place.is_dir():
            continue
        for path in sorted(place.iterdir()):
            if place.name == "arrays" and path.suffix == ".npz":
                arrays = {key: _shortened(values) for key, values in read_arrays(path).items()}
                write_arrays(inside(copy, place.name, path.name), arrays)
            elif place.name == "chapters" and (path / RESULTS).is_file():
                inside(copy, place.name, path.name).mkdir(parents=True)
                _copy(path, inside(copy, place.name, path.name))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(each, change) for each in value]
    if isinstance(value, dict):
        return {change(key): _changed(each, change) for key, each in value.items()}
    return value


def _shortened(values: Any) -> Any:
    """Arrays of texts, e.g. names of files, with their paths shortened; others as they are."""
    if values.dtype.kind != "U":
        return values
    texts = [without_machine_paths(str(each)) for each in values.flat]
    return np.array(texts).reshape(values.shape) if texts else values
