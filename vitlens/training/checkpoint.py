"""The tensor files of a run: its checkpoint, from which it resumes exactly, and weights kept at
intervals of epochs.

No pickle, and no state of a random generator: image order, augmentation and dropout derive from
(seed, epoch, step).
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitlens.errors import InputError, StorageError, argument
from vitlens.files import write_atomically
from vitlens.models import saved
from vitlens.models.model import Model
from vitlens.models.weights import to_save
from vitlens.names import fingerprinted
from vitlens.training.metrics import KEPT_FOLDER, EpochMetrics, read_metrics
from vitlens.typed import Count, between, parse_json, read_as

FOLDER = "checkpoint"
_FILE = "state.safetensors"
IMAGES = "images"  # in the identity of a training: the fingerprints of its images by part
PARTS = ("train", "test")
_AGAIN = "train anew in another folder"
_KEPT_FILE = re.compile(r"epoch-(\d{4,})\.safetensors")


@dataclass(frozen=True)
class Facts:
    """The part of a checkpoint that is not tensors: the run's identity, steps, seconds and finished
    epochs.
    """

    identity: Mapping[str, Any]
    step: Count
    seconds: Annotated[float, between(0, 1e10)]
    history: tuple[EpochMetrics, ...]

    def require_same(self, now: Mapping[str, object], folder: Path) -> None:
        """Raise InputError for another model, data or recipe than the checkpoint's; names the first
        difference.
        """
        before = _flat(self.identity)
        after = _flat(json.loads(json.dumps(now)))
        names = [
            name for name in sorted(before.keys() | after.keys()) if name.startswith(f"{IMAGES}.")
        ]
        fingerprints = {name: (before.pop(name, None), after.pop(name, None)) for name in names}
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                raise InputError(
                    f"expected to resume {folder} with its {name} = {before.get(name)}, found "
                    f"{after.get(name)}; resume with the options it began with, or {_AGAIN}"
                )
        for name, (first, second) in fingerprints.items():
            if (
                first is not None and second is not None and first != second
            ):  # earlier versions wrote none
                what = fingerprinted(name.removeprefix(f"{IMAGES}."))
                raise InputError(
                    f"expected the {what} that the training in {folder} began with, found others; "
                    "resume with the "
                    f"same, or {_AGAIN}"
                )


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a nested mapping as one level of dotted names."""
    flat: dict[str, object] = {}
    for name, item in value.items():
        flat |= (
            _flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
        )
    return flat


def write_checkpoint(folder: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Replace the folder's checkpoint, all or nothing. Raises StorageError; the previous one then
    survives.

    tensors: by name: model/..., average/..., optimiser/..., best/..., sums.
    """
    path = folder / FOLDER / _FILE
    stored = to_save(tensors)
    metadata = {"vitlens": json.dumps(asdict(facts))}
    try:
        with write_atomically(path) as temporary:
            save_file(stored, str(temporary), metadata=metadata)
    except SafetensorError as error:
        raise StorageError(
            f"expected room on the disk for {path}, found: {error}; free some, then resume"
        ) from error


def read_checkpoint(folder: Path) -> tuple[Facts, dict[str, Tensor]] | None:
    """Return the folder's checkpoint, or None where none was written yet. Raises InputError when it
    is broken.
    """
    path = folder / FOLDER / _FILE
    if not path.exists():
        return None
    for leftover in path.parent.glob(
        f".{path.stem}-*"
    ):  # a kill while writing leaves its temporary file
        with suppress(OSError):
            leftover.unlink()
    try:
        with safe_open(str(path), framework="pt") as file:
            stored = parse_json(file.metadata()["vitlens"], source=str(path))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"expected a checkpoint in {path}, found: {error}; {_AGAIN}") from error
    return read_as(Facts, stored, source=str(path), hint=_AGAIN), tensors


@dataclass(frozen=True)
class KeptWeights:
    """Weights kept during training: the number of epochs done (0: before the first), and their
    file.
    """

    epochs: int
    file: Path


def require_interval(every: int | None) -> None:
    """Raise InputError unless the interval is at least 1 epoch (None: no weights are kept)."""
    if every is not None and every < 1:
        raise InputError(
            f"expected {argument('keep_every')} at least 1, found {every}; leave it out to keep "
            "none"
        )


def keep_weights(folder: Path, model: Model, *, epochs: int) -> None:
    """Write the model's current weights in half precision, named by the number of epochs done; all
    or nothing.
    """
    saved.save(model, folder / KEPT_FOLDER / f"epoch-{epochs:04}.safetensors", half=True)


def read_kept_weights(folder: Path) -> tuple[KeptWeights, ...]:
    """Return the kept weights of a training folder, by epoch."""
    files = (
        (_KEPT_FILE.fullmatch(path.name), path)
        for path in (folder / KEPT_FOLDER).glob("*.safetensors")
    )
    kept = (KeptWeights(int(match[1]), path) for match, path in files if match)
    return tuple(sorted(kept, key=lambda weights: weights.epochs))


def delete_kept_after(folder: Path, epochs: int) -> None:
    """Delete the weights of later epochs (-1: all), and temporary files of a run killed while
    writing.
    """
    unwanted = [weights.file for weights in read_kept_weights(folder) if weights.epochs > epochs]
    for path in (*unwanted, *(folder / KEPT_FOLDER).glob(".epoch-*.safetensors")):
        with suppress(OSError):
            path.unlink()


def weights_over_training(folder: Path) -> tuple[KeptWeights, ...]:
    """Return the kept weights and, at the end, the last ones (model.safetensors, in full
    precision).

    Empty for a folder without kept weights. Raises InputError where metrics.jsonl is missing or
    broken.
    """
    kept = read_kept_weights(folder)
    last = folder / saved.WEIGHTS_FILE
    if not kept or not last.is_file():  # stopped in its first epoch
        return kept
    done = len(read_metrics(folder))
    return (*(weights for weights in kept if weights.epochs < done), KeptWeights(done, last))
