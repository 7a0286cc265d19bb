"""What changed in the attention of each head, by image and class: sections of the report."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitlens.analysis.heads.registry import STATISTICS as REGISTRY
from vitlens.commands.study.report.transfer.facts import TransferFacts, words
from vitlens.commands.study.transfer.record import (
    CLASS_CHANGES,
    HEAD_CHANGES,
    HEAD_SHIFTS,
    MAP_ARRAYS,
    MAPS,
    MOVED,
    HeadChangeRow,
    HeadShiftRow,
)
from vitlens.commands.study.transfer.regimes import FULL, LAST, STATISTICS
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import LEVEL, Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOVED = (
    "Moved attention is the total variation between the rows of a head before and after, half the sum of absolute "
    "differences: the share of attention that lies on other keys; mean over queries, test images and seeds. Between "
    "seeds it is measured between trainings that differ only in their seed: a change of that size is not one of the "
    "data. Intervals cover test images."
)
_LABEL = "attention per patch"


def attention_section(facts: TransferFacts) -> Section:
    """By how much and where the attention of each head moved, and the maps before and after."""
    heads = FigureSpec("attention_moved", _MOVED, partial(_draw_heads, facts))
    caption = (
        "Attention of the last layer, mean over heads, of the model as it was given and after full training (first "
        "seed), on one test image of each class: the first, not chosen by its maps. Under each: the class, the "
        "prediction before, among the model's own classes, and after. The last row is the mean over all "
        "compared images."
    )
    maps = FigureSpec("maps_before_after", caption, partial(_draw_maps, facts, rollout=False))
    columns = {
        "class": lambda row: row.name,
        "images": lambda row: row.images,
        "moved attention": lambda row: in_words(Estimate(row.moved, row.low, row.high)),
    }
    table = Table.of("Moved attention by class, mean over all heads", facts.record.rows(CLASS_CHANGES), columns)
    sentences = (*_amounts(facts), *_most_moved(facts), *_shifted(facts), Sentence(_MOVED, says="method"))
    return Section(
        "Attention before and after", sentences, (table,), (heads, maps), "How did the attention of each head change?",
        True,
    )  # fmt: skip


def _amounts(facts: TransferFacts) -> Iterator[Sentence]:
    full, last = (facts.record.metric(MOVED(model=regime.label)) for regime in (FULL, LAST))
    rows = [row for row in facts.record.rows(HEAD_CHANGES) if row.label == FULL.label]
    text = f"Full training moved {in_words(full)} of the attention, mean over heads, training of the last blocks "
    text += f"{in_words(last, with_n=False)}."
    yield Sentence(text, (full, last))
    known = [row.between for row in rows if row.between is not None]
    if known:
        between, more = Estimate(float(np.mean(known))), [row for row in rows if _beyond_seeds(row)]
        yield Sentence(
            f"Two full trainings that differ only in their seed are {in_words(between)} apart; in {len(more)} of "
            f"{len(rows)} heads the change is larger than between seeds, by its interval's lower end.",
            (between, len(more), len(rows)),
        )


def _beyond_seeds(row: HeadChangeRow) -> bool:
    return row.between is not None and row.low is not None and row.low > row.between


def _most_moved(facts: TransferFacts) -> Iterator[Sentence]:
    rows = [row for row in facts.record.rows(HEAD_CHANGES) if row.label == FULL.label]
    top = sorted(rows, key=lambda row: -row.moved)[:3]
    listed = ", ".join(f"L{row.layer}.H{row.head} {in_words(Estimate(row.moved, row.low, row.high))}" for row in top)
    yield Sentence(f"The heads whose attention moved most: {listed}.", tuple(top))
    by_layer = _by_layer(rows)
    most, least = max(by_layer, key=lambda at: by_layer[at]), min(by_layer, key=lambda at: by_layer[at])
    ends = Estimate(by_layer[most]), Estimate(by_layer[least])
    yield Sentence(
        f"By layer, most in layer {most} ({in_words(ends[0])}) and least in layer {least} ({in_words(ends[1])}).",
        (*ends, most, least),
    )


def _by_layer(rows: Sequence[HeadChangeRow]) -> dict[int, float]:
    layers = sorted({row.layer for row in rows})
    return {layer: float(np.mean([row.moved for row in rows if row.layer == layer])) for layer in layers}


def _shifted(facts: TransferFacts) -> Iterator[Sentence]:
    """How many heads changed in each statistic, and the largest change."""
    for name in STATISTICS:
        rows = [row for row in facts.record.rows(HEAD_SHIFTS) if row.statistic == name]
        changed = [row for row in rows if row.p_holm <= LEVEL]
        if not rows:
            continue
        title = REGISTRY[name].title
        text = f"{title[:1].upper()}{title[1:]}: {len(changed)} of {len(rows)} heads changed significantly (Holm)"
        if not changed:
            yield Sentence(f"{text}.", tuple(rows))
            continue
        top = max(changed, key=lambda row: abs(row.change))
        rose = sum(row.change > 0 for row in changed)
        unit = REGISTRY[name].unit
        size = in_words(Estimate(top.change, top.low, top.high, unit=unit))
        yield Sentence(
            f"{text}, {rose} upwards; most in L{top.layer}.H{top.head}, from "
            f"{in_words(Estimate(top.before, unit=unit))} by {size}.",
            (*rows, len(changed), len(rows), rose),
        )


def _draw_heads(facts: TransferFacts) -> "Figure":
    from vitlens.figures.stats.heads import head_heatmaps

    rows = facts.record.rows(HEAD_CHANGES)
    maps = {
        f"{words(regime.label)}: moved (%)": _board([row for row in rows if row.label == regime.label], "moved")
        for regime in (FULL, LAST)
    }
    between = _board([row for row in rows if row.label == FULL.label], "between")
    if np.isfinite(between).any():
        maps["full: between seeds (%)"] = between
    most = max(float(np.nanmax(each)) for each in maps.values())
    limits = dict.fromkeys(maps, (0.0, most))  # the panels are to be compared
    title = f"Attention moved from {facts.design.model}, by head"
    return head_heatmaps(values=maps, title=title, limits=limits)


def _board(rows: Sequence[HeadChangeRow], field: str) -> NDArray[np.float64]:
    """A number of each head in %, (layers, heads)."""
    table = np.full((max(row.layer for row in rows) + 1, max(row.head for row in rows) + 1), np.nan)
    for row in rows:
        value = getattr(row, field)
        table[row.layer, row.head] = np.nan if value is None else 100 * value
    return table


def _draw_maps(facts: TransferFacts, *, rollout: bool) -> "Figure":
    from vitlens.figures.study.before_after import before_and_after

    arrays = facts.record.arrays(MAP_ARRAYS)
    first, second = (arrays.rollout_before, arrays.rollout_after) if rollout else (arrays.before, arrays.after)
    assert first is not None
    assert second is not None
    return before_and_after(
        images=arrays.images / 255.0,
        before=first,
        after=second,
        means=None if rollout else (arrays.mean_before, arrays.mean_after),
        names=[(row.name, row.before, row.after) for row in facts.record.rows(MAPS)],
        n=facts.design.compared,
        label=f"rollout, {_LABEL}" if rollout else _LABEL,
        title=f"{'Rollout' if rollout else 'Last-layer attention'} before and after full training",
    )


def head_appendix(facts: TransferFacts) -> Section:
    """Every head in full, the changes of statistics, and the rollout maps."""
    columns = {
        "regime": lambda row: words(row.label),
        "head": lambda row: f"L{row.layer}.H{row.head}",
        "moved": lambda row: in_words(Estimate(row.moved, row.low, row.high)),
        "between seeds": lambda row: in_words(None if row.between is None else Estimate(row.between)),
    }
    tables = [Table.of("Moved attention of every head", facts.record.rows(HEAD_CHANGES), columns)]
    shifts = facts.record.rows(HEAD_SHIFTS)
    figures = []
    if shifts:
        caption = "Change of the statistics of every head, after full training minus before; dots: p (Holm) to 0.05."
        figures.append(FigureSpec("head_shifts", caption, partial(_draw_shifts, facts)))
    if facts.record.arrays(MAP_ARRAYS).rollout_before is not None:
        caption = "Rollout of the model as it was given and after full training, on the same images."
        figures.append(FigureSpec("rollout_before_after", caption, partial(_draw_maps, facts, rollout=True)))
    return Section("Every head", (), tuple(tables), tuple(figures))


def _draw_shifts(facts: TransferFacts) -> "Figure":
    from vitlens.figures.stats.heads import difference_maps

    rows = facts.record.rows(HEAD_SHIFTS)
    shape = (max(row.layer for row in rows) + 1, max(row.head for row in rows) + 1)
    values, marks, units = {}, {}, {}
    for name in dict.fromkeys(row.statistic for row in rows):
        title = REGISTRY[name].title
        own = [row for row in rows if row.statistic == name]
        values[title], marks[title] = _shift_board(own, shape)
        units[title] = REGISTRY[name].unit
    return difference_maps(differences=values, significant=marks, first="after", second="before", units=units)


def _shift_board(rows: Sequence[HeadShiftRow], shape: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values, marks = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for row in rows:
        values[row.layer, row.head], marks[row.layer, row.head] = row.change, row.p_holm <= LEVEL
    return values, marks
