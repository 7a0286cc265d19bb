"""Measuring what models rely on: the rows of shared/reliance.py, as fields of a record."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from math import gcd
from typing import Any

from vitlens.analysis.evaluation.evaluate import require_labels
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.analysis.reliance.cues import CUES, interventions_of
from vitlens.analysis.reliance.measure import Level, Measured, Plan, Viewer
from vitlens.analysis.reliance.rows import suspects
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.shared.tracing import Trace, trace_cue
from vitlens.data.split import Split
from vitlens.models.model import Model

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]


def viewers_of(models: Sequence[Model], splits: Sequence[Split], precision: str) -> list[Viewer]:
    """Return models with their images, which are labelled."""
    return [
        Viewer(model, split, require_labels(split).cpu().long(), precision)
        for model, split in zip(models, splits)
    ]


def plan_of(splits: Sequence[Split], *, thorough: bool, levels: bool) -> Plan:
    """Return all interventions or the main ones, with the levels of all disturbances where they are
    wanted.
    """
    has_masks = splits[0].masks is not None
    interventions = tuple(interventions_of(tuple(CUES), has_masks=has_masks, thorough=thorough))
    size = (
        reduce(gcd, [split.size[0] for split in splits]),
        reduce(gcd, [split.size[1] for split in splits]),
    )
    every = list[Level]()
    for kind, disturbance in DISTURBANCES.items() if levels else ():
        every += [(kind, level) for level in disturbance.at(size)]
    return Plan(interventions, tuple(every))


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
    """Trace the strongest suspect cue of each model, and return the tables as keyword arguments of
    a record.

    Suspect are cues that mislead the model, and those of the background.
    """
    traces: dict[str, Trace] = {}
    for viewer in viewers:
        alias = viewer.model.alias
        for row in suspects(reliance.rows, alias)[:1]:
            methods = _methods(viewer.model)
            count = min(limit, len(viewer.split))
            with progress(f"tracing {row.title} in {alias}", count * (1 + len(methods))) as advance:
                traces[alias] = trace_cue(
                    viewer, row, methods=methods, limit=limit, seed=seed, advance=advance
                )
    return {
        "cue_heads": tuple(head for trace in traces.values() for head in trace.heads),
        "cue_maps": tuple(judged for trace in traces.values() for judged in trace.maps),
        "cue_examples": tuple(example for trace in traces.values() for example in trace.examples),
        "cue_pictures": {alias: trace.pictures for alias, trace in traces.items()},
    }


def _methods(model: Model) -> list[str]:
    """Return the methods of maps that a study checks and that this model supports, but slow
    ones."""
    methods = list[str]()
    for name, entry in ATTRIBUTIONS.items():
        if entry.studied and not entry.slow and entry.is_supported_by(model):
            methods.append(name)
    return methods
