"""The report of what a visitor of `vitlens demo` exports from Intervene or 3D, from its record."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.run.describe import data_sentences
from vitlens.demo.record import (
    CLASSES,
    HEADS_OFF,
    INTERVENED,
    INTERVENED_ARRAYS,
    PATCHES_OFF,
    POINTS,
    SPACE,
    STRONGEST,
    IntervenedRow,
    SpaceRow,
)
from vitlens.record import Record
from vitlens.report import verdicts as rules
from vitlens.report.document import Document, FigureSpec, Section, Sentence, Table, Verdict
from vitlens.report.numbers import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LISTED: Final = 48  # patches


def report(record: Record) -> Document:
    """What heads and patches that are off change for one image; or where all heads look, in space."""
    intervened, space = record.rows(INTERVENED), record.rows(SPACE)
    sections = [*(_intervened(record, row) for row in intervened), *(_in_space(record, row) for row in space)]
    limits = [*(limit for row in intervened for limit in _limits(row)), *(_limit(row) for row in space)]
    return Document(
        record.config.title,
        tuple(sections),
        limits=tuple(limits),
        verdicts=tuple(_verdicts(record)),
        preface=data_sentences(record),
    )


def _verdicts(record: Record) -> Iterator[Verdict]:
    (alias,) = record.aliases
    yield rules.not_tested(
        f"accuracy of {alias}", f"one image without a label; vitlens evaluate {alias} --data DATA judges it"
    )
    if record.rows(INTERVENED):
        yield rules.not_tested(
            f"explanation of {alias}", "no map was checked on this model; vitlens explain --verify tests it"
        )


def _intervened(record: Record, row: IntervenedRow) -> Section:
    """The logit, the classes, and the map before and after."""
    heads, patches = record.rows(HEADS_OFF), record.rows(PATCHES_OFF)
    kept = f"the prediction stays {row.target}" if row.predicted == row.target else (
        f"the prediction becomes {row.predicted}, was {row.target}"
    )  # fmt: skip
    sentences = [
        Sentence(
            f"{_off_words(record)}: {kept}. The logit of {row.target} goes from {number(row.logit_before)} to "
            f"{number(row.logit_after)}.",
            (row, *heads, *patches),
        ),
        Sentence(
            "A head that is off puts out zero; to a patch that is off no token attends, in any layer. The prediction "
            f"is computed by `vitlens.replay`{f' ({row.note})' if row.note else ''}, the map under the same changes.",
            says="method",
        ),
        Sentence(f"From Python: `{_in_python(record)}`.", says="setting"),
    ]
    if patches:
        listed = "; ".join(f"{each.row}, {each.column}" for each in patches[:_LISTED])
        more = "; and others, in results.json" if len(patches) > _LISTED else ""
        sentences.append(Sentence(f"The patches that are off, by row and column: {listed}{more}.", patches))
    columns = {
        "class": lambda each: each.name,
        "logit before": lambda each: each.logit_before,
        "logit after": lambda each: each.logit_after,
        "probability before": lambda each: each.probability_before,
        "probability after": lambda each: each.probability_after,
    }
    table = Table.of("The leading classes, with everything on and with what is off", record.rows(CLASSES), columns)
    caption = (
        f"The image, in grey where patches are off, and where the evidence for {row.target} lies: {row.title} "
        f"({ATTRIBUTIONS[row.method].paper}), {ATTRIBUTIONS[row.method].description}. Each map is a share of its own "
        "largest value: places can be compared, amounts cannot."
    )
    figure = FigureSpec(
        "intervened", caption, partial(_draw_intervened, record, row),
        alt=f"{row.image} with the maps of {row.target} before and after",
    )  # fmt: skip
    return Section("What changes", tuple(sentences), (table,), (figure,), leading=True)


def _off_words(record: Record) -> str:
    """What is off, in words."""
    heads, patches = record.rows(HEADS_OFF), len(record.rows(PATCHES_OFF))
    words = [f"head{'s' if len(heads) > 1 else ''} {', '.join(each.name for each in heads)}"] if heads else []
    words += [f"{patches} patch{'es' if patches > 1 else ''}"] if patches else []
    return f"Without {' and '.join(words)}" if words else "With nothing off"


def _in_python(record: Record) -> str:
    """The changes as `vitlens.replay` takes them."""
    changes = [f'"blocks.{each.layer}.head.{each.head}": "zero"' for each in record.rows(HEADS_OFF)]
    keys = tuple(each.key for each in record.rows(PATCHES_OFF))
    if keys:
        listed = str(keys) if len(keys) <= _LISTED else "..."
        changes.append(f'"blocks.*.attention.weights": vitlens.KnockOut(keys={listed})')
    return f"vitlens.replay(model, images).run([{{{', '.join(changes)}}}])"


def _draw_intervened(record: Record, row: IntervenedRow) -> "Figure":
    from vitlens.charts import Picture, images

    arrays = record.arrays(INTERVENED_ARRAYS)
    pixels = arrays.pixels.astype(np.float32) / 255
    if row.grid is not None:
        height, width = pixels.shape[2:]
        for patch in record.rows(PATCHES_OFF):
            rows = slice(height * patch.row // row.grid[0], height * (patch.row + 1) // row.grid[0])
            columns = slice(width * patch.column // row.grid[1], width * (patch.column + 1) // row.grid[1])
            pixels[:, :, rows, columns] = 0.5
    cells = [Picture(pixels[0], column="image", below=row.image)]
    for name, values in ((f"{row.title} before", arrays.before), (f"{row.title} after", arrays.after)):
        cells.append(Picture(pixels[0], np.asarray(values, float), column=name, signed=row.signed))
    return images()(cells, f"{record.aliases[0]}: {row.title} for {row.target}")


def _limits(row: IntervenedRow) -> Iterator[Sentence]:
    yield Sentence(
        "This is one image, without an interval; `vitlens ablate` measures heads on many, one by one and in pairs.",
        (row,),
    )
    yield Sentence(
        "Zero is far from any output of a head that later layers have seen, so effects are overstated; and the effects "
        "of several heads do not add up.",
        says="method",
    )


def _in_space(record: Record, row: SpaceRow) -> Section:
    """The points, and the strongest of them."""
    strongest = record.rows(STRONGEST)
    first = strongest[0]
    sentences = (
        Sentence(
            f"The largest share of the attention of {row.reading} lies in L{first.layer}.H{first.head} on the patch "
            f"at row {first.row}, column {first.column}: {number(first.share)} times that of a uniform map.",
            (first, row),
        ),
        Sentence(
            "A point is a patch, a plane of patches a head, a floor a layer (L0 below); larger and brighter is more "
            "attention, 1 that of a uniform map.",
            says="method",
        ),
    )
    columns = {
        "layer": lambda each: each.layer,
        "head": lambda each: each.head,
        "row": lambda each: each.row,
        "column": lambda each: each.column,
        "times uniform": lambda each: each.share,
    }
    table = Table.of("The strongest points", strongest, columns)
    figure = FigureSpec(
        "space",
        f"The attention of {row.reading} by layer, head and patch: the {row.shown:,} strongest of {row.points:,}, "
        "all of them in arrays/points.npz.",
        partial(_draw_space, record, row),
        alt=f"The attention of all heads on {row.image} in space, a floor a layer, a plane of patches a head",
    )
    return Section("Where all heads look", sentences, (table,), (figure,), leading=True)


def _draw_space(record: Record, row: SpaceRow) -> "Figure":
    from vitlens.charts.space import attention_space

    points = record.arrays(POINTS)
    return attention_space(
        layer=points.layer, head=points.head, row=points.row, column=points.column, share=points.share, grid=row.grid,
        title=f"{record.aliases[0]}: attention of {row.reading} by layer, head and patch",
    )  # fmt: skip


def _limit(row: SpaceRow) -> Sentence:
    return Sentence(
        f"This is one image, and the {row.shown:,} strongest of {row.points:,} points; `vitlens stats` measures what "
        "heads attend to on many images.",
        (row,),
    )
