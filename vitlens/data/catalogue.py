"""From a name, a folder or a file to a Split; the registry says what there is."""

import os
from collections.abc import Sequence
from pathlib import Path

from vitlens.data.folder import list_images, load_listing
from vitlens.data.medmnist import NAMES, PREFIX, is_medmnist_name
from vitlens.data.reading import Progress
from vitlens.data.registry import LAYOUTS, SETS, DataRequest
from vitlens.data.split import Split
from vitlens.errors import DataError, UnknownNameError
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing
from vitlens.references import resolved


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
) -> Split:
    """One part of a named set, a folder or an .npz file, as a `Split`, which every function takes for images.

    name: as `vitlens data` lists them, or a path; limit: at most so many images, a seeded subset balanced by class;
    preprocessing: how photographs are resized and cropped (a model's `preprocessing`); sets of small images keep their
    size (the model resizes them). seed: of the scenes of digits, or of the division where there is no test part. canvas
    (px) and scenes (for each source digit) are for digits only. whole: data without parts is not divided. progress:
    called with (files done, files in all). Raises UnknownNameError or DataError.

    >>> import vitlens
    >>> digits = vitlens.load_data("digits", limit=16)
    >>> len(digits), digits.size, digits.classes[:3]
    (16, (32, 32), ('0', '1', '2'))
    """
    request = DataRequest(name, part, preprocessing, data_dir, seed, canvas, scenes, whole, progress)
    in_scenes = [data_set.name for data_set in SETS.values() if data_set.scenes]
    if name not in in_scenes and (canvas is not None or scenes is not None):
        raise DataError(f"expected --data {' or '.join(in_scenes)} for a canvas or a number of scenes, found {name!r}")
    split: Split = resolved(SETS[name].load if name in SETS else _reader_of(request))(request)
    return split.limit(limit, seed=seed)


def _reader_of(request: DataRequest) -> str:
    """The function that reads a path, as module:function. Raises DataError and UnknownNameError."""
    name, path = request.name, request.path
    if not name.strip():  # as a path it would be the current folder
        raise UnknownNameError("data", name, SETS, hint="vitlens data")
    for layout in LAYOUTS:
        if resolved(layout.recognises)(path):
            return layout.load
    if is_medmnist_name(name):
        return "vitlens.data.medmnist:load_named"
    if name.startswith(PREFIX):
        raise UnknownNameError("MedMNIST set", name.removeprefix(PREFIX), NAMES, hint="https://medmnist.com")
    if path.is_file():
        raise DataError(
            f"expected a folder, an .npz or a name for --data, found the file {name!r}; try --images {name}"
        )
    if "/" in name or os.sep in name:
        raise DataError(f"expected a folder or an .npz for --data, found nothing at {name!r}; see vitlens data")
    raise UnknownNameError("data", name, SETS, hint="vitlens data")


def load_images(
    paths: Sequence[str | Path],
    *,
    preprocessing: Preprocessing | None = None,
    progress: Progress | None = None,
) -> Split:
    """Images without labels: files in the order given, and all images below the folders given.

    Raises DataError for a path that does not exist, a folder without images, or when none can be read.
    """
    listing = list_images([Path(path).expanduser() for path in paths])
    return load_listing(listing, part="test", preprocessing=preprocessing, progress=progress)
