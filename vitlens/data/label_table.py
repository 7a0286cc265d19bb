"""Read labels of images from a table of file names and labels (`--labels FILE.csv`)."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Final

import torch

from vitlens.data.decode import SUFFIXES
from vitlens.data.folder import Listing, list_images, read_listing, readable_classes
from vitlens.data.parts import role_of
from vitlens.data.registry import DataRequest
from vitlens.data.split import Split, hold_out
from vitlens.errors import DataError, argument, by_caller
from vitlens.files import csv_rows, read_csv_text

# most bytes of a table; that of ImageNet's 1.3 million training images has half of it
_MOST_BYTES: Final = 128 << 20
_MOST_CLASSES: Final = 100_000
_SAMPLE: Final = 200  # lines that decide which character divides the cells
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
# titles of a column of labels, in lower case; the last one is that of Kaggle's ImageNet
_LABEL_TITLES: Final = frozenset((*_PLAIN_TITLES, *_OTHER_TITLES, "predictionstring"))
# titles of a column of file names, in lower case
_FILE_TITLES: Final = frozenset(
    (
        *("file", "files", "file_name", "filename", "filenames", "fname"),
        *("path", "paths", "file_path", "filepath", "image_path", "img_path"),
        *("image", "images", "image_id", "imageid", "image_name", "img", "img_name"),
        *("photo", "picture"),
    )
)
_ID_TITLES: Final = ("id", "ids", "index")  # of images, but also of classes, patients, lines
_SPLIT_TITLES: Final = ("split", "splits", "subset", "partition", "phase")
# titles of a column of parts only if all of its cells are parts
_AMBIGUOUS_SPLIT_TITLES: Final = ("part", "set")
# labels in Kaggle's ImageNet: a wnid and its boxes
_BOXES: Final = re.compile(r"(n\d{8})(?: -?\d+(?:\.\d+)?)+")
_NUMBER: Final = re.compile(r"-?\d{1,12}(?:\.\d{0,12})?")
_NO_LABEL: Final = ("", "nan", "none", "null", "na", "n/a")

Rows = list[list[str]]


def load(request: DataRequest) -> Split:
    """Return the images below a folder that a table labels; others are left out, and counted.

    The table has a column of file names, with or without the folders and the suffix. Another
    column has the labels: names, wnids of ImageNet, or class indices from 0. Commas, semicolons,
    tabs, bars or blanks divide the columns; a line of titles may come first. A column called split
    (or subset, partition, ...) divides the images into train, val and test. Without one, a seeded
    fifth of each class is held out for test, as for class folders. Raises DataError for a table of
    another form, for an image with two labels or none, and if no image has a line.
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
    contents = _read_contents(root, paths, table)
    labelled = [path for path in paths if path in contents.labels]
    labels, classes, notes = _class_labels([contents.labels[path] for path in labelled], table)
    if len(labelled) < len(paths):
        notes.append(
            f"images without a line in {table.name} were left out: {len(paths) - len(labelled)}"
        )
    if contents.unmatched:
        notes.append(
            f"lines of {table.name} that name no image in {root.name}/ were left out: "
            f"{contents.unmatched}"
        )
    if {"test", "val"} & set(contents.roles.values()):
        column = f"column {contents.role_title!r} of {table.name}"
        roles = [contents.roles[path] for path in labelled]
        chosen, division_notes = _choose_part(roles, request, column)
    else:
        indices, division_notes = hold_out(
            torch.tensor(labels), request.part, seed=request.seed, whole=request.whole
        )
        chosen = indices.tolist()
    listing = Listing(
        paths=tuple(labelled[index] for index in chosen),
        labels=tuple(labels[index] for index in chosen),
        classes=classes,
        notes=(f"labels are those of {table.name}", *notes, *division_notes),
    )
    return read_listing(listing, request)


@dataclass(frozen=True)
class _Contents:
    """The contents of a table.

    labels: the label of each image.
    roles: the part of each image, empty without a column of parts.
    role_title: the title of that column.
    unmatched: the number of lines that name no image.
    """

    labels: dict[Path, str]
    roles: dict[Path, str]
    role_title: str
    unmatched: int


def _read_contents(root: Path, paths: Sequence[Path], table: Path) -> _Contents:
    """Return the label, and the part, of each image in a table."""
    lines = _read_rows(table)
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
        label = _cell(row, label_column)
        if labels.setdefault(path, label) != label:
            raise DataError(
                f"expected one label an image in {table}, found {labels[path]!r} and "
                f"{label!r} for {path.name}; remove one line"
            )
        if split_column is not None:
            roles[path] = _role(row, split_column, table)
    _require_labels(labels, table)
    role_title = "" if split_column is None else lines[0][split_column]
    return _Contents(labels, roles, role_title, unmatched)


def _split_column(rows: Rows, file_column: int) -> int | None:
    """Return the column of the parts, by its title or its cells; None without one."""
    for column in range(_width(rows)):
        if column == file_column:
            continue
        cells = [row[column] for row in rows if column < len(row)]
        # of the first line, if it has titles; a part (train, test, val) is none of these words
        title = cells[0].lower() if cells else ""
        if title in _SPLIT_TITLES:
            return column
        if title in _AMBIGUOUS_SPLIT_TITLES and all(role_of(cell) for cell in cells[1:]):
            return column
    return None


def _role(row: Sequence[str], column: int, table: Path) -> str:
    """Return the part of an image: train, test or val. Raises DataError for another word."""
    cell = _cell(row, column)
    role = role_of(cell)
    if role is None:
        raise DataError(
            f"expected train, val or test in the column of the parts of {table}, found "
            f"{cell[:40]!r}; correct it, or remove the column"
        )
    return role


def _choose_part(
    roles: Sequence[str], request: DataRequest, column: str
) -> tuple[list[int], tuple[str, ...]]:
    """Return the indices of the images of a part, as a table divides them, and a note.

    Raises DataError for a part without images.
    """
    part = "train"
    if request.part != "train":
        part = "test" if "test" in roles else "val"
    chosen = [index for index, role in enumerate(roles) if role == part]
    if not chosen:
        raise DataError(
            f"expected images for {request.part} in {column}, found none; write {part} for some"
        )
    return chosen, (f"the part is that of {column}: {part}",)


class _Names:
    """The images of a folder by the names that a table may have for them."""

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path | None] = {}  # None for the name of several images
        for path in paths:
            relative = PurePosixPath(_compose_accents(path.relative_to(root).as_posix()))
            without_suffix = str(relative.with_suffix(""))
            names = {str(relative), without_suffix, relative.name, relative.stem}
            for name in names:
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
    """Yield the last parts of a path in a cell, longest first, with and without suffix."""
    parts = PurePosixPath(_compose_accents(cell.replace("\\", "/"))).parts
    for start in range(len(parts)):
        below = PurePosixPath(*parts[start:])
        yield str(below)
        if below.suffix:
            yield str(below.with_suffix(""))


def _compose_accents(name: str) -> str:
    """Return a name with accented letters as single characters, as file systems differ in this."""
    return unicodedata.normalize("NFC", name)


def _read_rows(table: Path) -> Rows:
    """Return the cells of the non-empty lines. Raises DataError for a file other than a table."""
    text = read_csv_text(table, _MOST_BYTES, what="a table of labels", error=DataError)
    if not text.strip():
        raise DataError(
            f"expected a line for each image in {table}, found no text; write FILE,LABEL lines"
        )
    rows = []
    for cells in _split_lines(text, table):
        row = [cell.strip() for cell in cells]
        if any(row):
            rows.append(row)
    if not rows or _width(rows) < 2:
        raise DataError(
            f"expected a column of file names and one of labels in {table}, found one column; "
            "write FILE,LABEL lines"
        )
    return rows


def _split_lines(text: str, table: Path) -> Rows:
    """Return the cells of each line, separated by the first fitting delimiter, else by blanks."""
    sample = [line for line in text.splitlines() if line.strip()][:_SAMPLE]
    for delimiter in _DELIMITERS:
        if _divides_evenly(sample, delimiter, table):
            return csv_rows(StringIO(text), table, delimiter=delimiter, error=DataError)
    _require_no_delimiter(sample, table)
    return [line.split(None, 1) for line in text.splitlines()]


def _width(rows: Rows) -> int:
    """Return the number of cells of the longest line."""
    return max(len(row) for row in rows)


def _cell(row: Sequence[str], column: int) -> str:
    """Return a cell of a line, "" in a line that is too short."""
    return row[column] if column < len(row) else ""


def _divides_evenly(lines: Sequence[str], delimiter: str, table: Path) -> bool:
    """Return True if a delimiter divides all lines into the same number of cells, at least two."""
    rows = csv_rows(lines, table, delimiter=delimiter, error=DataError)
    counts = {len(row) for row in rows}
    return len(counts) == 1 and counts.pop() > 1


def _require_no_delimiter(lines: Sequence[str], table: Path) -> None:
    """Raise DataError, with the first odd line, if a delimiter divides only most lines evenly."""
    for delimiter in _DELIMITERS:
        rows = csv_rows(lines, table, delimiter=delimiter, error=DataError)
        counts = [len(row) for row in rows]
        usual_width = max(counts, key=counts.count)
        if usual_width <= 1:
            continue
        for number, count in enumerate(counts, start=1):
            if count != usual_width:
                raise DataError(
                    f"expected {usual_width} cells in every line of {table}, separated by "
                    f"{delimiter!r}, found {count} in line {number} ({lines[number - 1][:60]!r}); "
                    f"correct it, and write names that hold {delimiter!r} in quotes"
                )


def _file_column(rows: Rows, names: _Names, table: Path) -> int:
    """Return the column that names the most images, first with their suffixes, then without.

    A number may be a label as well as the name of an image without its suffix. So only columns that
    look like file names are compared, if there are any, and none that is called label. A column
    that names the same images again and again has labels rather than names. Raises DataError if no
    column names an image.
    """
    columns = _candidate_columns(rows, names)
    matches = {column: _count_matches(rows, column, names) for column in columns}
    if not any(counts.images for counts in matches.values()):
        # more helpful than the error below, if the names are those of several images
        for row in rows[1:]:
            for column in columns:
                names.require_one(_cell(row, column), table)
        folder = by_caller(python="the folder", command="--data")
        raise DataError(
            f"expected file names of the images in a column of {table}, found none that "
            f"matches (line 1: {', '.join(rows[0])[:80]!r}); check {folder} and the "
            "names"
        )

    def rank(column: int) -> tuple[int, float, int]:
        counts = matches[column]
        title = _title(rows, column, names)
        title_rank = 2 * (title in _FILE_TITLES) + (title in _ID_TITLES)
        return counts.images_with_suffix, counts.distinct_images, title_rank

    return max(columns, key=rank)


@dataclass(frozen=True)
class _Matches:
    """How often a column names images of the folder.

    lines: lines that name an image.
    images: different images that they name.
    images_with_suffix: those that are named with their suffix.
    """

    lines: int
    images: int
    images_with_suffix: int

    @property
    def distinct_images(self) -> float:
        """Return the number of images times the images per line.

        It is low for a column of labels, which names few images on many lines.
        """
        return self.images * (self.images / max(1, self.lines))


def _count_matches(rows: Rows, column: int, names: _Names) -> _Matches:
    lines = 0
    images = set()
    images_with_suffix = set()
    for row in rows:
        cell = _cell(row, column)
        path = names.find(cell)
        if path is None:
            continue
        lines += 1
        images.add(path)
        if cell.endswith(path.suffix):
            images_with_suffix.add(path)
    return _Matches(lines, len(images), len(images_with_suffix))


def _candidate_columns(rows: Rows, names: _Names) -> list[int]:
    """Return the columns that may have file names: those that look so, or all but labels."""
    unlabelled = []
    file_like = []
    for column in range(_width(rows)):
        title = _title(rows, column, names)
        if title in _LABEL_TITLES:
            continue
        unlabelled.append(column)
        if title in _FILE_TITLES or _has_suffixes(rows, column):
            file_like.append(column)
    if file_like:
        # an id is compared with columns that look like file names, not in their place
        ids = [column for column in unlabelled if _title(rows, column, names) in _ID_TITLES]
        return sorted({*file_like, *ids})
    return unlabelled or list(range(_width(rows)))


def _has_suffixes(rows: Rows, column: int) -> bool:
    """Return True if most cells of a column end in the suffix of an image."""
    count = 0
    for row in rows:
        suffix = PurePosixPath(_cell(row, column)).suffix
        count += suffix.lower() in SUFFIXES
    return 2 * count > len(rows)


def _title(rows: Rows, column: int, names: _Names) -> str:
    """Return the first cell of a column in lower case, "" if it is the name of an image."""
    title = _cell(rows[0], column)
    return title.lower() if names.find(title) is None else ""


def _label_column(
    rows: Rows, file_column: int, names: _Names, table: Path, split_column: int | None
) -> tuple[int, Rows]:
    """Return the column of the labels, and the lines without the line of titles.

    It is a column with a title of labels or, without titles, the only column that is left. Several
    columns with such titles must name the same classes, for example by number and by name.
    """
    first_row = rows[0]
    candidates = [
        column for column in range(_width(rows)) if column not in (file_column, split_column)
    ]
    titled = []
    for column in candidates:
        if _cell(first_row, column).lower() in _LABEL_TITLES:
            titled.append(column)
    names_image = names.find(_cell(first_row, file_column)) is not None
    looks_like_titles = bool(titled) or not _repeats_label(rows, candidates)
    has_titles = looks_like_titles and not names_image
    lines = rows[1:] if has_titles else rows
    body = [row for row in lines if file_column < len(row)]
    if has_titles:
        for column in titled:
            if all(_are_equivalent(body, column, other) for other in titled if other != column):
                return column, body
    if len(candidates) == 1:
        return candidates[0], body
    raise DataError(
        f"expected one column of labels in {table}, found {len(candidates)} ("
        f"{', '.join(first_row)[:80]}); keep only the file names and the labels, in "
        "columns called file and label"
    )


def _repeats_label(rows: Rows, columns: Sequence[int]) -> bool:
    """Return True if the first line has the label of another line, and so holds no titles."""
    if len(columns) != 1:
        return False
    first_label = _cell(rows[0], columns[0])
    return any(_cell(row, columns[0]) == first_label for row in rows[1:])


def _are_equivalent(rows: Rows, first: int, second: int) -> bool:
    """Return True if each name in one column always has the same name in the other, and back."""
    pairs = {(row[first], row[second]) for row in rows if max(first, second) < len(row)}
    first_names = {name for name, _ in pairs}
    second_names = {name for _, name in pairs}
    return len(pairs) == len(first_names) == len(second_names)


def _require_labels(labels: dict[Path, str], table: Path) -> None:
    """Raise DataError for images with an empty label."""
    unlabelled = [path.name for path, label in labels.items() if label.lower() in _NO_LABEL]
    if unlabelled:
        raise DataError(
            f"expected a label for each image in {table}, found none for "
            f"{len(unlabelled)} (first {unlabelled[0]}); remove their lines"
        )


def _class_labels(
    texts: Sequence[str], table: Path
) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Return the labels as class indices, the classes, and notes.

    Raises DataError for numbers that are no indices, and for too many classes.
    """
    if all(map(_NUMBER.fullmatch, texts)):
        labels = _class_indices(texts, table)
        classes = tuple(map(str, range(max(labels) + 1)))
        return labels, classes, zero_note(min(labels))
    names = []
    for text in texts:
        boxes = _BOXES.fullmatch(text)
        names.append(boxes[1] if boxes else text)
    class_names = sorted(set(names))
    if len(class_names) > _MOST_CLASSES:
        raise DataError(
            f"expected at most {_MOST_CLASSES:,} classes in {table}, found {len(class_names):,}; "
            "check its columns"
        )
    index_of_name = {name: index for index, name in enumerate(class_names)}
    return [index_of_name[name] for name in names], readable_classes(class_names), []


def _class_indices(labels: Sequence[str], table: Path) -> list[int]:
    """Return labels that are all numbers as class indices."""
    indices = []
    for label in labels:
        number = float(label)
        if not 0 <= number < _MOST_CLASSES or number % 1 != 0:
            raise DataError(
                f"expected labels in {table} as names or whole numbers from 0, found "
                f"{label[:40]!r}; write class indices or names"
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
