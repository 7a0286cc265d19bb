"""What every run begins with: specimens and images, from what was typed."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.data.catalogue import load_data, load_images
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.digits import digits
from vitlens.data.split import Split
from vitlens.devices import resolve_device
from vitlens.errors import InputError
from vitlens.files import read_run
from vitlens.models.naming import parse_models
from vitlens.models.specimen import Specimen
from vitlens.models.support import require_supported
from vitlens.models.zoo import load
from vitlens.names import CommandName, Part
from vitlens.runs.options import ModelOptions, RunOptions


def load_specimens(
    models: Sequence[str],
    *,
    command: CommandName | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> tuple[Specimen, ...]:
    """The specimens named, on the device asked for, each under an alias of its own.

    command: what they are loaded for. Raises UnsupportedError for a specimen that does not support it, InputError when
    --weights is given for several models, and whatever zoo.load raises.
    """
    if model_options.weights is not None and len(models) > 1:
        raise InputError(f"expected --weights with one model, found {len(models)}; write NAME@FILE for each")
    device = resolve_device(options.device)
    classes = None if model_options.classes is None else _read_classes(model_options.classes)
    found = tuple(
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
        for named in parse_models(models)
    )
    for specimen in found:
        if command is not None:
            require_supported(specimen, command)
    return found


def load_split(
    specimen: Specimen,
    *,
    options: RunOptions,
    data: str | None = None,
    images: Sequence[str] | None = None,
    part: Part = "test",
    limit: int | None = None,
    repeat: bool = False,
) -> Split:
    """The images asked for, as this specimen takes them: --images, --data, or for a model of digits those.

    limit: at most so many where --limit says nothing; repeat: digits are shown in several scenes each where more images
    are asked for than there are digits to test on (for what takes its intervals over source digits). Raises InputError
    when both are given, or neither for a model of something else.
    """
    if images and data:
        raise InputError("expected --images or --data, found both; leave one out")
    count = options.limit or limit
    if images:
        split = load_images([Path(image) for image in images], preprocessing=specimen.preprocessing)
    else:
        if data is None and specimen.classes != DIGITS:
            raise InputError(f"expected images for {specimen.alias}, found none; give --images PATH... or --data DATA")
        if repeat and part == "test" and count is not None and (data or "digits") == "digits":
            return scenes_of_digits(count, seed=options.seed)
        # nothing of a folder without a test part was held out from a model that vitlens did not train
        foreign = specimen.architecture["kind"] != "preset" and not _trained_here(specimen)
        split = load_data(
            data or "digits",
            part=part,
            preprocessing=specimen.preprocessing,
            data_dir=options.data_dir,
            seed=options.seed,
            whole=foreign,
        )
    if split.skipped and not options.quiet:
        named = "; ".join(f"{skipped.file}: {skipped.reason}" for skipped in split.skipped[:3])
        more = f"; and {len(split.skipped) - 3} more" if len(split.skipped) > 3 else ""
        print(f"left out {len(split.skipped)} of the images ({named}{more})", file=sys.stderr)  # noqa: T201
    return split.limit(count, seed=options.seed)


def scenes_of_digits(count: int, *, seed: int = 0) -> Split:
    """So many scenes of the digits to test on: a seeded subset of them, or all of them in as many scenes as it takes.

    The first scenes are those that a run without more would see; of the last round a class-balanced subset is taken.
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
        f"There are {len(once)} source digits: each is shown in {rounds - 1} to {rounds} scenes, and intervals are "
        "bootstrapped over source digits."
    )
    return replace(split.pick(torch.cat([torch.arange(whole), numbered.groups])), notes=(*split.notes, note))


def _trained_here(specimen: Specimen) -> bool:
    """Whether `vitlens train` wrote its weights: then a test part was held out, whatever the architecture."""
    place = Path(specimen.provenance.name)
    with suppress(InputError):
        return read_run(place if place.is_dir() else place.parent).command == "train"
    return False


def load_splits(
    specimens: Sequence[Specimen],
    *,
    options: RunOptions,
    data: str | None = None,
    images: Sequence[str] | None = None,
    limit: int | None = None,
    repeat: bool = False,
) -> list[Split]:
    """The same images in the same order for each specimen, as it takes them; read once for those that agree.

    limit, repeat: as load_split.
    """
    found: dict[tuple[object, ...], Split] = {}
    splits = []
    for specimen in specimens:
        wanted = specimen.preprocessing
        key = (wanted.size, wanted.resize, wanted.interpolation)
        if key not in found:
            found[key] = load_split(specimen, options=options, data=data, images=images, limit=limit, repeat=repeat)
        splits.append(found[key])
    return splits


def _read_classes(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"expected a text file with one class a line at {file}, found: {error}") from error
    return tuple(line.strip() for line in lines if line.strip())
