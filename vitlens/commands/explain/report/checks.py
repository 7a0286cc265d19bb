"""The sections of single checks of one model's methods: localisation, randomisation, agreement, counterfactuals."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.commands.explain.record import COUNTERFACTUALS, SEARCH, SIZE_SEARCHED, TURNED
from vitlens.commands.explain.report.league import League, in_three_decimals
from vitlens.records import MetricName
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.uncertainty import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS: Final = 5  # orders of patches beside each other in the figure of counterfactuals
_SCORES: Final = {  # column of the league, title
    "roc_auc": "ROC-AUC",
    "pointing": "pointing",
    "average_precision": "average precision",
    "iou": "IoU",
    "pixel_accuracy": "pixel accuracy",
    "mass": "mass inside",
}


def check_sections(league: League) -> Iterator[Section]:
    """The sections of the checks that were run."""
    yield from _localisation(league)
    yield from _randomisation(league)
    yield from _agreement(league)
    yield from _counterfactuals(league)


def _localisation(league: League) -> Iterator[Section]:
    """How well maps localise the objects, where masks are known."""
    scored = next(
        (estimate for estimate in (league.estimate("roc_auc", name) for name in league.names) if estimate), None
    )
    if scored is None:
        return
    words = (
        f"Maps are interpolated bilinearly to the size of the masks ({scored.n:,} images). Chance level of average "
        "precision and of mass inside: the area of the mask. IoU and pixel accuracy use a threshold at the mean of the "
        "map. In the pointing game, tied maxima count only when all of them lie on the object."
    )
    table = Table(
        "Localisation, fractions",
        ("method", *_SCORES.values()),
        tuple(
            (name, *(in_three_decimals(league.estimate(column, name)) for column in _SCORES)) for name in league.names
        ),
    )
    yield Section(f"Localisation{league.of}", (Sentence(words, league.rows),), (table,))


def _randomisation(league: League) -> Iterator[Section]:
    """How far maps change as the weights are randomised from the head down."""
    words = (
        f"Mean Spearman correlation of the maps of {league.settings.randomised} images before and after the weights "
        "are randomised, from the head down; each column randomises its part in addition to those before it. For a "
        "method that depends on the learned weights, the correlation falls towards 0."
    )
    checked = [row for row in league.rows if row.by_stage is not None]
    stages = tuple(checked[0].by_stage or ()) if checked else ()
    rows: list[tuple[Cell, ...]] = []
    for row in checked:
        means = [None if row.by_stage is None else row.by_stage.get(stage) for stage in stages]
        rows.append(
            (
                row.method,
                *("–" if mean is None else f"{mean:.2f}" for mean in means),
                "yes" if row.flagged else "",
            )
        )
    table = Table("Correlation with the model's own map", ("method", *stages, "flagged"), tuple(rows))
    title = f"Randomisation check{league.of}"
    yield Section(title, (Sentence(words, tuple(checked)),), (table,) if checked else ())


def _agreement(league: League) -> Iterator[Section]:
    """How similar the maps of each pair of methods are."""
    if not league.pairs:
        return
    order = sorted(league.pairs, key=lambda row: row.spearman)
    least, most = order[0], order[-1]
    words = Sentence(
        f"Highest agreement: {most.first} and {most.second} (Spearman {most.spearman}); lowest: {least.first} and "
        f"{least.second} ({least.spearman}). All pairs are in results.json.",
        (most, least),
    )
    yield Section(f"Agreement between methods{league.of}", (words,), (_agreement_matrix(league),))


def _agreement_matrix(league: League) -> Table:
    """A matrix of Spearman's correlations of all pairs."""
    names = list(dict.fromkeys(end for row in league.pairs for end in (row.first, row.second)))
    value = {(row.first, row.second): f"{row.spearman:.2f}" for row in league.pairs}
    value |= {(second, first): text for (first, second), text in value.items()}
    rows = tuple((name, *(value.get((name, other), "") for other in names)) for name in names)
    return Table("Spearman's correlation of the maps, mean over images", ("", *names), rows)


def _counterfactuals(league: League) -> Iterator[Section]:
    """How many patches must be removed before the prediction changes."""
    if not league.record.has(COUNTERFACTUALS, model=league.alias):
        return
    searched = league.record.metric(SIZE_SEARCHED(model=league.alias, method=SEARCH))
    words = (
        "The share of the patches that must be removed, in the order of each map, before the prediction changes; and "
        f"the size of the sets found by a greedy search on the first {searched.n} images, which no order can be "
        "expected to beat. The fewer patches a map needs, the better it identifies those on which the prediction "
        "depends."
    )
    yield Section(
        f"Counterfactuals{league.of}",
        (Sentence(words, league.rows),),
        (_sizes(league),),
        (_counterfactual_figure(league),),
    )


def _sizes(league: League) -> Table:
    def of(metric: MetricName, name: str) -> Estimate | None:
        return league.record.metrics.get(metric(model=league.alias, method=name))

    rows: list[tuple[Cell, ...]] = [
        (name, league.estimate("size", name), of(TURNED, name), of(SIZE_SEARCHED, name))
        for name in (*league.names, SEARCH)
    ]
    columns = ("order", "patches to remove", "changed at all", "on the searched images")
    return Table("Share of the patches that must be removed", columns, tuple(rows))


def _counterfactual_figure(league: League) -> FigureSpec:
    caption = (
        "Counterfactuals. Below each input: its prediction; below each panel: the number of removed patches and the "
        "prediction without them. Grey: removed patches; the model gets the substrate in their place. Orders: the best "
        "methods by insertion − deletion, a random order, and the greedy search. Other patches than those of a small "
        "set may support the prediction as well."
    )
    return FigureSpec(f"counterfactuals{league.suffix}", caption, partial(_draw_counterfactuals, league))


def _draw_counterfactuals(league: League) -> "Figure":
    from vitlens.figures.counterfactual import counterfactual_panels

    arrays = league.record.arrays(COUNTERFACTUALS, model=league.alias)
    known = arrays.methods.tolist()
    best = [row.method for row in league.methods][: _PANELS - 2]
    shown = [*best, league.baselines[0], SEARCH]
    places = [known.index(name) for name in shown]
    classes = [str(name) for name in arrays.classes]
    turned: Any = arrays.turned[:, places]
    images: Any = arrays.images / np.float32(255)
    return counterfactual_panels(
        images=images,
        removed=arrays.removed[:, places],
        titles=shown,
        names=[classes[index] for index in arrays.prediction],
        turned=[[classes[index] for index in row] for row in turned],
        title=f"{league.alias}: the patches whose removal changes the prediction (grey)",
    )
