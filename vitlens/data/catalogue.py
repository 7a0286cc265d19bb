"""What a name after --data stands for: the embedded scenes, torchvision's sets, a folder or an .npz."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitlens.data.arrays import load_arrays
from vitlens.data.cue_conflict import is_cue_conflict, load_cue_conflict
from vitlens.data.digits import CANVAS, digits
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.folder import list_images, load_folder, load_listing
from vitlens.data.reading import Progress
from vitlens.data.shapes import CLASSES as SHAPES
from vitlens.data.shapes import shapes
from vitlens.data.split import Split
from vitlens.data.tiny_imagenet import is_tiny_imagenet, load_tiny_imagenet
from vitlens.data.torchvision_sets import SETS, load_torchvision
from vitlens.errors import DataError, UnknownNameError
from vitlens.names import EMBEDDED_DATA, TORCHVISION_DATA, Part
from vitlens.preprocessing import Preprocessing

NAMES = (*EMBEDDED_DATA, *TORCHVISION_DATA)


@dataclass(frozen=True)
class DataInfo:
    """One line of `vitlens data`.

    classes: how many; size: pixels (height, width), None where the images differ; origin: where it comes from.
    """

    name: str
    title: str
    classes: int
    size: tuple[int, int] | None
    origin: str
    needs_download: bool


def load_data(
    name: str,
    *,
    part: Part,
    preprocessing: Preprocessing | None = None,
    data_dir: Path = Path("data"),
    seed: int = 0,
    canvas: int | None = None,
    scenes: int | None = None,
    whole: bool = False,
    progress: Progress | None = None,
) -> Split:
    """One part of the data that a name, a folder or an .npz file stands for.

    preprocessing: how photographs are resized and cropped; sets of small images keep their size (the model resizes
    them). seed: of the scenes of digits, or of the division where no test part is given. canvas (px) and scenes (for
    each source digit) are for digits alone. whole: what has no parts of its own is not divided. progress: called
    with (files done, files in all). Raises UnknownNameError or DataError.
    """
    if name != "digits" and (canvas is not None or scenes is not None):
        raise DataError(f"expected --data digits for a canvas or a number of scenes, found {name!r}")
    if name in ("shapes", "shapes-conflict"):
        return shapes(part, cue="agree" if name == "shapes" else "conflict", seed=seed)
    if name == "digits":
        return digits(part, canvas=CANVAS if canvas is None else canvas, scenes=scenes, seed=seed)
    if name in SETS:
        return load_torchvision(name, part=part, data_dir=data_dir, preprocessing=preprocessing, seed=seed, whole=whole)
    if not name.strip():  # as a path it would be the current folder
        raise UnknownNameError("data", name, NAMES, hint="vitlens data")
    path = Path(name).expanduser()
    if path.suffix.lower() == ".npz":
        return load_arrays(path, part=part, seed=seed, whole=whole)
    if path.is_dir() and is_tiny_imagenet(path):
        return load_tiny_imagenet(path, part=part, preprocessing=preprocessing, progress=progress)
    if path.is_dir() and is_cue_conflict(path):
        return load_cue_conflict(path, part=part, preprocessing=preprocessing, progress=progress)
    if path.is_dir():
        return load_folder(path, part=part, preprocessing=preprocessing, seed=seed, whole=whole, progress=progress)
    if path.is_file():
        raise DataError(
            f"expected a folder, an .npz or a name for --data, found the file {name!r}; try --images {name}"
        )
    if "/" in name or os.sep in name:
        raise DataError(f"expected a folder or an .npz for --data, found nothing at {name!r}; see vitlens data")
    raise UnknownNameError("data", name, NAMES, hint="vitlens data")


def load_images(
    paths: Sequence[str | Path],
    *,
    preprocessing: Preprocessing | None = None,
    progress: Progress | None = None,
) -> Split:
    """Images without labels: files in the order given, and all images below the folders given.

    Raises DataError for a path that is not there, a folder without images, or when none can be read.
    """
    listing = list_images([Path(path).expanduser() for path in paths])
    return load_listing(listing, part="test", preprocessing=preprocessing, progress=progress)


def describe_data() -> tuple[DataInfo, ...]:
    """Every set that has a name, embedded ones first."""
    embedded = DataInfo(
        "digits", "Digits in scenes", len(DIGITS), (CANVAS, CANVAS), "scikit-learn's digits, drawn here", False
    )
    size = (CANVAS, CANVAS)
    agreeing = DataInfo("shapes", "Shapes", len(SHAPES), size, "shape and texture agree, drawn here", False)
    conflicting = DataInfo("shapes-conflict", "Shapes with another's texture", len(SHAPES), size, "drawn here", False)
    return (
        embedded,
        agreeing,
        conflicting,
        *(
            DataInfo(
                name, SETS[name].title, SETS[name].classes, SETS[name].size, f"torchvision's {SETS[name].cls}", True
            )
            for name in TORCHVISION_DATA
        ),
    )
