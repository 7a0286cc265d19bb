"""Two models on the same labelled images: predictions, maps, failures and successes, disturbed images, shape bias."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.answers.classes import require_shared
from vitlens.analysis.answers.evaluate import (
    BACKWARD,
    accuracy,
    answers,
    calibration,
    calibration_error,
    evaluate,
    fitting_batch_size,
    per_class,
    require_labels,
)
from vitlens.analysis.failures.compare import Comparison, compare_answers
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.disturbed import levels_of, robustness
from vitlens.analysis.failures.shape_bias import require_cues, shape_bias
from vitlens.analysis.faithfulness.league import Settings, checks_in, league
from vitlens.analysis.faithfulness.map_shares import MapOverlap, as_shares, map_overlap, map_shares
from vitlens.analysis.faithfulness.randomisation import Explain
from vitlens.analysis.faithfulness.resampled import removal_grid
from vitlens.attribution.explain import explain, preferred_methods, require_method
from vitlens.attribution.registry import attribution
from vitlens.commands.compare import record as rows
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.run.load import read_as
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.calibration import calibration_rows
from vitlens.commands.shared.comparison import compared, in_pairs
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.commands.shared.maps.measure import CheckedMaps, on_object_rows
from vitlens.commands.shared.maps.record import MapCheckRow, judged_maps
from vitlens.commands.shared.trainings import trainings_of
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow
from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of
from vitlens.data.identity import sources
from vitlens.data.shapes import CLASSES as SHAPES
from vitlens.data.shapes import shapes
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, bootstrap_mean

EXAMPLES: Final = 6  # images of each cell that are shown with their maps
CANDIDATES: Final = 2  # methods of a model of which the best is taken
STEPS: Final = 8  # of the removal curves; vitlens explain has 20


@dataclass(frozen=True)
class Maps:
    """Maps of some images: indices (m,) into the split, sorted; sampled: (m,), those of the random subset over which
    statistics are averaged, the others are examples; values: raw maps of each model (m, rows, columns); overlap: of
    both, (m,); grid: of cells, and size in px, on which it was computed."""

    indices: Tensor
    sampled: Tensor
    values: tuple[Tensor, ...]
    overlap: MapOverlap
    grid: tuple[int, int]
    size: tuple[int, int]


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
    first, second = run.models
    one, two = first.module.state_dict(), second.module.state_dict()
    same = first.architecture == second.architecture and first.preprocessing == second.preprocessing
    if same and one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one):
        raise InputError(
            f"expected two models to compare, found the same weights as {first.alias} and {second.alias}; name another"
        )
    for split in run.splits:
        require_labels(split)
    require_shared(first.classes, second.classes, run.split.classes)
    run.splits = read_as(run.models, run.splits, run.run)
    named = candidates(options.method, run.models)
    for model, split in zip(run.models, run.splits):
        chosen_targets(options.target, model, split)
    conflicts = _cue_conflicts(run)
    if conflicts:
        require_shared(first.classes, second.classes, conflicts[0].classes)
    with run.folder("Comparison of") as folder:
        return folder.publish(lambda: _recorded(run, named, conflicts))


def _recorded(
    run: Run[CompareOptions], named: Sequence[Sequence[str]], conflicts: Sequence[Split]
) -> rows.CompareRecord:
    """All rows of the comparison."""
    options, split = run.options, run.split
    checks = [checked(run, *each) if options.checked else () for each in zip(run.models, run.splits, named)]
    methods = tuple(best_method(own) if own else names[0] for own, names in zip(checks, named))
    with run.progress(f"predicting{quicker(run)}", 2 * len(split)) as advance:
        evaluated = [evaluate(*each, **run.passes, advance=advance) for each in zip(run.models, run.splits)]
    comparison = compare_answers(*evaluated)
    sampled, by_cell = sample(split, options.maps, seed=run.run.seed), _examples(comparison)
    maps = maps_of_both(run, methods, torch.cat([sampled, *by_cell]).unique(), sampled)
    harder, pairs = _disturbed(run) if options.harder else ((), ())
    bias, cue_conflicts = _bias(run, conflicts)
    images = _images(comparison, split, maps, by_cell, options.panels)
    subjects = [  # with the maps of the sampled images: the others are shown for their errors
        Subject(model, own, each, values[maps.sampled], maps.indices[maps.sampled], **run.passes, seed=run.run.seed)
        for model, own, each, values in zip(run.models, run.splits, evaluated, maps.values)
    ]
    return replace(
        answered(comparison, run.run.seed),
        **described(run, methods, maps),
        **failure_fields(subjects, quiet=run.run.quiet),
        map_checks=(*checks[0], *checks[1]),
        images_shown=tuple(images),
        robustness=harder,
        disturbed_pairs=pairs,
        shape_bias=bias,
        cue_conflicts=cue_conflicts,
        training=trainings_of(run.models),
        shown=_shown(images, split, maps),
    )


def answered(comparison: Comparison, seed: int) -> rows.CompareRecord:
    """The rows of the predictions: accuracy, the paired test, cells of errors, classes, confusions, calibration."""
    both = comparison.first, comparison.second
    (first, second), groups, names = [each.alias for each in both], both[0].groups, both[0].classes
    return rows.CompareRecord(
        scores=tuple(
            rows.ScoreRow(
                each.alias, own, calibration_error(each.probabilities, each.labels, groups=groups, seed=seed)
            )
            for each, own in zip(both, comparison.accuracies(seed=seed))
        ),
        pairs=in_pairs(
            {each.alias: each.correct.numpy() for each in both}, groups=None if groups is None else groups.numpy(),
            seed=seed,
        ),
        cells=tuple(
            rows.CellRow(
                first, second, cell, name.format(first=first, second=second), int((comparison.cells == at).sum()),
                accuracy(comparison.cells == at, groups=groups, seed=seed),
            )
            for at, (cell, name) in enumerate(rows.CELLS.items())
        ),
        per_class=tuple(
            ClassRow(each.alias, own.name, own.n, own.accuracy)
            for each in both for own in per_class(each, count=len(names), seed=seed) if own.n
        ),
        confusions=tuple(
            ConfusionRow(each.alias, names[truth], names[other], count)
            for each in both
            for (truth, other), count in Counter(zip(each.labels.tolist(), each.predictions.tolist())).most_common()
            if truth != other
        ),
        calibration=tuple(
            row for each in both for row in calibration_rows(each.alias, calibration(each.probabilities, each.labels))
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
    first, second, names = comparison.first, comparison.second, comparison.first.classes
    return [
        rows.ImageRow(
            index,
            split.files[index] if split.files else f"{split.name} {index}",
            names[first.labels[index]],
            list(rows.CELLS)[comparison.cells[index]],
            names[first.predictions[index]],
            round(float(first.confidence[index]), 4),
            names[second.predictions[index]],
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


def _disturbed(run: Run[CompareOptions]) -> tuple[tuple[rows.HarderRow, ...], tuple[rows.DisturbedPairRow, ...]]:
    """Accuracy of each model by level of every disturbance, on the same seeded, class-balanced subset of at most
    --disturbed images; and the differences of the two, all tests corrected together (Holm)."""
    seed, found, correct = run.run.seed, [], []
    for model, split in zip(run.models, run.splits):
        subset = split.limit(run.options.disturbed, seed=seed)
        levels = levels_of(subset.size)
        with run.progress(f"{model.alias} on disturbed images{quicker(run)}", len(subset) * len(levels)) as advance:
            right = robustness(model, subset, **run.passes, seed=seed, advance=advance)
        found.append([
            rows.HarderRow(
                model.alias, *level, accuracy(each, groups=subset.groups, seed=seed), 1 / len(split.classes)
            )
            for level, each in zip(levels, right)
        ])  # fmt: skip
        correct.append(right.numpy())
    groups = None if subset.groups is None else subset.groups.numpy()
    pairs = compared([(*run.aliases, *both) for both in zip(*correct)], groups=groups, seed=seed)
    tested = tuple(
        rows.DisturbedPairRow(**vars(pair), kind=row.kind, level=row.level) for row, pair in zip(found[0], pairs)
    )
    return (*found[0], *found[1]), tested


def _cue_conflicts(run: Run[CompareOptions]) -> list[Split]:
    """Images with cue conflicts, preprocessed for each model: those of --cue-conflict, else those of the data, else the
    embedded shapes for models of their classes, else none.

    Raises DataError where --cue-conflict names other images.
    """
    name, options, split = run.options.cue_conflict, run.run, run.split
    if name is not None:
        load = partial(load_data, name, part="test", data_dir=options.data_dir, seed=options.seed, whole=True)
        named = [load(preprocessing=model.preprocessing) for model in run.models]
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
) -> tuple[tuple[rows.BiasRow, ...], tuple[rows.ConflictRow, ...]]:
    """The shape bias of both models, overall and by class of shape; nothing where there is no cue conflict."""
    overall, by_shape = [], []
    for model, split in zip(run.models, conflicts):
        with run.progress(f"{model.alias} on cue conflicts", len(split)) as advance:
            found = shape_bias(model, split, **run.passes, seed=run.run.seed, advance=advance)
        for each in found.by_class:
            either = each.shape + each.texture
            share = each.shape / either if either else None
            by_shape.append(rows.ConflictRow(model.alias, each.name, each.n, each.shape, each.texture, share))
        n, data = sum(each.n for each in found.by_class), split.title or split.name
        overall.append(rows.BiasRow(model.alias, n, found.bias, found.shape, found.texture, data, found.note))
    return tuple(overall), tuple(by_shape)


def candidates(method: Sequence[str], models: Sequence[Model]) -> tuple[tuple[str, ...], ...]:
    """The methods of each model that are checked: the one of `method`, or the first and second of two, else the
    preferred ones of its family.

    Raises InputError for more than two, UnknownNameError and UnsupportedError as the registry does.
    """
    if len(method) > 2:
        raise InputError(f"expected --method A or A,B (the first model's, the second's), found {len(method)} methods")
    for name in method:
        attribution(name)
    chosen = (
        [(name,) for name in [*method, *method][:2]] if method else [preferred_methods(m, CANDIDATES) for m in models]
    )
    for model, names in zip(models, chosen):
        for name in names:
            require_method(model, name)
    return tuple(chosen)


def checked(run: Run[CompareOptions], model: Model, split: Split, names: Sequence[str]) -> tuple[MapCheckRow, ...]:
    """The checks of a model's methods on a seeded, class-balanced subset of at most --checked images, of the target
    class's logit."""
    options, target = run.run, run.options.target
    chosen = sample(split, run.options.checked, seed=options.seed)
    part = split.pick(chosen)
    size = options.batch_size or fitting_batch_size(model)
    images = torch.cat([batch.images for batch in part.batches(size, device=model.device)])
    targets = chosen_targets(target, model, split)
    classes = answers(model, part, batch_size=size).argmax(-1) if targets is None else targets[chosen]

    def maps_by(name: str) -> Explain:
        return lambda model, images, classes: explain(
            model, images, targets=classes, method=name, batch_size=options.batch_size, seed=options.seed
        )

    functions = {name: maps_by(name) for name in names}
    settings = Settings(steps=STEPS, counterfactuals=False, seed=options.seed, batch_size=size)
    with run.progress(f"checking maps of {model.alias}", checks_in(len(names)), "checks") as advance:
        found = league(model, images, classes.to(model.device), functions, settings=settings, advance=advance)
    given = (model, images, classes.to(model.device), functions, found, settings, part.groups, sources(part))
    return tuple(CheckedMaps(*given, quiet=options.quiet).rows())


def best_method(checks: Sequence[MapCheckRow]) -> str:
    """The method of the best verdict, then of the greatest ROAD; where no verdict is better than inconclusive, the
    first, which is the preferred one."""
    best = judged_maps(checks)[0]
    return best.method if best.state in ("pass", "warn") else checks[0].method


def sample(split: Split, count: int, *, seed: int) -> Tensor:
    """Indices (sorted) of a seeded, class-balanced subset of at most count images."""
    numbered = replace(split, groups=torch.arange(len(split))).limit(count, seed=seed)
    return torch.arange(len(split)) if numbered.groups is None else numbered.groups


def quicker(run: Run[CompareOptions]) -> str:
    """What a line of progress says where --limit was not given."""
    return "" if run.run.limit else " (--limit N: fewer images)"


def maps_of_both(run: Run[CompareOptions], methods: Sequence[str], indices: Tensor, sampled: Tensor) -> Maps:
    """Both models' maps of the images at these indices, of the target class's logit, with their overlap on the patches
    of the first model that has patches (else about 14 cells a side)."""
    options, both = run.run, []
    for model, split, method in zip(run.models, run.splits, methods):
        targets = chosen_targets(run.options.target, model, split)
        count = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
        parts = []
        with run.progress(f"{method} of {model.alias}{quicker(run)}", len(indices)) as advance:
            for batch in split.pick(indices).batches(count, device=model.device):
                own = None if targets is None else targets[indices[batch.indices]].to(model.device)
                found = explain(model, batch.images, targets=own, method=method, seed=options.seed)
                parts.append(found.detach().float().cpu())
                advance(len(found))
        both.append(torch.cat(parts))
    reference = next((model for model in run.models if model.anatomy.layout is not None), run.model)
    grid, (height, width) = removal_grid(reference), reference.input_size
    size = (grid[0] * -(-height // grid[0]), grid[1] * -(-width // grid[1]))
    overlap = map_overlap(*both, size=size, grid=grid)
    return Maps(indices, torch.isin(indices, sampled), tuple(both), overlap, grid, size)


def described(run: Run[CompareOptions], methods: Sequence[str], maps: Maps) -> dict[str, Any]:
    """The fields of the record that describe the maps: means over those of the sampled images that are usable."""
    seed, split = run.run.seed, run.split.pick(maps.indices[maps.sampled])
    photographs, cells = sources(split), {"size": maps.size, "grid": maps.grid}

    def mean(values: Tensor, usable: Tensor, unit: str = "fraction") -> Estimate:
        groups = None if split.groups is None else split.groups[usable].numpy()
        return bootstrap_mean(values[usable].numpy(), groups=groups, seed=seed, unit=unit)

    known, on_object, averages, halves = [], [], [], []
    for alias, method, every in zip(run.aliases, methods, maps.values):
        own, means = every[maps.sampled], {}
        shares = map_shares(own, **cells, masks=split.masks)
        usable, average = shares.usable, np.full(maps.grid, 1 / np.prod(maps.grid))  # where there is none
        if usable.any():
            means = {
                name: mean(getattr(shares, name), usable) for name in ("half", "spread", "central", "row", "column")
            }
            average = np.asarray(as_shares(own[usable], **cells).mean(0).numpy())
        if usable.any() and split.masks is not None:
            groups = None if split.groups is None else split.groups[usable]
            for score, name in (("mass", "inside"), ("pointing", "pointing")):
                for found in on_object_rows(
                    alias, [(alias, own[usable])], score, split.masks[usable], groups=groups,
                    sources=photographs[usable], seed=seed,
                ):  # fmt: skip
                    on_object.append(found)
                    means[name] = found.estimate
        known.append(rows.MapRow(alias, method, accuracy(usable), **means))
        averages.append(average)
        halves.append(shares.half)
    usable = maps.overlap.usable[maps.sampled]
    agreement: tuple[rows.AgreementRow, ...] = ()
    if usable.any():
        first, second = run.aliases
        spearman, top, shared = (
            mean(getattr(maps.overlap, name)[maps.sampled], usable, "" if name == "spearman" else "fraction")
            for name in ("spearman", "top", "shared")
        )
        agreement = (rows.AgreementRow(first, second, spearman, top, shared, mean(halves[0] - halves[1], usable)),)
    return {
        "methods": tuple(known),
        "on_object": tuple(on_object),
        "agreement": agreement,
        "mean_maps": rows.MeanMapArrays(*averages),
    }
