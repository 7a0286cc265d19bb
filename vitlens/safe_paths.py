"""Paths inside a run's folder: names from files cannot lead out of it, and links in it are not followed."""

from collections.abc import Iterable
from pathlib import Path

from vitlens.errors import InputError

_FOREIGN = ("wandb",)  # folders of other programs in a run's folder, which vitlens neither reads nor writes


def inside(folder: Path, *parts: str) -> Path:
    """The path of the parts below a folder, which itself may be a link.

    Raises InputError for parts that lead out of the folder, and for a link in them, for reading as for writing: an
    untrusted file must not determine what is read or overwritten.
    """
    below = Path(*parts)
    try:
        if below.is_absolute() or not below.parts or ".." in below.parts or "\0" in str(below):
            raise InputError(f"expected a place inside {folder}, found {'/'.join(parts)!r}; make the run anew")
        path = folder
        for part in below.parts:
            path /= part
            _require_no_link(path)
    except (OSError, ValueError) as error:  # an invalid file name
        raise InputError(f"expected a place inside {folder}, found {str(below)[:80]!r} ({error})") from error
    return path


def require_no_links(folder: Path, names: Iterable[str]) -> None:
    """Raise InputError where one of these files and folders of a run's folder, or anything below them, is a link."""
    pending = [folder / name for name in names]
    while pending:
        path = pending.pop()
        _require_no_link(path)
        if path.is_dir():
            pending += [child for child in path.iterdir() if child.name not in _FOREIGN]


def _require_no_link(path: Path) -> None:
    if path.is_symlink():
        raise InputError(
            f"expected no link in a run's folder, found {path}, which leads to {path.readlink()}; "
            "put a copy in its place, or remove it"
        )
