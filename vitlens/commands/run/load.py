"""The models and images of a run, from its command line."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.analysis.answers.classes import reading
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.unseen import KnownTrainingImages, split_by_seed, training_images_of, unseen
from vitlens.data.catalogue import load_data, load_images
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.digits import digits
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.display import for_terminal
from vitlens.errors import InputError
from vitlens.files import read_bounded
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_models, require_rule
from vitlens.models.support import require_supported


def load_models(
    models: Sequence[str | ModelName],
    *,
    command: str | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> tuple[Model, ...]:
    """The named models on the chosen device, each under its own alias; names are texts, or parsed already.

    command: what they are loaded for. Raises UnsupportedError for a model that does not support it, InputError when
    --weights is given for several models, and whatever load raises.
    """
    if model_options.weights is not None and len(models) > 1:
        raise InputError(f"expected --weights with one model, found {len(models)}; write NAME@FILE for each")
    names = _parsed(models)
    device = resolve_device(options.device)
    classes = None if model_options.classes is None else _read_classes(model_options.classes)
    loaded = tuple(
        load(
            name,
            weights=model_options.weights,
            random_weights=model_options.random_weights,
            arch=model_options.arch,
            image_size=model_options.image_size,
            mean=model_options.mean,
            std=model_options.std,
            classes=classes,
            device=device,
            seed=options.seed,
            code_files=model_options.model_file,
        )
        for name in names
    )
    for model in loaded:
        if command is not None:
            require_supported(model, command)
    return loaded


def _parsed(models: Sequence[str | ModelName]) -> tuple[ModelName, ...]:
    texts = [model for model in models if isinstance(model, str)]
    require_rule(texts)
    names = iter(parse_models(texts))
    return tuple(next(names) if isinstance(model, str) else model for model in models)


def load_split(
    model: Model,
    *,
    options: RunOptions,
    data: str | None = None,
    images: Sequence[str] | None = None,
    beside: Sequence[Model] = (),
    limit: int | None = None,
    repeat: bool = False,
) -> Split:
    """The images of --images or --data, preprocessed for this model; without either, digits for a model of digits.

    Of a folder or .npz without a test part those are given that neither this model nor those beside it (the others
    that answer the same images) were trained on; the split's first note says so, and so does a line on stderr. limit:
    at most so many where --limit says nothing; repeat: digits are shown in several scenes each where more images are
    asked for than there are digits to test on (for what takes its intervals over source digits). Raises InputError when
    both are given, or neither for a model of something else.
    """
    if images and data:
        raise InputError("expected --images or --data, found both; leave one out")
    known = training_images_of((model, *beside), seed=options.seed) if not images else None
    split = _read(model, known, options=options, data=data, images=images, limit=limit, repeat=repeat)
    print_data(split, options)
    return split


def _read(
    model: Model,
    known: KnownTrainingImages | None,
    *,
    options: RunOptions,
    data: str | None,
    images: Sequence[str] | None,
    limit: int | None,
    repeat: bool,
) -> Split:
    """As load_split, printing nothing; known: the models' training images, None for --images."""
    for name in (data, *(images or ())):
        if name is not None and not str(name).strip():  # as a path it would be the current folder
            raise InputError(f"expected a name or a path for --data and --images, found {name!r}; see vitlens data")
    count = options.limit or limit
    if images or known is None:
        split = load_images([Path(image) for image in images or ()], preprocessing=model.preprocessing)
        return split.limit(count, seed=options.seed)
    if data is None and model.classes != DIGITS:
        raise InputError(f"expected images for {model.alias}, found none; give --images PATH... or --data DATA")
    if repeat and count is not None and (data or "digits") == "digits":
        return scenes_of_digits(count, seed=options.seed)

    def part(whole: bool, seed: int) -> Split:
        return load_data(
            data or "digits",
            part="test",
            preprocessing=model.preprocessing,
            data_dir=options.data_dir,
            seed=seed,
            whole=whole,
        )

    split = unseen(part, known) if split_by_seed(data or "digits") else part(False, options.seed)
    return split.limit(count, seed=options.seed)


def print_data(split: Split, options: RunOptions) -> None:
    """Print on stderr which images are used, how they were processed, and which could not be read."""
    if options.quiet:
        return
    for note in split.notes:
        print(for_terminal(f"{split.title or split.name}: {note}"), file=sys.stderr)  # noqa: T201
    if split.skipped:
        named = "; ".join(f"{skipped.file}: {skipped.reason}" for skipped in split.skipped[:3])
        more = f"; and {len(split.skipped) - 3} more" if len(split.skipped) > 3 else ""
        line = f"left out {len(split.skipped)} of the images ({named}{more})"
        print(for_terminal(line), file=sys.stderr)  # noqa: T201


def scenes_of_digits(count: int, *, seed: int = 0) -> Split:
    """`count` scenes of the test digits: a seeded subset, or each digit in several scenes where there are too few.

    The first scene of each digit is the one of a smaller run; the last round is a class-balanced subset.
    """
    once = digits("test", seed=seed)
    rounds = -(-count // len(once))
    if rounds == 1:
        return once.limit(count, seed=seed)
    split, whole = digits("test", seed=seed, scenes=rounds), len(once) * (rounds - 1)
    last = torch.arange(whole, len(split))
    numbered = replace(split.pick(last), groups=last).limit(count - whole, seed=seed)
    assert numbered.groups is not None
    note = (
        f"There are {len(once)} source digits, each in {rounds - 1} to {rounds} scenes; intervals are "
        "bootstrapped over source digits."
    )
    return replace(split.pick(torch.cat([torch.arange(whole), numbered.groups])), notes=(*split.notes, note))


def load_splits(
    models: Sequence[Model],
    *,
    options: RunOptions,
    data: str | None = None,
    images: Sequence[str] | None = None,
    limit: int | None = None,
    repeat: bool = False,
) -> list[Split]:
    """The same images in the same order for each model, preprocessed for it; read once where preprocessing agrees.

    The training images of all models together are left out, so that all answer the same images. limit, repeat: as
    load_split.
    """
    if images and data:
        raise InputError("expected --images or --data, found both; leave one out")
    for name in (data, *(images or ())):
        if name is not None and not str(name).strip():  # as a path it would be the current folder
            raise InputError(f"expected a name or a path for --data and --images, found {name!r}; see vitlens data")
    known = training_images_of(models, seed=options.seed) if not images else None
    by_preprocessing: dict[tuple[object, ...], Split] = {}
    splits = []
    for model in models:
        wanted = model.preprocessing
        key = (wanted.size, wanted.resize, wanted.interpolation)
        if key not in by_preprocessing:
            by_preprocessing[key] = _read(
                model, known, options=options, data=data, images=images, limit=limit, repeat=repeat
            )
        splits.append(by_preprocessing[key])
    if splits:
        print_data(splits[0], options)
    return splits


def read_as(models: Sequence[Model], splits: Sequence[Split], options: RunOptions) -> list[Split]:
    """The splits, with a first note where a model's classes are mapped to the data's; the note goes to stderr, too.

    Raises InputError where a model does not know the data's classes.
    """
    readings = [reading(model.classes, split.classes).note for model, split in zip(models, splits)]
    notes = tuple(dict.fromkeys(note for note in readings if note))
    if not options.quiet:
        for note in notes:
            print(for_terminal(note), file=sys.stderr)  # noqa: T201
    return [replace(split, notes=(*notes, *split.notes)) for split in splits]


def _read_classes(file: Path) -> tuple[str, ...]:
    try:
        lines = read_bounded(file, 16 << 20, what="a text file with one class a line").decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"expected a text file with one class a line at {file}, found: {error}") from error
    return tuple(line.strip() for line in lines if line.strip())
