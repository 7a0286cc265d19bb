"""What the heads of a model specialise in: their labels, the rules of these, and the offsets that they attend to."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.analysis.heads.labels import LABELS, MARGIN, MIXED, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.registry import shown_in
from vitlens.commands.stats.record import OFFSET_ARRAYS, RULES, HeadRow, OffsetArrays
from vitlens.commands.stats.shown import ModelShown, backbones, title_of
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_ranges, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN: Final = 400  # heads in the report's table: more than a ViT-L has
_RULE: Final = (
    "A score is the share of the information in a head's attention (log2 of the number of keys minus the entropy, in "
    "bits, at least one) that the label's pattern explains, as a gain in log-likelihood over uniform attention. A head "
    f"gets the label of the highest score if that is at least {THRESHOLD} and above that of every label that "
    f"contradicts it by {MARGIN} and by more than the 95 % interval of the difference over images"
)
_OLDER_RULE: Final = (
    "Rules of an older version of vitlens, in their order; the first with a score of at least 0.5 counts"
)
_OLDER_OTHERS: Final = {MIXED: "no rule reaches its threshold; the score is the highest"}
_FRAMES: Final = (
    "Frame and code give the label; the number is the highest score of any label, the share of the information in the "
    "head's attention that it explains."
)
_OLDER_FRAMES: Final = (
    "Frame and code give the label by the rules of an older version of vitlens, light grey for labels that are no "
    "longer in use; the number is its score."
)


def specialisation_section(record: Record, model: ModelShown) -> Section:
    """What labels mean, every head with its label, and the offsets of the keys that it attends to."""
    rules = {row.label: row.rule for row in record.rows(RULES)}
    older = _is_older(record)
    others = _OLDER_OTHERS if older else {name: label.sentence for name, label in LABELS.items() if not label.function}
    tables = [
        Table.of(
            _OLDER_RULE if older else _RULE,
            [*rules.items(), *((name, sentence) for name, sentence in others.items() if name not in rules)],
            {"label": lambda rule: rule[0], "condition": lambda rule: rule[1]},
        )
    ]
    common = backbones(record)
    if common is None or not common.comparable:  # else the section on differences compares them head by head
        tables.append(_head_table(model))
    tables.reverse()  # the heads first
    lines = [_clear_sentence(model)]
    if len(model.heads) > _SHOWN:
        lines.append(Sentence(f"The table has the first {_SHOWN} heads; all are in results.json.", says="setting"))
    return Section(f"Specialisation of every head{model.of}", tuple(lines), tuple(tables), leading=True)


def _clear_sentence(model: ModelShown) -> Sentence:
    """How many heads have a clear label, and the label of most heads."""
    labelled = [row for row in model.heads if row.label is not None]
    clear = Counter(row.label for row in labelled if row.label not in (MIXED, UNLABELLED))
    if not labelled:
        return Sentence("No head has a label, as no layer's tokens have a place in the image.", model.layers)
    common = clear.most_common(1)
    most = f"; most often {common[0][0]} ({common[0][1]})" if common else ""
    return Sentence(f"{clear.total()} of {len(labelled)} heads have a clear label{most}.", tuple(labelled))


def _head_table(model: ModelShown) -> Table:
    heads = model.heads[:_SHOWN]
    columns: dict[str, Callable[[HeadRow], Cell]] = {
        "layer": lambda row: row.layer,
        "head": lambda row: row.head,
        "label": lambda row: row.label,
        "score": _score,
        "most attended patch": _place,
        "next": lambda row: None if row.other is None else f"{row.other} {row.other_score:.2f}",
    }
    for name in shown_in("table"):
        if any(row.statistics.get(name) is not None for row in heads):
            columns[title_of(name)] = partial(_statistic, name)
    return Table.of("Every head, layers and heads counted from 0", heads, columns)


def _is_older(record: Record) -> bool:
    """Whether the labels are those of a version in which the first rule that a head met gave its label."""
    return not {row.label for row in record.rows(RULES)} <= LABELS.keys()


def _score(row: HeadRow) -> Cell:
    """The score with its interval; of a head without a clear label, after the name of the highest score."""
    if row.score is None or row.best is None:
        return row.score
    interval = "" if row.low is None or row.high is None else f" ({row.low:.2f} to {row.high:.2f})"
    return f"{row.score:.2f}{interval}" if row.best == row.label else f"{row.best} {row.score:.2f}{interval}"


def _place(row: HeadRow) -> Cell:
    """The patch that receives most attention, with its share."""
    if row.place is None or row.place_mass is None:
        return None
    return f"row {row.place[0]}, column {row.place[1]}: {percent(row.place_mass, 1)}"


def _statistic(name: str, row: HeadRow) -> float | None:
    return row.statistics.get(name)


def specialisation_figures(record: Record, shown: Sequence[ModelShown]) -> Iterator[FigureSpec]:
    """Where the heads of each model attend to, by offset; nothing for a model whose layers have no place."""
    for model in shown:
        yield from _offset_figures(record, model)


def _offset_figures(record: Record, model: ModelShown) -> Iterator[FigureSpec]:
    if record.has(OFFSET_ARRAYS, model=model.alias):
        caption = (
            "For each head, the mean weight of keys by their offset from the query patch (in the centre), in units of "
            f"uniform attention. {_OLDER_FRAMES if _is_older(record) else _FRAMES} A label summarises where a head "
            "attends; it does not show a mechanism."
            f"{_unplaced_words(model)}"
        )
        arrays = record.arrays(OFFSET_ARRAYS, model=model.alias)
        yield FigureSpec(f"specialisation{model.suffix}", caption, partial(_draw_offsets, model, arrays))


def _draw_offsets(model: ModelShown, arrays: OffsetArrays) -> "Figure":
    from vitlens.figures.stats.specialisation import specialisation_matrix

    labelled = {
        layer: [row for row in heads if row.label is not None]
        for layer, heads in model.by_layer.items()
        if any(row.label is not None for row in heads)
    }  # windows of MaxViT and the pooling of SigLIP have no labels
    return specialisation_matrix(
        ratios=[arrays.ratio.get(layer) for layer in labelled],
        labels=[[row.label if row.label in LABELS else UNLABELLED for row in heads] for heads in labelled.values()],
        scores=[[np.nan if row.score is None else row.score for row in heads] for heads in labelled.values()],
        layers=list(labelled),
        title=f"Specialisation of every head{model.of}",
    )


def _unplaced_words(model: ModelShown) -> str:
    """Which layers have no labels, and why; "" where all have labels."""
    without = sorted((row.unplaced, row.layer) for row in model.layers if row.unplaced is not None)
    if not without:
        return ""
    listed = "; ".join(
        f"{in_ranges([layer for _, layer in layers])} ({reason})"
        for reason, layers in groupby(without, key=lambda pair: pair[0])
    )
    return f" Layers without labels, as their tokens cannot be placed in the image: {listed}."
