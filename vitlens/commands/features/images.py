"""The images whose features are extracted: those that are classified, and the labelled training images (the bank)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.run.load import load_splits, once_each, print_data
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.unseen import seen, training_images_of
from vitlens.data.catalogue import load_data, load_images
from vitlens.data.registry import SETS
from vitlens.data.split import Split, balanced, describe_hold_out
from vitlens.errors import DataError, InputError
from vitlens.models.model import Model
from vitlens.names import Part
from vitlens.shapes import Images

SHOWN = 6  # images in a figure
_LETTERS = 11  # of a file's name below its image
_BANK_RATIO = 10  # training images per test image, where --limit is given and --bank is not
_SMALLEST_BANK = 200  # enough for 20 neighbours


@dataclass(frozen=True)
class FeatureSets:
    """One model with its images, preprocessed for it.

    test: those that are classified, mapped and compared; bank: labelled training images, or None; no_bank: why there
    are none; query: images whose neighbours are searched, or None; shown: the only images to draw, or None for a sample
    of the test images.
    """

    model: Model
    options: FeaturesOptions
    test: Split
    bank: Split | None
    no_bank: str
    query: Split | None
    shown: Split | None

    @property
    def alias(self) -> str:
        """Return the model's alias."""
        return self.model.alias

    @property
    def seed(self) -> int:
        """Return the seed of every random number."""
        return self.options.run.seed

    @property
    def parts(self) -> dict[str, Split]:
        """Return the images to be read, by what they are for."""
        named = {"test": self.test, "bank": self.bank, "query": self.query, "shown": self.shown}
        return {name: split for name, split in named.items() if split is not None}

    @property
    def groups(self) -> NDArray[Any] | None:
        """Return the source of each test image, for intervals."""
        return None if self.test.groups is None else self.test.groups.cpu().numpy()

    @property
    def chance(self) -> float:
        """Return the accuracy of always predicting the most frequent class; 0 without labels."""
        labels = self.test.labels
        return 0.0 if labels is None else float(torch.bincount(labels.cpu().long()).max()) / len(labels)

    @property
    def drawn(self) -> Split:
        """Return the images of which some are drawn."""
        return self.test if self.shown is None else self.shown

    @property
    def chosen(self) -> Tensor:
        """Return the numbers of those that are drawn: the first of --show, else a seeded sample."""
        if self.shown is not None:
            return torch.arange(min(SHOWN, len(self.shown)))
        return self.sample(SHOWN)

    def sample(self, most: int) -> Tensor:
        """Return the numbers of a seeded sample of the test images, balanced over classes."""
        return balanced(len(self.test), self.test.labels, most, self.seed)


def load_sets(models: Sequence[Model], options: FeaturesOptions) -> list[FeatureSets]:
    """Return the same images for every model, loaded once for models with the same preprocessing.

    Raises InputError or DataError.
    """
    data = options.data
    images = options.images
    run = options.run
    if images or data is None:
        tests = load_splits(models, options=run, data=data, images=images, scenes=1)
    else:
        tests = [split.limit(run.limit, seed=run.seed) for split in _parts(models, data, "test", run)]
        print_data(tests[0], run)
    banks, reason = _banks(models, options, tests)
    sets = []
    for model, test, bank in zip(models, tests, banks):
        relabelled = test if bank is None else _relabelled(test, bank)
        query = load_images(list(options.query), preprocessing=model.preprocessing) if options.query else None
        sets.append(FeatureSets(model, options, relabelled, bank, reason, query, _shown(model, relabelled, options)))
    return sets


def _parts(models: Sequence[Model], data: str, part: Part, options: RunOptions) -> list[Split]:
    """Return one part of the data for each model.

    The training part holds the images that the models were trained on; where that is none or all of them, a folder
    without parts is divided by seed, in the same way for all models.
    """
    known = training_images_of(models, seed=options.seed)
    drawn_in_scenes = part == "test" and data in SETS and SETS[data].scenes
    seed = known.seed if known.unknown else options.seed

    def read(model: Model) -> Split:
        loading = partial(
            load_data,
            data,
            preprocessing=model.preprocessing,
            data_dir=options.data_dir,
            seed=seed,
            labels=options.labels,
            limit=options.limit if drawn_in_scenes else None,
            scenes=1 if drawn_in_scenes and options.limit is None else None,
        )
        drawn = loading(part=part)
        if known.unknown or not len(known.numbers) or describe_hold_out(seed) not in drawn.notes:
            return drawn
        whole = loading(part="test", whole=True)
        trained = seen(whole, known)
        if not trained.any() or trained.all():
            return drawn
        chosen = (trained if part == "train" else ~trained).nonzero().squeeze(1)
        note = (
            f"the {len(whole) - int(trained.sum()):,} images that are not training images of "
            f"{' and '.join(known.names)} (known by their content) are classified, and the {int(trained.sum()):,} "
            "others are the bank"
        )
        return replace(whole.pick(chosen), part=part, notes=(note, *whole.notes))

    return once_each(models, read)


def _banks(models: Sequence[Model], options: FeaturesOptions, tests: Sequence[Split]) -> tuple[list[Split | None], str]:
    """Return the labelled training images of each model; or None for each, and why."""
    run = options.run
    no_banks: list[Split | None] = [None] * len(models)
    if options.images or tests[0].labels is None:
        return no_banks, "the images have no labels"
    try:
        banks = _parts(models, options.data or "digits", "train", run)
    except DataError as error:
        return no_banks, f"there is no training part ({error})"
    count = options.bank or (None if run.limit is None else default_bank(run.limit))
    return [bank.limit(count, seed=run.seed) for bank in banks], ""


def default_bank(limit: int) -> int:
    """Return the default number of training images for this many test images."""
    return max(_BANK_RATIO * limit, _SMALLEST_BANK)


def _relabelled(test: Split, bank: Split) -> Split:
    """Return the test images with labels that index the bank's classes.

    Raises InputError where a class is not in the bank.
    """
    if test.classes == bank.classes:
        return test
    missing = [name for name in test.classes if name not in bank.classes]
    if missing or test.labels is None:
        raise InputError(f"expected the classes of the training part, found {missing[:5]} in the test part alone")
    places = torch.tensor([bank.classes.index(name) for name in test.classes])
    return replace(test, labels=places[test.labels.long()], classes=bank.classes)


def _shown(model: Model, test: Split, options: FeaturesOptions) -> Split | None:
    """Return the images of --show: files or folders where all are paths, else images of the data by name."""
    if not options.show:
        return None
    if options.thumbnails:
        raise InputError("expected --show or --thumbnails, found both: thumbnails draw the data's own images")
    if all(Path(name).exists() for name in options.show):
        return load_images(list(options.show), preprocessing=model.preprocessing)
    return test.starting_with(options.show).pick(torch.arange(len(set(options.show))))


def pixels(split: Split, indices: Tensor, *, most: int = 224) -> Tensor:
    """Pixels (n, 3, height, width) uint8 of some images, downscaled where a side is longer than `most`."""
    whole = split.source.read(indices)
    longest = max(whole.shape[-2:])
    if not len(whole) or longest <= most:
        return whole
    size = [max(1, round(side * most / longest)) for side in whole.shape[-2:]]
    small = torch.nn.functional.interpolate(whole.float(), size=size, mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).byte()


def batch_of(split: Split, indices: Tensor, model: Model) -> Images:
    """Return some images as one batch on the model's device."""
    (batch,) = split.pick(indices).batches(max(1, len(indices)), device=model.device)
    return batch.images


def names_of(split: Split, indices: Tensor) -> list[str]:
    """Return the labels of images in figures: their class, else the end of their file name, else their number."""
    chosen = [int(index) for index in indices]
    if split.labels is not None and split.classes:
        return [split.classes[int(split.labels[index])] for index in chosen]
    names = [PurePath(split.files[index]).name if split.files else f"image {index}" for index in chosen]
    return [name if len(name) <= _LETTERS else f"…{PurePath(name).stem[-_LETTERS + 1 :]}" for name in names]
