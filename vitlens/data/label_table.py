"""Labels of images from a table: a column of file names and one of labels (`--labels FILE.csv`)."""

import csv
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Final

import torch

from vitlens.data.folder import Listing, list_images, read_listing
from vitlens.data.parts import role_of
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split, hold_out
from vitlens.errors import DataError, argument, by_caller
from vitlens.files import read_bounded
from vitlens.names import are_imagenet, imagenet_classes, imagenet_indices

_BYTES: Final = (
    128 << 20
)  # of a table; that of ImageNet's 1.3 million training images has half of it
_CLASSES: Final = 100_000  # most classes
_SAMPLE: Final = 200  # lines by which columns are told apart
_DELIMITERS: Final = (",", ";", "\t", "|")
_PLAIN_TITLES: Final = (
    "label",
    "labels",
    "class",
    "classes",
    "class_id",
    "class_name",
    "category",
    "category_id",
)
_OTHER_TITLES: Final = (
    "target",
    "y",
    "dx",
    "species",
    "breed",
    "diagnosis",
    "level",
    "wnid",
    "synset",
    "label_name",
)
_TITLES: Final = frozenset(
    (*_PLAIN_TITLES, *_OTHER_TITLES, "predictionstring")
)  # of columns of labels
_SPLITS: Final = ("split", "splits", "subset", "partition", "phase")  # titles of columns of parts
_PERHAPS_SPLITS: Final = ("part", "set")  # of columns of parts where all their cells are some
_BOXES: Final = re.compile(
    r"(n\d{8})(?: -?\d+(?:\.\d+)?)+"
)  # Kaggle's ImageNet: a wnid and its boxes
_NUMBER: Final = re.compile(r"-?\d{1,12}(?:\.\d{0,12})?")
_NO_LABEL: Final = ("", "nan", "none", "null", "na", "n/a")

Rows = list[list[str]]


def load(request: DataRequest) -> Split:
    """Read the images below a folder that a table labels; images without a line are left out, and
    counted.

    The table has a column of file names, relative to the folder or alone, with or without suffix,
    and a column of labels: names, wnids of ImageNet, or class indices from 0. Commas, semicolons,
    tabs, bars or blanks divide it; a line of titles may come first. A column called split (or
    subset, partition, ...) divides the images into train, val and test; without one, a seeded fifth
    of each class is held out for test, as of class folders. Raises DataError for a table of another
    form, for an image with two labels or none, and if no image has a line.
    """
    root = request.path
    table = request.labels
    if table is None or not root.is_dir():
        where = by_caller(python="a folder", command="--data FOLDER")
        raise DataError(
            f"expected {argument('labels')} with {where} of images, found {str(root)!r}; name the "
            "folder"
        )
    paths = list_images([root])
    labelled = _labelled(root, paths, table)
    used = [path for path in paths if path in labelled.labels]
    indices, classes, notes = _classes([labelled.labels[path] for path in used], table)
    if len(used) < len(paths):
        notes.append(
            f"images without a line in {table.name} were left out: {len(paths) - len(used)}"
        )
    if labelled.unmatched:
        notes.append(
            f"lines of {table.name} that name no image in {root.name}/ were left out: "
            f"{labelled.unmatched}"
        )
    if {"test", "val"} & set(labelled.roles.values()):
        column = f"column {labelled.role_title!r} of {table.name}"
        chosen, division = _divided([labelled.roles[path] for path in used], request, column)
    else:
        held, division = hold_out(
            torch.tensor(indices), request.part, seed=request.seed, whole=request.whole
        )
        chosen = held.tolist()
    listing = Listing(
        paths=tuple(used[index] for index in chosen),
        labels=tuple(indices[index] for index in chosen),
        classes=classes,
        notes=(f"labels are those of {table.name}", *notes, *division),
    )
    return read_listing(listing, request)


@dataclass(frozen=True)
class _Labelled:
    """The contents of a table.

    labels: by image; roles: the part of each image, empty without a column of parts; role_title:
    title of that column; unmatched: number of lines that name no image.
    """

    labels: dict[Path, str]
    roles: dict[Path, str]
    role_title: str
    unmatched: int


def _labelled(root: Path, paths: Sequence[Path], table: Path) -> _Labelled:
    """Read the label, and the part, of each image from a table."""
    lines = _rows(table)
    names = _Names(root, paths)
    file_column = _file_column(lines, names, table)
    split_column = _split_column(lines, file_column)
    label_column, body = _label_column(lines, file_column, names, table, split_column)
    labels: dict[Path, str] = {}
    roles: dict[Path, str] = {}
    unmatched = 0
    for row in body:
        path = names.find(row[file_column])
        if path is None:
            names.require_one(row[file_column], table)
            unmatched += 1
            continue
        label = row[label_column] if label_column < len(row) else ""
        if labels.setdefault(path, label) != label:
            raise DataError(
                f"expected one label an image in {table}, found {labels[path]!r} and {label!r} for "
                f"{path.name}; leave "
                "one line out"
            )
        if split_column is not None:
            roles[path] = _role(row, split_column, table)
    _require_labels(labels, table)
    role_title = "" if split_column is None else lines[0][split_column]
    return _Labelled(labels, roles, role_title, unmatched)


def _split_column(rows: Rows, file_column: int) -> int | None:
    """Return the column of the parts, known by its title or its cells; None without one."""
    for column in range(_width(rows)):
        if column == file_column:
            continue
        cells = [row[column] for row in rows if column < len(row)]
        title = cells[0].lower() if cells else ""
        if title in _SPLITS or (
            title in _PERHAPS_SPLITS and all(role_of(cell) for cell in cells[1:])
        ):
            return column
    return None


def _role(row: Sequence[str], column: int, table: Path) -> str:
    """Return the part of an image: train, test or val. Raises DataError for another word."""
    cell = row[column] if column < len(row) else ""
    role = role_of(cell)
    if role is None:
        raise DataError(
            f"expected train, val or test in the column of the parts of {table}, found "
            f"{cell[:40]!r}; correct it, or "
            "take the column out"
        )
    return role


def _divided(
    roles: Sequence[str], request: DataRequest, column: str
) -> tuple[list[int], tuple[str, ...]]:
    """Choose the images of a part as a table divides them, and note it. Raises DataError for a part
    without images.
    """
    wanted = "train"
    if request.part != "train":
        wanted = "test" if "test" in roles else "val"
    chosen = [index for index, role in enumerate(roles) if role == wanted]
    if not chosen:
        raise DataError(
            f"expected images for {request.part} in {column}, found none; write {wanted} for some"
        )
    return chosen, (f"the part is that of {column}: {wanted}",)


class _Names:
    """The images of a folder by the names that a table may have for them."""

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path | None] = {}  # None: of several images
        for path in paths:
            relative = PurePosixPath(_composed(path.relative_to(root).as_posix()))
            for name in {
                str(relative),
                str(relative.with_suffix("")),
                relative.name,
                relative.stem,
            }:
                self._paths[name] = path if name not in self._paths else None

    def find(self, cell: str) -> Path | None:
        """Return the image of a cell: a name, or a path whose last parts are those of the image."""
        for name in _endings(cell):
            path = self._paths.get(name)
            if path is not None:
                return path
        return None

    def require_one(self, cell: str, table: Path) -> None:
        """Raise DataError for a cell that is the name of several images."""
        if any(name in self._paths for name in _endings(cell)):
            raise DataError(
                f"expected the path of one image in each line of {table}, found {cell[:80]!r}, "
                "which is the name of several; write their paths below the folder"
            )


def _endings(cell: str) -> Iterator[str]:
    """Yield the names that a cell may have for an image: its last parts, the longest first, with
    and without suffix.
    """
    parts = PurePosixPath(_composed(cell.replace("\\", "/"))).parts
    for start in range(len(parts)):
        below = PurePosixPath(*parts[start:])
        yield str(below)
        if below.suffix:
            yield str(below.with_suffix(""))


def _composed(name: str) -> str:
    """Return a name with each letter and its accents as one character, as file systems differ in
    this.
    """
    return unicodedata.normalize("NFC", name)


def _rows(table: Path) -> Rows:
    """Return the cells of the lines that are not empty. Raises DataError for a file that is no text
    table.
    """
    content = read_bounded(table, _BYTES, what="a table of labels", error=DataError)
    encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
        sample = [line for line in text.splitlines()[:_SAMPLE] if line.strip()]
        delimiter = next(
            (character for character in _DELIMITERS if _divides(sample, character)), None
        )
        if delimiter is None:
            _require_even(sample, table)
            cells = [line.split(None, 1) for line in text.splitlines()]
        else:
            cells = list(csv.reader(StringIO(text), delimiter=delimiter))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"expected a text table (CSV) at {table}, found: {error}; save it as UTF-8"
        ) from error
    rows = []
    for line in cells:
        row = [cell.strip() for cell in line]
        if any(row):
            rows.append(row)
    if not rows or _width(rows) < 2:
        raise DataError(
            f"expected a column of file names and one of labels in {table}, found one column; "
            "write FILE,LABEL lines"
        )
    return rows


def _width(rows: Rows) -> int:
    """Return the number of cells of the longest line."""
    return max(len(row) for row in rows)


def _divides(lines: Sequence[str], delimiter: str) -> bool:
    """Return True if a delimiter divides all lines into the same number of cells, at least two."""
    counts = {len(row) for row in csv.reader(lines, delimiter=delimiter)}
    return len(counts) == 1 and counts.pop() > 1


def _require_even(lines: Sequence[str], table: Path) -> None:
    """Raise DataError, with the first such line, if a delimiter divides lines into different
    numbers of cells.
    """
    for delimiter in _DELIMITERS:
        counts = [len(row) for row in csv.reader(lines, delimiter=delimiter)]
        usual = max(counts, key=counts.count)
        if usual <= 1:
            continue
        for number, count in enumerate(counts, start=1):
            if count != usual:
                raise DataError(
                    f"expected {usual} cells in every line of {table}, divided by {delimiter!r}, "
                    f"found {count} in line {number} ({lines[number - 1][:60]!r}); correct it, and "
                    f"write names that hold {delimiter!r} in "
                    "quotes"
                )


def _file_column(rows: Rows, names: _Names, table: Path) -> int:
    """Return the column whose cells are most often names of images, if possible not one that is
    called label.
    """
    counts = [0] * _width(rows)
    for row in rows:
        for column, cell in enumerate(row):
            counts[column] += names.find(cell) is not None
    if not max(counts):
        for row in rows[1:]:
            for cell in row:
                names.require_one(cell, table)
        raise DataError(
            f"expected file names of the images in a column of {table}, found none that is among "
            "them (line 1: "
            f"{', '.join(rows[0])[:80]!r}); check "
            f"{by_caller(python='the folder', command='--data')} and the names"
        )
    best = [column for column, count in enumerate(counts) if count == max(counts)]
    titles = rows[0] + [""] * len(counts)
    return next((column for column in best if titles[column].lower() not in _TITLES), best[0])


def _label_column(
    rows: Rows, file_column: int, names: _Names, table: Path, split_column: int | None
) -> tuple[int, Rows]:
    """Return the column of the labels, and the lines without the line of titles."""
    others = [column for column in range(_width(rows)) if column not in (file_column, split_column)]
    titled = [
        column for column in others if column < len(rows[0]) and rows[0][column].lower() in _TITLES
    ]
    is_first_image = file_column < len(rows[0]) and names.find(rows[0][file_column]) is not None
    body = [row for row in rows if file_column < len(row)]
    if not is_first_image and (titled or not _repeats(rows, others)):
        titles = rows[0]
        body = body[1:] if body and body[0] is titles else body
        for column in titled:
            if len(titled) == 1 or all(_say_the_same(body, column, other) for other in titled):
                return column, body
    if len(others) == 1:
        return others[0], body
    raise DataError(
        f"expected one column of labels in {table}, found {len(others)} "
        f"({', '.join(rows[0])[:80]}); leave the file "
        "names and the labels, and call them file and label"
    )


def _repeats(rows: Rows, columns: Sequence[int]) -> bool:
    """Return True if the first line has the label of another line, and so holds no titles."""
    return len(columns) == 1 and any(row[-1] == rows[0][-1] for row in rows[1:])


def _say_the_same(rows: Rows, first: int, second: int) -> bool:
    """Return True if two columns name the same classes: each name of one goes with one name of the
    other.
    """
    pairs = {(row[first], row[second]) for row in rows if max(first, second) < len(row)}
    first_names = {name for name, _ in pairs}
    second_names = {name for _, name in pairs}
    return len(pairs) == len(first_names) == len(second_names)


def _require_labels(labels: dict[Path, str], table: Path) -> None:
    without = [path.name for path, label in labels.items() if label.lower() in _NO_LABEL]
    if without:
        raise DataError(
            f"expected a label for each image in {table}, found none for {len(without)} (first "
            f"{without[0]}); leave "
            "their lines out"
        )


def _classes(labels: Sequence[str], table: Path) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Return class indices, the classes and notes. Raises DataError for numbers that are no
    indices.
    """
    if all(map(_NUMBER.fullmatch, labels)):
        indices = _class_indices(labels, table)
        return indices, tuple(map(str, range(max(indices) + 1))), zero_note(min(indices))
    names = []
    for label in labels:
        boxes = _BOXES.fullmatch(label)
        names.append(boxes[1] if boxes else label)
    unique = sorted(set(names))
    if len(unique) > _CLASSES:
        raise DataError(
            f"expected at most {_CLASSES:,} classes in {table}, found {len(unique):,}; check its "
            "columns"
        )
    index_of_name = {name: index for index, name in enumerate(unique)}
    classes = tuple(unique)
    if are_imagenet(unique):
        classes = tuple(imagenet_classes()[imagenet_indices()[name]] for name in unique)
    return [index_of_name[name] for name in names], classes, []


def _class_indices(labels: Sequence[str], table: Path) -> list[int]:
    """Return labels that are all numbers as class indices."""
    indices = []
    for label in labels:
        number = float(label)
        if not 0 <= number < _CLASSES or number % 1 != 0:
            raise DataError(
                f"expected labels in {table} as names or whole numbers from 0, found "
                f"{label[:40]!r}; write class "
                "indices or names"
            )
        indices.append(int(number))
    return indices


def zero_note(least: int) -> list[str]:
    """Return a note if no image has the label 0, as labels may count from 1."""
    if least == 0:
        return []
    return [
        f"no image has the label 0 (the least is {least}): labels count from 0; subtract 1 if "
        "these count from 1"
    ]
