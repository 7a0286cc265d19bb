"""The images that features are made of: those that are asked about, and the bank that answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath

import torch
from torch import Tensor

from vitlens.commands.scaffold.load import load_splits, say_data
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.unseen import Known, known_of, seen
from vitlens.data.catalogue import load_data, load_images
from vitlens.data.holdout import describe_hold_out
from vitlens.data.split import Split
from vitlens.errors import DataError, InputError
from vitlens.models.model import Model
from vitlens.names import Part
from vitlens.preprocessing import Preprocessing
from vitlens.runs.features_choices import FeatureChoices

SHOWN = 6  # images of a sheet
_LETTERS = 11  # of a file's name below its picture
_TIMES = 10  # training images for each test image, where --limit is given and --bank is not
_LEAST = 200  # of them: enough for 20 neighbours


@dataclass(frozen=True)
class Sets:
    """One model's images, as it takes them.

    test: those that are classified, drawn and compared; bank: labelled training images, or None with the reason why;
    query: images whose neighbours are looked for, or None; shown: images that alone are drawn, or None for the test's.
    """

    test: Split
    bank: Split | None
    reason: str
    query: Split | None = None
    shown: Split | None = None


def load_sets(
    models: Sequence[Model],
    *,
    data: str | None,
    images: Sequence[str] | None,
    choices: FeatureChoices,
    options: RunOptions,
) -> list[Sets]:
    """The same images for every model, read once for those that take them alike. Raises InputError or DataError."""
    if images or data is None:
        tests = load_splits(models, options=options, data=data, images=images)
    else:
        tests = [split.limit(options.limit, seed=options.seed) for split in _parts(models, data, "test", options)]
        say_data(tests[0], options)
    banks, reason = _banks(models, data, images, choices, options, tests)
    queries = [_files(model, choices.query) for model in models]
    found = []
    for model, test, bank, query in zip(models, tests, banks, queries):
        named = _relabelled(test, bank) if bank is not None else test
        found.append(Sets(named, bank, reason, query, _shown(model, named, choices)))
    return found


def _parts(models: Sequence[Model], data: str, part: Part, options: RunOptions) -> list[Split]:
    """One part for each model. What a model was trained on is the training part; where that is nothing or everything,
    a folder without parts is divided by seed, for all models alike."""
    known = known_of(models, seed=options.seed)
    read: dict[object, Split] = {}
    for model in models:
        if _wants(model) not in read:
            read[_wants(model)] = _part(model, data, part, known, options)
    return [read[_wants(model)] for model in models]


def _part(model: Model, data: str, part: Part, known: Known, options: RunOptions) -> Split:
    seed = known.seed if known.unknown else options.seed
    loading = partial(load_data, data, preprocessing=model.preprocessing, data_dir=options.data_dir, seed=seed)
    drawn = loading(part=part)
    if known.unknown or not len(known.numbers) or describe_hold_out(seed) not in drawn.notes:
        return drawn
    whole = loading(part="test", whole=True)
    trained = seen(whole, known)
    if not trained.any() or trained.all():
        return drawn
    chosen = (trained if part == "train" else ~trained).nonzero().squeeze(1)
    note = (
        f"the {len(whole) - int(trained.sum()):,} images that are no training images of {' and '.join(known.names)} "
        f"(known by their content) are classified, the {int(trained.sum()):,} others answer for them"
    )
    return replace(whole.pick(chosen), part=part, notes=(note, *whole.notes))


def _wants(model: Model) -> object:
    wanted: Preprocessing = model.preprocessing
    return wanted.size, wanted.resize, wanted.interpolation


def _banks(
    models: Sequence[Model],
    data: str | None,
    images: Sequence[str] | None,
    choices: FeatureChoices,
    options: RunOptions,
    tests: Sequence[Split],
) -> tuple[list[Split | None], str]:
    """The labelled training images, or none and why."""
    nothing: list[Split | None] = [None] * len(models)
    if images or tests[0].labels is None:
        return nothing, "the images have no labels"
    try:
        banks = _parts(models, data or "digits", "train", options)
    except DataError as error:
        return nothing, f"there is no training part ({error})"
    count = choices.bank or (None if options.limit is None else bank_of(options.limit))
    return [bank.limit(count, seed=options.seed) for bank in banks], ""


def bank_of(limit: int) -> int:
    """How many training images answer for so many test images, where nobody says it."""
    return max(_TIMES * limit, _LEAST)


def _relabelled(test: Split, bank: Split) -> Split:
    """The test images under the bank's numbers of classes. Raises InputError where a class is not in the bank."""
    if test.classes == bank.classes:
        return test
    missing = [name for name in test.classes if name not in bank.classes]
    if missing or test.labels is None:
        raise InputError(f"expected the classes of the training part, found {missing[:5]} in the test part alone")
    places = torch.tensor([bank.classes.index(name) for name in test.classes])
    return replace(test, labels=places[test.labels.long()], classes=bank.classes)


def _files(model: Model, paths: Sequence[str]) -> Split | None:
    return load_images(list(paths), preprocessing=model.preprocessing) if paths else None


def _shown(model: Model, test: Split, choices: FeatureChoices) -> Split | None:
    """The images asked for: files (or folders) of their own where all are paths, else the data's by name."""
    if not choices.show:
        return None
    if choices.thumbnails:
        raise InputError("expected --show or --thumbnails, found both: thumbnails draw the data's own images")
    if all(Path(name).exists() for name in choices.show):
        return _files(model, choices.show)
    return test.led_by(choices.show).pick(torch.arange(len(set(choices.show))))


def some(count: int, most: int, *, labels: Tensor | None, seed: int) -> Tensor:
    """Sorted indices of at most so many of count images, drawn with the seed, as many of each class as there are."""
    if most >= count:
        return torch.arange(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if labels is None:
        return order[:most].sort().values
    shuffled = labels.cpu()[order].long()
    turn = torch.empty(count, dtype=torch.long)  # the how-manieth of its class each image is
    for label in shuffled.unique():
        members = (shuffled == label).nonzero().squeeze(1)
        turn[members] = torch.arange(len(members))
    return order[turn.argsort(stable=True)[:most]].sort().values


def pixels(split: Split, indices: Tensor, *, most: int = 224) -> Tensor:
    """Pixels (n, 3, height, width) uint8 of some images, made smaller where a side has more than that many."""
    found = split.source.read(indices)
    longest = max(found.shape[-2:])
    if not len(found) or longest <= most:
        return found
    size = [max(1, round(side * most / longest)) for side in found.shape[-2:]]
    small = torch.nn.functional.interpolate(found.float(), size=size, mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).byte()


def names_of(split: Split, indices: Tensor) -> list[str]:
    """What to call some images: their class, else their file, else their number from 1."""
    chosen = [int(index) for index in indices]
    if split.labels is not None and split.classes:
        return [split.classes[int(split.labels[index])] for index in chosen]
    return [_tail(PurePath(split.files[index]).name) if split.files else f"image {index + 1}" for index in chosen]


def _tail(name: str) -> str:
    """A long name's end, which tells numbered files apart."""
    return name if len(name) <= _LETTERS else f"…{PurePath(name).stem[-_LETTERS + 1 :]}"
