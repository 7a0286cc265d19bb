"""The section on composites: whether maps find the class that they explain, where masks are not needed."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.faithfulness.composite_kinds import COMPOSITE_KINDS, CONFIDENT
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.explain.evidence_record import (
    COMPOSITE,
    COMPOSITE_MAPS,
    COMPOSITE_SETS,
    COMPOSITES,
    RECOGNISED,
    CompositeRow,
    CompositeSetRow,
)
from vitlens.commands.explain.report.league import League
from vitlens.commands.shared.maps.findings import listed
from vitlens.commands.shared.maps.judged import in_three_decimals
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = 12  # of the table
_PANELS: Final = 5  # methods in the figure


def composite_sections(league: League) -> Iterator[Section]:
    """A section for each kind of composites, and one line for a kind that could not be made."""
    for made in league.record.rows(COMPOSITE_SETS):
        if made.model == league.alias:
            yield _section(league, made)


def _section(league: League, made: CompositeSetRow) -> Section:
    kind = COMPOSITE_KINDS[made.kind]
    title = f"Localisation on composites: {kind.title}{league.of}"
    if made.refused:
        return Section(title, (Sentence(f"Not made: {made.refused}.", (made,)),))
    rows = [row for row in league.record.rows(COMPOSITES) if (row.model, row.kind) == (made.model, made.kind)]
    seen = _seen(league, made)
    said = (_answer(league, made, rows), seen, _words(made)) if made.seen else (seen, _words(made))
    return Section(title, said, (_table(league, made, rows),), (_figure(league, made),), leading=True)


def _answer(league: League, made: CompositeSetRow, rows: list[CompositeRow]) -> Sentence:
    """The method with most mass in the right place, and which are shown to find it at all."""
    methods = [row for row in rows if not row.baseline]
    baselines = [row for row in rows if row.baseline]
    best = methods[0]
    both = [row.method for row in methods if len(row.above) == len(baselines)]
    beaten = ", ".join(f"{row.method} {row.mass:.3f}" for row in baselines)
    found = (
        f"{listed(both)} {'is' if len(both) == 1 else 'are'} shown to exceed both baselines ({beaten})"
        if both
        else f"no method is shown to exceed both baselines ({beaten})"
    )
    mass = _estimate(league, made, "mass", best.method)
    images = f"{made.composites:,} composites of {made.usable:,} images"
    return Sentence(
        f"**{best.method}** puts {in_words(mass, with_n=False)} of its positive mass where the explained class is, by "
        f"chance {in_words(Estimate(made.chance or 0.0), with_n=False)} ({made.maps:,} maps of {images}); {found}.",
        (made, *rows, *((mass,) if mass else ()), *(row.mass for row in baselines)),
    )


def _seen(league: League, made: CompositeSetRow) -> Sentence:
    """Whether the model sees the parts; where it does not, the maps are not to be blamed."""
    share = league.record.metric(RECOGNISED(model=made.model, kind=made.kind))
    number = COMPOSITE_KINDS[made.kind].classes
    named = (
        f"{made.model} has the explained class among the {number} most probable in {in_words(share, with_n=False)} of "
        f"the maps (by guessing {in_words(Estimate(made.guessed), with_n=False)})"
    )
    if made.seen:
        return Sentence(
            f"{named}. On those maps it sees the part, and a map without mass on it misses what it explains; on the "
            "others it may not, and the map is not to be blamed.",
            (made, share, number),
        )
    return Sentence(
        f"**These composites do not judge the maps of {made.model}**: {named}, so it is not shown to see the parts, "
        "and a map cannot be expected to find them.",
        (made, share, number),
    )


def _words(made: CompositeSetRow) -> Sentence:
    """How they were made, and what the explained classes are."""
    kind = COMPOSITE_KINDS[made.kind]
    classes = (
        "their labels"
        if made.labels == "labels"
        else "what the model predicts for the whole images, as these have no labels of its classes"
    )
    return Sentence(
        f"{kind.title.capitalize()}: {kind.description}. Only images that are classified as their class with a "
        f"probability of at least {CONFIDENT} are used; the classes are {classes}. Mass: share of a map's positive "
        "values on the explained part, values of a patch spread evenly over its pixels; in the pointing game a tie "
        "counts as a miss. Intervals are over composites; the same images recur in several, so with few images they "
        "are too narrow.",
        says="method",
    )


def _table(league: League, made: CompositeSetRow, rows: list[CompositeRow]) -> Table:
    baselines = [row for row in rows if row.baseline]
    methods = [row for row in rows if not row.baseline]
    kept = {row.method for row in (*methods[: _ROWS - len(baselines)], *baselines)}
    cells: list[tuple[Cell, ...]] = [
        (
            row.method,
            *(
                in_three_decimals(_estimate(league, made, score, row.method))
                for score in ("mass", "pointing", "roc_auc")
            ),
            "" if row.baseline else ", ".join(row.above) or "none",
        )
        for row in rows
        if row.method in kept
    ]
    extent = f", the {len(kept) - len(baselines)} best of {len(methods)} methods" if len(kept) < len(rows) else ""
    columns = ("method", "mass on the class", "pointing", "ROC-AUC", "mass above")
    return Table(f"Localisation on {COMPOSITE_KINDS[made.kind].title}, fractions{extent}", columns, tuple(cells))


def _estimate(league: League, made: CompositeSetRow, score: str, method: str) -> Estimate | None:
    return league.record.metrics.get(COMPOSITE(model=made.model, kind=made.kind, score=score, method=method))


def _figure(league: League, made: CompositeSetRow) -> FigureSpec:
    kind = COMPOSITE_KINDS[made.kind]
    caption = (
        f"{kind.title.capitalize()}: {kind.description}. A row for each explained class; outlined: where it is. Red is "
        "evidence for the class, blue against it; each map has its own scale. Methods: those with most mass in the "
        "outlined part."
    )
    return FigureSpec(f"composites_{made.kind}{league.suffix}", caption, partial(_draw, league, made))


def _draw(league: League, made: CompositeSetRow) -> "Figure":
    from vitlens.figures.explain import attribution_overlays

    arrays = league.record.arrays(COMPOSITE_MAPS, kind=made.kind, model=made.model)
    known = arrays.methods.tolist()
    rows = [row for row in league.record.rows(COMPOSITES) if (row.model, row.kind) == (made.model, made.kind)]
    shown = [row.method for row in rows if not row.baseline][:_PANELS]
    pixels: Any = arrays.images / np.float32(255)
    return attribution_overlays(
        images=pixels,
        maps=[arrays.maps[known.index(name)] for name in shown],
        signed=[ATTRIBUTIONS[name].signed for name in shown],
        titles=[ATTRIBUTIONS[name].title for name in shown],
        names=[f"explained: {name}" for name in arrays.targets.tolist()],
        masks=arrays.masks,
        title=f"{made.model}: maps of the outlined class on {COMPOSITE_KINDS[made.kind].title}",
    )
