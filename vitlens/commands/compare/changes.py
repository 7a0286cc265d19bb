"""Two models on changed images: interventions on cues, disturbances, and cue conflicts."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.analysis.failures.compare import ShapeBias, require_cues, shape_bias
from vitlens.analysis.failures.rows import ClassBias
from vitlens.analysis.reliance.measure import Measured, measure_reliance
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import BiasRow, DisturbedPairRow, HarderRow
from vitlens.commands.run.run import Run
from vitlens.commands.shared.comparison import comparison_rows
from vitlens.commands.shared.reliance_measure import (
    plan_of,
    reliance_fields,
    traced_fields,
    viewers_of,
)
from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of
from vitlens.data.split import Split
from vitlens.data.textured_shapes import CLASSES as SHAPE_CLASSES
from vitlens.data.textured_shapes import shapes
from vitlens.models.model import Model


def changed_image_fields(run: Run[CompareOptions]) -> dict[str, Any]:
    """Return the fields of the record that are measured on changed images: reliance on cues, and
    disturbances.

    All of them use the same seeded, class-balanced subset of at most --disturbed images. The levels
    of the disturbances are among the interventions.
    """
    options = run.options
    seed = run.run_options.seed
    subsets = [split.limit(options.disturbed, seed=seed) for split in run.splits]
    viewers = viewers_of(run.models, subsets, run.run_options.precision)
    plan = plan_of(subsets, thorough=options.every_cue, levels=True)
    images = sum(len(subset) for subset in subsets)
    with run.progress("changing images", plan.passes * images) as advance:
        measured = measure_reliance(
            viewers, plan, batch_size=run.run_options.batch_size, seed=seed, advance=advance
        )
    return {
        **reliance_fields(measured),
        **traced_fields(
            measured, viewers, limit=options.disturbed, seed=seed, progress=run.progress
        ),
        "robustness": tuple(_accuracy_by_level(run, measured)),
        "disturbed_pairs": tuple(_differences_by_level(run, measured)),
    }


def _accuracy_by_level(run: Run[CompareOptions], measured: Measured) -> Iterator[HarderRow]:
    """Yield the accuracy of each model at every level of each disturbance."""
    groups = None
    if measured.groups is not None:
        groups = torch.from_numpy(measured.groups)
    for index, (model, split) in enumerate(zip(run.models, run.splits)):
        # the data may have only some classes of the model
        classes = max(len(split.classes), len(model.classes))
        for (kind, level), correct in measured.correct.items():
            yield HarderRow(
                model=model.alias,
                kind=kind,
                level=level,
                accuracy=accuracy(torch.from_numpy(correct[index]), groups=groups),
                chance=1 / classes,
            )


def _differences_by_level(
    run: Run[CompareOptions], measured: Measured
) -> Iterator[DisturbedPairRow]:
    """Yield the difference of the models at each level, all tests corrected together (Holm)."""
    first, second = run.aliases
    tests = [(first, second, correct[0], correct[1]) for correct in measured.correct.values()]
    pairs = comparison_rows(tests, groups=measured.groups, seed=run.run_options.seed)
    for (kind, level), pair in zip(measured.correct, pairs):
        # the other fields of the row are those of the pair
        yield DisturbedPairRow(**vars(pair), kind=kind, level=level)


def load_cue_conflicts(run: Run[CompareOptions]) -> list[Split]:
    """Return images with cue conflicts, preprocessed for each model; none if there are none.

    They are those of --cue-conflict, or else those of the data, or else the bundled shapes for
    models that know their classes. Raises DataError if --cue-conflict names other images.
    """
    if run.options.cue_conflict is not None:
        return _load_named(run, run.options.cue_conflict)
    split = run.split
    cues = cues_of(split)
    if cues is not None and bool(cues.conflict.any()):
        return list(run.splits)
    if split.classes == SHAPE_CLASSES and all(_knows_shapes(model) for model in run.models):
        bundled = shapes("test", cue="conflict", seed=run.run_options.seed, canvas=split.size[0])
        return [bundled, bundled]
    return []


def _load_named(run: Run[CompareOptions], name: str) -> list[Split]:
    splits = []
    for model in run.models:
        split = load_data(
            name,
            part="test",
            preprocessing=model.preprocessing,
            data_dir=run.run_options.data_dir,
            seed=run.run_options.seed,
            whole=True,
        )
        splits.append(split)
    for split in splits:
        require_cues(split)
    return splits


def _knows_shapes(model: Model) -> bool:
    return set(SHAPE_CLASSES) <= set(model.classes)


def shape_bias_fields(run: Run[CompareOptions], conflicts: Sequence[Split]) -> dict[str, Any]:
    """Return the fields of the record on the shape bias of both models.

    Returns empty tables without cue conflicts.
    """
    rows = []
    rows_by_shape = list[ClassBias]()
    for model, split in zip(run.models, conflicts):
        with run.progress(f"{model.alias} on cue conflicts", len(split)) as advance:
            bias = shape_bias(model, split, **run.passes, advance=advance)
        rows.append(_bias_row(model.alias, split, bias))
        rows_by_shape += bias.by_class
    return {"shape_bias": tuple(rows), "cue_conflicts": tuple(rows_by_shape)}


def _bias_row(alias: str, split: Split, bias: ShapeBias) -> BiasRow:
    return BiasRow(
        model=alias,
        n=sum(shape.n for shape in bias.by_class),
        bias=bias.bias,
        shape=bias.shape,
        texture=bias.texture,
        data=split.title or split.name,
        note=bias.note,
    )
