"""Measure what models rely on: the fields of a `RelianceRecord`.

A command makes `viewers_of` its models and images and a plan (`plan_of`), runs `measure_reliance`,
and records the result with `reliance_fields` and `traced_fields`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import gcd
from typing import Any

from vitlens.analysis.evaluation.evaluate import require_labels
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.reliance.cues import CUES, interventions_of
from vitlens.analysis.reliance.measure import Level, Measured, Plan, Viewer
from vitlens.analysis.reliance.rows import suspects
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.shared.tracing import Trace, has_maps, trace_cue
from vitlens.data.split import Split
from vitlens.models.model import Model

# called with a title and a total; the context's value is called with each number of steps done
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


def viewers_of(models: Sequence[Model], splits: Sequence[Split], precision: str) -> list[Viewer]:
    """Return models with their images, which are labelled."""
    return [
        Viewer(model, split, require_labels(split).cpu().long(), precision)
        for model, split in zip(models, splits)
    ]


def plan_of(splits: Sequence[Split], *, thorough: bool, levels: bool) -> Plan:
    """Return a plan of interventions and of levels of disturbances.

    thorough: True for all interventions, False for the main ones.
    levels: True to include all levels of all disturbances.
    """
    has_masks = splits[0].masks is not None
    interventions = tuple(interventions_of(tuple(CUES), has_masks=has_masks, thorough=thorough))
    disturbance_levels = list[Level]()
    if levels:
        # tiles must divide the images of every model
        height = gcd(*(split.size[0] for split in splits))
        width = gcd(*(split.size[1] for split in splits))
        for kind, disturbance in DISTURBANCES.items():
            disturbance_levels += [(kind, level) for level in disturbance.at((height, width))]
    return Plan(interventions, tuple(disturbance_levels))


def reliance_fields(reliance: Measured) -> dict[str, Any]:
    """Return the tables, as keyword arguments of a record."""
    return {
        "reliance": reliance.rows,
        "reliance_pairs": reliance.pairs,
        "reliance_left_out": reliance.left_out,
    }


def traced_fields(
    reliance: Measured, viewers: Sequence[Viewer], *, limit: int, seed: int, progress: Progress
) -> dict[str, Any]:
    """Trace the strongest suspect cue of each model, and return the tables as fields of a record.

    Suspect are cues that mislead the model, and those of the background.
    """
    traces: dict[str, Trace] = {}
    for viewer in viewers:
        alias = viewer.model.alias
        suspect_cues = suspects(reliance.rows, alias)
        if not suspect_cues:
            continue
        suspect = suspect_cues[0]
        methods = _methods(viewer.model) if has_maps(suspect) else []
        count = min(limit, len(viewer.split))
        total = count * (1 + len(methods))  # the heads, then each method
        with progress(f"tracing {suspect.title} in {alias}", total) as advance:
            traces[alias] = trace_cue(
                viewer, suspect, methods=methods, limit=limit, seed=seed, advance=advance
            )
    return {
        "cue_heads": tuple(row for trace in traces.values() for row in trace.heads),
        "cue_maps": tuple(row for trace in traces.values() for row in trace.maps),
        "cue_examples": tuple(row for trace in traces.values() for row in trace.examples),
        "cue_pictures": {
            alias: trace.pictures for alias, trace in traces.items() if trace.examples
        },
    }


def _methods(model: Model) -> list[str]:
    """Return the methods that a study checks and that this model supports, without slow ones."""
    methods = list[str]()
    for name, entry in ATTRIBUTIONS.items():
        if entry.studied and not entry.slow and entry.is_supported_by(model):
            methods.append(name)
    return methods
