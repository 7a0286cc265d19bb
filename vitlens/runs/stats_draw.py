"""What `vitlens stats` draws, from its folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vitlens.analysis.heads.labels import THRESHOLD
from vitlens.analysis.heads.registry import STATISTICS, View, shown_in
from vitlens.figures.stats.heads import difference_maps, head_heatmaps
from vitlens.figures.stats.specialisation import specialisation_matrix
from vitlens.figures.stats.depth import distance_by_layer, layer_evolution, token_norms
from vitlens.files import RunRecord
from vitlens.lens.site import NO_PLACE
from vitlens.runs.report import Drawn
from vitlens.runs.stats_learning_report import draw_learning
from vitlens.runs.stats_words import in_ranges

_PANELS = 6  # in a figure
_ROWS = {"patches": "rows of patches", "CLS": "row of CLS"}


def draw(record: RunRecord) -> Iterator[Drawn]:
    """Distance by layer, statistics of every head, their course over depth, roles, and how two models differ."""
    aliases = aliases_of(record)
    shown = aliases[:1] if are_identical(record) else aliases  # the other's figures would be the same
    tables: dict[str, Any] = {alias: record.arrays(f"stats-{alias}") for alias in shown}
    yield from _distance(record, tables)
    for alias in shown:
        end = f"_{alias}" if len(aliases) > 1 else ""
        of = f" of {alias}" if len(aliases) > 1 else ""
        yield from _maps(tables[alias], end, of)
        yield from _tokens(tables[alias], end, of)
        yield from _roles(record, alias, end, of)
    if record.has_arrays("differences") and not are_identical(record):
        yield from _differences(record, aliases)
    yield from draw_learning(record)


def _distance(record: RunRecord, tables: Mapping[str, Any]) -> Iterator[Drawn]:
    known = {alias: found for alias, found in tables.items() if is_measured(found, "distance")}
    if not known:
        return
    several = record.config["data"]["images"] > 1  # type: ignore[index]
    figure = distance_by_layer(
        distance=[found["distance"] for found in known.values()],
        uniform=[found["uniform_distance"] for found in known.values()],
        names=list(known),
        low=[found["distance_low"] for found in known.values()] if several else None,
        high=[found["distance_high"] for found in known.values()] if several else None,
    )
    how = "on patches alone, scaled to 1" if _choices(record)["renormalise"] else "with the mass on CLS counted as 0 px"
    caption = (
        f"Mean distance between a patch and what it looks at (Dosovitskiy 2021; Raghu 2021), attention {how}; one dot "
        "a head. Dots far below the dashed line are local heads, dots on it look everywhere alike or at the same few "
        "places from everywhere: the distance does not tell which."
    )
    yield Drawn("distance", figure, caption)


def _maps(found: Any, end: str, of: str) -> Iterator[Drawn]:
    for figure_name, chosen in pages(f"heads{end}", measured_in("maps", found)).items():
        figure = head_heatmaps(
            values={title_of(name): found[name] for name in chosen},
            title=f"Statistics of every head{of}, rows of patches",
            units={title_of(name): STATISTICS[name].unit for name in chosen},
            limits={title_of(name): _limits(name, found[name]) for name in chosen},
        )
        caption = "Each a mean over patches and images; layers and heads count from 1, and each panel has its own bar."
        yield Drawn(figure_name, figure, caption)
    curves = measured_in("depth", found)
    for figure_name, panels in pages(f"evolution{end}", panels_of(curves)).items():
        figure = layer_evolution(
            panels={
                STATISTICS[panel].label: {
                    _ROWS[STATISTICS[name].rows]: found[name] for name in curves if _panel_of(name) == panel
                }
                for panel in panels
            },
            title=f"Statistics of attention{of}, layer by layer",
        )
        yield Drawn(figure_name, figure, "How attention changes with depth; a wide band means unlike heads.")


def _limits(name: str, values: Any) -> tuple[float, float]:
    """Of a map's colours: the statistic's whole range, or up to its greatest value."""
    least, greatest = STATISTICS[name].range
    if STATISTICS[name].whole_range:
        return least, greatest
    low, high = min(0.0, float(np.nanmin(values))), float(np.nanmax(values))
    return low, high if high > low else low + 1.0


def _panel_of(name: str) -> str:
    return STATISTICS[name].beside or name


def panels_of(names: Sequence[str]) -> list[str]:
    """The panels of the curves over depth, named after the statistic that a panel is of."""
    return list(dict.fromkeys(_panel_of(name) for name in names))


def measured_in(view: View, found: Mapping[str, Any]) -> list[str]:
    """The statistics of a view that any head has."""
    return [name for name in shown_in(view) if is_measured(found, name)]


def pages(name: str, panels: Sequence[str]) -> dict[str, Sequence[str]]:
    """The panels of each figure, by its name: as many as a figure holds, the next ones in NAME-2 and so on."""
    starts = range(0, len(panels), _PANELS)
    return {f"{name}-{page}" if page > 1 else name: panels[at : at + _PANELS] for page, at in enumerate(starts, 1)}


def _tokens(found: Any, end: str, of: str) -> Iterator[Drawn]:
    if not is_measured(found, "token_norm") or np.isnan(found["token_norm"]).any():
        return
    high = found["high_norm_patches"][:, 0] + found["high_norm_prefix"][:, 0]
    figure = token_norms(
        median=found["token_norm"][:, 0],
        greatest=found["greatest_norm"][:, 0],
        high_norm=high,
        sinks=found["sinks"] if is_measured(found, "sinks") else None,
        title=f"Tokens{of} after each block, and keys that receive much attention",
    )
    caption = (
        "Norms of the residual stream before the final norm. A token is of high norm, and a key a sink, where it "
        "exceeds the median of its image by 5 median absolute deviations; sinks that lie on the object are no artefact."
    )
    yield Drawn(f"tokens{end}", figure, caption)


def _roles(record: RunRecord, alias: str, end: str, of: str) -> Iterator[Drawn]:
    if not record.has_arrays(f"offsets-{alias}"):
        return
    offsets = record.arrays(f"offsets-{alias}")
    rows = [row for row in record.table("heads") if row["model"] == alias]
    labelled = [row for row in rows if row["label"] is not None]  # MaxViT's windows and SigLIP's pooling have none
    layers = sorted({int(str(row["layer"])) for row in labelled})
    by_layer = [[row for row in labelled if row["layer"] == layer] for layer in layers]
    figure = specialisation_matrix(
        ratios=[offsets.get(f"ratio{layer}") for layer in layers],
        labels=[[str(row["label"]) for row in layer] for layer in by_layer],
        scores=[[float(str(row["score"])) for row in layer] for layer in by_layer],
        layers=layers,
        title=f"What every head specialises in{of}",
    )
    caption = (
        "For each head, where it looks relative to the patch that looks (in the middle): mean weight by offset, in "
        "units of uniform attention. Frame and code tell the first rule that the head meets (score of at least "
        f"{THRESHOLD}); the number is its score. A label is a summary of means, not a mechanism."
    ) + unplaced_words(record, alias)
    yield Drawn(f"specialisation{end}", figure, caption)


def _differences(record: RunRecord, aliases: Sequence[str]) -> Iterator[Drawn]:
    found = record.arrays("differences")
    for figure_name, chosen in pages("differences", measured_in("differences", found)).items():
        figure = difference_maps(
            differences={title_of(name): found[name] for name in chosen},
            significant={title_of(name): np.nan_to_num(found[f"{name}_p"], nan=1.0) <= 0.05 for name in chosen},
            first=aliases[0],
            second=aliases[1],
            units={title_of(name): STATISTICS[name].unit for name in chosen},
        )
        caption = (
            f"{aliases[0]} minus {aliases[1]} on the same images, head by head. A head of one model need not "
            "correspond to the head of the same number in the other, unless one was made from the other."
        )
        yield Drawn(figure_name, figure, caption)


def unplaced_words(record: RunRecord, alias: str) -> str:
    """Which layers have no labels, and why; nothing where all have."""
    rows = [row for row in record.table("layers") if row["model"] == alias]
    without = [row for row in rows if row["grid"] is None]
    if not without:
        return ""
    kinds: dict[str, list[int]] = {}
    for row in without:
        kinds.setdefault(str(row["kind"]), []).append(int(str(row["layer"])) + 1)
    listed = "; ".join(f"{in_ranges(numbers)} ({NO_PLACE[kind]})" for kind, numbers in kinds.items())
    return f" Without a label, as their attention has no known place in the image: {listed}."


def backbones(record: RunRecord) -> Mapping[str, object]:
    """What two models have in common: whether they are comparable head by head, whether identical; else nothing."""
    tables: Any = record.results["tables"]
    rows = tables.get("backbones", ())
    return rows[0] if rows else {}


def are_identical(record: RunRecord) -> bool:
    """Whether two models have the same backbone."""
    return bool(backbones(record).get("identical"))


def title_of(name: str) -> str:
    """A statistic as figures and tables name it."""
    return STATISTICS[name].title


def is_measured(found: Mapping[str, Any], name: str) -> bool:
    """Whether any head has this statistic."""
    return name in found and not bool(np.isnan(found[name]).all())


def aliases_of(record: RunRecord) -> list[str]:
    """What the models are called."""
    models: Any = record.config["models"]
    return [str(model["alias"]) for model in models]


def _choices(record: RunRecord) -> Any:
    return record.config["options"]
