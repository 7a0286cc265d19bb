"""From what the command line says to specimens and images, the same for every command."""

from collections.abc import Sequence
from pathlib import Path

from vitlens.data.catalogue import load_data, load_images
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.models.naming import parse_models
from vitlens.models.specimen import Specimen
from vitlens.models.zoo import load
from vitlens.runs.options import ModelOptions, RunOptions

DEFAULT_DATA = "digits"


def load_specimens(names: Sequence[str], model_options: ModelOptions, options: RunOptions) -> tuple[Specimen, ...]:
    """The models as named, on the chosen device, each under an alias of its own.

    Raises InputError when --weights is given for several models, and whatever zoo.load raises.
    """
    if not names:
        raise InputError("expected a model, found none; e.g. vit-digits, see vitlens models")
    if model_options.weights is not None and len(names) > 1:
        raise InputError(f"expected --weights with one model, found {len(names)}; write NAME@FILE for each instead")
    device = resolve_device(options.device)
    classes = None if model_options.classes is None else _read_names(model_options.classes)
    return tuple(
        load(
            f"{named.alias}={named.name}" + (f"@{named.weights}" if named.weights else ""),
            weights=model_options.weights,
            random_weights=model_options.random_weights,
            arch=model_options.arch,
            image_size=model_options.image_size,
            mean=model_options.mean,
            std=model_options.std,
            classes=classes,
            device=device,
            seed=options.seed,
        )
        for named in parse_models(names)
    )


def load_splits(data: str, specimens: Sequence[Specimen], options: RunOptions) -> tuple[Split, ...]:
    """The test part of the data for each specimen, resized as that model was trained: the same images, in one order.

    Read once where the models agree on the size.
    """
    found: dict[tuple[object, ...], Split] = {}
    splits = []
    for specimen in specimens:
        wanted = specimen.preprocessing
        key = (wanted.size, wanted.resize, wanted.interpolation)
        if key not in found:
            where = Path("data") if options.data_dir is None else options.data_dir
            whole = load_data(data, part="test", preprocessing=wanted, data_dir=where, seed=options.seed)
            found[key] = whole.limit(options.limit, seed=options.seed)
        splits.append(found[key])
    return tuple(splits)


def load_pictures(images: Sequence[str] | None, data: str | None, specimen: Specimen, options: RunOptions) -> Split:
    """The images of a command that takes --images or --data; neither means the embedded digits, for models of digits.

    Raises InputError when both are given, or neither for a model of something else.
    """
    if images and data:
        raise InputError("expected --images or --data, found both; leave one out")
    if images:
        paths = [Path(image) for image in images]
        return load_images(paths, preprocessing=specimen.preprocessing).limit(options.limit, seed=options.seed)
    (split,) = load_splits(data or DEFAULT_DATA, [specimen], options)
    if data is None and split.classes != specimen.classes:
        raise InputError(f"expected --images or --data for {specimen.alias}, found neither; e.g. --images cat.jpg")
    return split


def _read_names(path: Path) -> tuple[str, ...]:
    """The class names in a file, one a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"expected --classes FILE with one name a line, found: {error}") from error
    names = tuple(line.strip() for line in lines if line.strip())
    if len(set(names)) != len(names):
        raise InputError(f"expected every class name once in {path}, found {len(names) - len(set(names))} twice")
    return names
