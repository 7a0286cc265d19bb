"""The head board: every head's label, what its ablation costs, and the five heads that matter most."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.ablate.record import UNITS
from vitlens.commands.ablate.record.rows import UnitRow
from vitlens.commands.stats.record import HEADS, HeadRow
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST: Final = 5  # heads that are named
_MAIN: Final = ("mean", "zero", "resample")  # replacements, the preferred one first
Head = tuple[int, int]


def heads_section(study: Study) -> Iterator[Section]:
    """One section for each ViT whose heads were both described and ablated."""
    for alias in study.vits:
        stats, ablate = study.about("stats", alias), study.about("ablate", alias)
        if stats is None or ablate is None:
            continue
        heads = {(row.layer, row.head): row for row in stats.record.rows(HEADS) if row.model == alias}
        rows = [row for row in ablate.record.rows(UNITS) if row.kind == "head" and row.head is not None]
        kinds = sorted({row.replace for row in rows}, key=lambda kind: _MAIN.index(kind) if kind in _MAIN else 9)
        main = {(row.layer, row.head or 0): row for row in rows if row.replace == kinds[0]} if kinds else {}
        other = {(row.layer, row.head or 0): row for row in rows if row.replace == "resample"}
        if main:
            several = f" ({alias})" if len(study.vits) > 1 else ""
            yield _section(several, heads, main, other if kinds[0] != "resample" else {})


def _section(
    several: str, heads: Mapping[Head, HeadRow], main: Mapping[Head, UnitRow], other: Mapping[Head, UnitRow]
) -> Section:
    first = sorted(main, key=lambda place: -main[place].delta_loss)[:_MOST]
    figure = FigureSpec(
        f"head_board{several.strip(' ()') and '_' + several.strip(' ()')}",
        "The rise of the loss without each head (colour) and the head's label (text; docs/stats.md explains them).",
        partial(_draw, heads, main),
    )
    columns: dict[str, Callable[[Head], Cell]] = {
        "head": lambda place: main[place].label,
        "what it does": lambda place: _label(heads.get(place)),
        "rise of the loss without it": lambda place: main[place].loss,
        "points of accuracy lost": lambda place: main[place].accuracy,
    }
    if other:
        columns["rise with resampling"] = lambda place: other[place].loss if place in other else None
    table = Table.of("The heads whose ablation raises the loss most", first, columns)
    return Section(
        f"What do the heads that matter do?{several}", tuple(_sentences(first, heads, main)), (table,), (figure,),
        "Which heads matter, and what do they do?", leading=True,
    )  # fmt: skip


def _sentences(first: list[Head], heads: Mapping[Head, HeadRow], main: Mapping[Head, UnitRow]) -> Iterator[Sentence]:
    significant = [place for place in first if main[place].matters]
    if not significant:
        rows = tuple(main.values())
        yield Sentence("No head changes the loss significantly when it alone is ablated.", rows)
        return
    named = [f"{main[place].label} ({_label(heads.get(place))}; {in_words(main[place].loss)})" for place in significant]
    backing: tuple[object, ...] = tuple((main[place], heads.get(place)) for place in significant)
    yield Sentence(f"The loss rises most without {'; '.join(named)}.", backing)
    count = sum(row.matters for row in main.values())
    yield Sentence(
        f"{count} of {len(main)} heads raise the loss significantly when each alone is ablated.", tuple(main.values())
    )


def _label(row: HeadRow | None) -> str:
    return "not labelled" if row is None or row.label is None else row.label


def _draw(heads: Mapping[Head, HeadRow], main: Mapping[Head, UnitRow]) -> "Figure":
    from vitlens.figures.study import labelled_heads

    layers, most = max(place[0] for place in main) + 1, max(place[1] for place in main) + 1
    values = np.full((layers, most), np.nan)
    labels = [["" for _ in range(most)] for _ in range(layers)]
    for (layer, head), row in main.items():
        values[layer, head] = row.delta_loss
        labels[layer][head] = _label(heads.get((layer, head)))
    return labelled_heads(values=values, labels=labels, title="What each head does, and what its ablation costs")
