"""List the images of a folder, and its folders that hold images."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vitlens.data.decode import SUFFIXES
from vitlens.errors import DataError
from vitlens.signatures import image_format

# A folder with more other files and folders than this is refused, if they are also more than _RARE
# for each image: it is then no folder of images.
MANY = 100_000
_RARE = 10
_TEXTS: Final = (
    ".txt",
    ".json",
    ".xml",
    ".csv",
    ".tsv",
    ".md",
    ".html",
    ".yaml",
    ".yml",
    ".log",
    ".py",
)
_DATA: Final = (
    ".npy",
    ".npz",
    ".pt",
    ".pth",
    ".bin",
    ".safetensors",
    ".pkl",
    ".h5",
    ".mat",
    ".parquet",
)
_ARCHIVES: Final = (".zip", ".tar", ".gz", ".7z", ".rar")
_MEDIA: Final = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".mp3", ".wav", ".pdf")
# copies of another file, and incomplete files
_COPIES: Final = (".bak", ".orig", ".old", ".tmp", ".part", ".crdownload")
# suffixes of files that are not opened
_NO_IMAGES: Final = frozenset((*_TEXTS, *_DATA, *_ARCHIVES, *_MEDIA, *_COPIES))
_JUNK: Final = frozenset(
    {
        "@eadir",  # thumbnails of a Synology NAS
        "@recycle",
        "@recently-snapshot",
        "#recycle",
        "#snapshot",
        "$recycle.bin",
        "recycler",
        "lost+found",
        "system volume information",
    }
)
# hidden folders in which other programs keep copies of images
_OF_PROGRAMS: Final = frozenset(
    (
        *(".ipynb_checkpoints", ".cache", ".git", ".venv", ".thumbnails", ".thumbs"),
        *(".trash", ".trashes", ".trash-1000", ".spotlight-v100", ".fseventsd", ".snapshot"),
        ".picasaoriginals",
    )
)


def class_folders(folder: Path) -> list[Path]:
    """Return the visible folders with an image at any depth, sorted. Raises DataError."""
    return [child for child in _visible_folders(folder) if _holds_images(child)]


def folders_of_others(folder: Path) -> list[Path]:
    """Return the visible folders that hold files but no image, sorted. Raises DataError."""
    return [
        child
        for child in _visible_folders(folder)
        if not _holds_images(child) and _holds_files(child)
    ]


def hidden_folders(folder: Path) -> list[Path]:
    """Return the folders that a dot at the beginning of their names hides, and that hold images.

    Such a folder may be meant as a class. Those of other programs are left out. Raises DataError.
    """
    names = []
    with readable(folder), os.scandir(folder) as entries:
        for entry in entries:
            is_dotted = entry.name.startswith(".") and entry.name.lower() not in _OF_PROGRAMS
            if is_dotted and _is_folder(entry):
                names.append(entry.name)
    return [folder / name for name in sorted(names) if images_in(folder / name)]


def _visible_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without hidden ones. Raises DataError."""
    with readable(folder), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _is_folder(entry) and not is_hidden(entry.name)]
    return [folder / name for name in sorted(names)]


def _holds_images(folder: Path) -> bool:
    return any(True for _ in images_below(folder))


def _holds_files(folder: Path) -> bool:
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]
        if any(not is_hidden(name) for name in files):
            return True
    return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def images_below(folder: Path) -> Iterator[Path]:
    """Yield the images at any depth, sorted, without hidden files and folders.

    Linked folders are followed, but no folder is read twice. Raises DataError for a folder without
    permission to read, and if only few of MANY files are images (a home folder, a disk).
    """
    images = 0
    others = 0
    visited: set[tuple[int, int]] = set()  # device and number of each folder
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        status = Path(place).stat()
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in sorted(files):
            path = Path(place, name)
            if is_image(path):
                images += 1
                yield path
            else:
                others += 1
        others += 1  # the folder itself
        if others > MANY and others > _RARE * images:
            raise DataError(
                f"expected a folder of images, found {images:,} images among the first "
                f"{images + others:,} files and folders of {folder}; name the folder that holds "
                "them"
            )


def images_in(folder: Path) -> list[Path]:
    """Return the images directly in a folder, sorted. Raises DataError."""
    with readable(folder), os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not _is_folder(entry))
    return [folder / name for name in names if is_image(folder / name)]


def is_image(path: Path) -> bool:
    """Return True for a file with an image's suffix, or another one with an image's first bytes.

    Files with the suffix of another kind of file are not opened.
    """
    if is_hidden(path.name) or path.is_dir():
        return False
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return True
    if suffix in _NO_IMAGES or suffix.endswith("~"):
        return False
    return path.is_file() and image_format(path) != ""


def is_hidden(name: str) -> bool:
    """Return True for names of hidden files and folders, and of folders that systems add."""
    return name.startswith((".", "__")) or name.lower() in _JUNK  # __MACOSX, __pycache__


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn every OSError inside into a DataError of one line."""
    try:
        yield
    except OSError as error:
        _refuse(error, folder)


def _refuse(error: OSError, folder: Path | None = None) -> None:
    """Raise a DataError in place of an OSError; os.walk calls it with the error."""
    reason = error.strerror or error
    raise DataError(
        f"expected a folder that can be read at {error.filename or folder}, found: {reason}; check "
        "its permissions"
    ) from error
