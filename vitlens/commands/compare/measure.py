"""Compare two models on the same labelled images: predictions, maps, failures, changed images,
shape bias.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vitlens.analysis.evaluation.evaluate import Evaluation, evaluate, require_labels
from vitlens.analysis.failures.attention import outcome_attention
from vitlens.analysis.failures.compare import compare_evaluations
from vitlens.analysis.failures.covariates import Subject
from vitlens.classes import require_shared
from vitlens.commands.compare.changes import (
    changed_image_fields,
    load_cue_conflicts,
    shape_bias_fields,
)
from vitlens.commands.compare.maps import MapsOfBoth, explain_images, map_fields
from vitlens.commands.compare.methods import best_method, candidate_methods, check_methods
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.predictions import choose_examples, prediction_record
from vitlens.commands.compare.record import CompareRecord
from vitlens.commands.compare.shown import image_rows, shown_arrays
from vitlens.commands.run.load import ImageRequest, read_as
from vitlens.commands.run.progress import phase
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets, require_evaluable
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.commands.shared.maps.record import MapCheckRow
from vitlens.commands.shared.methods import print_notes
from vitlens.commands.shared.trainings import trainings_of
from vitlens.data.split import Split, balanced
from vitlens.errors import InputError
from vitlens.models.model import Model


def measure(options: CompareOptions) -> Path | None:
    """Compare two models on labelled images and write the report; returns its path.

    Raises InputError (or a subclass) before anything is written.
    """
    _require_options(options)
    run = Run("compare", options, images=ImageRequest(repeat=True))
    first, second = run.models
    _require_different(first, second)
    for split in run.splits:
        require_labels(split)
    require_shared(first.classes, second.classes, run.split.classes)
    run = run.with_images(read_as(run.models, run.splits, run.run_options))
    candidates = candidate_methods(options.method, run.models)
    print_notes(options.method, quiet=run.run_options.quiet)
    for model, split in zip(run.models, run.splits):
        # refuses a --target that a model does not know, before anything is written
        chosen_targets(options.target, model, split)
    conflicts = load_cue_conflicts(run)
    if conflicts:
        require_shared(first.classes, second.classes, conflicts[0].classes)
    with run.folder("Comparison of") as folder:
        return folder.publish(lambda: _record(run, candidates, conflicts))


def _require_options(options: CompareOptions) -> None:
    """Raise InputError for another number of models than two, or for more panels than maps."""
    if len(options.models) != 2:
        raise InputError(
            f"expected two models to compare, found {len(options.models)}; e.g. vitlens compare "
            "vit-digits cnn-digits"
        )
    if options.panels > options.maps:
        raise InputError(
            f"expected --maps of at least --panels ({options.panels}), found {options.maps}"
        )
    if options.run.labels is None:
        require_evaluable(options.data)


def _require_different(first: Model, second: Model) -> None:
    """Raise InputError for two models with the same architecture, preprocessing and weights."""
    if first.architecture != second.architecture or first.preprocessing != second.preprocessing:
        return
    weights = first.module.state_dict()
    other_weights = second.module.state_dict()
    if weights.keys() != other_weights.keys():
        return
    if all(torch.equal(weights[name], other_weights[name]) for name in weights):
        raise InputError(
            f"expected two models to compare, found the same weights as {first.alias} and "
            f"{second.alias}; name another"
        )


def _record(
    run: Run[CompareOptions], candidates: Sequence[Sequence[str]], conflicts: Sequence[Split]
) -> CompareRecord:
    """Return all tables and arrays of the comparison.

    candidates: methods of the maps that are checked, for each model.
    conflicts: images with cue conflicts, for each model.
    """
    options = run.options
    seed = run.run_options.seed
    map_checks: list[MapCheckRow] = []
    methods = []
    for model, split, names in zip(run.models, run.splits, candidates):
        checks = check_methods(run, model, split, names)
        map_checks += checks
        methods.append(best_method(names, checks))
    evaluations = _evaluate(run)
    comparison = compare_evaluations(*evaluations)
    # without labels, images are not balanced by class, so that means over maps are those of all
    # images
    sampled = balanced(len(run.split), labels=None, count=options.maps, seed=seed)
    examples = choose_examples(comparison)
    mapped = torch.cat([sampled, *examples]).unique()  # ascending
    maps = explain_images(run, methods, mapped, sampled)
    rows = tuple(image_rows(comparison, run.split, maps, examples, options.panels))
    shape_bias = shape_bias_fields(run, conflicts)
    subjects = _subjects(run, evaluations, maps)
    with phase("Attention on errors"):
        attention_on_errors, attention_untested = outcome_attention(subjects)
    changed_images = {}
    if options.harder:
        changed_images = changed_image_fields(run)
    return replace(
        prediction_record(comparison, seed),
        **map_fields(run, methods, maps),
        **failure_fields(subjects, quiet=run.run_options.quiet),
        **changed_images,
        map_checks=tuple(map_checks),
        attention_on_errors=attention_on_errors,
        attention_untested=attention_untested,
        images_shown=rows,
        **shape_bias,
        training=trainings_of(run.models),
        shown=shown_arrays(rows, run.split, maps),
    )


def _evaluate(run: Run[CompareOptions]) -> list[Evaluation]:
    evaluations = []
    with run.progress("predicting", 2 * len(run.split)) as advance:
        for model, split in zip(run.models, run.splits):
            evaluations.append(evaluate(model, split, **run.passes, advance=advance))
    return evaluations


def _subjects(
    run: Run[CompareOptions], evaluations: Sequence[Evaluation], maps: MapsOfBoth
) -> list[Subject]:
    """Return both models for the analysis of failures, with the maps of the sampled images.

    The other mapped images are left out, because they were chosen for their errors.
    """
    subjects = []
    for model, split, evaluation, values in zip(run.models, run.splits, evaluations, maps.values):
        subject = Subject(
            model=model,
            split=split,
            evaluation=evaluation,
            maps=values[maps.sampled],
            indices=maps.indices[maps.sampled],
            **run.passes,
            seed=run.run_options.seed,
        )
        subjects.append(subject)
    return subjects
