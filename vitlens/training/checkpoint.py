"""Files of tensors that a run writes: its checkpoint, to go on from exactly, and weights kept every so many epochs.

No pickle, and no state of a random generator: orders, augmentation and dropout derive from (seed, epoch, step).
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
from vitlens.strict_json import parse_json
from vitlens.training.defaults import KEPT_FOLDER
from vitlens.training.metrics import read_metrics
from vitlens.training.optimiser import Average, Optimiser, copy_into

FOLDER = "checkpoint"
_FILE = "state.safetensors"
_KEPT_FILE = re.compile(r"epoch-(\d{4,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name (model/..., average/..., optimiser/...) and facts that JSON can hold."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def collect(module: nn.Module, optimiser: Optimiser, average: Average | None) -> dict[str, Tensor]:
    """Every tensor that training changes, by name."""
    tensors = {f"model/{name}": value for name, value in module.state_dict().items()}
    if average is not None:
        tensors |= {f"average/{name}": value for name, value in average.tensors.items()}
    return tensors | {f"optimiser/{name}": value for name, value in optimiser.tensors().items()}


def restore(checkpoint: Checkpoint, module: nn.Module, optimiser: Optimiser, average: Average | None) -> None:
    """Write a checkpoint's tensors over a model, its optimiser and its average.

    Raises InputError where they do not fit these.
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
    tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.tensors.items()}
    with storage_errors(path), write_atomically(path) as temporary:
        save_file(tensors, str(temporary), metadata={"vitlens": json.dumps(checkpoint.facts)})


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Errors that safetensors wraps in a type of its own become StorageError, in one line."""
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


def require_same(found: Mapping[str, object], expected: Mapping[str, object], *, folder: Path) -> None:
    """Refuse to go on with another model, data or recipe than the checkpoint's; names the first difference."""
    then, now = _flat(found), _flat(json.loads(json.dumps(expected)))
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            raise InputError(
                f"expected to resume {folder} with its {name} = {then.get(name)}, found {now.get(name)}; "
                "resume with the options it began with, or train in another folder"
            )


def _require_fitting(checkpoint: Checkpoint, module: nn.Module, optimiser: Optimiser, average: Average | None) -> None:
    """Refuse tensors that are not those of this model and optimiser, or that are no finite numbers."""
    expected = {f"model/{name}": value for name, value in module.state_dict().items()}
    if average is not None:
        expected |= {f"average/{name}": value for name, value in average.tensors.items()}
    found = checkpoint.tensors
    held = {name: value for name, value in found.items() if name.startswith("optimiser/")}
    expected |= {f"optimiser/{name}": value for name, value in optimiser.blank(begun=bool(held)).items()}
    own = {name for name in found if name.startswith(("model/", "average/", "optimiser/"))}
    odd = sorted(own ^ expected.keys())
    odd += [name for name, value in expected.items() if name in own and not _is_like(found[name], value)]
    if odd:
        raise InputError(
            f"expected a checkpoint of this model, found {len(odd)} that do not fit it (first {odd[0][:80]!r}); "
            "train anew in another folder"
        )


def _is_like(found: Tensor, expected: Tensor) -> bool:
    """Whether a tensor can stand in another's place: its shape and kind of number, finite."""
    alike = found.shape == expected.shape and found.is_floating_point() == expected.is_floating_point()
    return alike and not found.is_complex() and bool(found.isfinite().all())


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A nested mapping as one level of dotted names."""
    flat: dict[str, object] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {prefix + name: item}
    return flat


@dataclass(frozen=True)
class Kept:
    """Weights at one moment of a training: after how many epochs (0: before the first), and the file that has them."""

    epochs: int
    file: Path


def require_interval(every: int | None) -> None:
    """Raise InputError unless epochs between kept weights are at least 1 (None: none are kept)."""
    if every is not None and every < 1:
        raise InputError(f"expected --keep-every at least 1, found {every}; leave it out to keep none")


def keep_weights(folder: Path, model: Model, *, epochs: int) -> None:
    """Write the model's present weights, in half precision, as those after so many epochs; all or nothing."""
    path = folder / KEPT_FOLDER / f"epoch-{epochs:04}.safetensors"
    with storage_errors(path):
        saved.save(model, path, half=True)


def read_kept(folder: Path) -> tuple[Kept, ...]:
    """The kept weights of a training folder by epoch; none where there are none."""
    files = ((_KEPT_FILE.fullmatch(path.name), path) for path in (folder / KEPT_FOLDER).glob("*.safetensors"))
    return tuple(sorted((Kept(int(match[1]), path) for match, path in files if match), key=lambda kept: kept.epochs))


def delete_kept_after(folder: Path, epochs: int) -> None:
    """Delete what was kept after so many epochs (-1: all), and temporary files of a run killed while writing."""
    unwanted = [kept.file for kept in read_kept(folder) if kept.epochs > epochs]
    for path in (*unwanted, *(folder / KEPT_FOLDER).glob(".epoch-*.safetensors")):
        with suppress(OSError):
            path.unlink()


def weights_over_training(folder: Path) -> tuple[Kept, ...]:
    """The kept weights and, at the end, the last ones (model.safetensors, in full precision).

    Empty for a folder without kept weights. Raises InputError where metrics.jsonl is missing or broken.
    """
    kept = read_kept(folder)
    if not kept:
        return ()
    done = len(read_metrics(folder))
    last = folder / saved.WEIGHTS_FILE
    if not last.is_file():  # stopped within its first epoch
        return kept
    return (*(one for one in kept if one.epochs < done), Kept(done, last))
