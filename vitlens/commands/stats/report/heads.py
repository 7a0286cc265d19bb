"""The sections on one model: distance, how sharp the heads' attention is, and what they specialise in."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.heads.labels import LABELS, MARGIN, MIXED, THRESHOLD, UNLABELLED
from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import MEAN, OFFSET_ARRAYS, RULES, HeadRow, OffsetArrays
from vitlens.commands.stats.shown import (
    ModelShown,
    backbones,
    is_measured,
    measured_in,
    pages,
    panel_of,
    title_of,
)
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import in_ranges, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN: Final = 400  # heads in the report's table: more than a ViT-L has
_ROWS: Final = {"patches": "rows of patches", "CLS": "row of CLS"}
_MAPS_CAPTION: Final = (
    "Means over patches and images. Layers and heads count from 0; each panel has its own colour bar."
)
_DEPTH_CAPTION: Final = "How attention changes with depth; a wide band means that the heads of a layer differ."
_RULE: Final = (
    "A score is the share of the information in a head's attention (log2 of the number of keys minus the entropy, in "
    "bits, at least one) that the label's pattern explains, as a gain in log-likelihood over uniform attention. A head "
    f"gets the label of the highest score if that is at least {THRESHOLD} and above that of every label that "
    f"contradicts it by {MARGIN} and by more than the 95 % interval of the difference over images"
)
_OLDER_RULE: Final = (
    "Rules of an older version of vitlens, in their order; the first with a score of at least 0.5 counts"
)
_OLDER_OTHERS: Final = {MIXED: "no rule reaches its threshold; the score is the highest"}
_FRAMES: Final = (
    "Frame and code give the label; the number is the highest score of any label, the share of the information in the "
    "head's attention that it explains."
)
_OLDER_FRAMES: Final = (
    "Frame and code give the label by the rules of an older version of vitlens, light grey for labels that are no "
    "longer in use; the number is its score."
)
_TOKENS_CAPTION: Final = (
    "Norms of the residual stream before the final norm. A token has a high norm, and a key is a sink, where its value "
    "exceeds the median of its image by 5 median absolute deviations; sinks that lie on the object are not artefacts."
)


def distance_figures(record: Record, shown: Sequence[ModelShown]) -> Iterator[FigureSpec]:
    """The attention distance of every head, all models in one figure; nothing where there is no distance."""
    models = [model for model in shown if is_measured(model.arrays.mean, "distance")]
    if not models:
        return
    renormalised = record.options(StatsOptions).renormalise
    how = "on patches alone, scaled to 1" if renormalised else "with the mass on CLS counted as 0 px"
    caption = (
        f"Mean distance between a patch and the patches it attends to (Dosovitskiy 2021; Raghu 2021), attention {how}; "
        "one dot per head. Heads far below the dashed line are local; heads on it attend uniformly, or to the same few "
        "positions from every patch: the distance does not distinguish the two."
    )
    several = record.config.data is not None and record.config.data.images > 1
    yield FigureSpec("distance", caption, partial(_draw_distance, models, intervals=several))


def _draw_distance(models: Sequence[ModelShown], *, intervals: bool) -> "Figure":
    from vitlens.figures.stats.depth import distance_by_layer

    return distance_by_layer(
        distance=[model.arrays.mean["distance"] for model in models],
        uniform=[model.arrays.uniform_distance for model in models],
        names=[model.alias for model in models],
        low=[model.arrays.low["distance"] for model in models] if intervals else None,
        high=[model.arrays.high["distance"] for model in models] if intervals else None,
    )


def sharpness_section(record: Record, model: ModelShown) -> Section:
    """Entropy, sparsity and masses over all heads: a table of extremes, maps, curves over depth, token norms."""
    names = [name for name in shown_in("overview") if any(row.statistics.get(name) is not None for row in model.heads)]
    table = Table.of(
        "Over all heads, rows of patches",
        names,
        {
            "statistic": title_of,
            "mean of heads": lambda name: record.metrics.get(MEAN(statistic=name, model=model.alias)),
            "least": lambda name: _extreme(model, name, min),
            "most": lambda name: _extreme(model, name, max),
        },
    )
    figures = (*_map_figures(model), *_depth_figures(model), *_token_figures(model))
    lines = (_sharpness_sentence(model),) if any("normalised_entropy" in row.statistics for row in model.heads) else ()
    title = f"Entropy, sparsity and mass of attention{model.of}"
    return Section(title, lines, tables=(table,), figures=figures, leading=True)


def _sharpness_sentence(model: ModelShown) -> Sentence:
    """The heads of the sharpest and of the most even attention."""
    values = [(value, row) for row in model.heads if (value := row.statistics.get("normalised_entropy")) is not None]
    if not values:
        return Sentence("No head has an entropy.", model.heads)
    (least, sharp), (most, even) = min(values, key=lambda pair: pair[0]), max(values, key=lambda pair: pair[0])
    return Sentence(
        f"The sharpest attention is that of {sharp.name}, whose entropy is {percent(least)} of that of uniform "
        f"attention; the most even is that of {even.name}, with {percent(most)}.",
        (sharp, even),
    )


def _extreme(model: ModelShown, name: str, choose: Callable[..., tuple[float, HeadRow]]) -> str:
    """The least or the greatest value of a statistic, with its head."""
    values = [(value, row) for row in model.heads if (value := row.statistics.get(name)) is not None]
    value, row = choose(values, key=lambda pair: pair[0])
    return f"{value:.3g} ({row.name})"


def _map_figures(model: ModelShown) -> Iterator[FigureSpec]:
    for figure, names in pages(f"heads{model.suffix}", measured_in("maps", model.arrays.mean)).items():
        yield FigureSpec(figure, _MAPS_CAPTION, partial(_draw_maps, model, names))


def _draw_maps(model: ModelShown, names: Sequence[str]) -> "Figure":
    from vitlens.figures.stats.heads import head_heatmaps

    values = model.arrays.mean
    return head_heatmaps(
        values={title_of(name): values[name] for name in names},
        title=f"Statistics of every head{model.of}, rows of patches",
        units={title_of(name): STATISTICS[name].unit for name in names},
        limits={title_of(name): _limits(name, values[name]) for name in names},
    )


def _limits(name: str, values: Any) -> tuple[float, float]:
    """The limits of a map's colours: the statistic's whole range, or up to its greatest value."""
    least, greatest = STATISTICS[name].range
    if STATISTICS[name].whole_range:
        return least, greatest
    low, high = min(0.0, float(np.nanmin(values))), float(np.nanmax(values))
    return low, high if high > low else low + 1.0


def _depth_figures(model: ModelShown) -> Iterator[FigureSpec]:
    names = measured_in("depth", model.arrays.mean)
    for figure, panels in pages(f"evolution{model.suffix}", list(dict.fromkeys(map(panel_of, names)))).items():
        yield FigureSpec(figure, _DEPTH_CAPTION, partial(_draw_depth, model, panels, names))


def _draw_depth(model: ModelShown, panels: Sequence[str], names: Sequence[str]) -> "Figure":
    from vitlens.figures.stats.depth import layer_evolution

    values = model.arrays.mean
    return layer_evolution(
        panels={
            STATISTICS[panel].label: {
                _ROWS[STATISTICS[name].rows]: values[name] for name in names if panel_of(name) == panel
            }
            for panel in panels
        },
        title=f"Statistics of attention{model.of}, layer by layer",
    )


def _token_figures(model: ModelShown) -> Iterator[FigureSpec]:
    """The norms of tokens; only for a model that has tokens after every block."""
    norms = model.arrays.mean.get("token_norm")
    if norms is not None and not np.isnan(norms).any():
        yield FigureSpec(f"tokens{model.suffix}", _TOKENS_CAPTION, partial(_draw_tokens, model))


def _draw_tokens(model: ModelShown) -> "Figure":
    from vitlens.figures.stats.depth import token_norms

    values = model.arrays.mean
    return token_norms(
        median=values["token_norm"][:, 0],
        greatest=values["greatest_norm"][:, 0],
        high_norm=values["high_norm_patches"][:, 0] + values["high_norm_prefix"][:, 0],
        sinks=values["sinks"] if is_measured(values, "sinks") else None,
        title=f"Tokens{model.of} after each block, and keys that receive much attention",
    )


def specialisation_section(record: Record, model: ModelShown) -> Section:
    """What labels mean, every head with its label, and the offsets of the keys that it attends to."""
    rules = {row.label: row.rule for row in record.rows(RULES)}
    older = _is_older(record)
    others = _OLDER_OTHERS if older else {name: label.sentence for name, label in LABELS.items() if not label.function}
    tables = [
        Table.of(
            _OLDER_RULE if older else _RULE,
            [*rules.items(), *((name, sentence) for name, sentence in others.items() if name not in rules)],
            {"label": lambda rule: rule[0], "condition": lambda rule: rule[1]},
        )
    ]
    common = backbones(record)
    if common is None or not common.comparable:  # else the section on differences compares them head by head
        tables.append(_head_table(model))
    tables.reverse()  # the heads first
    lines = [_clear_sentence(model)]
    if len(model.heads) > _SHOWN:
        lines.append(Sentence(f"The table has the first {_SHOWN} heads; all are in results.json.", says="setting"))
    return Section(f"Specialisation of every head{model.of}", tuple(lines), tuple(tables), leading=True)


def _clear_sentence(model: ModelShown) -> Sentence:
    """How many heads have a clear label, and the label of most heads."""
    labelled = [row for row in model.heads if row.label is not None]
    clear = Counter(row.label for row in labelled if row.label not in (MIXED, UNLABELLED))
    if not labelled:
        return Sentence("No head has a label, as no layer's tokens have a place in the image.", model.layers)
    common = clear.most_common(1)
    most = f"; most often {common[0][0]} ({common[0][1]})" if common else ""
    return Sentence(f"{clear.total()} of {len(labelled)} heads have a clear label{most}.", labelled)


def _head_table(model: ModelShown) -> Table:
    heads = model.heads[:_SHOWN]
    columns: dict[str, Callable[[HeadRow], Cell]] = {
        "layer": lambda row: row.layer,
        "head": lambda row: row.head,
        "label": lambda row: row.label,
        "score": _score,
        "most attended patch": _place,
        "next": lambda row: None if row.other is None else f"{row.other} {row.other_score:.2f}",
    }
    for name in shown_in("table"):
        if any(row.statistics.get(name) is not None for row in heads):
            columns[title_of(name)] = partial(_statistic, name)
    return Table.of("Every head, layers and heads counted from 0", heads, columns)


def _is_older(record: Record) -> bool:
    """Whether the labels are those of a version in which the first rule that a head met gave its label."""
    return not {row.label for row in record.rows(RULES)} <= LABELS.keys()


def _score(row: HeadRow) -> Cell:
    """The score with its interval; of a head without a clear label, after the name of the highest score."""
    if row.score is None or row.best is None:
        return row.score
    interval = "" if row.low is None or row.high is None else f" ({row.low:.2f} to {row.high:.2f})"
    return f"{row.score:.2f}{interval}" if row.best == row.label else f"{row.best} {row.score:.2f}{interval}"


def _place(row: HeadRow) -> Cell:
    """The patch that receives most attention, with its share."""
    if row.place is None or row.place_mass is None:
        return None
    return f"row {row.place[0]}, column {row.place[1]}: {percent(row.place_mass, 1)}"


def _statistic(name: str, row: HeadRow) -> float | None:
    return row.statistics.get(name)


def specialisation_figures(record: Record, shown: Sequence[ModelShown]) -> Iterator[FigureSpec]:
    """Where the heads of each model attend to, by offset; nothing for a model whose layers have no place."""
    for model in shown:
        yield from _offset_figures(record, model)


def _offset_figures(record: Record, model: ModelShown) -> Iterator[FigureSpec]:
    if record.has(OFFSET_ARRAYS, model=model.alias):
        caption = (
            "For each head, the mean weight of keys by their offset from the query patch (in the centre), in units of "
            f"uniform attention. {_OLDER_FRAMES if _is_older(record) else _FRAMES} A label summarises where a head "
            "attends; it does not show a mechanism."
            f"{_unplaced_words(model)}"
        )
        arrays = record.arrays(OFFSET_ARRAYS, model=model.alias)
        yield FigureSpec(f"specialisation{model.suffix}", caption, partial(_draw_offsets, model, arrays))


def _draw_offsets(model: ModelShown, arrays: OffsetArrays) -> "Figure":
    from vitlens.figures.stats.specialisation import specialisation_matrix

    labelled = {
        layer: [row for row in heads if row.label is not None]
        for layer, heads in model.by_layer.items()
        if any(row.label is not None for row in heads)
    }  # windows of MaxViT and the pooling of SigLIP have no labels
    return specialisation_matrix(
        ratios=[arrays.ratio.get(layer) for layer in labelled],
        labels=[[row.label if row.label in LABELS else UNLABELLED for row in heads] for heads in labelled.values()],
        scores=[[np.nan if row.score is None else row.score for row in heads] for heads in labelled.values()],
        layers=list(labelled),
        title=f"Specialisation of every head{model.of}",
    )


def _unplaced_words(model: ModelShown) -> str:
    """Which layers have no labels, and why; "" where all have labels."""
    without = sorted((row.unplaced, row.layer) for row in model.layers if row.unplaced is not None)
    if not without:
        return ""
    listed = "; ".join(
        f"{in_ranges([layer for _, layer in layers])} ({reason})"
        for reason, layers in groupby(without, key=lambda pair: pair[0])
    )
    return f" Layers without labels, as their tokens cannot be placed in the image: {listed}."
