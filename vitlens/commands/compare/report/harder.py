"""Both models on disturbed images, and on images whose shape and texture belong to different classes."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.commands.compare.levels import level_words
from vitlens.commands.compare.record import (
    CONFLICTS,
    DISTURBED_PAIRS,
    HARDER,
    SHAPE_ANSWERS,
    SHAPE_BIAS,
    TEXTURE_ANSWERS,
    HarderRow,
)
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate, Side, apart, values_and_ends

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BIAS: Final = (
    "Shape bias is the fraction of predictions of the shape's class among those of the shape's or the texture's class "
    "(Geirhos 2019)."
)


def harder_sections(record: Record) -> Iterator[Section]:
    """Accuracy by level of every disturbance; nothing with --no-harder."""
    rows = record.rows(HARDER)
    if not rows:
        return
    kinds = {kind: _levels(rows, kind) for kind in dict.fromkeys(row.kind for row in rows)}
    yield Section(
        "Filtered, shuffled and occluded images",
        (_answer(record), *_subset(record), *(_comparison(record, kind, levels) for kind, levels in kinds.items())),
        (_level_table(record, kinds),),
        (_robustness_figure(record, kinds),),
        leading=True,
    )


def shape_bias_sections(record: Record) -> Iterator[Section]:
    """Predictions by shape and by texture where the two disagree; nothing where there are no such images."""
    rows = record.rows(CONFLICTS)
    if not rows:
        return
    cells: list[tuple[Cell, ...]] = []
    for alias in record.aliases:
        bias = record.metrics.get(SHAPE_BIAS(model=alias))
        answers = (record.metric(metric(model=alias)) for metric in (SHAPE_ANSWERS, TEXTURE_ANSWERS))
        cells.append((alias, None if bias is None else in_words(bias), *map(in_words, answers)))
    columns = ("model", "shape bias", "predictions by shape", "by texture")
    notes = dict.fromkeys(row.note for row in rows if row.note)
    yield Section(
        "Shape or texture",
        (_bias_answer(record), *(Sentence(note, rows) for note in notes), Sentence(_BIAS, says="method")),
        (Table("Predictions on cue conflicts", columns, tuple(cells)),),
        tuple(_bias_figure(record)),
        leading=True,
    )


def _answer(record: Record) -> Sentence:
    """At how many levels each model is significantly ahead, by the paired tests."""
    pairs, levels = record.rows(DISTURBED_PAIRS), record.rows(HARDER)
    if not pairs:
        return Sentence("The models are compared level by level below, by the intervals of each.", levels)
    ahead = [row for row in pairs if row.p_holm <= LEVEL]
    for_first = sum(row.difference > 0 for row in ahead)
    first, second = record.aliases
    if not ahead:
        text = f"Neither model is shown to be ahead at any of {len(pairs)} levels"
    else:
        text = (
            f"Of {len(pairs)} levels, **{first}** is ahead at {for_first}, **{second}** at {len(ahead) - for_first}; "
            f"at {len(pairs) - len(ahead)} no difference is shown"
        )
    return Sentence(f"{text} (McNemar's exact test, corrected by Holm's method).", pairs)


def _subset(record: Record) -> Iterator[Sentence]:
    """How many images were disturbed, where these are not all."""
    row, data = record.rows(HARDER)[0], record.config.data
    if data is not None and row.n is not None and row.n < data.images:
        text = f"Measured on {row.n:,} of the {data.images:,} images, drawn with the seed and balanced by class."
        yield Sentence(text, (row, data), says="setting")


def _bias_answer(record: Record) -> Sentence:
    """The shape bias of both models, and whether the intervals overlap."""
    known = {
        alias: bias for alias in record.aliases if (bias := record.metrics.get(SHAPE_BIAS(model=alias))) is not None
    }
    if len(known) < len(record.aliases):
        missing = " and ".join(alias for alias in record.aliases if alias not in known)
        text = f"No prediction of {missing} is of the shape's or the texture's class, so there is no shape bias of it."
        return Sentence(text, (*known.values(), *record.rows(CONFLICTS)))
    (first, one), (second, two) = known.items()
    reached = f"{in_words(one)} and {in_words(two)}"
    side = apart(one, two)
    if side is Side.UNDECIDED:
        text = f"The shape biases of **{first}** and **{second}** are not shown to differ: {reached}."
    else:
        ahead, other = (first, second) if side is Side.ABOVE else (second, first)
        text = f"**{ahead}** relies on shape more than **{other}**: shape bias of {first} and {second} {reached}."
    return Sentence(text, (one, two))


def _levels(rows: Sequence[HarderRow], kind: str) -> dict[float, tuple[HarderRow, ...]]:
    """The rows of one kind by level, in the order in which they were tried."""
    of_kind = [row for row in rows if row.kind == kind]
    return {
        level: tuple(row for row in of_kind if row.level == level)
        for level in dict.fromkeys(row.level for row in of_kind)
    }


def _comparison(record: Record, kind: str, levels: dict[float, tuple[HarderRow, ...]]) -> Sentence:
    """At which levels the two models' intervals do not overlap."""
    better = {level: _better(_by_model(record, rows)) for level, rows in levels.items()}
    listed = "; ".join(f"{alias} at {level_words(kind, level)}" for level, alias in better.items() if alias)
    rows = tuple(row for of_level in levels.values() for row in of_level)
    if listed:
        return Sentence(f"{kind}: the intervals do not overlap, with higher accuracy of {listed}.", rows)
    return Sentence(f"{kind}: the two models' intervals overlap at every level.", rows)


def _by_model(record: Record, rows: Sequence[HarderRow]) -> dict[str, Estimate]:
    """The accuracies at one level, in the models' order."""
    known = {row.model: row.estimate for row in rows}
    return {alias: known[alias] for alias in record.aliases}


def _better(accuracies: dict[str, Estimate]) -> str | None:
    """The model of higher accuracy, where the intervals do not overlap."""
    (first, one), (second, two) = accuracies.items()
    return {Side.ABOVE: first, Side.BELOW: second}.get(apart(one, two))


def _level_table(record: Record, kinds: dict[str, dict[float, tuple[HarderRow, ...]]]) -> Table:
    rows = tuple(
        (
            kind,
            level_words(kind, level),
            *(in_words(estimate, with_n=False) for estimate in _by_model(record, of_level).values()),
        )
        for kind, levels in kinds.items()
        for level, of_level in levels.items()
    )
    return Table("Accuracy by level", ("disturbance", "level (as in the figure)", *record.aliases), rows)


def _robustness_figure(record: Record, kinds: dict[str, dict[float, tuple[HarderRow, ...]]]) -> FigureSpec:
    described = "; ".join(f"{kind}: {entry.description}" for kind, entry in DISTURBANCES.items())
    return FigureSpec(
        "robustness",
        f"Disturbances: {described}. The leftmost level is the undisturbed image. Both models get the same pixels. "
        "Accuracy can fall because a model needs what is removed, or because such images are far from its training "
        "images.",
        partial(_draw_robustness, record, kinds),
    )


def _draw_robustness(record: Record, kinds: dict[str, dict[float, tuple[HarderRow, ...]]]) -> "Figure":
    from vitlens.figures.robustness import DisturbancePanel, robustness_curves

    disturbances = []
    for kind, levels in kinds.items():
        accuracies = [_by_model(record, rows) for rows in levels.values()]
        curves = {alias: values_and_ends([level[alias] for level in accuracies]) for alias in record.aliases}
        entry = DISTURBANCES[kind]
        disturbances.append(
            DisturbancePanel(entry.title, entry.axis, [level_words(kind, level) for level in levels], curves)
        )
    data, images = record.config.data, record.rows(HARDER)[0].n
    classes = data.classes if data else 0
    return robustness_curves(disturbances=disturbances, chance=1 / classes, n=images or 0)


def _bias_figure(record: Record) -> Iterator[FigureSpec]:
    if any(SHAPE_BIAS(model=alias) in record.metrics for alias in record.aliases):
        yield FigureSpec(
            "shape_bias",
            "Predictions on images with the shape of one class and the texture of another "
            f"({record.rows(CONFLICTS)[0].data}): the fraction by shape among those by shape or by texture. Marks: "
            "classes of shape, from few images each. Other predictions are not counted here.",
            partial(_draw_bias, record),
        )


def _draw_bias(record: Record) -> "Figure":
    from vitlens.figures.robustness import Bias, shape_bias_chart

    models = []
    for alias in record.aliases:
        overall = record.metrics.get(SHAPE_BIAS(model=alias))
        if overall is None:
            continue
        rows = [row for row in record.rows(CONFLICTS) if row.model == alias]
        shape, texture = ({row.class_name: getattr(row, cue) for row in rows} for cue in ("shape", "texture"))
        models.append(Bias(alias, overall.value, overall.low, overall.high, shape, texture))
    return shape_bias_chart(models=models)
