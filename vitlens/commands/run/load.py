"""The models and images of a run, from its command line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from vitlens.classes import position_note, reading
from vitlens.commands.needs import needs_of, require
from vitlens.commands.run.notes import print_notes
from vitlens.commands.run.options import ModelOptions, RunOptions
from vitlens.commands.run.progress import phase
from vitlens.commands.run.unseen import split_by_seed, training_images_of, unseen
from vitlens.data.catalogue import load_data, load_images, reader_of
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.digits import CLEAR_DIGITS, SHORTCUT, scenes_of_digits
from vitlens.data.folder import list_images
from vitlens.data.registry import SETS
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.files import read_bounded
from vitlens.models.language_image import MOST_PHRASES
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.models.model_names import ModelName, parse_models, require_rule

_MOST_SKIPPED: Final = 3  # images that a line names with the reason why they could not be read
_MOST_BYTES: Final = 16 << 20  # of a file of class names


def load_models(
    models: Sequence[str | ModelName],
    *,
    command: str | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> tuple[Model, ...]:
    """Return the named models on the chosen device, each under its own alias.

    models: names as texts, or parsed already.
    command: the command that they are loaded for, None to check nothing.

    Raises UnsupportedError for a model that does not support the command, InputError when --weights
    is given for several models, and whatever load raises.
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
    # load has the fields of ModelOptions as arguments, with another name and type for two of them
    arguments = dict(vars(model_options))
    arguments["code_files"] = arguments.pop("model_file")
    if model_options.classes is not None:
        arguments["classes"] = _read_classes(model_options.classes)
    arguments["device"] = resolve_device(options.device)
    arguments["seed"] = options.seed
    loaded = []
    for name in _parsed(models):
        with phase(f"Loading {name.alias}"):
            loaded.append(load(name, **arguments))
    if command is not None:
        for model in loaded:
            with phase(f"Checking what {model.alias} supports"):
                require(model, *needs_of(command))
    return tuple(loaded)


def _parsed(models: Sequence[str | ModelName]) -> list[ModelName]:
    """Return the names in order, with the texts parsed together so that their aliases differ."""
    texts = [model for model in models if isinstance(model, str)]
    require_rule(texts)
    parsed_texts = iter(parse_models(texts))
    names = []
    for model in models:
        names.append(next(parsed_texts) if isinstance(model, str) else model)
    return names


def require_data(data: str | None, images: Sequence[str], *, labels: Path | None) -> None:
    """Refuse --data, --images and --labels that do not fit together, before a model is loaded.

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


def require_image_paths(images: Sequence[str]) -> None:
    """Raise DataError for a value of --images that is not there, before a model is loaded."""
    list_images([Path(image).expanduser() for image in images])


@dataclass(frozen=True)
class ImageRequest:
    """The images that a command reads where its options leave the choice open.

    limit: the largest number of images without --limit, None for all.
    scenes: the number of scenes of each source digit if nothing limits the images, None for the
        default of the data.
    repeat: True to show digits in as many scenes as the limit needs.
    first: file names of images to begin with.
    """

    limit: int | None = None
    scenes: int | None = None
    repeat: bool = False
    first: tuple[str, ...] = ()


ANY_IMAGES: Final = ImageRequest()  # of a command that leaves every choice to its options


def load_split(model: Model, **arguments: Any) -> Split:
    """Return the images of one model.

    arguments: as for load_splits.
    """
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

    They are preprocessed for the model, and read once for models with equal preprocessing. Without
    either option, a model of digits gets digits.

    A folder or .npz may have no test part. Of it, images are read that none of the models was
    trained on. The split's first note says so, and so does a line on stderr.

    other_models: further models that classify the same images, but get no split here.

    Raises InputError when both options are given, or neither for a model of something else.
    """
    require_data(data, images or (), labels=options.labels)
    if data is None and not images:
        _require_digits(models)
    training_models = (*models, *other_models)
    reader = _ImageReader(options, data, tuple(images or ()), training_models, request)
    with phase("Reading images"):
        splits = []
        for split, model in zip(once_each(models, reader.read), models):
            if options.labels is not None:
                split = _by_index(split, model)
            splits.append(_with_note(split, model))
    if splits:
        print_data(splits[0], options)
    return splits


def _require_digits(models: Sequence[Model]) -> None:
    """Raise InputError for a model of other classes than digits, of which images must be given."""
    for model in models:
        if model.classes != DIGITS:
            raise InputError(
                f"expected images for {model.alias}, found none; give --images PATH... or --data "
                "DATA"
            )


@dataclass(frozen=True)
class _ImageReader:
    """Reads the images of a run, of which only the preprocessing depends on the model.

    options: the run options.
    data: the value of --data.
    images: the values of --images.
    models: models with training images that are left out.
    request: what to read where options leave the choice open.
    """

    options: RunOptions
    data: str | None
    images: tuple[str, ...]
    models: tuple[Model, ...]
    request: ImageRequest

    @property
    def limit(self) -> int | None:
        """Return the largest number of images: that of --limit, else that of the request."""
        return self.options.limit or self.request.limit

    def read(self, model: Model) -> Split:
        """Return the images, preprocessed for a model."""
        seed = self.options.seed
        if self.images:
            paths = [Path(image) for image in self.images]
            split = load_images(paths, preprocessing=model.preprocessing)
            return split.starting_with(self.request.first, self.limit, seed=seed)
        return self._read_data(model, self.data or "digits")

    def _read_data(self, model: Model, name: str) -> Split:
        """Return the images of a data set, a folder or a file."""
        options = self.options
        first = self.request.first
        limit = self.limit
        # Of drawn scenes, the limit decides how many are made. Of photographs, all are read, and
        # `starting_with` limits them.
        is_drawn = name in SETS and SETS[name].scenes
        # images that `first` names may lie anywhere in the data, so all are loaded to find them
        limit_before_loading = None
        scenes = None
        if is_drawn and not first:
            limit_before_loading = limit
        if is_drawn and limit is None:
            scenes = self.request.scenes
        if limit_before_loading is not None and self.request.repeat:
            return scenes_of_digits(
                limit_before_loading,
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
            limit=limit_before_loading,
            scenes=scenes,
        )
        if split_by_seed(name):
            training_images = training_images_of(self.models, seed=options.seed)
            split = unseen(
                lambda all_images, seed: load_part(seed=seed, whole=all_images), training_images
            )
        else:
            split = load_part(seed=options.seed)
        return split.starting_with(first, limit, seed=options.seed)


def _by_index(split: Split, model: Model) -> Split:
    """Return the split with the model's classes if the table of labels has class indices.

    Such indices are taken for those of the model.
    """
    is_numbered = split.classes == tuple(str(index) for index in range(len(split.classes)))
    if not is_numbered or len(split.classes) > len(model.classes):
        return split
    return replace(split, classes=model.classes)


def _with_note(split: Split, model: Model) -> Split:
    """Return the split with a note where its classes are matched with the model's by position."""
    if split.labels is None or not model.has_classifier:
        return split
    note = position_note(model.classes, split.classes)
    if not note:
        return split
    return replace(split, notes=(note, *split.notes))


def once_each(models: Sequence[Model], read: Callable[[Model], Split]) -> list[Split]:
    """Return the images of each model, read once for models with the same preprocessing.

    read: reads the images for one model, of which only its preprocessing may be used.
    """
    by_geometry: dict[object, Split] = {}
    splits = []
    for model in models:
        geometry = model.preprocessing.geometry
        if geometry not in by_geometry:
            by_geometry[geometry] = read(model)
        splits.append(by_geometry[geometry])
    return splits


def print_data(split: Split, options: RunOptions) -> None:
    """Print on stderr the notes about the images, and which could not be read.

    With --quiet, nothing is printed.
    """
    if options.quiet:
        return
    print_notes([f"{split.title or split.name}: {note}" for note in split.notes])
    if split.skipped:
        shown = split.skipped[:_MOST_SKIPPED]
        reasons = "; ".join(f"{skipped.file}: {skipped.reason}" for skipped in shown)
        if len(split.skipped) > len(shown):
            reasons += f"; and {len(split.skipped) - len(shown)} more"
        print_notes([f"left out {len(split.skipped)} of the images ({reasons})"])


def read_as(models: Sequence[Model], splits: Sequence[Split], options: RunOptions) -> list[Split]:
    """Return the splits, with a first note where a model's classes are mapped to the data's.

    The note goes to stderr, too. Raises InputError where a model does not know the data's
    classes.
    """
    earlier_notes = {note for split in splits for note in split.notes}
    new_notes: list[str] = []
    for model, split in zip(models, splits):
        note = reading(model.classes, split.classes).note
        if note and note not in earlier_notes and note not in new_notes:
            new_notes.append(note)
    if not options.quiet:
        print_notes(new_notes)
    return [replace(split, notes=(*new_notes, *split.notes)) for split in splits]


def _read_classes(file: Path) -> tuple[str, ...]:
    what = "a text file with one class a line"
    try:
        text = read_bounded(file, _MOST_BYTES, what=what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"expected {what} at {file}, found: {error}") from error
    return tuple(line.strip() for line in text.splitlines() if line.strip())
