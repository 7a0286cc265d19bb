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
    """Those of the checks that were run."""
    yield from _localisation(league)
    yield from _randomisation(league)
    yield from _agreement(league)
    yield from _counterfactuals(league)


def _localisation(league: League) -> Iterator[Section]:
    """How far maps lie on the objects, where masks are known."""
    scored = next((one for one in (league.estimate("roc_auc", name) for name in league.names) if one), None)
    if scored is None:
        return
    words = (
        f"Maps brought bilinearly to the masks of {scored.n:,} images. Average precision and mass inside are the "
        "mask's area by chance; IoU and pixel accuracy take what lies above the map's mean; in the pointing game ties "
        "count only when all of them lie on the object."
    )
    table = Table(
        "Localisation, fractions",
        ("method", *_SCORES.values()),
        tuple(
            (name, *(in_three_decimals(league.estimate(column, name)) for column in _SCORES)) for name in league.names
        ),
    )
    yield Section(f"On the object{league.of}", (Sentence(words, league.rows),), (table,))


def _randomisation(league: League) -> Iterator[Section]:
    """How far maps change as the weights are randomised from the head down."""
    words = (
        f"Mean Spearman correlation of {league.settings.randomised} images' maps before and after, weights randomised "
        "from the head down, each column with all before it. The correlation of a map that depends on what the model "
        "has learnt falls towards 0."
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
    title = f"When the weights are randomised{league.of}"
    yield Section(title, (Sentence(words, tuple(checked)),), (table,) if checked else ())


def _agreement(league: League) -> Iterator[Section]:
    """How alike the maps of each two methods are."""
    if not league.pairs:
        return
    order = sorted(league.pairs, key=lambda row: row.spearman)
    least, most = order[0], order[-1]
    words = Sentence(
        f"Most alike: {most.first} and {most.second} (Spearman {most.spearman}); least: {least.first} and "
        f"{least.second} ({least.spearman}). Every pair is in results.json.",
        (most, least),
    )
    yield Section(f"Agreement between methods{league.of}", (words,), (_agreement_matrix(league),))


def _agreement_matrix(league: League) -> Table:
    """A matrix of Spearman's correlations, which is easier to read than a hundred lines."""
    names = list(dict.fromkeys(end for row in league.pairs for end in (row.first, row.second)))
    value = {(row.first, row.second): f"{row.spearman:.2f}" for row in league.pairs}
    value |= {(second, first): text for (first, second), text in value.items()}
    rows = tuple((one, *(value.get((one, other), "") for other in names)) for one in names)
    return Table("Spearman's correlation of the maps, mean over images", ("", *names), rows)


def _counterfactuals(league: League) -> Iterator[Section]:
    """How many patches must be removed before the prediction changes."""
    if not league.record.has(COUNTERFACTUALS, model=league.alias):
        return
    searched = league.record.metric(SIZE_SEARCHED(model=league.alias, method=SEARCH))
    words = (
        "The share of the patches whose removal changes the prediction: the shortest beginning of each map's order, "
        f"and a greedy search for small sets on the first {searched.n} images, which no order can be expected to beat. "
        "The fewer patches a map needs, the better it finds those on which the prediction depends."
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
        "Counterfactuals. Below each input its prediction; below each panel how many patches were removed and what is "
        "predicted without them. Grey stands for removed; the model saw the substrate in their place. The best methods "
        "of the league by insertion − deletion, a random order, and the greedy search. A small set need not be all "
        "that matters: other patches may support the prediction as well."
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
