"""Accuracy under common corruptions."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.analysis.failures.corruptions import SEVERITIES
from vitlens.commands.attack.conclusions import over_clean
from vitlens.commands.attack.record import (
    ACCURACY,
    CORRUPTED,
    CORRUPTION_KINDS,
    MEAN_CORRUPTION_ERROR,
    MEAN_ERROR,
)
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Side, beyond, values_and_ends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CAPTION: Final = (
    "Accuracy under common corruptions; severity 0: the clean images. The table gives the strength of each severity. "
    "All models get the same pixels. Severities of different kinds are not comparable."
)
_KINDS: Final = (
    "Kinds and severities follow Hendrycks & Dietterich (2019), adapted to images of any size; the results are not "
    "comparable with those on ImageNet-C or CIFAR-10-C."
)
_SIDES: Final = {Side.BELOW: "fewer errors", Side.ABOVE: "more errors", Side.UNDECIDED: "not shown to differ"}


def corruption_sentences(record: Record) -> Iterator[Sentence]:
    """Mean errors, the kind of lowest accuracy, and errors relative to the baseline."""
    rows, relative = record.rows(CORRUPTED), list(record.all(MEAN_CORRUPTION_ERROR))
    for alias in record.aliases if rows else ():
        hardest = min((row for row in rows if row.model == alias), key=lambda row: row.accuracy)
        mean, ratio = record.metric(MEAN_ERROR(model=alias)), over_clean(record, alias)
        times = "" if ratio is None else f", {in_words(ratio, with_n=False)} times its clean error"
        yield Sentence(
            f"{alias}: mean error {in_words(mean)} under common corruptions, over all kinds and severities{times}; "
            f"accuracy is lowest under {hardest.kind} of severity {hardest.severity}, {in_words(hardest.estimate)}.",
            (hardest, mean, *([] if ratio is None else [ratio])),
        )
    if len(record.aliases) > 1 and rows and not relative:
        yield Sentence(
            "Mean corruption errors are not defined, as the baseline model makes no error under some kind of "
            "corruption.",
            rows,
        )
    for parts, ratio in relative:
        if parts["model"] != parts["baseline"]:
            yield Sentence(
                f"Mean corruption error of {parts['model']} relative to {parts['baseline']} (100 %): "
                f"{in_words(ratio)}, {_SIDES[beyond(ratio, 1.0)]}.",
                (ratio, 1.0),
            )


def corruptions(record: Record) -> Iterator[Section]:
    """Accuracies by kind and severity; nothing where corruptions were not measured."""
    if record.rows(CORRUPTED):
        figure = FigureSpec("corruptions", _CAPTION, partial(_draw, record))
        lines = (*corruption_sentences(record), *sentences(_KINDS, says="method"))
        tables = (_accuracies(record), _kinds(record))
        yield Section("Common corruptions", lines, tables, (figure,), leading=True)


def _kinds(record: Record) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (row.kind, row.description, *row.strengths) for row in record.rows(CORRUPTION_KINDS)
    )
    return Table("Strength of each severity", ("kind", "strength", *map(str, SEVERITIES)), rows)


def _accuracies(record: Record) -> Table:
    rows, aliases = record.rows(CORRUPTED), record.aliases
    cells = {(row.kind, row.severity, row.model): in_words(row.estimate, with_n=False) for row in rows}
    lines: list[tuple[Cell, ...]] = [
        (kind, severity, *(cells.get((kind, severity, alias)) for alias in aliases))
        for kind, severity in dict.fromkeys((row.kind, row.severity) for row in rows)
    ]
    return Table("Accuracy by kind and severity", ("kind", "severity", *aliases), tuple(lines))


def _draw(record: Record) -> "Figure":
    from vitlens.figures.robustness import DisturbancePanel, robustness_curves

    rows, panels = record.rows(CORRUPTED), []
    for kind in record.rows(CORRUPTION_KINDS):
        curves = {}
        for alias in record.aliases:
            levels = [row.estimate for row in rows if (row.kind, row.model) == (kind.kind, alias)]
            curves[alias] = values_and_ends([record.metric(ACCURACY(model=alias)), *levels])
        panels.append(DisturbancePanel(kind.title, "severity", ["0", *map(str, SEVERITIES)], curves))
    classes = 0 if record.config.data is None else record.config.data.classes
    return robustness_curves(disturbances=panels, chance=1 / (classes or 1), n=rows[0].n)
