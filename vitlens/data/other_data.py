"""Describe data that are not read, by their files, and what to do with them."""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

from vitlens.errors import argument, by_caller
from vitlens.signatures import described, image_format

_MOST_ENTRIES: Final = 1000  # most entries of a folder that are examined
_SAVE_ARRAYS: Final = "numpy.savez('DATA.npz', images=images, labels=labels) makes what is read"
_SAVE: Final = "save its images as FOLDER/<class>/<number>.png"
# what a file is, and what to do with it; {labels} stands for the argument that names a table
_BY_SUFFIX: Final = {
    ".tar": "a tar archive; unpack it, and name the folder of class folders",
    ".tgz": "a tar archive; unpack it, and name the folder of class folders",
    ".gz": "a packed file; unpack it first",
    ".zip": "a zip archive; unpack it, and name the folder of class folders",
    ".7z": "an archive; unpack it, and name the folder of class folders",
    ".rar": "an archive; unpack it, and name the folder of class folders",
    ".parquet": f"a Parquet table; {_SAVE}, with load_dataset of Hugging Face's datasets",
    ".arrow": f"an Arrow table; {_SAVE}, with load_from_disk of Hugging Face's datasets",
    ".tfrecord": f"TFRecords; {_SAVE}, with tensorflow_datasets",
    ".lmdb": f"an LMDB database; {_SAVE}",
    ".mdb": f"an LMDB database; {_SAVE}",
    ".csv": "a table; name the folder of the images, and the table with {labels}",
    ".tsv": "a table; name the folder of the images, and the table with {labels}",
    ".json": "JSON; name the folder of the images",
    ".txt": (
        "a text file; name the folder of the images, and the file with {labels} where it has "
        "their labels"
    ),
    ".npy": f"one array; {_SAVE_ARRAYS}",
    ".mat": f"arrays of MATLAB; {_SAVE_ARRAYS}",
    ".h5": f"an HDF5 file; {_SAVE_ARRAYS}",
    ".hdf5": f"an HDF5 file; {_SAVE_ARRAYS}",
    ".pkl": f"a pickle, which could run code; {_SAVE_ARRAYS}",
    ".pickle": f"a pickle, which could run code; {_SAVE_ARRAYS}",
    ".pt": f"tensors of torch; {_SAVE_ARRAYS}",
    ".pth": f"tensors of torch; {_SAVE_ARRAYS}",
    ".dcm": "DICOM images; save them as PNG of 8 or 16 bits in a folder a class",
    ".nii": "volumes (NIfTI); save their slices as PNG in a folder a class",
    ".mp4": "videos; save their frames as PNG in a folder a class",
    ".avi": "videos; save their frames as PNG in a folder a class",
}


def _loading_call(name: str, folder: Path) -> str:
    """Return how the caller loads a data set from a folder."""
    return by_caller(
        python=f"vitlens.load_data({name!r}, data_dir={str(folder)!r})",
        command=f"--data {name} --data-dir {folder}",
    )


def _by_suffix(name: str) -> str:
    """Return what a file is by its suffix, and what to do with it; "" for an unknown suffix."""
    return _BY_SUFFIX.get(_suffix(name), "").format(labels=argument("labels"))


def _cifar(folder: Path) -> str:
    name = "cifar100" if "100" in folder.name else "cifar10"
    call = _loading_call(name, folder.parent)
    return f"the batches of CIFAR; name the set and the folder above: {call}"


def _hugging_face(_: Path) -> str:
    return (
        f"a data set of Hugging Face (save_to_disk); {_SAVE}, with load_from_disk of Hugging "
        "Face's datasets"
    )


def _mnist(folder: Path) -> str:
    above = folder.parent.parent if folder.name == "raw" else folder.parent
    call = _loading_call("mnist", above)
    return f"the files of MNIST; name the set and the folder above MNIST/raw: {call}"


# for a folder that holds a file or folder of this name
_BY_NAME: Final[dict[str, Callable[[Path], str]]] = {
    "batches.meta": _cifar,
    "data_batch_1": _cifar,
    "dataset_info.json": _hugging_face,
    "dataset_dict.json": _hugging_face,
    "state.json": _hugging_face,
    "train-images-idx3-ubyte": _mnist,
    "train-images-idx3-ubyte.gz": _mnist,
}


def describe_other_data(folder: Path) -> str:
    """Return what a folder without images holds, and what to do with it; "" if unknown."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MOST_ENTRIES)]
    for name, describe in _BY_NAME.items():
        if name in names:
            return describe(folder)
    if {"meta", "train", "test"} <= set(names) and (folder / "meta").is_file():
        return _cifar(folder)
    for name in sorted(names):
        if _suffix(name) in _BY_SUFFIX:
            return f"none, but {_by_suffix(name)} (first {name})"
    return ""


def describe_file(path: Path) -> str:
    """Return what a file is that was named as data, and what to do with it."""
    if image_format(path):
        return f"an image; try {images_alone(path)}, for images without labels"
    return _by_suffix(path.name) or described(path) or "a file of another kind; see vitlens data"


def images_alone(path: Path) -> str:
    """Return how a caller takes images without labels."""
    return by_caller(python=f"vitlens.images({str(path)!r})", command=f"--images {path}")


def _suffix(name: str) -> str:
    if ".tfrecord" in name.lower():  # as in data.tfrecord-00000-of-00010
        return ".tfrecord"
    return Path(name).suffix.lower()
