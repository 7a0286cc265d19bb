"""Looks at photographs: predictions, maps of the prediction and the runner-up, and the heads that matter."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.heads.labels import FAULTY
from vitlens.attribution.look import Look, look
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.look.images import given_images
from vitlens.commands.look.options import LookOptions
from vitlens.commands.look.record import (
    CLASSES,
    HEADS,
    IMAGES,
    LOOK,
    MAPS,
    LookArrays,
    LookClassRow,
    LookHeadRow,
    LookImageRow,
    LookRow,
)
from vitlens.commands.look.terminal import print_look
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.explorer.measure import write_explorer
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models
from vitlens.commands.scaffold.options import ModelOptions
from vitlens.commands.scaffold.publish import publish, read
from vitlens.commands.scaffold.sheets import DRAWN
from vitlens.data.digits import CLASSES as DIGITS
from vitlens.data.split import Split
from vitlens.devices import autocast, one_thread
from vitlens.display import for_terminal
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_model
from vitlens.models.sources.on_disk import vits_on_disk
from vitlens.names import BUNDLED

_SMALL: Final = 30_000_000  # parameters, below which one thread is fastest on a few images
ANOTHER: Final = "--model timm:NAME (see vitlens models) takes another"


def measure(options: LookOptions) -> Path:
    """Look at each image and write the report; returns the report's path.

    Raises DataError where none of the images can be read, UnsupportedError for a model without a classifier.
    """
    run = options.run
    name, chosen = chosen_model(options)
    if chosen and not run.quiet:
        print(for_terminal(chosen), file=sys.stderr)  # noqa: T201
    with one_thread():  # the passes that check a model are few and small
        (model,) = load_models((name,), command="look", model_options=options.model_options, options=run)
    split = given_images(options.images, model, run)
    return measured(options, model, split, chosen)


def measured(options: LookOptions, model: Model, split: Split, chosen: str = "") -> Path:
    """Look at images that are loaded already, and write the report; returns the report's path.

    chosen: how the model came to be taken, "" where it was named.
    """
    run = options.run
    (batch,) = split.batches(len(split), device=model.device)
    with RunFolder.create(
        "look",
        name_parts=(model.alias, Path(options.images[0]).stem if len(split) == 1 else "images"),
        title=f"{model.alias} looks at {_title(split)}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=(model,), split=split),
        formats=run.formats,
    ) as folder:
        with one_thread() if model.parameter_count() < _SMALL else nullcontext(), autocast(model.device, run.precision):
            seen = look(model, batch.images, batch_size=run.batch_size, seed=run.seed)
            write_explorer(folder, model, batch.images[:DRAWN])
        _write(folder, model, split, seen, chosen)
        path = publish(folder)
        if not run.quiet:
            print_look(read(folder.record(), escaped=False))
        return path


def chosen_model(options: LookOptions) -> tuple[ModelName, str]:
    """The model's name, and how it came to be taken ("" where it was named).

    Raises InputError for weights of no model.
    """
    if options.model is not None:
        return parse_model(options.model), ""
    plain = replace(ModelOptions(), classes=options.model_options.classes)
    if options.model_options != plain:
        raise InputError("expected --model with options of your own weights, found them alone; add --model NAME")
    found = vits_on_disk()
    if found:
        return found[0], f"takes {found[0].name}, the first of timm's ViTs whose weights are on this disk; {ANOTHER}"
    return parse_model(BUNDLED[0]), (
        f"takes {BUNDLED[0]}, which comes with vitlens and knows the digits 0 to 9 alone, as no weights of timm's ViTs "
        f"are on this disk; {ANOTHER}"
    )


def _title(split: Split) -> str:
    return Path(split.files[0]).name if split.files and len(split) == 1 else f"{len(split)} images"


def _write(folder: RunFolder, model: Model, split: Split, seen: Look, chosen: str) -> None:
    """Write all rows and arrays but the explorer's."""
    method, given = ATTRIBUTIONS[seen.method], [one for layer in seen.labels for one in layer]
    row = LookRow(
        chosen,
        model.classes == DIGITS,
        seen.method,
        method.title,
        method.signed,
        seen.replace if seen.places else None,
        seen.note,
        images=len(split),
        heads=len(seen.places),
        labelled=len(given),
        faulty=sum(one.label in FAULTY for one in given),
    )
    folder.write(LOOK, [row])
    folder.write(IMAGES, [LookImageRow(number, file) for number, file in enumerate(_names(split))])
    folder.write(CLASSES, list(_class_rows(seen)))
    folder.write(HEADS, list(_head_rows(seen)))
    maps = seen.maps.float().numpy()
    runner_up = maps[:, 1] if maps.shape[1] > 1 else None
    folder.save(MAPS, LookArrays(split.source.read(torch.arange(len(split))).numpy(), maps[:, 0], runner_up))


def _names(split: Split) -> Sequence[str]:
    return split.files or tuple(f"{split.name} {index}" for index in range(len(split)))


def _class_rows(seen: Look) -> Iterator[LookClassRow]:
    for number, (names, shares) in enumerate(zip(seen.names, seen.probabilities.tolist())):
        for rank, (name, share) in enumerate(zip(names, shares)):
            yield LookClassRow(number, rank, name, share)


def _head_rows(seen: Look) -> Iterator[LookHeadRow]:
    """Every head for every image, the head that matters most first."""
    for number in range(len(seen.names)):
        for each in seen.heads(number, most=len(seen.places)):
            given = each.given
            yield LookHeadRow(
                number,
                each.layer,
                each.head,
                each.delta_loss,
                each.probability,
                None if given is None else given.label,
                None if given is None else given.best,
                None if given is None else given.other or None,
                None if given is None else given.score,
            )
