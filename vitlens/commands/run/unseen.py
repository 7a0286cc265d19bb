"""Which images models were trained on, by content, and which of the images for evaluation are none of those.

`vitlens train` writes a number for each training image, made of its file's bytes (or its pixels), in
`arrays/training_images.npz` beside the weights. An image of that content is known wherever it lies and whatever it is
called, so a separate test folder is evaluated whole, and of the training folder only the held-out images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vitlens.arrays import read_arrays, write_arrays
from vitlens.commands.shared.trainings import TRAINING_IMAGES, training_run
from vitlens.data.identity import image_numbers
from vitlens.data.registry import SETS
from vitlens.data.split import Split, describe_hold_out
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.names import BUNDLED

_FILE = f"arrays/{TRAINING_IMAGES}.npz"
_ABOVE = 4  # folders from a weights file upwards in which its run is looked for: RUN/points/LABEL/seed-0/weights


@dataclass(frozen=True)
class KnownTrainingImages:
    """The images that models were trained on, as far as they are known.

    names: the models' aliases; numbers: of their training images by content, sorted uint64; unknown: the aliases of
    those of which nothing is known; seed: the one that held out their test images.
    """

    names: tuple[str, ...]
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
    unknown: tuple[str, ...] = ()
    seed: int = 0


def split_by_seed(data: str) -> bool:
    """Return True if the parts of this --data may have been drawn by a seed, so that training images are known by
    content."""
    return data not in SETS or SETS[data].parts == "none"


def keep_training_images(folder: Path, split: Split, *, data: str, start: Model | None = None) -> None:
    """Write which images a model in `folder` is trained on, and those that its start was trained on before.

    Of a training that goes on, the images of which it knew stay: it was trained on them.
    """
    numbers = image_numbers(split) if split_by_seed(data) else np.zeros(0, np.uint64)
    before = None if start is None else _numbers_of(start)
    earlier = _read(folder / _FILE) if (folder / _FILE).is_file() else None
    for known in (before, earlier):
        if known is not None:
            numbers = np.union1d(numbers, known)
    write_arrays(folder / _FILE, {"numbers": np.unique(numbers)})


def copy_training_images(model: Model, folder: Path) -> None:
    """Write a model's training images, where they are known, beside weights that were made from its own."""
    numbers = _numbers_of(model)
    if numbers is not None:
        write_arrays(folder / _FILE, {"numbers": numbers})


def training_images_of(models: Sequence[Model], *, seed: int) -> KnownTrainingImages:
    """Return the training images of all these models together.

    seed: the one assumed for a model whose training images are unknown and whose run names none.
    """
    by_model = [(model, _numbers_of(model)) for model in models]
    unknown = [model for model, numbers in by_model if numbers is None]
    of_all = [numbers for _, numbers in by_model if numbers is not None]
    trained = [model.alias for model, numbers in by_model if numbers is not None and len(numbers)]
    return KnownTrainingImages(
        tuple(trained),
        np.unique(np.concatenate([np.zeros(0, np.uint64), *of_all])),
        tuple(model.alias for model in unknown),
        next((_seed_of(model, seed) for model in unknown), seed),
    )


def unseen(read: Callable[[bool, int], Split], known: KnownTrainingImages) -> Split:
    """Return the images to evaluate, with a note that says which they are, and why.

    read: all images (True), or the part that a seed holds out. Images that none of the models was trained on are
    evaluated; where none are left, all are, and the note says that the model was trained on them. Where a model's
    training images are not known, the part is evaluated that its training would have held out.
    """
    if known.unknown:
        return _held_out(read(False, known.seed), known)
    split = read(True, known.seed)
    if not len(known.numbers):
        return split
    fresh = torch.from_numpy(~np.isin(image_numbers(split), known.numbers))
    count = int(fresh.sum())
    total = len(split)
    names = " and ".join(known.names)
    if count == total:
        return _noted(split, f"none of these {total:,} images is a training image of {names}: all are used")
    if count == 0:
        return _noted(split, f"all {total:,} images are training images of {names}: their accuracy is no test accuracy")
    left_out = (
        f"of the {total:,} images given {total - count:,} are left out, as they are training images of {names} (known "
        f"by their content); the {count:,} others are used"
    )
    return _noted(split.pick(fresh.nonzero().squeeze(1)), left_out)


def seen(split: Split, known: KnownTrainingImages) -> torch.Tensor:
    """Return which images (n,) of a split one of the models was trained on."""
    if not len(known.numbers):
        return torch.zeros(len(split), dtype=torch.bool)
    return torch.from_numpy(np.isin(image_numbers(split), known.numbers))


def _held_out(split: Split, known: KnownTrainingImages) -> Split:
    """Return a part drawn by seed, with a note that says why; as it is where the data has a test part of its own."""
    hold_out = describe_hold_out(known.seed)
    if hold_out not in split.notes:
        return split
    rest = tuple(note for note in split.notes if note != hold_out)
    note = (
        f"the training images of {' and '.join(known.unknown)} are not known (the run was written before vitlens kept "
        f"them, or there is none beside the weights): a fifth of each class, drawn with seed {known.seed}, is used, as "
        "training would have held it out; put the class folders into test/ inside the folder to use all"
    )
    return replace(split, notes=(note, *rest))


def _noted(split: Split, note: str) -> Split:
    return replace(split, notes=(note, *split.notes))


def _numbers_of(model: Model) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]] | None:
    """Return the training images of a model by content: none for random weights, a bundled model and others' weights;
    None where nothing is known."""
    none = np.zeros(0, np.uint64)
    if model.provenance.weights == "random" or model.provenance.name in BUNDLED:
        return none
    place = Path(model.provenance.name)
    for folder in [place] if place.is_dir() else list(place.parents)[:_ABOVE]:
        if (folder / _FILE).is_file():
            return _read(folder / _FILE)
    return None if model.architecture["kind"] == "preset" else none


def _read(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    numbers = read_arrays(path).get("numbers")
    if numbers is None or numbers.dtype != np.uint64 or numbers.ndim != 1:
        raise InputError(f"expected the numbers of training images in {path}, found something else; train again")
    return np.unique(numbers)


def _seed_of(model: Model, seed: int) -> int:
    run = training_run(model)
    own = None if run is None else run.config.get("seed")
    return own if isinstance(own, int) else seed
