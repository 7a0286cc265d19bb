"""The sizes of the smallest perturbations; tables of all accuracies, paired tests and costs."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from vitlens.commands.attack.epsilons import AXES, epsilon_words, scale_of
from vitlens.commands.attack.record import ATTACKED, CURVES, IMAGES, MEDIAN_DISTANCE, ROBUST_PAIRS
from vitlens.commands.attack.record.rows import AttackRow
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words, number
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MINIMUM: Final = "The attack searches for the smallest perturbation."
_TRIED: Final = "Sizes take only the values of the epsilons tried."


def distances(record: Record) -> Section:
    """The median smallest perturbations, their histogram, and the tables of paired tests and costs."""
    return Section(
        "Smallest perturbations",
        tuple(_sentences(record)),
        (*_medians(record), *_pairs(record), _costs(record)),
        tuple(_figure(record)),
        leading=True,
    )


def _sentences(record: Record) -> Iterator[Sentence]:
    """The median smallest perturbation of each model under each attack that searches for it; else under all."""
    rows = record.rows(ATTACKED)
    for row in [row for row in rows if row.kind == "minimum"] or rows:
        if not row.right or row.norm == "patch":
            continue
        backing: list[object] = [row]
        if row.median is None:
            text = (
                f"{row.model} under {row.title}: {row.survived} of the {row.right} correctly classified images, at "
                "least half, withstand every perturbation tried, so the median distance is larger than these."
            )
        else:
            unit = "/255" if row.norm == "linf" else " (L2)"
            median = record.metric(MEDIAN_DISTANCE(model=row.model, attack=row.attack))
            backing.append(median)
            text = (
                f"{row.model} under {row.title}: the median of the smallest perturbations is "
                f"{number(median.value)}{unit}{_interval(median)}, over correctly classified images."
            )
        yield Sentence(text, tuple(backing))


def _interval(median: Estimate) -> str:
    if median.low is None:
        return ""
    high = "more than was tried" if median.high is None else number(median.high)
    return f" (95 % interval {number(median.low)} to {high}, n = {median.n or 0:,})"


def _figure(record: Record) -> Iterator[FigureSpec]:
    """The distances of attacks that search for the smallest; where none does, of all but patches."""
    rows = record.rows(ATTACKED)
    chosen = [row for row in rows if row.kind == "minimum"] or [row for row in rows if row.norm != "patch"]
    sizes = {(row.model, row.attack): _distances(record, row) for row in chosen}
    if not any(len(values) for values in sizes.values()):
        return
    how = _MINIMUM if chosen[0].kind == "minimum" else _TRIED
    yield FigureSpec(
        "distances",
        "The size of the smallest perturbation found that changes the prediction, for each correctly classified image. "
        f"{how} Dashed: the median. Each size is an upper bound: a smaller perturbation may exist.",
        partial(_draw, chosen, sizes),
    )


def _distances(record: Record, row: AttackRow) -> NDArray[np.floating]:
    """The smallest perturbations found of correctly classified images, in the unit of epsilons on the command line."""
    arrays = record.arrays(IMAGES, model=row.model)
    values: NDArray[np.floating] = arrays.distance[row.attack] * scale_of(row.norm)
    smallest: NDArray[np.floating] = values[arrays.clean & np.isfinite(values) & (values > 0)]
    return smallest


def _draw(rows: Sequence[AttackRow], sizes: dict[tuple[str, str], NDArray[np.floating]]) -> "Figure":
    from vitlens.figures.attack.curves import Distances, distance_histograms

    panels: dict[str, list[Distances]] = {}
    for row in rows:
        values = sizes[row.model, row.attack]
        panels.setdefault(row.title, []).append(Distances(row.model, values, row.right - len(values), row.median))
    axis = {row.title: AXES[row.norm] for row in rows}
    return distance_histograms(panels=panels, axis=axis, title="The smallest perturbation found for each image")


def accuracies(record: Record) -> Table:
    """All accuracies: a line for each attack at each epsilon, a column for each model."""
    rows, aliases = record.rows(CURVES), record.aliases
    cells = {(row.attack, row.epsilon, row.model): in_words(row.estimate, with_n=False) for row in rows}
    lines: list[tuple[Cell, ...]] = []
    for attack, epsilon in dict.fromkeys((row.attack, row.epsilon) for row in rows):
        row = next(row for row in rows if (row.attack, row.epsilon) == (attack, epsilon))
        if epsilon > 0:
            shown: tuple[str, str] = row.title, epsilon_words(epsilon, row.norm)
        elif lines:
            continue  # the clean accuracy is the same of all attacks
        else:
            shown = "none", "0"
        lines.append((*shown, *(cells.get((attack, epsilon, alias)) for alias in aliases)))
    return Table("Accuracy under attack, with 95 % intervals", ("attack", "epsilon", *aliases), tuple(lines))


def _pairs(record: Record) -> Iterator[Table]:
    """Every paired test of two models; none of one model."""
    rows = record.rows(ROBUST_PAIRS)
    if rows:
        yield Table.of(
            "Paired tests of the models (McNemar's exact test)",
            rows,
            {
                "attack": lambda row: row.title,
                "epsilon": lambda row: "0" if row.attack == "clean" else epsilon_words(row.epsilon, row.norm),
                "models": lambda row: f"{row.first} − {row.second}",
                "only the first right": lambda row: row.only_first,
                "only the second right": lambda row: row.only_second,
                "difference": lambda row: in_words(row.estimate, with_n=False),
                "p": lambda row: number(row.p),
                "p (Holm)": lambda row: number(row.p_holm),
            },
        )


def _medians(record: Record) -> Iterator[Table]:
    """How many images each attack fooled, and the median smallest perturbation."""
    rows = [row for row in record.rows(ATTACKED) if row.right and row.norm != "patch"]
    if rows:
        yield Table.of(
            "Smallest perturbations of the correctly classified images",
            rows,
            {
                "model": lambda row: row.model,
                "attack": lambda row: row.title,
                "images": lambda row: row.right,
                "fooled": lambda row: row.broken,
                "median": lambda row: _median_cell(record, row),
            },
        )


def _median_cell(record: Record, row: AttackRow) -> str:
    if row.median is None:
        return "more than was tried"
    median = record.metric(MEDIAN_DISTANCE(model=row.model, attack=row.attack))
    return f"{number(median.value)}{'/255' if row.norm == 'linf' else ' (L2)'}{_interval(median)}"


def _costs(record: Record) -> Table:
    return Table.of(
        "Attacks and their cost",
        record.rows(ATTACKED),
        {
            "model": lambda row: row.model,
            "attack": lambda row: row.title,
            "source": lambda row: row.source,
            "steps": lambda row: row.steps,
            "restarts": lambda row: row.restarts,
            "images forward": lambda row: row.forwards,
            "backward": lambda row: row.backwards,
            "seconds": lambda row: row.seconds,
        },
    )
