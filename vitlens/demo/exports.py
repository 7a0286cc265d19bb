"""Where a session's reports lie until its tab is closed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path


def token_of(session: str) -> str:
    """A session's part in the names of its files; the session cannot be told from it."""
    return sha256(session.encode()).hexdigest()[:12]


@contextmanager
def place_of(root: Path, session: str, word: str) -> Iterator[tuple[Path, str]]:
    """A session's folder, and the name of the files of a report there; an earlier one of the same command is deleted,
    and what an error leaves behind, too."""
    place = root / token_of(session)
    place.mkdir(parents=True, exist_ok=True)
    name = f"vitlens-{word}-{token_of(session)}"
    _remove(place, name)
    try:
        yield place, name
    except BaseException:
        _remove(place, name)
        raise


def forget(root: Path, cache: Path, session: str) -> None:
    """Delete a session's reports, and the copies of them from which a browser downloads."""
    token = token_of(session)
    shutil.rmtree(root / token, ignore_errors=True)
    for copy in cache.glob(f"*/vitlens-*-{token}.*"):
        copy.unlink(missing_ok=True)


def _remove(place: Path, name: str) -> None:
    for path in place.glob(f"{name}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
