"""The report of `vitlens look`, from its record."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.look.conclusions import verdicts
from vitlens.commands.look.record import (
    CLASSES,
    HEADS,
    IMAGES,
    LOOK,
    MAPS,
    LookArrays,
    LookClassRow,
    LookHeadRow,
    LookRow,
)
from vitlens.commands.scaffold.describe import data_sentences
from vitlens.commands.scaffold.explorer.report import Shown, explorer_of, explorer_sentences
from vitlens.commands.scaffold.sheets import sheets
from vitlens.records import Record
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table
from vitlens.report.explorer import Explorer
from vitlens.report.numbers import number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST: Final = 3  # heads that are named
_EACH: Final = 4  # images in a figure


def report(record: Record) -> Document:
    """What the model predicts, where the evidence lies, and which heads matter for it; the explorer on the page."""
    (row,) = record.rows(LOOK)
    return Document(
        record.config.title,
        (_predictions(record, row), *_heads(record, row)),
        limits=tuple(_limits(row)),
        verdicts=tuple(verdicts(record)),
        preface=(*_chosen(row), *data_sentences(record), *_digits(record, row), *explorer_sentences(record)),
        explorer=_explorer(record),
    )


def heads_of(record: Record, image: int) -> tuple[LookHeadRow, ...]:
    """The heads that matter most for an image's prediction."""
    return tuple(row for row in record.rows(HEADS) if row.number == image)[:MOST]


def classes_of(record: Record, image: int) -> tuple[LookClassRow, ...]:
    """An image's most probable classes."""
    return tuple(row for row in record.rows(CLASSES) if row.number == image)


def names_of(record: Record) -> list[str]:
    """The images, by the names of their files."""
    return [Path(row.image).name for row in record.rows(IMAGES)]


def _chosen(row: LookRow) -> Iterator[Sentence]:
    if row.chosen:
        yield Sentence(f"No model was named: this run {row.chosen}.", says="setting")


def _digits(record: Record, row: LookRow) -> Iterator[Sentence]:
    if row.digits:
        yield Sentence(digits_words(record.aliases[0]), says="setting")


def digits_words(alias: str) -> str:
    """What a model of digits can say of a photograph."""
    return (
        f"**{alias} knows only the digits 0 to 9**: for a photograph of anything else every answer is wrong, "
        "however probable, and only shows what such a page looks like."
    )


def _predictions(record: Record, row: LookRow) -> Section:
    """The classes of each image, and the figure."""
    named = names_of(record)
    lines = [
        Sentence(f"{name}: {'; '.join(f'{each.name} {percent(each.probability, 1)}' for each in own)}.", own)
        for name, own in ((name, classes_of(record, index)) for index, name in enumerate(named))
    ]
    tables: tuple[Table, ...] = ()
    if len(named) > _EACH:
        first = [classes_of(record, index) for index in range(len(named))]
        columns = {"image": lambda own: named[own[0].number], "prediction": lambda own: own[0].name,
                   "probability": lambda own: own[0].probability}  # fmt: skip
        tables = (Table.of("Predictions", first, columns),)
    return Section("What it sees, and where", tuple(lines[:_EACH]), tables, tuple(_figures(record, row)), leading=True)


def _figures(record: Record, row: LookRow) -> Iterator[FigureSpec]:
    arrays, names = record.arrays(MAPS), names_of(record)
    for figure, part in sheets("look", len(names), _EACH):
        yield FigureSpec(
            figure,
            f"Each image as the model saw it, and where the evidence for its prediction and for the runner-up lies: "
            f"{row.title} ({ATTRIBUTIONS[row.method].paper}), {ATTRIBUTIONS[row.method].description}. Each map is "
            "divided by its largest value: places can be compared, amounts cannot. A map alone is no evidence.",
            partial(_draw, record, arrays, names, part, row),
            alt=f"{', '.join(names[part])} with the maps of the prediction and of the runner-up",
        )


def _draw(record: Record, arrays: LookArrays, names: list[str], part: slice, row: LookRow) -> "Figure":
    from vitlens.figures.look import look_rows

    maps = [arrays.prediction[part], *([] if arrays.runner_up is None else [arrays.runner_up[part]])]
    captions = [
        (name, *(f"{each.name} {percent(each.probability, 1)}" for each in classes_of(record, index)[: len(maps)]))
        for index, name in list(enumerate(names))[part]
    ]
    pixels = arrays.pixels[part] / np.float32(255)
    return look_rows(images=pixels, maps=maps, captions=captions, title=f"{record.aliases[0]}: {row.title}")


def _heads(record: Record, row: LookRow) -> Iterator[Section]:
    """The three heads of each image without which its prediction loses most."""
    if not row.heads or row.replace is None:
        yield Section(
            "Heads",
            (Sentence(f"{record.aliases[0]} has no heads that can be ablated one by one.", says="setting"),),
        )
        return
    names = names_of(record)
    found = [each for index in range(len(names)) for each in heads_of(record, index)]
    sentences = [_head_sentence(record, index, name, row) for index, name in enumerate(names[:_EACH])]
    columns = {
        "image": lambda each: names[each.number],
        "head": lambda each: each.name,
        "rise of the loss (nats)": lambda each: each.delta_loss,
        "probability without it": lambda each: each.probability,
        "attends to": lambda each: each.words(row.images),
    }
    caption = f"The heads that matter most for each prediction, of {row.heads}; ablated one by one, exactly"
    method = Sentence(
        "Each head's output is replaced (ablated), and the rise of the cross-entropy of the predicted class is "
        f"measured; {_replaced(row)}. What a head attends to is the label of `vitlens stats` (docs/stats.md).",
        says="method",
    )
    yield Section(
        "The heads that matter for it", (*sentences, method), (Table.of(caption, found, columns),), leading=True
    )


def _replaced(row: LookRow) -> str:
    by = {
        "zero": "by zero",
        "resample": "by its output for another of the images",
        "mean": "by its mean over the images",
    }
    return f"replaced {by[row.replace or 'mean']}{f' ({row.note})' if row.note else ''}"


def _head_sentence(record: Record, index: int, name: str, row: LookRow) -> Sentence:
    """The heads of one image in words."""
    first, found = classes_of(record, index)[0], heads_of(record, index)
    supporting = [each for each in found if each.delta_loss > 0]
    if not supporting:
        return Sentence(f"{name}: no head, ablated alone, lowers the probability of {first.name}.", (first, *found))
    listed = "; ".join(
        f"{each.name} (to {percent(each.probability, 1)}; {each.words(row.images)})" for each in supporting
    )
    return Sentence(
        f"{name}: the probability of {first.name}, {percent(first.probability, 1)}, falls most without {listed}.",
        (first, *supporting, row),
    )


def _limits(row: LookRow) -> Iterator[Sentence]:
    """At most four."""
    images = f"{row.images} image{'' if row.images == 1 else 's'}"
    yield Sentence(
        f"The maps of {row.title} were not checked on this model: `vitlens explain --verify` says which method may be "
        "trusted.",
        (row,),
    )
    if row.replace == "zero":
        yield Sentence(
            f"With {images} there is no mean and no other image to replace a head's output by: zero is far from what "
            "later layers expect, so the effects of heads are overstated and their order may change.",
            (row,),
        )
    elif row.heads:
        yield Sentence(
            f"Which heads matter is said of {images}, without intervals, and beside other images it may be others; "
            "`vitlens ablate` on a data set tests it.",
            (row,),
        )
    if row.labelled:
        few = " One image cannot tell fixed places from places that it chooses." if row.images == 1 else ""
        yield Sentence(f"What heads attend to rests on {images}; `vitlens stats` has the intervals.{few}", (row,))
    yield Sentence("A probability is the model's own confidence, not its accuracy.", says="method")


def _explorer(record: Record) -> Explorer | None:
    """The images with both maps; heads with their labels and the mean rise of the loss without them."""
    arrays = record.arrays(MAPS)
    names = names_of(record)
    maps = {"prediction": arrays.prediction}
    if arrays.runner_up is not None:
        maps["runner-up"] = arrays.runner_up
    facts = [
        (
            "; ".join(f"{each.name} {percent(each.probability, 1)}" for each in classes_of(record, index)),
            *(
                f"{each.name}: loss {'+' if each.delta_loss > 0 else ''}{number(each.delta_loss)} nats without it"
                for each in heads_of(record, index)
            ),
        )
        for index in range(len(names))
    ]
    labels, importance = _of_heads(record)
    return explorer_of(record, Shown(arrays.pixels, names, facts, maps, labels, importance))


def _of_heads(record: Record) -> tuple[list[list[str]], "np.ndarray | None"]:
    """The label of each head, and the mean rise of the loss over the images without it."""
    rows = record.rows(HEADS)
    if not rows:
        return [], None
    shape = 1 + max(row.layer for row in rows), 1 + max(row.head for row in rows)
    labels = [["" for _ in range(shape[1])] for _ in range(shape[0])]
    sums, counts = np.zeros(shape), np.zeros(shape)
    for row in rows:
        labels[row.layer][row.head] = row.label or ""
        sums[row.layer, row.head] += row.delta_loss
        counts[row.layer, row.head] += 1
    return labels, np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
