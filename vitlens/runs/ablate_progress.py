"""What a run of `vitlens ablate` has done so far, layer by layer, so that a killed one goes on where it was."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.ablation.effects import Unit
from vitlens.analysis.ablation.joint import BatchOutcomes
from vitlens.archives import Form, require_forms
from vitlens.errors import InputError
from vitlens.files import read_arrays, write_arrays
from vitlens.names import Replacement
from vitlens.runs.digests import batch_digest

FOLDER = "progress"


@dataclass(frozen=True)
class Store:
    """Outcomes on disk while a run lasts; folder: None keeps nothing. process: whose share of the images it is."""

    folder: Path | None
    process: int = 0

    def batch(self, replace: Replacement, offset: int, images: Tensor, labels: Tensor) -> "BatchMemory | None":
        """What is known of one batch with one replacement; None where nothing is kept."""
        if self.folder is None:
            return None
        name = f"{replace}-{self.process}-{offset}"
        return BatchMemory(self.folder, name, batch_digest(images, labels), len(labels))

    def forget(self) -> None:
        """Take away what a finished run needs no more."""
        if self.folder is None or not self.folder.is_dir():
            return
        for file in self.folder.glob("*.npz"):
            file.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


@dataclass(frozen=True)
class BatchMemory:
    """The outcomes of one batch, a file for the units that begin at one layer; digest: of its images and labels;
    count: how many they are."""

    folder: Path
    name: str
    digest: str
    count: int

    def recall(self, sets: Sequence[tuple[Unit, ...]]) -> BatchOutcomes | None:
        """The outcomes as they were found, or None; None too for a file without their cost (of an older vitlens).

        Raises InputError when they are of other images, or damaged.
        """
        path = self._path(sets)
        if not path.is_file():
            return None
        found = read_arrays(path)
        sides = (len(sets), self.count)
        require_forms(found, {"digest": Form("U")}, path)
        if str(found["digest"]) != self.digest:
            raise InputError(
                f"expected the images that the run in {self.folder.parent} began with, found others; give the same "
                "--data, --limit, --seed and --batch-size, or begin anew without --resume"
            )
        require_forms(found, {"loss": Form("f", sides), "correct": Form("b", sides)}, path)
        if "cost" not in found:
            return None
        require_forms(found, {"cost": Form("iu")}, path)
        loss, correct = (torch.from_numpy(np.asarray(found[name])) for name in ("loss", "correct"))
        return BatchOutcomes(loss, correct, int(found["cost"]))

    def remember(self, sets: Sequence[tuple[Unit, ...]], found: BatchOutcomes) -> None:
        """Keep what was found, all or nothing."""
        arrays = {"digest": self.digest, "loss": found.loss, "correct": found.correct, "cost": found.cost}
        write_arrays(self._path(sets), {name: np.asarray(value) for name, value in arrays.items()})

    def _path(self, sets: Sequence[tuple[Unit, ...]]) -> Path:
        names = ",".join("+".join(unit.name for unit in each) for each in sets)
        return self.folder / f"{self.name}-{hashlib.sha256(names.encode()).hexdigest()[:16]}.npz"
