"""The images of `vitlens features`.

These are test images, which are classified, and labelled training images, from which classifiers
learn ("the bank").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.run.load import ImageRequest, load_splits, once_each, print_data
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.unseen import (
    KnownTrainingImages,
    held_out_by_all,
    seen_mask,
    split_by_seed,
    training_images_of,
    without_seen,
)
from vitlens.data.catalogue import load_data, load_images
from vitlens.data.registry import SETS
from vitlens.data.split import Split, balanced, describe_hold_out
from vitlens.errors import DataError, InputError
from vitlens.models.model import Model
from vitlens.names import Part
from vitlens.shapes import Images

SHOWN: Final = 6  # images in a figure
_LETTERS: Final = 11  # of a file name below its image
_BANK_RATIO: Final = 10  # training images for each test image, with --limit and without --bank
_SMALLEST_BANK: Final = 200  # training images with --limit, enough for 20 neighbours


@dataclass(frozen=True)
class Subject:
    """One model with its images, preprocessed for it.

    test: images that are classified, mapped and compared.
    bank: labelled training images, or None.
    no_bank: the reason for a missing bank.
    query: images of --query, or None.
    selected: the only images to draw (--show), or None for a sample of the test images.
    """

    model: Model
    options: FeaturesOptions
    test: Split
    bank: Split | None
    no_bank: str
    query: Split | None
    selected: Split | None

    @property
    def alias(self) -> str:
        """Return the model's alias."""
        return self.model.alias

    @property
    def seed(self) -> int:
        """Return the seed of every random number."""
        return self.options.run.seed

    @property
    def splits(self) -> dict[str, Split]:
        """Return the images whose features are read, by their purpose."""
        splits = {"test": self.test}
        if self.bank is not None:
            splits["bank"] = self.bank
        if self.query is not None:
            splits["query"] = self.query
        if self.selected is not None:
            splits["selected"] = self.selected
        return splits

    @property
    def groups(self) -> NDArray[Any] | None:
        """Return the source of each test image, for intervals."""
        if self.test.groups is None:
            return None
        return self.test.groups.cpu().numpy()

    @property
    def chance(self) -> float:
        """Return the accuracy of always predicting the most frequent class, 0 without labels."""
        labels = self.test.labels
        if labels is None:
            return 0.0
        counts = torch.bincount(labels.cpu().long())
        return float(counts.max()) / len(labels)

    @property
    def to_draw(self) -> Split:
        """Return the images from which the drawn ones are taken."""
        return self.test if self.selected is None else self.selected

    @property
    def indices_to_draw(self) -> Tensor:
        """Return the indices of the images that are drawn: the first of --show, or a seeded
        sample."""
        if self.selected is not None:
            return torch.arange(min(SHOWN, len(self.selected)))
        return self.sample(SHOWN)

    def sample(self, most: int) -> Tensor:
        """Return the indices of a seeded sample of the test images, balanced over classes."""
        return balanced(len(self.test), self.test.labels, most, self.seed)


def load_subjects(models: Sequence[Model], options: FeaturesOptions) -> list[Subject]:
    """Return each model with the images, which are the same for all models.

    Raises InputError or DataError.
    """
    tests = _load_tests(models, options)
    banks, no_bank = _load_banks(models, options, tests)
    subjects = []
    for model, test, bank in zip(models, tests, banks):
        if bank is not None:
            test = _relabel(test, bank)
        query = None
        if options.query:
            query = load_images(list(options.query), preprocessing=model.preprocessing)
        selected = _load_selected(model, test, options)
        subjects.append(Subject(model, options, test, bank, no_bank, query, selected))
    return subjects


def _load_tests(models: Sequence[Model], options: FeaturesOptions) -> list[Split]:
    """Return the images that are classified, for each model."""
    run = options.run
    if options.images or options.data is None:
        return load_splits(
            models,
            options=run,
            data=options.data,
            images=options.images,
            request=ImageRequest(scenes=1),
        )
    parts = _load_parts(models, options.data, "test", run)
    tests = [split.limit(run.limit, seed=run.seed) for split in parts]
    print_data(tests[0], run)
    return tests


def _load_banks(
    models: Sequence[Model], options: FeaturesOptions, tests: Sequence[Split]
) -> tuple[list[Split | None], str]:
    """Return the labelled training images of each model, or None for each and the reason."""
    run = options.run
    no_banks: list[Split | None] = [None] * len(models)
    if options.images or tests[0].labels is None:
        return no_banks, "the images have no labels"
    try:
        banks = _load_parts(models, options.data or "digits", "train", run)
    except DataError as error:
        return no_banks, f"there is no training part ({error})"
    count = options.bank
    if count is None and run.limit is not None:
        count = default_bank(run.limit)
    return [bank.limit(count, seed=run.seed) for bank in banks], ""


def default_bank(limit: int) -> int:
    """Return the default number of training images for this many test images."""
    return max(_BANK_RATIO * limit, _SMALLEST_BANK)


def _load_parts(models: Sequence[Model], data: str, part: Part, options: RunOptions) -> list[Split]:
    """Return one part of the data for each model.

    The training part holds the images that the models were trained on. If that is none or all of
    the images, a folder without parts is divided by seed, in the same way for all models.
    """
    training_images = training_images_of(models, seed=options.seed)

    def load(model: Model) -> Split:
        return _load_part(model, data, part, options, training_images)

    return once_each(models, load)


def _load_part(
    model: Model, data: str, part: Part, options: RunOptions, training_images: KnownTrainingImages
) -> Split:
    """Return a part of the data for one model.

    If a seed would divide the data, and the training images of the models are known, the part is
    defined by these.
    """
    if part == "test" and training_images.unknown and split_by_seed(data):
        test = held_out_by_all(
            lambda seed: _load(model, data, part, options, seed), training_images
        )
        return without_seen(test, training_images)
    # training images that are not known cannot be recognised: the seed of the training divides the
    # data again
    seed = training_images.seeds[0] if training_images.unknown else options.seed
    by_seed = _load(model, data, part, options, seed)
    is_divided_by_seed = describe_hold_out(seed) in by_seed.notes
    is_known = len(training_images.numbers) > 0 and not training_images.unknown
    if not (is_divided_by_seed and is_known):
        return by_seed
    all_images = _load(model, data, "test", options, seed, undivided=True)
    is_trained_on = seen_mask(all_images, training_images)
    if not is_trained_on.any() or is_trained_on.all():
        return by_seed
    is_in_part = is_trained_on if part == "train" else ~is_trained_on
    count = int(is_trained_on.sum())
    note = (
        f"the {len(all_images) - count:,} images that are not training images of "
        f"{' and '.join(training_images.names)} (recognised by their content) are classified, "
        f"and the other {count:,} are the bank"
    )
    images = all_images.pick(is_in_part.nonzero().squeeze(1))
    return replace(images, part=part, notes=(note, *all_images.notes))


def _load(
    model: Model, data: str, part: Part, options: RunOptions, seed: int, *, undivided: bool = False
) -> Split:
    """Return one part of the data, or the whole data.

    Scenes of test images are drawn as far as --limit needs them.
    """
    # with --limit, scenes are drawn until it is reached; without, one of each source digit
    limit = None
    scenes = None
    if part == "test" and data in SETS and SETS[data].scenes:
        limit = options.limit
        if limit is None:
            scenes = 1
    return load_data(
        data,
        part=part,
        preprocessing=model.preprocessing,
        data_dir=options.data_dir,
        seed=seed,
        labels=options.labels,
        limit=limit,
        scenes=scenes,
        whole=undivided,
    )


def _relabel(test: Split, bank: Split) -> Split:
    """Return the test images with labels that index the bank's classes.

    Raises InputError for a class that is not in the bank.
    """
    if test.classes == bank.classes:
        return test
    missing = [name for name in test.classes if name not in bank.classes]
    if missing or test.labels is None:
        raise InputError(
            f"expected the classes of the training part, found {missing[:5]} in the test part alone"
        )
    # the index in the bank of each class of the test images
    bank_indices = torch.tensor([bank.classes.index(name) for name in test.classes])
    return replace(test, labels=bank_indices[test.labels.long()], classes=bank.classes)


def _load_selected(model: Model, test: Split, options: FeaturesOptions) -> Split | None:
    """Return the images of --show, None without it.

    If all names are paths, these files and folders are read; else the images of the data with
    these names.
    """
    if not options.show:
        return None
    if options.thumbnails:
        raise InputError(
            "expected --show or --thumbnails, found both: thumbnails draw the images of the data"
        )
    if all(Path(name).exists() for name in options.show):
        return load_images(list(options.show), preprocessing=model.preprocessing)
    count = len(set(options.show))
    return test.starting_with(options.show).pick(torch.arange(count))


def pixels(split: Split, indices: Tensor, *, most: int = 224) -> Tensor:
    """Return the pixels (n, 3, height, width) uint8 of some images, with sides up to `most` px."""
    full = split.source.read(indices)
    longest = max(full.shape[-2:])
    if not len(full) or longest <= most:
        return full
    size = [max(1, round(side * most / longest)) for side in full.shape[-2:]]
    small = torch.nn.functional.interpolate(
        full.float(), size=size, mode="bilinear", antialias=True
    )
    return small.round().clamp(0, 255).byte()


def batch_of(split: Split, indices: Tensor, model: Model) -> Images:
    """Return some images as one batch on the model's device."""
    size = max(1, len(indices))  # a batch size must be positive
    [batch] = split.pick(indices).batches(size, device=model.device)
    return batch.images


def names_of(split: Split, indices: Tensor) -> list[str]:
    """Return names of images for figures: their class, else the end of their file name, else their
    index.
    """
    names = []
    for index in indices.tolist():
        if split.labels is not None and split.classes:
            names.append(split.classes[int(split.labels[index])])
        elif split.files:
            names.append(_shorten(PurePath(split.files[index]).name))
        else:
            names.append(_shorten(f"image {index}"))
    return names


def _shorten(name: str) -> str:
    if len(name) <= _LETTERS:
        return name
    letters = _LETTERS - 1  # one is the ellipsis
    return f"…{PurePath(name).stem[-letters:]}"
