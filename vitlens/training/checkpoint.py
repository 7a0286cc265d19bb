"""The tensor files of a run: its checkpoint, from which it resumes exactly, and weights kept at intervals of epochs.

No pickle, and no state of a random generator: image order, augmentation and dropout derive from (seed, epoch, step).
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitlens.errors import InputError, StorageError
from vitlens.files import write_atomically
from vitlens.models import saved
from vitlens.models.model import Model
from vitlens.models.weights import to_save
from vitlens.training.defaults import KEPT_FOLDER
from vitlens.training.metrics import read_metrics
from vitlens.training.optimiser import Average, Optimiser, copy_into
from vitlens.typed import parse_json

FOLDER = "checkpoint"
_FILE = "state.safetensors"
_KEPT_FILE = re.compile(r"epoch-(\d{4,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name (model/..., average/..., optimiser/...) and facts that are stored as JSON."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def collect(module: nn.Module, optimiser: Optimiser, average: Average | None) -> dict[str, Tensor]:
    """Every tensor that training changes, by name."""
    tensors = {f"model/{name}": value for name, value in module.state_dict().items()}
    if average is not None:
        tensors |= {f"average/{name}": value for name, value in average.tensors.items()}
    return tensors | {f"optimiser/{name}": value for name, value in optimiser.tensors().items()}


def restore(checkpoint: Checkpoint, module: nn.Module, optimiser: Optimiser, average: Average | None) -> None:
    """Copy a checkpoint's tensors into a model, its optimiser and its average.

    Raises InputError where they do not match.
    """
    _require_fitting(checkpoint, module, optimiser, average)
    copy_into(module, _below("model/", checkpoint.tensors))
    if average is not None:
        for name, value in _below("average/", checkpoint.tensors).items():
            average.tensors[name].copy_(value)
    optimiser.restore(_below("optimiser/", checkpoint.tensors))


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the folder's checkpoint, all or nothing. Raises StorageError; the previous one then survives."""
    path = folder / FOLDER / _FILE
    tensors = to_save(checkpoint.tensors)
    with storage_errors(path), write_atomically(path) as temporary:
        save_file(tensors, str(temporary), metadata={"vitlens": json.dumps(checkpoint.facts)})


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise errors of safetensors as StorageError."""
    try:
        yield
    except SafetensorError as error:
        raise StorageError(f"expected room on the disk for {path}, found: {error}; free some, then resume") from error


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The folder's checkpoint, or None where none was written yet. Raises InputError when it is broken."""
    path = folder / FOLDER / _FILE
    if not path.exists():
        return None
    for leftover in path.parent.glob(f".{path.stem}-*"):  # a kill while writing leaves its temporary file
        with suppress(OSError):
            leftover.unlink()
    try:
        with safe_open(str(path), framework="pt") as file:
            facts = parse_json(file.metadata()["vitlens"], source=str(path))
            return Checkpoint({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"expected a checkpoint in {path}, found: {error}; train anew in another folder") from error


def require_same(saved_facts: Mapping[str, object], expected: Mapping[str, object], *, folder: Path) -> None:
    """Raise InputError for another model, data or recipe than the checkpoint's; names the first difference."""
    then, now = _flat(saved_facts), _flat(json.loads(json.dumps(expected)))
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            raise InputError(
                f"expected to resume {folder} with its {name} = {then.get(name)}, found {now.get(name)}; "
                "resume with the options it began with, or train in another folder"
            )


def _require_fitting(checkpoint: Checkpoint, module: nn.Module, optimiser: Optimiser, average: Average | None) -> None:
    """Raise InputError for tensors that do not match this model and optimiser, or are not finite."""
    expected = {f"model/{name}": value for name, value in module.state_dict().items()}
    if average is not None:
        expected |= {f"average/{name}": value for name, value in average.tensors.items()}
    tensors = checkpoint.tensors
    started = any(name.startswith("optimiser/") for name in tensors)
    expected |= {f"optimiser/{name}": value for name, value in optimiser.expected_state(started=started).items()}
    names = {name for name in tensors if name.startswith(("model/", "average/", "optimiser/"))}
    wrong = sorted(names ^ expected.keys())
    wrong += [name for name, value in expected.items() if name in names and not _is_like(tensors[name], value)]
    if wrong:
        raise InputError(
            f"expected a checkpoint of this model, found {len(wrong)} other tensors (first {wrong[0][:80]!r}); "
            "train anew in another folder"
        )


def _is_like(tensor: Tensor, expected: Tensor) -> bool:
    """Whether a tensor is finite and has the expected shape and kind of number."""
    alike = tensor.shape == expected.shape and tensor.is_floating_point() == expected.is_floating_point()
    return alike and not tensor.is_complex() and bool(tensor.isfinite().all())


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A nested mapping as one level of dotted names."""
    flat: dict[str, object] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
    return flat


@dataclass(frozen=True)
class KeptWeights:
    """Weights kept during training: the number of epochs done (0: before the first), and their file."""

    epochs: int
    file: Path


def require_interval(every: int | None) -> None:
    """Raise InputError unless the interval is at least 1 epoch (None: no weights are kept)."""
    if every is not None and every < 1:
        raise InputError(f"expected --keep-every at least 1, found {every}; leave it out to keep none")


def keep_weights(folder: Path, model: Model, *, epochs: int) -> None:
    """Write the model's current weights in half precision, named by the number of epochs done; all or nothing."""
    path = folder / KEPT_FOLDER / f"epoch-{epochs:04}.safetensors"
    with storage_errors(path):
        saved.save(model, path, half=True)


def read_kept_weights(folder: Path) -> tuple[KeptWeights, ...]:
    """The kept weights of a training folder, by epoch."""
    files = ((_KEPT_FILE.fullmatch(path.name), path) for path in (folder / KEPT_FOLDER).glob("*.safetensors"))
    checkpoints = (KeptWeights(int(match[1]), path) for match, path in files if match)
    return tuple(sorted(checkpoints, key=lambda weights: weights.epochs))


def delete_kept_after(folder: Path, epochs: int) -> None:
    """Delete the weights of later epochs (-1: all), and temporary files of a run killed while writing."""
    unwanted = [weights.file for weights in read_kept_weights(folder) if weights.epochs > epochs]
    for path in (*unwanted, *(folder / KEPT_FOLDER).glob(".epoch-*.safetensors")):
        with suppress(OSError):
            path.unlink()


def weights_over_training(folder: Path) -> tuple[KeptWeights, ...]:
    """The kept weights and, at the end, the last ones (model.safetensors, in full precision).

    Empty for a folder without kept weights. Raises InputError where metrics.jsonl is missing or broken.
    """
    checkpoints = read_kept_weights(folder)
    if not checkpoints:
        return ()
    done = len(read_metrics(folder))
    last = folder / saved.WEIGHTS_FILE
    if not last.is_file():  # stopped in its first epoch
        return checkpoints
    return (*(weights for weights in checkpoints if weights.epochs < done), KeptWeights(done, last))
