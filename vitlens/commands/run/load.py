"""The models and images of a run, from its command line."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from vitlens.classes import position_note, reading
from vitlens.commands.needs import needs_of, require
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.progress import phase
from vitlens.commands.run.unseen import split_by_seed, training_images_of, unseen
from vitlens.data.catalogue import load_data, load_images, reader_of
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.digits import CLEAR_DIGITS, SHORTCUT, scenes_of_digits
from vitlens.data.registry import SETS
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.display import for_terminal
from vitlens.errors import InputError
from vitlens.files import read_bounded
from vitlens.models.language_image import MOST_PHRASES
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.model_names import ModelName, parse_models, require_rule


def load_models(
    models: Sequence[str | ModelName],
    *,
    command: str | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> tuple[Model, ...]:
    """Return the named models on the chosen device, each under its own alias.

    Names are texts, or parsed already. command: what they are loaded for. Raises
    UnsupportedError for a model that does not support it, InputError when --weights is given
    for several models, and whatever load raises.
    """
    if model_options.weights is not None and len(models) > 1:
        raise InputError(
            f"expected --weights with one model, found {len(models)}; write NAME@FILE for each"
        )
    if len(model_options.text) > MOST_PHRASES:
        raise InputError(
            f"expected at most {MOST_PHRASES} phrases, each with its maps, found "
            f"{len(model_options.text)}; --classes FILE classifies by more"
        )
    arguments = dict(vars(model_options))
    arguments |= {
        "code_files": arguments.pop("model_file"),
        "device": resolve_device(options.device),
        "seed": options.seed,
    }
    arguments["classes"] = (
        None if model_options.classes is None else _read_classes(model_options.classes)
    )
    typed = [model for model in models if isinstance(model, str)]
    require_rule(typed)
    names = iter(parse_models(typed))
    loaded = []
    for typed_name in models:
        name = next(names) if isinstance(typed_name, str) else typed_name
        with phase(f"Loading {name.alias}"):
            loaded.append(load(name, **arguments))
    if command is not None:
        for model in loaded:
            with phase(f"Checking what {model.alias} supports"):
                require(model, *needs_of(command))
    return tuple(loaded)


def require_data(data: str | None, images: Sequence[str], *, labels: Path | None) -> None:
    """Refuse --data, --images and --labels that fit nothing, before a model is loaded.

    Raises InputError for options that exclude each other, UnknownNameError or DataError for data
    that are not there.
    """
    if images and data:
        raise InputError("expected --images or --data, found both; leave one out")
    if labels is not None and data is None:
        raise InputError(
            "expected --labels with --data FOLDER, found no --data; name the folder of the images"
        )
    if data is not None and data not in SETS:
        reader_of(data, Path(data).expanduser())


@dataclass(frozen=True)
class ImageRequest:
    """The images that a command reads where its options leave the choice open.

    limit: at most so many without --limit.
    scenes: number of scenes of each source digit if nothing limits the images (None: the default of
        the data).
    repeat: show digits in as many scenes as the limit needs.
    first: file names of images to begin with.
    """

    limit: int | None = None
    scenes: int | None = None
    repeat: bool = False
    first: tuple[str, ...] = ()


ANY_IMAGES: Final = ImageRequest()  # of a command that leaves every choice to its options


def load_split(model: Model, **arguments: Any) -> Split:
    """Return the images of one model; arguments: as for load_splits."""
    (split,) = load_splits((model,), **arguments)
    return split


def load_splits(
    models: Sequence[Model],
    *,
    options: RunOptions,
    data: str | None = None,
    images: Sequence[str] | None = None,
    other_models: Sequence[Model] = (),
    request: ImageRequest = ANY_IMAGES,
) -> list[Split]:
    """Return the images of --images or --data, the same in the same order for each model.

    They are preprocessed for the model, and read once where preprocessing agrees. Without either
    option, a model of digits gets digits.

    Of a folder or .npz without a test part those are read that neither these models nor
    other_models (which answer the same images) were trained on; the split's first note says so, and
    so does a line on stderr.

    Raises InputError when both are given, or neither for a model of something else.
    """
    require_data(data, images or (), labels=options.labels)
    training_models = (*models, *other_models)
    reader = _ImageReader(options, data, tuple(images or ()), training_models, request)
    with phase("Reading images"):
        splits = []
        for split, model in zip(once_each(models, reader.read), models):
            splits.append(_with_note(split, model))
    if splits:
        print_data(splits[0], options)
    return splits


@dataclass(frozen=True)
class _ImageReader:
    """Reads the images of a run for one model after another.

    models: those whose training images are left out.
    """

    options: RunOptions
    data: str | None
    images: tuple[str, ...]
    models: tuple[Model, ...]
    request: ImageRequest

    @property
    def limit(self) -> int | None:
        """Return the number of images at most: of --limit, else of the request."""
        return self.options.limit or self.request.limit

    def read(self, model: Model) -> Split:
        """Return the images, preprocessed for a model."""
        seed = self.options.seed
        if self.images:
            paths = [Path(image) for image in self.images]
            split = load_images(paths, preprocessing=model.preprocessing)
            return split.starting_with(self.request.first, self.limit, seed=seed)
        if self.data is None and model.classes != DIGITS:
            raise InputError(
                f"expected images for {model.alias}, found none; give --images PATH... or --data "
                "DATA"
            )
        return self._read_data(model, self.data or "digits")

    def _read_data(self, model: Model, name: str) -> Split:
        """Return the images of a data set, a folder or a file."""
        options = self.options
        first = self.request.first
        limit = self.limit
        is_drawn = name in SETS and SETS[name].scenes
        if is_drawn and self.request.repeat and limit is not None and not first:
            return scenes_of_digits(
                limit,
                seed=options.seed,
                shortcut=name == SHORTCUT,
                clear=name == CLEAR_DIGITS,
            )
        load_part = partial(
            load_data,
            name,
            preprocessing=model.preprocessing,
            data_dir=options.data_dir,
            labels=options.labels,
            limit=limit if is_drawn and not first else None,
            scenes=self.request.scenes if is_drawn and limit is None else None,
        )
        if split_by_seed(name):
            training_images = training_images_of(self.models, seed=options.seed)
            split = unseen(
                lambda all_images, seed: load_part(seed=seed, whole=all_images), training_images
            )
        else:
            split = load_part(seed=options.seed)
        if options.labels is not None:
            split = _by_index(split, model)
        return split.starting_with(first, limit, seed=options.seed)


def _by_index(split: Split, model: Model) -> Split:
    """Return the split with the model's classes where a table has class indices, which are those of
    the model.
    """
    numbered = split.classes == tuple(str(index) for index in range(len(split.classes)))
    if not numbered or len(split.classes) > len(model.classes):
        return split
    return replace(split, classes=model.classes)


def _with_note(split: Split, model: Model) -> Split:
    """Return the split with a note where its classes are matched with the model's by position."""
    if split.labels is None or not model.has_classifier:
        return split
    note = position_note(model.classes, split.classes)
    return replace(split, notes=(note, *split.notes)) if note else split


def once_each(models: Sequence[Model], read: Callable[[Model], Split]) -> list[Split]:
    """Return what is read for each model, once for those with the same preprocessing."""
    by_geometry: dict[object, Split] = {}
    keys = [model.preprocessing.geometry for model in models]
    for key, model in zip(keys, models):
        if key not in by_geometry:
            by_geometry[key] = read(model)
    return [by_geometry[key] for key in keys]


def print_data(split: Split, options: RunOptions) -> None:
    """Print on stderr which images are used, how they were processed, and which could not be
    read."""
    _tell([f"{split.title or split.name}: {note}" for note in split.notes], options)
    if split.skipped:
        reasons = "; ".join(f"{skipped.file}: {skipped.reason}" for skipped in split.skipped[:3])
        more = f"; and {len(split.skipped) - 3} more" if len(split.skipped) > 3 else ""
        _tell([f"left out {len(split.skipped)} of the images ({reasons}{more})"], options)


def _tell(lines: Sequence[str], options: RunOptions) -> None:
    for line in () if options.quiet else lines:
        print(for_terminal(line), file=sys.stderr)  # noqa: T201


def read_as(models: Sequence[Model], splits: Sequence[Split], options: RunOptions) -> list[Split]:
    """Return the splits, with a first note where a model's classes are mapped to the data's.

    The note goes to stderr, too. Raises InputError where a model does not know the data's
    classes.
    """
    readings = [reading(model.classes, split.classes).note for model, split in zip(models, splits)]
    said = {note for split in splits for note in split.notes}
    notes = tuple(dict.fromkeys(note for note in readings if note and note not in said))
    _tell(notes, options)
    return [replace(split, notes=(*notes, *split.notes)) for split in splits]


def _read_classes(file: Path) -> tuple[str, ...]:
    try:
        lines = (
            read_bounded(file, 16 << 20, what="a text file with one class a line")
            .decode("utf-8")
            .splitlines()
        )
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected a text file with one class a line at {file}, found: {error}"
        ) from error
    return tuple(line.strip() for line in lines if line.strip())
