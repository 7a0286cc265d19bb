"""Partial results of a run on disk, from which --resume continues."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitlens.archives import Form, require_forms
from vitlens.errors import InputError
from vitlens.files import read_arrays, write_arrays

PROGRESS: Final = "progress"  # the folder within the run's


@dataclass(frozen=True)
class ProgressStore:
    """Arrays by key while a run lasts, one file each, with the digest of what they were computed from.

    folder: None keeps nothing; process: which of several processes computed them.
    """

    folder: Path | None
    process: int = 0

    def recall(self, key: str, digest: str, forms: Mapping[str, Form]) -> dict[str, NDArray[np.generic]] | None:
        """The arrays stored under a key, or None; forms: their expected types and shapes.

        Raises InputError when they were computed from something else (digest: of what they should be computed from), or
        are damaged.
        """
        path = self._path(key)
        if path is None or not path.is_file():
            return None
        stored = read_arrays(path)
        require_forms(stored, {"digest": Form("U")}, path)
        if str(stored["digest"]) != digest:
            raise InputError(
                f"expected the images that the run in {path.parent.parent} began with, found others; give the same "
                "--data, --limit, --seed and --batch-size, or begin anew without --resume"
            )
        require_forms(stored, forms, path)
        return {name: stored[name] for name in forms}

    def remember(self, key: str, digest: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Store arrays under a key, in one atomic write."""
        path = self._path(key)
        if path is not None:
            write_arrays(path, {"digest": digest, **{name: np.asarray(array) for name, array in arrays.items()}})

    def forget(self) -> None:
        """Delete everything, once the run has ended."""
        if self.folder is None or not self.folder.is_dir():
            return
        for file in self.folder.glob("*.npz"):
            file.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _path(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{key}-{self.process}.npz"
