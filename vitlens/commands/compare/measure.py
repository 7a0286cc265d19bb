"""Two models on the same labelled images: predictions, maps, failures and successes, disturbed images, shape bias."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.answers.classes import require_shared
from vitlens.analysis.answers.evaluate import (
    Evaluation,
    accuracy,
    calibration,
    calibration_error,
    require_labels,
)
from vitlens.analysis.failures.compare import evaluations
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.disturbed import passes, robustness
from vitlens.analysis.failures.errors import Comparison, by_class, compare_answers, confusions
from vitlens.analysis.failures.shape_bias import require_cues, shape_bias
from vitlens.commands.compare import record as rows
from vitlens.commands.compare.maps import (
    Maps,
    best_method,
    candidates,
    checked,
    described,
    maps_of_both,
    quicker,
    sample,
)
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.run.load import read_as
from vitlens.commands.run.progress import progress
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.calibration import calibration_rows
from vitlens.commands.shared.comparison import compared, in_pairs
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.commands.shared.trainings import trainings_of
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow
from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of
from vitlens.data.shapes import CLASSES as SHAPES
from vitlens.data.shapes import shapes
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model

EXAMPLES: Final = 6  # images of each cell that are shown with their maps


def measure(options: CompareOptions) -> Path | None:
    """Compare two models on labelled images and write the report; returns its path.

    Raises InputError (or one of its kind) before anything is written.
    """
    if len(options.models) != 2:
        raise InputError(
            f"expected two models to compare, found {len(options.models)}; e.g. vitlens compare vit-digits cnn-digits"
        )
    if options.panels > options.maps:
        raise InputError(f"expected --maps of at least --panels ({options.panels}), found {options.maps}")
    run = Run("compare", options)
    _require_two(*run.models)
    for split in run.splits:
        require_labels(split)
    require_shared(run.models[0].classes, run.models[1].classes, run.split.classes)
    run.splits = read_as(run.models, run.splits, run.run)
    named = candidates(options.method, run.models)
    for model, split in zip(run.models, run.splits):
        chosen_targets(options.target, model, split)
    conflicts = _cue_conflicts(run)
    if conflicts:
        require_shared(run.models[0].classes, run.models[1].classes, conflicts[0].classes)
    with run.folder("Comparison of") as folder:
        return folder.publish(lambda: _recorded(run, named, conflicts))


def _require_two(first: Model, second: Model) -> None:
    """Raise InputError for one model under two names."""
    one, two = first.module.state_dict(), second.module.state_dict()
    same = first.architecture == second.architecture and first.preprocessing == second.preprocessing
    if same and one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one):
        raise InputError(
            f"expected two models to compare, found the same weights as {first.alias} and {second.alias}; name another"
        )


def _recorded(
    run: Run[CompareOptions], named: Sequence[Sequence[str]], conflicts: Sequence[Split]
) -> rows.CompareRecord:
    """All rows of the comparison."""
    options, split, seed, (first, second) = run.options, run.split, run.run.seed, run.models
    checks = [checked(run, *each) if options.checked else () for each in zip(run.models, run.splits, named)]
    methods = tuple(best_method(own) if own else names[0] for own, names in zip(checks, named))
    with progress(f"predicting{quicker(run)}", 2 * len(split), quiet=run.run.quiet) as advance:
        evaluated = evaluations(
            (first, second),
            (run.splits[0], run.splits[1]),
            batch_size=run.run.batch_size,
            precision=run.run.precision,
            advance=advance,
        )
    comparison = compare_answers(*evaluated)
    sampled, by_cell = sample(split, options.maps, seed=seed), _examples(comparison)
    maps = maps_of_both(run, methods, torch.cat([sampled, *by_cell]).unique(), sampled)
    disturbed = list(_disturbed(run)) if options.harder else []
    bias = list(_bias(run, conflicts))
    images = _images(comparison, split, maps, by_cell, options.panels)
    return replace(
        answered(comparison, evaluated, seed),
        **described(run, methods, maps),
        **failure_fields(_subjects(run, evaluated, maps), quiet=run.run.quiet),
        map_checks=(*checks[0], *checks[1]),
        images_shown=tuple(images),
        robustness=tuple(row for own, _ in disturbed for row in own),
        disturbed_pairs=tuple(_disturbed_pairs([each for _, each in disturbed], run)) if disturbed else (),
        shape_bias=tuple(row for row, _ in bias),
        cue_conflicts=tuple(row for _, own in bias for row in own),
        training=trainings_of(run.models),
        shown=_shown(images, split, maps),
    )


def _subjects(run: Run[CompareOptions], evaluated: Sequence[Evaluation], maps: Maps) -> list[Subject]:
    """Both models with the maps of the sampled images: the others are shown for their errors."""
    options, sampled = run.run, maps.sampled
    return [
        Subject(
            model, split, evaluation, values[sampled], maps.indices[sampled],
            precision=options.precision, batch_size=options.batch_size, seed=options.seed,
        )
        for model, split, evaluation, values in zip(run.models, run.splits, evaluated, maps.values)
    ]  # fmt: skip


def answered(comparison: Comparison, evaluated: Sequence[Evaluation], seed: int) -> rows.CompareRecord:
    """The rows of the predictions: accuracy, the paired test, cells of errors, classes, confusions, calibration."""
    first, second = comparison.first, comparison.second
    aliases, groups = (first.alias, second.alias), comparison.groups
    correct = {each.alias: each.correct.numpy() for each in (first, second)}
    words = {"first": first.alias, "second": second.alias}
    return rows.CompareRecord(
        scores=tuple(
            rows.ScoreRow(
                each.alias, own, calibration_error(each.probabilities, each.labels, groups=groups, seed=seed)
            )
            for each, own in zip(evaluated, comparison.accuracies(seed=seed))
        ),
        pairs=in_pairs(correct, groups=None if groups is None else groups.numpy(), seed=seed),
        cells=tuple(
            rows.CellRow(
                *aliases, cell, name.format(**words), int((comparison.cells == at).sum()),
                accuracy(comparison.cells == at, groups=groups, seed=seed),
            )
            for at, (cell, name) in enumerate(rows.CELLS.items())
        ),
        per_class=tuple(
            ClassRow(alias, part.name, part.n, own)
            for part in by_class(comparison, seed=seed) for alias, own in zip(aliases, (part.first, part.second))
        ),
        confusions=tuple(
            ConfusionRow(alias, each.truth, each.prediction, count)
            for each in confusions(comparison) for alias, count in zip(aliases, (each.first, each.second)) if count
        ),
        calibration=tuple(
            row for each in evaluated
            for row in calibration_rows(each.alias, calibration(each.probabilities, each.labels))
        ),
    )  # fmt: skip


def _examples(comparison: Comparison) -> list[Tensor]:
    """For each cell the indices of at most 6 of its images: those with the most confident wrong predictions (both
    right: at random)."""
    wrong = torch.zeros_like(comparison.first.confidence)
    for model in (comparison.first, comparison.second):
        wrong = torch.maximum(wrong, model.confidence * ~model.correct)
    by_cell = []
    for cell in range(len(rows.CELLS)):
        members = (comparison.cells == cell).nonzero().flatten()
        if cell == 0:
            order = torch.randperm(len(members), generator=torch.Generator().manual_seed(0))
        else:
            order = wrong[members].argsort(descending=True, stable=True)
        by_cell.append(members[order[:EXAMPLES]])
    return by_cell


def _images(
    comparison: Comparison, split: Split, maps: Maps, by_cell: Sequence[Tensor], panels: int
) -> list[rows.ImageRow]:
    """The images that are shown: panels by rising agreement, then examples of each cell.

    The panels are evenly spaced over the ranking of all usable sampled maps, so that they show its whole range.
    """
    usable = (maps.overlap.usable & maps.sampled).nonzero().flatten()
    order = maps.indices[usable[maps.overlap.spearman[usable].argsort(stable=True)]]
    spaced = torch.linspace(0, len(order) - 1, min(panels, len(order)), dtype=torch.float64).round().long()
    places = {index: at for at, index in enumerate(order[spaced].tolist())}
    examples = [index for indices in by_cell for index in indices.tolist()]
    agreement = dict(zip(maps.indices.tolist(), maps.overlap.spearman.tolist()))
    known = set(maps.indices[maps.overlap.usable].tolist())
    first, second, names = comparison.first, comparison.second, comparison.classes
    return [
        rows.ImageRow(
            index,
            split.files[index] if split.files else f"{split.name} {index}",
            names[comparison.labels[index]],
            list(rows.CELLS)[comparison.cells[index]],
            names[first.prediction[index]],
            round(float(first.confidence[index]), 4),
            names[second.prediction[index]],
            round(float(second.confidence[index]), 4),
            round(agreement[index], 4) if index in known else None,
            places.get(index),
            index in examples,
        )
        for index in dict.fromkeys([*places, *examples])
    ]


def _shown(images: Sequence[rows.ImageRow], split: Split, maps: Maps) -> rows.ShownArrays:
    """Their pixels, and the positive part of both maps, with 0 for values that are not finite."""
    where = torch.tensor([row.image for row in images], dtype=torch.long)
    place = torch.searchsorted(maps.indices, where)
    first, second = (each[place].nan_to_num(0.0, 0.0, 0.0).clamp_min(0).numpy() for each in maps.values)
    masks = None if split.masks is None else split.masks[where].numpy()
    return rows.ShownArrays(split.source.read(where).numpy(), first, second, masks)


Outcomes = list[tuple[str, float, NDArray[np.bool_], Tensor | None]]  # disturbance, level, correct, groups


def _disturbed(run: Run[CompareOptions]) -> Iterator[tuple[list[rows.HarderRow], Outcomes]]:
    """For each model accuracy by level of every disturbance, on the same seeded, class-balanced subset of at most
    --disturbed images."""
    options = run.run
    for model, split in zip(run.models, run.splits):
        subset = split.limit(run.options.disturbed, seed=options.seed)
        chance, found, outcomes = 1 / len(split.classes), [], []
        with progress(
            f"{model.alias} on disturbed images{quicker(run)}", passes(subset), quiet=options.quiet
        ) as advance:
            disturbed = robustness(
                model,
                subset,
                batch_size=options.batch_size,
                precision=options.precision,
                seed=options.seed,
                advance=advance,
            )
        for each in disturbed:
            for level, correct, estimate in zip(each.levels, each.correct, each.accuracies(seed=options.seed)):
                found.append(rows.HarderRow(model.alias, each.kind, level, estimate, chance))
                outcomes.append((each.kind, level, correct.numpy(), each.groups))
        yield found, outcomes


def _disturbed_pairs(outcomes: Sequence[Outcomes], run: Run[CompareOptions]) -> Iterator[rows.DisturbedPairRow]:
    """The difference of the two models at every level of every disturbance, all tests corrected together (Holm)."""
    first, second = run.aliases
    correct = [(first, second, one[2], two[2]) for one, two in zip(*outcomes)]
    groups = outcomes[0][0][3]
    pairs = compared(correct, groups=None if groups is None else groups.numpy(), seed=run.run.seed)
    for (kind, level, *_), row in zip(outcomes[0], pairs):
        yield rows.DisturbedPairRow(**vars(row), kind=kind, level=level)


def _cue_conflicts(run: Run[CompareOptions]) -> list[Split]:
    """Images with cue conflicts, preprocessed for each model: those of --cue-conflict, else those of the data, else the
    embedded shapes for models of their classes, else none.

    Raises DataError where --cue-conflict names other images.
    """
    name, options, split = run.options.cue_conflict, run.run, run.split
    if name is not None:
        named = [
            load_data(
                name,
                part="test",
                preprocessing=model.preprocessing,
                data_dir=options.data_dir,
                seed=options.seed,
                whole=True,
            )
            for model in run.models
        ]
        for each in named:
            require_cues(each)
        return named
    cues = cues_of(split)
    if cues is not None and bool(cues.conflict.any()):
        return list(run.splits)
    if split.classes == SHAPES and all(set(SHAPES) <= set(model.classes) for model in run.models):
        return [shapes("test", cue="conflict", seed=options.seed, canvas=split.size[0])] * 2
    return []


def _bias(
    run: Run[CompareOptions], conflicts: Sequence[Split]
) -> Iterator[tuple[rows.BiasRow, list[rows.ConflictRow]]]:
    """The shape bias of both models, overall and by class of shape; nothing where there is no cue conflict."""
    options = run.run
    for model, split in zip(run.models, conflicts):
        with progress(f"{model.alias} on cue conflicts", len(split), quiet=options.quiet) as advance:
            found = shape_bias(
                model,
                split,
                batch_size=options.batch_size,
                precision=options.precision,
                seed=options.seed,
                advance=advance,
            )
        of_class = [
            rows.ConflictRow(
                model.alias, each.name, each.n, each.shape, each.texture,
                each.shape / (each.shape + each.texture) if each.shape + each.texture else None,
            )
            for each in found.by_class
        ]  # fmt: skip
        n, data = sum(each.n for each in found.by_class), split.title or split.name
        yield rows.BiasRow(model.alias, n, found.bias, found.shape, found.texture, data, found.note), of_class
