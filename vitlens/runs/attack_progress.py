"""What a run of `vitlens attack` has done so far, a file for each attack on each part of the images, to be resumed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens.archives import Form, require_forms
from vitlens.errors import InputError
from vitlens.files import read_arrays, write_arrays

FOLDER = "progress"


@dataclass(frozen=True)
class Store:
    """Results on disk while a run lasts; folder: None keeps nothing. process: whose share of the images it is."""

    folder: Path | None
    process: int = 0

    def recall(
        self, alias: str, attack: str, start: int, digest: str, forms: Mapping[str, Form]
    ) -> dict[str, Tensor] | None:
        """What was found for one attack on the images from start on, or None; forms: of the arrays that it is.

        Raises InputError when that was found on other images (digest: of these), or is damaged.
        """
        path = self._path(alias, attack, start)
        if path is None or not path.is_file():
            return None
        found = read_arrays(path)
        require_forms(found, {"digest": Form("U")}, path)
        if str(found.pop("digest")) != digest:
            raise InputError(
                f"expected the images that the run in {path.parent.parent} began with, found others; give the same "
                "--data, --limit, --seed and --batch-size, or begin anew without --resume"
            )
        require_forms(found, forms, path)
        return {name: torch.from_numpy(np.asarray(found[name])) for name in forms}

    def remember(self, alias: str, attack: str, start: int, digest: str, found: Mapping[str, Tensor]) -> None:
        """Keep what was found, all or nothing."""
        path = self._path(alias, attack, start)
        if path is not None:
            write_arrays(path, {"digest": digest, **{name: values.numpy() for name, values in found.items()}})

    def forget(self) -> None:
        """Take away what a finished run needs no more."""
        if self.folder is None or not self.folder.is_dir():
            return
        for file in self.folder.glob("*.npz"):
            file.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _path(self, alias: str, attack: str, start: int) -> Path | None:
        return None if self.folder is None else self.folder / f"{alias}-{attack}-{self.process}-{start}.npz"
