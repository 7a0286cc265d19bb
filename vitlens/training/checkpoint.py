"""Read and write a run's checkpoint, and the weights kept at intervals of epochs.

A run resumes exactly from its checkpoint. There is no pickle, and no state of a random generator:
image order, augmentation and dropout derive from (seed, epoch, step).
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
IMAGES = "images"  # key of the fingerprints of images by part, in the identity of a training
PARTS = ("train", "test")
_AGAIN = "train anew in another folder"  # what to type, at the end of a message
_KEPT_FILE = re.compile(r"epoch-(\d{4,})\.safetensors")


@dataclass(frozen=True)
class Facts:
    """The run of a checkpoint.

    identity: the settings that must be the same in a resumed run.
    step: the number of finished steps.
    seconds: the seconds so far.
    history: the finished epochs.
    """

    identity: Mapping[str, Any]
    step: Count
    seconds: Annotated[float, between(0, 1e10)]
    history: tuple[EpochMetrics, ...]

    def require_same(self, identity: Mapping[str, object], folder: Path) -> None:
        """Raise InputError, with the first difference, for another model, data or recipe.

        identity: that of the resumed run.
        """
        before = _flatten(self.identity)
        after = _flatten(json.loads(json.dumps(identity)))  # tuples become lists, as in the file
        names = sorted(before.keys() | after.keys())
        images_prefix = f"{IMAGES}."
        # first the settings: other images may follow from another setting
        for name in names:
            if name.startswith(images_prefix):
                continue
            if before.get(name) != after.get(name):
                raise InputError(
                    f"expected to resume {folder} with its {name} = {before.get(name)}, found "
                    f"{after.get(name)}; resume with the options it began with, or {_AGAIN}"
                )
        for name in names:
            if not name.startswith(images_prefix):
                continue
            # folders of earlier versions have no fingerprints of images
            has_both = before.get(name) is not None and after.get(name) is not None
            if has_both and before[name] != after[name]:
                images = fingerprinted(name.removeprefix(images_prefix))
                raise InputError(
                    f"expected the {images} that the training in {folder} began with, found "
                    f"others; resume with the same, or {_AGAIN}"
                )


def _flatten(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a nested mapping as one level of dotted names."""
    flat: dict[str, object] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flatten(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = item
    return flat


def write_checkpoint(folder: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Replace the folder's checkpoint, all or nothing.

    Raises StorageError; the previous checkpoint then survives.

    tensors: the tensors by name: model/..., average/..., optimiser/..., best/... and sums.
    """
    path = folder / FOLDER / _FILE
    stored = to_save(tensors)
    metadata = {"vitlens": json.dumps(asdict(facts))}
    try:
        with write_atomically(path) as temporary:
            save_file(stored, str(temporary), metadata=metadata)
    except SafetensorError as error:
        raise StorageError(
            f"expected free space on the disk for {path}, found: {error}; free some, then resume"
        ) from error


def read_checkpoint(folder: Path) -> tuple[Facts, dict[str, Tensor]] | None:
    """Return the folder's checkpoint, None before the first. Raises InputError for a broken one."""
    path = folder / FOLDER / _FILE
    if not path.exists():
        return None
    # a run that was killed while writing leaves its temporary file
    for leftover in path.parent.glob(f".{path.stem}-*"):
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
    """Weights kept during training.

    epochs: the number of finished epochs, 0 before the first.
    file: the file of the weights.
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
    """Write the model's current weights in half precision, named by the number of epochs done."""
    saved.save(model, folder / KEPT_FOLDER / f"epoch-{epochs:04}.safetensors", half=True)


def read_kept_weights(folder: Path) -> tuple[KeptWeights, ...]:
    """Return the kept weights of a training folder, by epoch."""
    checkpoints = []
    for path in (folder / KEPT_FOLDER).glob("*.safetensors"):
        match = _KEPT_FILE.fullmatch(path.name)
        if match:
            checkpoints.append(KeptWeights(int(match[1]), path))
    return tuple(sorted(checkpoints, key=lambda weights: weights.epochs))


def delete_kept_after(folder: Path, epochs: int) -> None:
    """Delete the weights of later epochs (-1: all), and temporary files of a killed run."""
    later = [weights.file for weights in read_kept_weights(folder) if weights.epochs > epochs]
    temporary = (folder / KEPT_FOLDER).glob(".epoch-*.safetensors")
    for path in (*later, *temporary):
        with suppress(OSError):
            path.unlink()


def weights_over_training(folder: Path) -> tuple[KeptWeights, ...]:
    """Return the kept weights and, at the end, the last ones (model.safetensors, full precision).

    They are empty for a folder without kept weights. Raises InputError if metrics.jsonl is missing
    or broken.
    """
    checkpoints = read_kept_weights(folder)
    last = folder / saved.WEIGHTS_FILE
    if not checkpoints or not last.is_file():  # the run was stopped in its first epoch
        return checkpoints
    epochs = len(read_metrics(folder))
    earlier = [weights for weights in checkpoints if weights.epochs < epochs]
    return (*earlier, KeptWeights(epochs, last))
