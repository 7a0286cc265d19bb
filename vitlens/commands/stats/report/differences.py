"""The section on two models: the same backbone, or how they differ, head by head where heads can be compared."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.analysis.heads.registry import STATISTICS
from vitlens.commands.stats.record import (
    CHANGES,
    DIFFERENCE,
    DIFFERENCE_ARRAYS,
    DIFFERENCES,
    HEADS_CHANGED,
    HeadDifferenceArrays,
    HeadDifferenceRow,
)
from vitlens.commands.stats.shown import backbones, measured_in, pages, title_of
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.uncertainty import LEVEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

_TITLE: Final = "Differences between the two models"
_CHANGED: Final = 20  # rows of the report's table


def difference_section(record: Record) -> Section:
    """What two models have in common, and how they differ."""
    first, second = record.aliases
    common = backbones(record)
    if common is not None and common.identical:
        sentence = Sentence(
            f"All {common.parameters:,} parameters and buffers before the classifiers of `{first}` and `{second}` are "
            "equal (compared value by value), so their attention is identical by construction: there is no difference "
            f"to measure, and all numbers of `{first}` below hold for both.",
            (common,),
        )
        return Section(_TITLE, (sentence,), leading=True)
    overall = [
        (parts["statistic"], estimate)
        for parts, estimate in record.all(DIFFERENCE)
        if not STATISTICS[parts["statistic"]].internal
    ]
    means = Table.of(
        "Mean of all heads, paired over images",
        overall,
        {"statistic": lambda pair: title_of(pair[0]), f"{first} minus {second}": lambda pair: pair[1]},
    )
    if not record.has(DIFFERENCE_ARRAYS):
        words = "The models differ in shape (or there is only one image), so heads are not compared individually."
        return Section(_TITLE, (Sentence(words, () if common is None else (common,)),), (means,), leading=True)
    tables = (*_head_tables(record), means)
    return Section(_TITLE, (_changed_sentence(record),), tables, tuple(_difference_figures(record)), leading=True)


def _changed_sentence(record: Record) -> Sentence:
    first, second = record.aliases
    share, rows = record.metric(HEADS_CHANGED(first=first, second=second)), record.rows(CHANGES)
    heads = share.n or 0
    titles = dict.fromkeys(title_of(row.statistic) for row in rows)
    return Sentence(
        f"{round(share.value * heads)} of {heads} heads differ significantly between `{first}` and `{second}` in at "
        f"least one of {len(titles)} statistics ({', '.join(titles)}): paired t tests over images, Holm's correction "
        "over all heads and statistics together.",
        rows,
    )


def _head_tables(record: Record) -> Iterator[Table]:
    first, second = record.aliases
    yield Table.of(
        "Head by head: paired t tests, Holm's correction over the heads of a statistic",
        [row for row in record.rows(DIFFERENCES) if not STATISTICS[row.statistic].internal],
        {
            "statistic": lambda row: title_of(row.statistic),
            "heads": lambda row: row.heads,
            "significantly different": lambda row: row.significant,
        },
    )
    rows = [row for row in record.rows(CHANGES) if row.p_holm <= LEVEL]
    rows.sort(key=_half_widths, reverse=True)
    if rows:
        largest = f"{_CHANGED} of {len(rows)}, the largest relative to their intervals"
        shown = largest if len(rows) > _CHANGED else f"all {len(rows)}"
        yield Table.of(
            f"Significant differences of single heads ({shown}), layers and heads counted from 0",
            rows[:_CHANGED],
            {
                "layer": lambda row: row.layer,
                "head": lambda row: row.head,
                "statistic": lambda row: title_of(row.statistic),
                f"{first} minus {second}": lambda row: row.estimate,
            },
        )


def _half_widths(row: HeadDifferenceRow) -> float:
    """The size of a difference in half-widths of its interval."""
    low = row.difference if row.low is None else row.low
    return abs(row.difference) / max(row.difference - low, 1e-12)


def _difference_figures(record: Record) -> Iterator[FigureSpec]:
    first, second = record.aliases
    arrays = record.arrays(DIFFERENCE_ARRAYS)
    caption = (
        f"{first} minus {second} on the same images, head by head. A head of one model need not correspond to the head "
        "of the same number in the other, unless one was made from the other."
    )
    for figure, names in pages("differences", measured_in("differences", arrays.mean)).items():
        yield FigureSpec(figure, caption, partial(_draw_differences, arrays, names, first, second))


def _draw_differences(arrays: HeadDifferenceArrays, names: "Sequence[str]", first: str, second: str) -> "Figure":
    from vitlens.figures.stats.heads import difference_maps

    return difference_maps(
        differences={title_of(name): arrays.mean[name] for name in names},
        significant={title_of(name): np.nan_to_num(arrays.p[name], nan=1.0) <= LEVEL for name in names},
        first=first,
        second=second,
        units={title_of(name): STATISTICS[name].unit for name in names},
    )
