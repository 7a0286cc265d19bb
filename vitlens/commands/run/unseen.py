"""Which images models were trained on, by content, so that they are left out of an evaluation.

`vitlens train` writes a number for each training image, made of its file's bytes (or its pixels),
in `arrays/training_images.npz` next to the weights. An image of that content is recognised in any
folder and under any name. So all images of a separate test folder are evaluated, and of the
training folder only the held-out ones.
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
# folders from a weights file upwards that may be its run's: RUN/points/LABEL/seed-0/weights
_MOST_PARENTS = 4
_Numbers = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]  # of images by content


@dataclass(frozen=True)
class KnownTrainingImages:
    """The images that models were trained on, as far as they are known.

    names: the aliases of the models with training images that are known.
    numbers: the numbers of these images by content, sorted.
    unknown: the aliases of the models with training images that are not known.
    seeds: the seeds by which the trainings of the unknown models held out test images, each once.
    """

    names: tuple[str, ...]
    numbers: _Numbers
    unknown: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)


def split_by_seed(data: str) -> bool:
    """Return True if a seed may have divided this --data into parts.

    Its test part then depends on the training, so training images must be known by content.
    """
    return data not in SETS or SETS[data].parts == "none"


def keep_training_images(
    folder: Path, split: Split, *, data: str, start: Model | None = None
) -> None:
    """Write the numbers of the images that the model in `folder` is trained on.

    split: the training images.
    data: the name of the data.
    start: the model whose weights the training starts from, which adds its training images. If
        these are not known, nothing is written: those of the new model are not known either.
    """
    file = folder / _FILE
    numbers = image_numbers(split) if split_by_seed(data) else np.zeros(0, np.uint64)
    if start is not None:
        numbers_of_start = _numbers_of(start)
        if numbers_of_start is None:
            return
        numbers = np.union1d(numbers, numbers_of_start)
    if file.is_file():  # the training is resumed, perhaps with other images
        numbers = np.union1d(numbers, _read(file))
    write_arrays(file, {"numbers": np.unique(numbers)})


def copy_training_images(model: Model, folder: Path) -> None:
    """Write a model's training images, if they are known, next to weights made from the model's."""
    numbers = _numbers_of(model)
    if numbers is not None:
        write_arrays(folder / _FILE, {"numbers": numbers})


def training_images_of(models: Sequence[Model], *, seed: int) -> KnownTrainingImages:
    """Return the training images of all these models together.

    seed: the one assumed for a model whose training images are unknown and whose run names none.
    """
    unknown = []
    seeds_of_unknown: dict[int, None] = {}  # in order, each once
    trained = []
    all_numbers = np.zeros(0, np.uint64)
    for model in models:
        numbers = _numbers_of(model)
        if numbers is None:
            unknown.append(model.alias)
            seeds_of_unknown[_seed_of(model, seed)] = None
        elif len(numbers):
            trained.append(model.alias)
            all_numbers = np.union1d(all_numbers, numbers)
    return KnownTrainingImages(
        names=tuple(trained),
        numbers=all_numbers,
        unknown=tuple(unknown),
        seeds=tuple(seeds_of_unknown) or (seed,),
    )


def unseen(read: Callable[[bool, int], Split], training_images: KnownTrainingImages) -> Split:
    """Return the images to evaluate, with a note that names and explains the choice.

    Images that none of the models was trained on are evaluated. If none are left, all are
    evaluated, and the note says that the models were trained on them. If the training images of a
    model are not known, only the part that its training would have held out is considered.

    read: reads images, given (True, seed) for all, or (False, seed) for the part that the seed
        holds out.
    """
    if training_images.unknown:
        all_images = False
        held_out = held_out_by_all(lambda seed: read(all_images, seed), training_images)
        return without_seen(held_out, training_images)
    all_images = True
    return without_seen(read(all_images, training_images.seeds[0]), training_images)


def without_seen(split: Split, training_images: KnownTrainingImages) -> Split:
    """Return the images that none of the models was trained on, as far as this is known.

    If none are left, all are returned. The first note says what was left out.
    """
    if not len(training_images.numbers):
        return split
    is_unseen = ~seen_mask(split, training_images)
    count = int(is_unseen.sum())
    total = len(split)
    names = " and ".join(training_images.names)
    if count == total:
        return _add_note(
            split, f"none of these {total:,} images is a training image of {names}: all are used"
        )
    if count == 0:
        return _add_note(
            split,
            f"all {total:,} images are training images of {names}: their accuracy is not "
            "a test accuracy",
        )
    left_out = (
        f"of the {total:,} images given, {total - count:,} are left out, because they are training "
        f"images of {names} (recognised by their content); the other {count:,} are used"
    )
    return _add_note(split.pick(is_unseen.nonzero().squeeze(1)), left_out)


def seen_mask(split: Split, training_images: KnownTrainingImages) -> torch.Tensor:
    """Return a mask (n,) of the images that one of the models was trained on."""
    if not len(training_images.numbers):
        return torch.zeros(len(split), dtype=torch.bool)
    return torch.from_numpy(np.isin(image_numbers(split), training_images.numbers))


def held_out_by_all(read: Callable[[int], Split], training_images: KnownTrainingImages) -> Split:
    """Return the images that the trainings of all unknown models held out, with a note.

    A test part that the data itself has stays as it is.

    read: reads the part that a seed holds out.
    """
    seed, *other_seeds = training_images.seeds
    split = read(seed)
    hold_out = describe_hold_out(seed)
    if hold_out not in split.notes:
        return split
    other_notes = tuple(note for note in split.notes if note != hold_out)
    reason = (
        f"the training images of {' and '.join(training_images.unknown)} are not known: "
        "an earlier version of vitlens wrote the run, or the weights have no run next "
        "to them"
    )
    remedy = "To use all images, put the class folders into test/ inside the folder"
    is_held_out = torch.ones(len(split), dtype=torch.bool)
    for other_seed in other_seeds:
        other_numbers = image_numbers(read(other_seed))
        is_held_out &= torch.from_numpy(np.isin(image_numbers(split), other_numbers))
    if not is_held_out.any():
        note = (
            f"{reason}. Each would have held out a fifth of each class, with seeds "
            f"{_in_words(training_images.seeds)}, and no image is in all of these parts. That of "
            f"seed {seed} is used: accuracies of models of other seeds are no test accuracies. "
            f"{remedy}"
        )
    elif other_seeds:
        split = split.pick(is_held_out.nonzero().squeeze(1))
        note = (
            f"{reason}. Training would have held out a fifth of each class, drawn with seed "
            f"{_in_words(training_images.seeds)}. The {len(split):,} images that are in all "
            f"of these parts are used. {remedy}"
        )
    else:
        note = (
            f"{reason}. A fifth of each class, drawn with seed {seed}, is "
            f"used, which training would have held out. {remedy}"
        )
    return replace(split, notes=(note, *other_notes))


def _in_words(seeds: Sequence[int]) -> str:
    return " and ".join(map(str, seeds))


def _add_note(split: Split, note: str) -> Split:
    return replace(split, notes=(note, *split.notes))


def _numbers_of(model: Model) -> _Numbers | None:
    """Return the training images of a model by content, None if they are not known.

    There are none for random weights, bundled models and weights of other libraries.
    """
    no_images = np.zeros(0, np.uint64)
    if model.provenance.weights == "random" or model.provenance.name in BUNDLED:
        return no_images
    path = Path(model.provenance.name)
    folders: list[Path] = []
    if path.is_dir():
        folders = [path]
    elif path.is_file():
        folders = list(path.parents)[:_MOST_PARENTS]
    # a preset or a name of a hub is no file: no folder is its run
    for folder in folders:
        if (folder / _FILE).is_file():
            return _read(folder / _FILE)
    # only vitlens trains presets, but older versions of it wrote no such file
    was_trained_here = model.architecture["kind"] == "preset"
    return None if was_trained_here else no_images


def _read(path: Path) -> _Numbers:
    numbers = read_arrays(path).get("numbers")
    if numbers is None or numbers.dtype != np.uint64 or numbers.ndim != 1:
        raise InputError(
            f"expected the numbers of training images in {path}, found something else; train again"
        )
    return np.unique(numbers)


def _seed_of(model: Model, seed: int) -> int:
    """Return the seed of a model's training; `seed` if its run is not known."""
    run = training_run(model)
    seed_of_run = None if run is None else run.config.get("seed")
    return seed_of_run if isinstance(seed_of_run, int) else seed
