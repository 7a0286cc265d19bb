"""The sections of single checks of one model's methods: localisation, randomisation, agreement, counterfactuals."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.faithfulness.cascade import Cascade, RandomisedStage
from vitlens.commands.explain.record import COUNTERFACTUALS, SEARCH, SIZE_SEARCHED, TURNED
from vitlens.commands.explain.report.league import League
from vitlens.commands.shared.maps.judged import cascade_words, in_three_decimals
from vitlens.commands.shared.maps.on_object import METHOD, on_object_table
from vitlens.records import MetricName
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_words
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
_BESIDE: Final = {"roc_auc": "ROC-AUC", "mass": "mass inside", "pointing": "pointing"}


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
    areas = {row.method: league.estimate("roc_auc", row.method) for row in league.methods}
    known = {name: area for name, area in areas.items() if area is not None}
    best = max(known, key=lambda name: known[name].value)
    answer = (
        f"**{best}** localises the objects of {league.alias}'s images best, with a ROC-AUC of "
        f"{in_three_decimals(known[best])} on {scored.n or 0:,} images."
    )
    words = (
        "Maps are interpolated bilinearly to the size of the masks. IoU and pixel accuracy use a threshold at the mean "
        "of the map. In the pointing game, of tied maxima the share that lies on the object counts. " + METHOD
    )
    table = Table(
        "Localisation, fractions",
        ("method", *_SCORES.values()),
        tuple(
            (name, *(in_three_decimals(league.estimate(column, name)) for column in _SCORES)) for name in league.names
        ),
    )
    beside = tuple(
        on_object_table(f"{title} beside maps that ignore the image", rows, {"method": lambda row: row.maps}, title)
        for score, title in _BESIDE.items()
        if (rows := league.on_object(score))
    )
    said = (Sentence(answer, (*known.values(), scored.n or 0)), Sentence(words, says="method"))
    yield Section(f"Localisation{league.of}", said, (table, *beside))


def _randomisation(league: League) -> Iterator[Section]:
    """How far maps change as the weights are randomised from the head down."""
    checked = [(each.check.method, each.check.cascade) for each in league.judged if each.check.cascade is not None]
    title = f"Randomisation check{league.of}"
    if not checked:
        yield Section(title, (Sentence("No method has finite maps to compare.", league.rows),))
        return
    stages = tuple(stage.name for stage in checked[0][1].stages)
    rows: list[tuple[Cell, ...]] = [
        (
            method,
            cascade_words(cascade),
            in_three_decimals(league.estimate("cascade", method)),
            cascade.first_below or "none",
            *map(_similarity, cascade.stages),
        )
        for method, cascade in checked
    ]
    known = [[stage.kept for stage in cascade.stages] for _, cascade in checked]
    kept = next((shares for shares in known if None not in shares), None)
    if kept is not None:
        rows.append(("predictions kept", "", "", "", *(f"{100 * (share or 0.0):.0f} %" for share in kept)))
    words = (
        "Rank correlation (Spearman, mean over images) of the maps before and after the weights are randomised; each "
        "column randomises its part in addition to those before it. For a method that depends on the learned weights "
        "the correlation falls towards 0. Whole cascade: its mean over all stages, 1 for maps that never change."
    )
    table = Table(
        "Correlation with the trained model's own maps",
        ("method", "check", "whole cascade", "first below at", *stages),
        tuple(rows),
    )
    cascades = tuple(cascade for _, cascade in checked)
    answer = Sentence(_randomisation_answer(league.alias, checked), (*cascades, league.settings, len(checked)))
    yield Section(title, (answer, Sentence(words, says="method")), (table,))


def _randomisation_answer(alias: str, checked: Sequence[tuple[str, Cascade]]) -> str:
    """Which methods fail, and which the check could not judge."""
    by_state = {
        state: [method for method, cascade in checked if cascade.state == state]
        for state in ("fails", "inconclusive", "passes")
    }
    if by_state["fails"]:
        words = [
            f"**{', '.join(by_state['fails'])}** fail the check for {alias}: their maps hardly depend on its weights"
        ]
    else:
        words = [f"No method is shown to fail the check for {alias}"]
    words += [f"inconclusive for {', '.join(by_state['inconclusive'])}"] if by_state["inconclusive"] else []
    words += [f"passed by {', '.join(by_state['passes'])}"] if by_state["passes"] else []
    return f"{'; '.join(words)}."


def _similarity(stage: RandomisedStage) -> Cell:
    if stage.similarity is None:
        return "–"
    ends = "" if stage.low is None or stage.high is None else f" ({stage.low:.2f} to {stage.high:.2f})"
    return f"{stage.similarity:.2f}{ends}"


def _agreement(league: League) -> Iterator[Section]:
    """How similar the maps of each pair of methods are."""
    if not league.pairs:
        return
    order = sorted(league.pairs, key=lambda row: row.spearman)
    least, most = order[0], order[-1]
    words = Sentence(
        f"The maps of {most.first} and {most.second} agree most (Spearman {most.spearman:.2f}), those of {least.first} "
        f"and {least.second} least ({least.spearman:.2f}).",
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
    known = {name: size for name in league.names if (size := league.estimate("size", name)) is not None}
    best = min(known, key=lambda name: known[name].value)
    answer = (
        f"In the order of **{best}** the fewest patches must be removed before {league.alias}'s prediction changes: "
        f"{in_words(known[best], with_n=False)} of them; a greedy search on {searched.n or 0} images needs "
        f"{in_words(searched, with_n=False)}."
    )
    words = (
        "The share of the patches that must be removed, in the order of each map, before the prediction changes (all "
        "of them where it never does); the greedy search cannot be expected to be beaten by any order. The fewer "
        "patches a map needs, the better it identifies those on which the prediction depends."
    )
    yield Section(
        f"Counterfactuals{league.of}",
        (Sentence(answer, (*known.values(), searched, searched.n or 0)), Sentence(words, says="method")),
        (_sizes(league),),
        (_counterfactual_figure(league),),
        leading=True,
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
        f"methods by {league.judged_by}, a random order, and the greedy search. Other patches than those of a small "
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
