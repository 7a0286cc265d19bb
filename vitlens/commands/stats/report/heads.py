"""The section on how sharp the attention of a model's heads is, and the figure of their distances."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.commands.stats.options import StatsOptions
from vitlens.commands.stats.record import MEAN, HeadRow
from vitlens.commands.stats.shown import (
    ModelShown,
    is_measured,
    measured_in,
    pages,
    panel_of,
    title_of,
)
from vitlens.records import Record
from vitlens.report.document import FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROWS: Final = {"patches": "rows of patches", "CLS": "row of CLS"}
_MAPS_CAPTION: Final = (
    "Means over patches and images. Layers and heads count from 0; each panel has its own colour bar."
)
_DEPTH_CAPTION: Final = "How attention changes with depth; a wide band means that the heads of a layer differ."
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
