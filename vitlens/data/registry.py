"""A list of every named set of images and every layout of a folder or file, one entry each.

The module is free of torch, because loading, `vitlens data`, completion, docs and tests read it. To
add a set, add its file in this package and its entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from vitlens.names import Part
from vitlens.preprocessing import Preprocessing
from vitlens.references import resolved

Parts = Literal["train", "split", "trainval", "none"]


@dataclass(frozen=True)
class DataSet:
    """A named set of images.

    name: the name of the set.
    title: the name in reports.
    classes: the number of classes.
    size: the (height, width) of all images in pixels, or None if they differ.
    origin: the origin of the images.
    load: reads the set, as "module:function" of (request) that returns a Split.
    download: whether the set is downloaded once.
    torchvision: the class of torchvision.datasets, or "".
    parts: how that class takes the part. With "train", it is train=True or False; with "split", it
        is split="train" or "test"; with "trainval", it is split="trainval" or "test". With "none",
        there are no parts, and the set is divided by seed.
    scenes: whether the set accepts a canvas and a number of scenes.
    """

    name: str
    title: str
    classes: int
    size: tuple[int, int] | None
    origin: str
    load: str
    download: bool = False
    torchvision: str = ""
    parts: Parts = "split"
    scenes: bool = False


@dataclass(frozen=True)
class Layout:
    """A layout of folders or files that can be read as data.

    recognises: returns whether a path has this layout.
    load: reads it, as "module:function" of (request) that returns a Split.
    usage: the name in `vitlens data`, or "" for a layout that is not listed there.
    help: the description in `vitlens data`.
    """

    recognises: Callable[[Path], bool]
    load: str
    usage: str = ""
    help: str = ""


@dataclass(frozen=True)
class DataRequest:
    """A request for data, with the arguments of load_data.

    name: the name of a set, or a path.
    part: the part that is read.
    preprocessing: how photographs are resized and cropped, or None if it is not stated.
    data_dir: the folder of downloaded sets.
    seed: the seed of scenes of digits, or of the division of data without a test part.
    canvas: the size of scenes of digits in pixels, or None for the default.
    scenes: the number of scenes of each source digit, or None for the default.
    whole: do not divide data without parts.
    progress: called with (files done, files in all).
    labels: a table with the labels of a folder's images, or None.
    limit: the largest number of images that are kept. A drawn set draws no others.
    """

    name: str
    part: Part
    preprocessing: Preprocessing | None = None
    data_dir: Path = Path("data")
    seed: int = 0
    canvas: int | None = None
    scenes: int | None = None
    whole: bool = False
    progress: Callable[[int, int], None] | None = None
    labels: Path | None = None
    limit: int | None = None

    @property
    def path(self) -> Path:
        """Return the name as a path."""
        return Path(self.name).expanduser()


def _torchvision(
    name: str,
    title: str,
    class_name: str,
    classes: int,
    size: tuple[int, int] | None,
    *,
    parts: Parts = "split",
) -> DataSet:
    """Return a set of torchvision; class_name: its class in torchvision.datasets."""
    return DataSet(
        name=name,
        title=title,
        classes=classes,
        size=size,
        origin=f"torchvision's {class_name}",
        load="vitlens.data.torchvision_sets:load",
        download=True,
        torchvision=class_name,
        parts=parts,
    )


def _drawn(
    name: str, title: str, classes: int, origin: str, module: str, *, scenes: bool = False
) -> DataSet:
    """Return a set that is drawn by a module of this package."""
    return DataSet(
        name=name,
        title=title,
        classes=classes,
        size=(32, 32),
        origin=origin,
        load=f"vitlens.data.{module}:load",
        scenes=scenes,
    )


_SETS: Final = (
    _drawn(
        name="digits",
        title="Digits in scenes",
        classes=10,
        origin="scikit-learn's digits, drawn here",
        module="digits",
        scenes=True,
    ),
    _drawn(
        name="digits-shortcut",
        title="Digits in scenes, trained with a shortcut",
        classes=10,
        origin="digits; in training the background's hue goes with the class",
        module="digits",
        scenes=True,
    ),
    _drawn(
        name="digits-clear",
        title="Digits in clear scenes",
        classes=10,
        origin="digits, large and of high contrast",
        module="digits",
        scenes=True,
    ),
    _drawn(
        name="shapes",
        title="Shapes",
        classes=8,
        origin="shape and texture agree, drawn here",
        module="textured_shapes",
    ),
    _drawn(
        name="shapes-conflict",
        title="Shapes with another's texture",
        classes=8,
        origin="drawn here",
        module="textured_shapes",
    ),
    # name, title, class of torchvision.datasets, number of classes, size
    _torchvision("cifar10", "CIFAR-10", "CIFAR10", 10, (32, 32), parts="train"),
    _torchvision("cifar100", "CIFAR-100", "CIFAR100", 100, (32, 32), parts="train"),
    _torchvision("fashion-mnist", "Fashion-MNIST", "FashionMNIST", 10, (28, 28), parts="train"),
    _torchvision("mnist", "MNIST", "MNIST", 10, (28, 28), parts="train"),
    _torchvision("svhn", "SVHN", "SVHN", 10, (32, 32)),
    _torchvision("eurosat", "EuroSAT", "EuroSAT", 10, (64, 64), parts="none"),
    _torchvision("flowers102", "Flowers-102", "Flowers102", 102, None),
    _torchvision("food101", "Food-101", "Food101", 101, None),
    _torchvision("pets", "Oxford-IIIT Pets", "OxfordIIITPet", 37, None, parts="trainval"),
    _torchvision("stl10", "STL-10", "STL10", 10, (96, 96)),
)
SETS: Final[Mapping[str, DataSet]] = {data_set.name: data_set for data_set in _SETS}


def _is_tiny_imagenet(path: Path) -> bool:
    validation = path / "val"
    return (validation / "val_annotations.txt").is_file() and (validation / "images").is_dir()


# The first layout that recognises a path reads it. Functions of modules with torch are named by
# strings, and imported when they are needed.
LAYOUTS: Final = (
    Layout(recognises=_is_tiny_imagenet, load="vitlens.data.folder:load_tiny_imagenet"),
    Layout(
        recognises=lambda path: resolved("vitlens.data.masks:has_objects")(path),
        load="vitlens.data.masks:load",
    ),
    Layout(
        recognises=lambda path: resolved("vitlens.data.cue_conflict:is_cue_conflict")(path),
        load="vitlens.data.cue_conflict:load",
    ),
    Layout(
        recognises=lambda path: path.is_dir() and path.suffix.lower() != ".npz",
        load="vitlens.data.folder:load",
        usage="FOLDER",
        help=(
            "class folders, with train/ and test/ or val/ inside or divided by seed; or loose "
            "images, which --labels FILE.csv labels"
        ),
    ),
    # two lines of `vitlens data` for one reader
    Layout(
        recognises=lambda path: path.suffix.lower() == ".npz",
        load="vitlens.data.arrays:load",
        usage="MEDMNIST.npz",
        help="MedMNIST's train_images, train_labels, val_images, ..., test_labels",
    ),
    Layout(
        recognises=lambda path: path.suffix.lower() == ".npz",
        load="vitlens.data.arrays:load",
        usage="FILE.npz",
        help="images (n, height, width[, 3]) uint8 and labels",
    ),
)
