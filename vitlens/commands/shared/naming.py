"""The heads of a run's model named, with the labels that its images have, or why what heads write cannot be said."""

import csv
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.statistics import Statistics
from vitlens.analysis.naming.names import HeadNames, named
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.files import read_bounded
from vitlens.pixels import Streamed

_VALUES: Final = 10  # of a column of attributes, above which it is none
_TRUE, _FALSE = {"1", "true", "yes"}, {"0", "false", "no"}
_BYTES: Final = 64 << 20  # of a file of attributes


class Named(NamedTuple):
    """The words for every head of a model; labels: as columns of the logits (n,), None without them."""

    names: HeadNames
    labels: Tensor | None


def heads_named(
    run: Run[Any], split: Split, attributes: Mapping[str, Tensor], *, slow: str = "", known: Statistics | None = None
) -> Named:
    """The words for every head on these images, with a note where what heads write cannot be said. attributes: see
    `attributes_of`; slow: why no head is removed, "" where each is; known: see `named`."""
    model, labels, why = run.model, None, slow
    if not model.has_classifier:
        why = f"{model.alias} has no classifier"
    elif not slow:
        doing = "say what heads write"
        try:
            labels = labels_of(model, split, predicted=run.options.predicted, doing=doing, options=run.run)
        except InputError as error:
            why = str(error)
    images, size = Streamed(split, model.pixel_dtype), run.run.batch_size or fitting_batch_size(model)
    with autocast(model.device, run.run.precision):
        found = named(
            model, images, labels, attributes, split.masks, size, run.run.seed, run.progress,
            remove=labels is not None, known=known,
        )  # fmt: skip
    found = replace(found, notes=(*found.notes, f"what heads write: {why}")) if why else found
    return Named(found, labels)


def attributes_of(path: Path | None, split: Split) -> dict[str, Tensor]:
    """The attributes of the images in a CSV whose first column names files, none without a path: (n,) True or False by
    name; a column of a few other values is an attribute for each of these, "column = value".

    Raises InputError for a file that is no such table, and for images that it does not name.
    """
    if path is None:
        return {}
    text = read_bounded(path, _BYTES).decode("utf-8-sig", "replace")
    table = list(csv.reader(StringIO(text)))
    if len(table) < 2 or len(table[0]) < 2 or len({*table[0]}) < len(table[0]):
        raise InputError(
            f"expected a line of column names, file names first, then a line an image, found other in {path}"
        )
    cells = {PurePath(row[0]).name: row for row in table[1:] if row}
    missing = [name for name in split.names if PurePath(name).name not in cells]
    if missing:
        raise InputError(
            f"expected a line for each of {len(split)} images in {path}, found none for {len(missing)}, as "
            f"{PurePath(missing[0]).name}"
        )
    ordered = [cells[PurePath(name).name] for name in split.names]
    if any(len(row) < len(table[0]) for row in ordered):
        raise InputError(f"expected {len(table[0])} columns in every line of {path}, found fewer")
    found = {}
    for column, title in enumerate(table[0][1:], 1):
        values = [row[column].strip().lower() for row in ordered]
        if {*values} <= _TRUE | _FALSE:
            found[title] = torch.tensor([value in _TRUE for value in values])
        elif len({*values}) <= _VALUES:
            found |= {
                f"{title} = {each}": torch.tensor([value == each for value in values]) for each in sorted({*values})
            }
    if not found:
        raise InputError(f"expected a column of yes and no, or of at most {_VALUES} values, in {path}, found none")
    return found
