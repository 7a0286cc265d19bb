"""The images that `vitlens look` is given: files and folders, of which some may be no images."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vitlens.commands.scaffold.load import load_split
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.decode import Header
from vitlens.data.folder import list_images
from vitlens.data.reading import probe
from vitlens.data.split import Split
from vitlens.display import for_terminal
from vitlens.errors import DataError
from vitlens.models.model import Model

MOST: Final = 8  # images of a run, unless --limit says otherwise


def given_images(given: Sequence[str], model: Model, run: RunOptions) -> Split:
    """The images that can be read, at most --limit or MOST of them, the first ones given.

    What is no image is one line on stderr each. Raises DataError where none is left.
    """
    most = run.limit or MOST
    files, faults = _listed(given)
    readable: list[Path] = []
    tried = 0
    while len(readable) < most and tried < len(files):
        part = files[tried : tried + most]
        tried += len(part)
        for file, header in zip(part, probe(part)):
            if isinstance(header, Header):
                readable.append(file)
            else:
                faults.append(f"{file}: {header}")
    readable = readable[:most]
    if not readable:
        raise DataError(f"expected at least one image, found none: {'; '.join(faults[:3])}")
    split = load_split(model, options=replace(run, limit=None, quiet=True), images=[str(file) for file in readable])
    faults += [f"{skipped.file}: {skipped.reason}" for skipped in split.skipped]
    more = (f"the first {len(split)} of {len(files)} files",) if tried < len(files) else ()
    lines = [*(f"left out {fault}" for fault in faults), *(f"looks at {each}; --limit N takes more" for each in more)]
    for line in () if run.quiet else lines:
        print(for_terminal(line), file=sys.stderr)  # noqa: T201
    return replace(split, notes=(*split.notes, *more))


def _listed(given: Sequence[str]) -> tuple[list[Path], list[str]]:
    """All files, in order, and a line for each path that holds none."""
    files: list[Path] = []
    faults: list[str] = []
    for path in given:
        try:
            files += list_images([Path(path).expanduser()]).paths
        except DataError as error:
            faults.append(str(error))
    return files, faults
