"""Labels for all heads of a run's model, and the attributes of images that heads may write."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import fitting_batch_size
from vitlens.analysis.heads.statistics import Statistics
from vitlens.analysis.naming.labels import HeadNames, Sample, label_heads
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of
from vitlens.data.split import Split
from vitlens.devices import autocast
from vitlens.errors import InputError
from vitlens.files import read_bounded
from vitlens.pixels import Streamed

_VALUES: Final = 10  # of a column of attributes, above which it is none
_TRUE = {"1", "true", "yes"}
_FALSE = {"0", "false", "no"}
_BYTES: Final = 64 << 20  # of a file of attributes

Line: TypeAlias = list[str]  # of a table: a file's name, then a value a column


class Named(NamedTuple):
    """Labels for every head of a model.

    labels: the labels of the images, as columns of the logits (n,), None without labels.
    """

    names: HeadNames
    labels: Tensor | None


def heads_named(
    run: Run[Any],
    split: Split,
    attributes: Mapping[str, Tensor],
    *,
    slow: str = "",
    statistics: Statistics | None = None,
) -> Named:
    """Label every head on these images; a note explains missing labels of what heads write.

    attributes: as returned by `attributes_of`.
    slow: the reason for which no head is removed, "" if each is.
    statistics: those from which heads are labelled, None to measure them.
    """
    model = run.model
    labels = None
    why = slow
    if not model.has_classifier:
        why = f"{model.alias} has no classifier"
    elif not slow:
        doing = "say what heads write"
        try:
            labels = labels_of(
                model, split, predicted=run.options.predicted, doing=doing, options=run.run
            )
        except InputError as error:
            why = str(error)
    images = Streamed(split, model.pixel_dtype)
    size = run.run.batch_size or fitting_batch_size(model)
    with autocast(model.device, run.run.precision):
        names = label_heads(
            model,
            Sample(images, labels, attributes, split.masks),
            size,
            run.run.seed,
            run.progress,
            remove=labels is not None,
            statistics=statistics,
        )
    if why:
        names = replace(names, notes=(*names.notes, f"what heads write: {why}"))
    return Named(names, labels)


def attributes_of(path: Path | None, split: Split) -> dict[str, Tensor]:
    """Read attributes of the images from a CSV whose first column names files; no attributes
    without a path.

    Each attribute is (n,) True or False, by name. A column of a few other values gives an attribute
    for each value, "column = value"; of two values, which are opposites, only for the first one.
    Raises InputError for a file that is no such table, for images that it does not name, and for a
    line that several images may match.
    """
    if path is None:
        return {}
    text = read_bounded(path, _BYTES).decode("utf-8-sig", "replace")
    table = list(csv.reader(StringIO(text)))
    titles = table[0] if table else []
    if len(table) < 2 or len(titles) < 2 or len(set(titles)) < len(titles):
        raise InputError(
            "expected a line of column names, file names first, then a line an image, found other "
            f"in {path}"
        )
    ordered = _lines_of(split.names, [line for line in table[1:] if line], path)
    if any(len(row) < len(titles) for row in ordered):
        raise InputError(f"expected {len(titles)} columns in every line of {path}, found fewer")
    attributes = {}
    for column, title in enumerate(titles[1:], 1):
        values = [row[column].strip().lower() for row in ordered]
        different_values = sorted(set(values))
        if set(values) <= _TRUE | _FALSE:
            attributes[title] = torch.tensor([value in _TRUE for value in values])
        elif len(different_values) <= _VALUES:
            if len(different_values) == 2:  # opposites: the first one says all
                different_values = different_values[:1]
            for name in different_values:
                attributes[f"{title} = {name}"] = torch.tensor([value == name for value in values])
    if not attributes:
        raise InputError(
            f"expected a column of yes and no, or of at most {_VALUES} values, in {path}, found "
            "none"
        )
    return attributes


def _lines_of(names: Sequence[str], lines: Sequence[Line], path: Path) -> list[Line]:
    """Return the line of each image: the one whose path agrees in most parts, from the file name
    up.

    Raises InputError for an image without a line, for one with several different lines that agree
    equally well, and for a line that several images match.
    """
    by_name: dict[str, list[Line]] = {}
    for line in lines:
        by_name.setdefault(PurePath(line[0].strip()).name, []).append(line)
    missing = [name for name in names if PurePath(name).name not in by_name]
    if missing:
        raise InputError(
            f"expected a line for each of {len(names)} images in {path}, found none for "
            f"{len(missing)}, as {missing[0]}"
        )
    chosen: list[Line] = []
    image_of: dict[str, str] = {}  # the first image that has a line, by the line's path
    for name in names:
        candidates = by_name[PurePath(name).name]
        most_shared = max(_shared_parts(line[0], name) for line in candidates)
        nearest = [line for line in candidates if _shared_parts(line[0], name) == most_shared]
        first_line = nearest[0]
        written = first_line[0].strip()
        if any(line[1:] != first_line[1:] for line in nearest):
            raise InputError(
                f"expected one line for {name} in {path}, found {len(nearest)}; write its path as "
                f"{name}"
            )
        first = image_of.setdefault(written, name)
        if first != name:
            raise InputError(
                f"expected a line for each image in {path}, found {written} for both {first} and "
                f"{name}; write their paths as {first} and {name}"
            )
        chosen.append(first_line)
    return chosen


def _shared_parts(first: str, second: str) -> int:
    """Return how many parts at the end of two paths are the same."""
    first_parts = reversed(PurePath(first.strip()).parts)
    second_parts = reversed(PurePath(second).parts)
    count = 0
    for first_part, second_part in zip(first_parts, second_parts):
        if first_part != second_part:
            break
        count += 1
    return count
