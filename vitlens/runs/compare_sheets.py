"""The sheets of `vitlens compare`: input and both maps, image by image, and where each model looks; from its folder."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitlens.analysis.failures.errors import CELLS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.figures.compare import Side, contact_sheet, mean_looks
from vitlens.files import RunRecord
from vitlens.runs.compare_keep import word_of
from vitlens.runs.report import Drawn
from vitlens.runs.sections import metrics

A_SHEET = 10  # images

Rows = Sequence[Mapping[str, Any]]


def aliases_of(record: RunRecord) -> tuple[str, str]:
    """What the two models are called."""
    models: Any = record.config["models"]
    return str(models[0]["alias"]), str(models[1]["alias"])


def cell_names(aliases: tuple[str, str]) -> dict[str, str]:
    """The cells of errors, with the models' own names."""
    first, second = aliases
    named = ("both right", f"only {first} wrong", f"only {second} wrong")
    return dict(zip(CELLS, (*named, "both wrong, the same class", "both wrong, different classes")))


def sheet_images(record: RunRecord) -> Iterator[tuple[str, list[int]]]:
    """Every sheet with the rows (places in the table images) that it shows: the panels, then examples of each cell."""
    place = {row["image"]: index for index, row in enumerate(record.table("images"))}
    for row in record.table("sheets"):
        indices: Any = row["images"]
        yield str(row["sheet"]), [place[index] for index in indices]


def drawn_sheet(record: RunRecord, arrays: Mapping[str, Any], rows: Sequence[int], title: str) -> Any:
    """A contact sheet of these rows of the table images."""
    table = record.table("images")
    shown: Rows = [table[row] for row in rows]
    where = list(rows)
    first, second = (
        Side(
            alias,
            arrays[key][where],
            [str(row[f"{key}_prediction"]) for row in shown],
            [float(row[f"{key}_probability"]) for row in shown],
            [row[f"{key}_prediction"] == row["truth"] for row in shown],
        )
        for key, alias in zip(("first", "second"), aliases_of(record))
    )
    return contact_sheet(
        images=arrays["pixels"][where] / np.float32(255),
        first=first,
        second=second,
        truths=[str(row["truth"]) for row in shown],
        agreement=[None if row["agreement"] is None else float(row["agreement"]) for row in shown],
        masks=arrays["masks"][where] if "masks" in arrays else None,
        title=title,
    )


def methods_words(record: RunRecord) -> str:
    """ "vit-digits by relevance, cnn-digits by GradCAM"."""
    options: Any = record.config["options"]
    named = zip(aliases_of(record), options["method"])
    return ", ".join(f"{alias} by {ATTRIBUTIONS[method].title}" for alias, method in named)


def draw_sheets(record: RunRecord) -> Iterator[Drawn]:
    """The panels, ten images a sheet, by rising agreement; then a sheet of examples of each cell of errors."""
    arrays: Any = record.arrays("images")
    aliases, by = aliases_of(record), methods_words(record)
    names = cell_names(aliases)
    counts = cell_counts(record)
    for sheet, rows in sheet_images(record):
        if sheet != "panels":
            figure = drawn_sheet(record, arrays, rows, f"{_sentence(names[sheet])}: {by}")
            yield Drawn(f"examples_{word_of(sheet)}", figure, _example_caption(sheet, names[sheet], len(rows), counts))
            continue
        total = -(-len(rows) // A_SHEET)
        for index in range(total):
            part = rows[index * A_SHEET : (index + 1) * A_SHEET]
            figure = drawn_sheet(record, arrays, part, f"Input, {by}; sheet {index + 1} of {total}")
            yield Drawn(f"panels_{index + 1}", figure, _panel_caption(index, total, len(rows), record))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _panel_caption(index: int, total: int, shown: int, record: RunRecord) -> str:
    if index:
        return f"Sheet {index + 1} of {total}, in order of agreement, as the first."
    n = int(metrics(record)[f"maps/usable/{aliases_of(record)[0]}"].n or 0)
    outlined = " Outlined: the object." if "masks" in record.arrays("images") else ""
    return (
        f"{shown} images by rising agreement of the two maps (rank correlation), evenly spaced over the ranking of {n} "
        f"drawn at random: the first disagree most.{outlined} Below the input the truth and the agreement, below each "
        "map the model's prediction and its probability, right or wrong. Colours are % of each map's own greatest "
        "value: places compare, amounts do not. A bright place is what the method marks; that the prediction rests "
        "on it is another question."
    )


def _example_caption(sheet: str, name: str, shown: int, counts: Mapping[str, int]) -> str:
    how = "drawn at random" if sheet == CELLS[0] else "those whose wrong answer is surest"
    return f"{shown} of {counts[sheet]:,} images: {name}; {how}. Examples, not a measure of anything."


def cell_counts(record: RunRecord) -> dict[str, int]:
    """Images in each cell of errors, over all classes."""
    rows: Rows = record.table("by_class")
    return {cell: sum(int(row[cell]) for row in rows) for cell in CELLS}


def draw_looks(record: RunRecord) -> Iterator[Drawn]:
    """Each model's mean map and how the two maps of an image agree; nothing where no image has both."""
    arrays: Any = record.arrays("looks")
    if not len(arrays["agreement"]):
        return
    figure = mean_looks(
        first=arrays["first"],
        second=arrays["second"],
        names=aliases_of(record),
        agreement=arrays["agreement"],
        title=f"Where each model looks on average: {methods_words(record)}",
    )
    yield Drawn(
        "looks",
        figure,
        f"Mean of the maps of {len(arrays['agreement'])} images, each as shares of its own sum; 1 is an even map. "
        "Right: how the two maps of one image agree. A mean shows where objects are as much as where models look.",
    )
