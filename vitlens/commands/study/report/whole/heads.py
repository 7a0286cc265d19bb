"""The head board: every head's label and what its ablation costs; the five heads that matter most in words."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitlens.commands.ablate.record import UNITS
from vitlens.commands.ablate.record.rows import UnitRow
from vitlens.commands.stats.record import HEADS, HeadRow
from vitlens.commands.study.report.whole.chapters import Study
from vitlens.report.document import FigureSpec, Sentence
from vitlens.report.numbers import in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST: Final = 5  # heads that are named
_MAIN: Final = ("mean", "zero", "resample")  # replacements, the preferred one first
Head = tuple[int, int]


def head_board(study: Study, alias: str) -> FigureSpec | None:
    """The board of one ViT whose heads were both described and ablated."""
    heads, main = heads_of(study, alias)
    if not heads or not main:
        return None
    return FigureSpec(
        f"head_board_{alias}",
        "The rise of the loss without each head (colour) and the head's label (text; docs/stats.md explains them).",
        partial(_draw, heads, main),
    )


def head_sentences(study: Study, alias: str) -> Iterator[Sentence]:
    """The heads that matter most and what they do; that none does, where that is so."""
    heads, main = heads_of(study, alias)
    if not main:
        return
    first = sorted(main, key=lambda place: -main[place].delta_loss)[:_MOST]
    significant = [place for place in first if main[place].matters]
    if not significant:
        text = f"No head of {alias} changes the loss significantly when it alone is ablated."
        yield Sentence(text, tuple(main.values()))
        return
    named = [
        f"{main[place].label} ({label_of(heads.get(place))}; {in_words(main[place].loss)})" for place in significant
    ]
    backing: tuple[object, ...] = tuple((main[place], heads.get(place)) for place in significant)
    yield Sentence(f"The loss rises most without {'; '.join(named)}.", backing)


def heads_of(study: Study, alias: str) -> tuple[Mapping[Head, HeadRow], Mapping[Head, UnitRow]]:
    """The heads of a ViT as described and as ablated, with the preferred replacement."""
    stats, ablate = study.about("stats", alias), study.about("ablate", alias)
    described = () if stats is None else stats.record.rows(HEADS)
    rows = [] if ablate is None else [row for row in ablate.record.rows(UNITS) if row.kind == "head"]
    kinds = sorted({row.replace for row in rows}, key=lambda kind: _MAIN.index(kind) if kind in _MAIN else len(_MAIN))
    return (
        {(row.layer, row.head): row for row in described if row.model == alias},
        {(row.layer, row.head or 0): row for row in rows if row.replace == kinds[0]},
    )


def label_of(row: HeadRow | None) -> str:
    """The label of a head, in words where it has none."""
    return "not labelled" if row is None or row.label is None else row.label


def _draw(heads: Mapping[Head, HeadRow], main: Mapping[Head, UnitRow]) -> "Figure":
    from vitlens.figures.study import labelled_heads

    layers, most = max(place[0] for place in main) + 1, max(place[1] for place in main) + 1
    values = np.full((layers, most), np.nan)
    labels = [["" for _ in range(most)] for _ in range(layers)]
    for (layer, head), row in main.items():
        values[layer, head] = row.delta_loss
        labels[layer][head] = label_of(heads.get((layer, head)))
    return labelled_heads(values=values, labels=labels, title="What each head does, and what its ablation costs")
