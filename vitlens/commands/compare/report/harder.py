"""Both models on images made harder, and on images whose shape and texture are of different classes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.commands.compare.record import (
    CONFLICTS,
    HARDER,
    SHAPE_ANSWERS,
    SHAPE_BIAS,
    TEXTURE_ANSWERS,
    HarderRow,
)
from vitlens.commands.compare.report.errors import ends
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate, Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def harder_sections(record: Record) -> Iterator[Section]:
    """Accuracy by level of every disturbance; nothing where none was tried."""
    rows = record.rows(HARDER)
    if not rows:
        return
    kinds = {kind: _levels(rows, kind) for kind in dict.fromkeys(row.kind for row in rows)}
    yield Section(
        "Images made harder",
        tuple(_comparison(record, kind, levels) for kind, levels in kinds.items()),
        (_level_table(record, kinds),),
        (_robustness_figure(record, kinds),),
    )


def shape_bias_sections(record: Record) -> Iterator[Section]:
    """Answers by shape and by texture where the two disagree; nothing where there are no such images."""
    rows = record.rows(CONFLICTS)
    if not rows:
        return
    cells: list[tuple[Cell, ...]] = []
    for alias in record.aliases:
        bias = record.metrics.get(SHAPE_BIAS(model=alias))
        answers = (record.metric(metric(model=alias)) for metric in (SHAPE_ANSWERS, TEXTURE_ANSWERS))
        cells.append((alias, None if bias is None else in_words(bias), *map(in_words, answers)))
    columns = ("model", "shape bias", "answers by shape", "by texture")
    notes = dict.fromkeys(row.note for row in rows if row.note)
    words = (
        "Shape bias is the share of answers by shape among those by shape or by texture (Geirhos 2019): 100 % is by "
        "shape alone, 0 % by texture alone.",
        *notes,
    )
    yield Section(
        "Shape or texture",
        tuple(Sentence(text, rows) for text in words),
        (Table("Answers to cue conflicts", columns, tuple(cells)),),
        tuple(_bias_figure(record)),
    )


def level_words(kind: str, level: float) -> str:
    """A level as a figure's axis says it."""
    if kind == "shuffle":
        return f"{level:.0f}"
    if kind == "low-pass" and level > 1.4:
        return "all"
    return f"{100 * level:.0f}"


def _levels(rows: Sequence[HarderRow], kind: str) -> dict[float, tuple[HarderRow, ...]]:
    """The rows of one kind by level, in the order in which they were tried."""
    mine = [row for row in rows if row.kind == kind]
    return {
        level: tuple(row for row in mine if row.level == level) for level in dict.fromkeys(row.level for row in mine)
    }


def _comparison(record: Record, kind: str, levels: dict[float, tuple[HarderRow, ...]]) -> Sentence:
    """At which levels the two models' intervals are apart."""
    better = {level: _better(_by_model(record, rows)) for level, rows in levels.items()}
    listed = "; ".join(f"{alias} at {level_words(kind, level)}" for level, alias in better.items() if alias)
    rows = tuple(row for some in levels.values() for row in some)
    if listed:
        return Sentence(f"{kind}: the intervals are apart, with the greater accuracy of {listed}.", rows)
    return Sentence(f"{kind}: at no level are the two models' intervals apart.", rows)


def _by_model(record: Record, rows: Sequence[HarderRow]) -> dict[str, Estimate]:
    """The accuracies at one level, in the models' order."""
    known = {row.model: row.estimate for row in rows}
    return {alias: known[alias] for alias in record.aliases}


def _better(accuracies: dict[str, Estimate]) -> str | None:
    """The model of greater accuracy, where the intervals are apart."""
    (first, one), (second, two) = accuracies.items()
    return {Side.ABOVE: first, Side.BELOW: second}.get(apart(one, two))


def _level_table(record: Record, kinds: dict[str, dict[float, tuple[HarderRow, ...]]]) -> Table:
    rows = tuple(
        (
            kind,
            level_words(kind, level),
            *(in_words(estimate, with_n=False) for estimate in _by_model(record, some).values()),
        )
        for kind, levels in kinds.items()
        for level, some in levels.items()
    )
    return Table("Accuracy by level", ("made harder by", "level (as in the figure)", *record.aliases), rows)


def _robustness_figure(record: Record, kinds: dict[str, dict[float, tuple[HarderRow, ...]]]) -> FigureSpec:
    described = "; ".join(f"{kind}: {entry.description}" for kind, entry in DISTURBANCES.items())
    return FigureSpec(
        "robustness",
        f"What is done: {described}. The untouched image stands left. Both models see the same pixels. A fall shows "
        "what a model needs, and also how far such images are from those of its training.",
        partial(_draw_robustness, record, kinds),
    )


def _draw_robustness(record: Record, kinds: dict[str, dict[float, tuple[HarderRow, ...]]]) -> "Figure":
    from vitlens.figures.robustness import Hardening, robustness_curves

    hardenings = []
    for kind, levels in kinds.items():
        accuracies = [_by_model(record, rows) for rows in levels.values()]
        curves = {alias: ends([level[alias] for level in accuracies]) for alias in record.aliases}
        entry = DISTURBANCES[kind]
        hardenings.append(Hardening(entry.title, entry.axis, [level_words(kind, level) for level in levels], curves))
    data, images = record.config.data, record.rows(HARDER)[0].n
    classes = data.classes if data else 0
    return robustness_curves(hardenings=hardenings, chance=1 / classes, n=images or 0)


def _bias_figure(record: Record) -> Iterator[FigureSpec]:
    if any(SHAPE_BIAS(model=alias) in record.metrics for alias in record.aliases):
        yield FigureSpec(
            "shape_bias",
            "Answers to images with the shape of one class and the texture of another "
            f"({record.rows(CONFLICTS)[0].data}): the share by shape, of those that are by either. Marks: classes of "
            "shape, from few images each. Answers that are neither are left out here; the table has them.",
            partial(_draw_bias, record),
        )


def _draw_bias(record: Record) -> "Figure":
    from vitlens.figures.robustness import Bias, shape_bias_chart

    models = []
    for alias in record.aliases:
        overall = record.metrics.get(SHAPE_BIAS(model=alias))
        if overall is None:
            continue
        mine = [row for row in record.rows(CONFLICTS) if row.model == alias]
        shape, texture = ({row.class_name: getattr(row, cue) for row in mine} for cue in ("shape", "texture"))
        models.append(Bias(alias, overall.value, overall.low, overall.high, shape, texture))
    return shape_bias_chart(models=models)
