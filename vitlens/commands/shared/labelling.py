"""Labels for all heads of a run's model, and the attributes of images that heads may write."""

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
from vitlens.files import csv_rows, read_csv_text
from vitlens.pixels import Streamed

_MOST_VALUES: Final = 10  # different values of a column; one with more is no attribute
_TRUE = {"1", "true", "yes"}
_FALSE = {"0", "false", "no"}
_MOST_BYTES: Final = 64 << 20  # of a file of attributes

Line: TypeAlias = list[str]  # of a table: a file's name, then one value for each column


class Named(NamedTuple):
    """The labels of every head of a model, and the labels of the images on which they were tested.

    labels: (n,), the label of each image as a column of the logits, None without labels.
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
    slow: the reason why removing every head would take too long, "" to remove every head.
    statistics: those from which heads are labelled, None to measure them.
    """
    model = run.model
    labels = None
    why_no_writes = slow
    if not model.has_classifier:
        why_no_writes = f"{model.alias} has no classifier"
    elif not slow:
        doing = "say what heads write"
        try:
            labels = labels_of(
                model, split, predicted=run.options.predicted, doing=doing, options=run.run_options
            )
        except InputError as error:
            why_no_writes = str(error)
    images = Streamed(split, model.pixel_dtype)
    size = run.run_options.batch_size or fitting_batch_size(model)
    with autocast(model.device, run.run_options.precision):
        names = label_heads(
            model,
            Sample(images, labels, attributes, split.masks),
            size,
            run.run_options.seed,
            run.progress,
            remove=labels is not None,
            statistics=statistics,
        )
    if why_no_writes:
        names = replace(names, notes=(*names.notes, f"what heads write: {why_no_writes}"))
    return Named(names, labels)


def attributes_of(path: Path | None, split: Split) -> dict[str, Tensor]:
    """Read attributes of the images from a CSV file; return none without a path.

    The first column of the file names image files. Every further column is an attribute, (n,) True
    or False, if its values are yes and no. A column of a few other values gives an attribute
    "column = value" for each value; a column of two values only for the first, as the other is its
    opposite.

    Raises InputError for a file that is no such table, for images that it does not name, and for a
    line that several images may match.
    """
    if path is None:
        return {}
    text = read_csv_text(path, _MOST_BYTES, what="a table of attributes")
    table = csv_rows(StringIO(text), path)
    titles = table[0] if table else []
    has_lines = len(table) >= 2
    has_attributes = len(titles) >= 2
    has_unique_titles = len(set(titles)) == len(titles)
    if not (has_lines and has_attributes and has_unique_titles):
        raise InputError(
            "expected a line of column names, file names first, then a line an image, found other "
            f"in {path}; write FILE,ATTRIBUTE lines"
        )
    lines = [line for line in table[1:] if line]  # a blank line is empty
    line_of_image = _lines_of(split.names, lines, path)
    if any(len(line) < len(titles) for line in line_of_image):
        raise InputError(f"expected {len(titles)} columns in every line of {path}, found fewer")
    attributes = {}
    for column, title in enumerate(titles[1:], 1):
        values = [line[column].strip().lower() for line in line_of_image]
        different_values = sorted(set(values))
        if set(values) <= _TRUE | _FALSE:
            attributes[title] = torch.tensor([value in _TRUE for value in values])
        elif len(different_values) <= _MOST_VALUES:
            if len(different_values) == 2:  # opposites: the first one says all
                different_values = different_values[:1]
            for name in different_values:
                attributes[f"{title} = {name}"] = torch.tensor([value == name for value in values])
    if not attributes:
        raise InputError(
            f"expected a column of yes and no, or of at most {_MOST_VALUES} values, in {path}, "
            "found none"
        )
    return attributes


def _lines_of(names: Sequence[str], lines: Sequence[Line], path: Path) -> list[Line]:
    """Return the line of each image: that of the path which shares most parts with it at the end.

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
    line_of_image: list[Line] = []
    image_of_line: dict[str, str] = {}  # by the path in the line
    for name in names:
        candidates = by_name[PurePath(name).name]
        most_shared = max(_shared_parts(line[0], name) for line in candidates)
        nearest = [line for line in candidates if _shared_parts(line[0], name) == most_shared]
        first_line = nearest[0]
        path_in_line = first_line[0].strip()
        # equally near lines do no harm if their values are the same
        if any(line[1:] != first_line[1:] for line in nearest):
            raise InputError(
                f"expected one line for {name} in {path}, found {len(nearest)}; write its path as "
                f"{name}"
            )
        # one line is for one image only
        first_image = image_of_line.setdefault(path_in_line, name)
        if first_image != name:
            raise InputError(
                f"expected a line for each image in {path}, found {path_in_line} for both "
                f"{first_image} and {name}; write their paths as {first_image} and {name}"
            )
        line_of_image.append(first_line)
    return line_of_image


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
