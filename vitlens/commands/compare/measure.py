"""Two models on the same labelled images: predictions, maps, failures and successes, disturbed images, shape bias."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vitlens.analysis.evaluation.classes import require_shared
from vitlens.analysis.evaluation.evaluate import (
    BACKWARD,
    accuracy,
    calibration_bins,
    calibration_error,
    confusion,
    evaluate,
    fitting_batch_size,
    per_class,
    predicted_logits,
    require_labels,
)
from vitlens.analysis.failures.compare import Comparison, compare_evaluations, require_cues, shape_bias
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.faithfulness.defaults import BASELINES
from vitlens.analysis.faithfulness.league import CHECKS, Settings, league
from vitlens.analysis.faithfulness.maps import Explain, MapOverlap, MapShares, map_overlap, map_shares, removal_grid
from vitlens.analysis.reliance.measure import Measured, measure_reliance
from vitlens.attribution.explain import explain, preferred_methods, require_method
from vitlens.attribution.registry import attribution
from vitlens.commands.compare import record as rows
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.run.load import read_as
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import chosen_targets, require_evaluable
from vitlens.commands.shared.calibration import calibration_rows
from vitlens.commands.shared.comparison import compared, in_pairs
from vitlens.commands.shared.failures_measure import failure_fields
from vitlens.commands.shared.maps.measure import CheckedMaps, on_object_rows
from vitlens.commands.shared.maps.record import MapCheckRow, OnObjectRow, judged_maps
from vitlens.commands.shared.reliance_measure import plan_of, reliance_fields, traced_fields, viewers_of
from vitlens.commands.shared.trainings import trainings_of
from vitlens.commands.shared.worst_class import ClassRow, ConfusionRow
from vitlens.data.catalogue import load_data
from vitlens.data.cue_conflict import cues_of
from vitlens.data.identity import sources
from vitlens.data.shapes import CLASSES as SHAPES
from vitlens.data.shapes import shapes
from vitlens.data.split import Split, balanced
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate, bootstrap_difference, bootstrap_mean

EXAMPLES: Final = 6  # images of each cell that are shown with their maps
CANDIDATES: Final = 2  # methods of a model of which the best is taken
STEPS: Final = 8  # of the removal curves; vitlens explain has 20


@dataclass(frozen=True)
class Maps:
    """Maps of some images: indices (m,) into the split, sorted; sampled: (m,), those of the random subset over which
    statistics are averaged, the others are examples; values: raw maps of each model (m, rows, columns); shares,
    overlap: their position, concentration and overlap, all (m,)."""

    indices: Tensor
    sampled: Tensor
    values: tuple[Tensor, ...]
    shares: tuple[MapShares, ...]
    overlap: MapOverlap


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
    if options.run.labels is None:
        require_evaluable(options.data)
    run = Run("compare", options, repeat=True)
    first, second = run.models
    one = first.module.state_dict()
    two = second.module.state_dict()
    same = first.architecture == second.architecture and first.preprocessing == second.preprocessing
    if same and one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one):
        raise InputError(
            f"expected two models to compare, found the same weights as {first.alias} and {second.alias}; name another"
        )
    for split in run.splits:
        require_labels(split)
    require_shared(first.classes, second.classes, run.split.classes)
    splits = read_as(run.models, run.splits, run.run)
    run.splits = splits
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
    """Return all rows of the comparison."""
    options = run.options
    split = run.split
    own = run.run
    checks = [checked(run, *each) if options.checked else () for each in zip(run.models, run.splits, named)]
    methods = tuple(best_method(found) if found else names[0] for found, names in zip(checks, named))
    with run.progress("predicting", 2 * len(split)) as advance:
        evaluated = [evaluate(*each, **run.passes, advance=advance) for each in zip(run.models, run.splits)]
    comparison = compare_evaluations(*evaluated)
    # at random, not by class: accuracies and means over maps are then those of all images
    sampled = balanced(len(split), None, options.maps, own.seed)
    by_cell = _examples(comparison)
    maps = maps_of_both(run, methods, torch.cat([sampled, *by_cell]).unique(), sampled)
    images = _images(comparison, split, maps, by_cell, options.panels)
    subjects = [  # with the maps of the sampled images: the others are shown for their errors
        Subject(model, images_of, each, values[maps.sampled], maps.indices[maps.sampled], **run.passes, seed=own.seed)
        for model, images_of, each, values in zip(run.models, run.splits, evaluated, maps.values)
    ]
    bias, cue_conflicts = _bias(run, conflicts)
    return replace(
        answered(comparison, own.seed),
        **described(run, methods, maps),
        **failure_fields(subjects, quiet=own.quiet),
        **(_changed_images(run) if options.harder else {}),
        map_checks=(*checks[0], *checks[1]),
        images_shown=tuple(images),
        shape_bias=bias,
        cue_conflicts=cue_conflicts,
        training=trainings_of(run.models),
        shown=_shown(images, split, maps),
    )


def answered(comparison: Comparison, seed: int) -> rows.CompareRecord:
    """Return the rows of the predictions: accuracy, the paired test, cells of errors, classes, confusions,
    calibration."""
    both = comparison.first, comparison.second
    first, second = aliases = comparison.first.alias, comparison.second.alias
    names = comparison.first.classes
    labels = comparison.first.labels
    groups = comparison.first.groups
    wrong = {each.alias: confusion(labels, each.predictions, count=len(names)).fill_diagonal_(0) for each in both}
    total = wrong[first] + wrong[second]
    return rows.CompareRecord(
        scores=tuple(
            rows.ScoreRow(each.alias, own, calibration_error(each.probabilities, labels, groups=groups, seed=seed))
            for each, own in zip(both, comparison.accuracies())
        ),
        pairs=in_pairs(
            {each.alias: each.correct.numpy() for each in both},
            groups=None if groups is None else groups.numpy(),
            seed=seed,
        ),
        cells=tuple(
            rows.CellRow(
                *aliases,
                cell,
                name.format(first=first, second=second),
                int((comparison.cells == at).sum()),
                accuracy(comparison.cells == at, groups=groups),
            )
            for at, (cell, name) in enumerate(rows.CELLS.items())
        ),
        per_class=tuple(
            ClassRow(alias, *score)
            for scores in zip(*(per_class(each, count=len(names)) for each in both))
            for alias, score in zip(aliases, scores)
            if score[1]
        ),
        confusions=tuple(
            ConfusionRow(alias, names[truth], names[prediction], int(counts[truth, prediction]))
            for truth, prediction in sorted(total.nonzero().tolist(), key=lambda pair: -int(total[tuple(pair)]))
            for alias, counts in wrong.items()
            if counts[truth, prediction]
        ),
        calibration=tuple(row for each in both for row in calibration_rows(each.alias, calibration_bins(each))),
    )


def _examples(comparison: Comparison) -> list[Tensor]:
    """For each cell the indices of at most 6 of its images: those with the most confident wrong predictions (both
    right: at random)."""
    first, second = (each.confidence * ~each.correct for each in (comparison.first, comparison.second))
    wrong = torch.maximum(first, second)
    by_cell = []
    for cell in range(len(rows.CELLS)):
        members = (comparison.cells == cell).nonzero().flatten()
        drawn = torch.randperm(len(members), generator=torch.Generator().manual_seed(0))
        order = wrong[members].argsort(descending=True, stable=True) if cell else drawn
        by_cell.append(members[order[:EXAMPLES]])
    return by_cell


def _images(
    comparison: Comparison, split: Split, maps: Maps, by_cell: Sequence[Tensor], panels: int
) -> list[rows.ImageRow]:
    """Return the images that are shown: panels by rising agreement, then examples of each cell.

    The panels are evenly spaced over the ranking of all usable sampled maps, so that they show its whole range.
    """
    usable = (maps.overlap.usable & maps.sampled).nonzero().flatten()
    order = maps.indices[usable[maps.overlap.spearman[usable].argsort(stable=True)]]
    spaced = torch.linspace(0, len(order) - 1, min(panels, len(order)), dtype=torch.float64).round().long()
    places = {index: at for at, index in enumerate(order[spaced].tolist())}
    examples = [index for indices in by_cell for index in indices.tolist()]
    known = maps.overlap.usable
    agreement = dict(zip(maps.indices[known].tolist(), maps.overlap.spearman[known].tolist()))
    names = comparison.first.classes
    cells = list(rows.CELLS)
    first, second = (
        [(names[guess], round(share, 4)) for guess, share in zip(each.predictions.tolist(), each.confidence.tolist())]
        for each in (comparison.first, comparison.second)
    )
    return [
        rows.ImageRow(  # type: ignore[call-arg]  # mypy counts no parts of two tuples
            index,
            split.files[index] if split.files else f"{split.name} {index}",
            names[comparison.first.labels[index]],
            cells[comparison.cells[index]],
            *first[index],
            *second[index],
            round(agreement[index], 4) if index in agreement else None,
            places.get(index),
            index in examples,
        )
        for index in dict.fromkeys([*places, *examples])
    ]


def _shown(images: Sequence[rows.ImageRow], split: Split, maps: Maps) -> rows.ShownArrays:
    """Return their pixels, and the positive part of both maps, with 0 for values that are not finite."""
    where = torch.tensor([row.image for row in images], dtype=torch.long)
    place = torch.searchsorted(maps.indices, where)
    first, second = (each[place].nan_to_num(0.0, 0.0, 0.0).clamp_min(0).numpy() for each in maps.values)
    masks = None if split.masks is None else split.masks[where].numpy()
    return rows.ShownArrays(split.source.read(where).numpy(), first, second, masks)


def _changed_images(run: Run[CompareOptions]) -> dict[str, Any]:
    """Measure what the models rely on, and their accuracy at every level of the disturbances, which are among the
    interventions: on the same seeded, class-balanced subset of at most --disturbed images."""
    seed = run.run.seed
    options = run.options
    subsets = [split.limit(options.disturbed, seed=seed) for split in run.splits]
    viewers = viewers_of(run.models, subsets, run.run.precision)
    plan = plan_of(subsets, thorough=options.every_cue, levels=True)
    with run.progress("changing images", plan.passes * sum(map(len, subsets))) as advance:
        found = measure_reliance(viewers, plan, batch_size=run.run.batch_size, seed=seed, advance=advance)
    traced = traced_fields(found, viewers, limit=options.disturbed, seed=seed, progress=run.progress)
    return reliance_fields(found) | traced | _by_level(run, found)


def _by_level(run: Run[CompareOptions], found: Measured) -> dict[str, Any]:
    """Return the accuracy of each model by level of every disturbance, and the differences of the two, all tests
    corrected together (Holm)."""
    harder = list[rows.HarderRow]()
    groups = None if found.groups is None else torch.from_numpy(found.groups)
    for at, (model, split) in enumerate(zip(run.models, run.splits)):
        chance = 1 / max(len(split.classes), len(model.classes))  # the data may have some of the model's classes
        for level, correct in found.correct.items():
            own = accuracy(torch.from_numpy(correct[at]), groups=groups)
            harder.append(rows.HarderRow(model.alias, *level, own, chance))
    both = [(*run.aliases, *correct) for correct in found.correct.values()]
    pairs = compared(both, groups=found.groups, seed=run.run.seed)
    tested = (
        rows.DisturbedPairRow(**vars(pair), kind=kind, level=level) for (kind, level), pair in zip(found.correct, pairs)
    )
    return {"robustness": tuple(harder), "disturbed_pairs": tuple(tested)}


def _cue_conflicts(run: Run[CompareOptions]) -> list[Split]:
    """Images with cue conflicts, preprocessed for each model: those of --cue-conflict, else those of the data, else the
    embedded shapes for models of their classes, else none.

    Raises DataError where --cue-conflict names other images.
    """
    name = run.options.cue_conflict
    options = run.run
    split = run.split
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
    """Return the shape bias of both models, overall and by class of shape; nothing where there is no cue conflict."""
    overall = []
    by_shape = []
    for model, split in zip(run.models, conflicts):
        with run.progress(f"{model.alias} on cue conflicts", len(split)) as advance:
            found = shape_bias(model, split, **run.passes, advance=advance)
        by_shape += [rows.ConflictRow(model.alias, **vars(each), share=each.share) for each in found.by_class]
        n = sum(each.n for each in found.by_class)
        data = split.title or split.name
        overall.append(rows.BiasRow(model.alias, n, found.bias, found.shape, found.texture, data, found.note))
    return tuple(overall), tuple(by_shape)


def candidates(method: Sequence[str], models: Sequence[Model]) -> tuple[tuple[str, ...], ...]:
    """Return the methods of each model that are checked: the one of `method`, or the first and second of two, else the
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
    """Return the checks of a model's methods on a seeded, class-balanced subset of at most --checked images, of the
    target class's logit."""
    options = run.run
    target = run.options.target
    chosen = balanced(len(split), split.labels, run.options.checked, options.seed)
    part = split.pick(chosen)
    size = options.batch_size or fitting_batch_size(model)
    images = torch.cat([batch.images for batch in part.batches(size, device=model.device)])
    targets = chosen_targets(target, model, split)
    classes = predicted_logits(model, part, batch_size=size).argmax(-1) if targets is None else targets[chosen]

    def maps_by(name: str) -> Explain:
        return lambda model, images, classes: explain(
            model, images, targets=classes, method=name, batch_size=options.batch_size, seed=options.seed
        )

    functions = {name: maps_by(name) for name in names}
    settings = Settings(steps=STEPS, counterfactuals=False, seed=options.seed, batch_size=size)
    with run.progress(f"checking maps of {model.alias}", CHECKS * (len(names) + len(BASELINES)), "checks") as advance:
        found = league(model, images, classes.to(model.device), functions, settings=settings, advance=advance)
    given = (model, images, classes.to(model.device), functions, found, settings, part.groups, sources(part))
    return tuple(CheckedMaps(*given, quiet=options.quiet).rows())


def best_method(checks: Sequence[MapCheckRow]) -> str:
    """Return the method of the best verdict, then of the greatest ROAD; where no verdict is better than inconclusive,
    the first, which is the preferred one."""
    best = judged_maps(checks)[0]
    return best.method if best.state in ("pass", "warn") else checks[0].method


def maps_of_both(run: Run[CompareOptions], methods: Sequence[str], indices: Tensor, sampled: Tensor) -> Maps:
    """Return both models' maps of the images at these indices, of the target class's logit, with their properties on
    the patches of the first model that has patches (else about 14 cells a side)."""
    options = run.run
    both = []
    for model, split, method in zip(run.models, run.splits, methods):
        targets = chosen_targets(run.options.target, model, split)
        count = options.batch_size or max(1, fitting_batch_size(model) // BACKWARD)
        parts = []
        with run.progress(f"{method} of {model.alias}", len(indices)) as advance:
            for batch in split.pick(indices).batches(count, device=model.device):
                own = None if targets is None else targets[indices[batch.indices]].to(model.device)
                found = explain(model, batch.images, targets=own, method=method, seed=options.seed)
                parts.append(found.detach().float().cpu())
                advance(len(found))
        both.append(torch.cat(parts))
    reference = next((model for model in run.models if model.anatomy.layout is not None), run.model)
    grid = removal_grid(reference)
    size = reference.input_size
    masks = None if run.split.masks is None else run.split.masks[indices]
    shares = tuple(map_shares(values, size=size, grid=grid, masks=masks) for values in both)
    overlap = map_overlap(*both, size=size, grid=grid)
    return Maps(indices, torch.isin(indices, sampled), tuple(both), shares, overlap)


def described(run: Run[CompareOptions], methods: Sequence[str], maps: Maps) -> dict[str, Any]:
    """Return the fields of the record that describe the maps: means over those of the sampled images that are
    usable."""
    split = run.split
    seed = run.run.seed
    known = []
    on_object: list[OnObjectRow] = []
    agreement: tuple[rows.AgreementRow, ...] = ()

    def groups_of(members: Tensor) -> Tensor | None:
        return None if split.groups is None else split.groups[maps.indices[members]]

    def mean(values: Tensor, members: Tensor, unit: str = "fraction") -> Estimate:
        groups = groups_of(members)
        numbers = None if groups is None else groups.numpy()
        least = -1.0 if unit == "" else 0.0  # a rank correlation, or a share
        return bootstrap_mean(values[members].numpy(), groups=numbers, seed=seed, unit=unit, least=least, most=1.0)

    masks = None if split.masks is None else split.masks[maps.indices]
    photographs = None if split.masks is None else sources(split.pick(maps.indices))
    for alias, method, shares, values in zip(run.aliases, methods, maps.shares, maps.values):
        usable = shares.usable & maps.sampled
        means = {}
        if usable.any():
            means = {
                name: mean(getattr(shares, name), usable) for name in ("half", "spread", "central", "row", "column")
            }
            if masks is not None and photographs is not None:
                for score, name in (("mass", "inside"), ("pointing", "pointing")):
                    on_object_of_method = on_object_rows(
                        alias,
                        [(alias, values[usable])],
                        score,
                        masks[usable],
                        groups=groups_of(usable),
                        sources=photographs[usable],
                        seed=seed,
                    )
                    on_object += on_object_of_method
                    if on_object_of_method:
                        means[name] = on_object_of_method[0].estimate
        known.append(
            rows.MapRow(alias, method, accuracy(shares.usable[maps.sampled], groups=groups_of(maps.sampled)), **means)
        )
    usable = maps.overlap.usable & maps.sampled
    overlap = maps.overlap
    if usable.any():
        groups = groups_of(usable)
        gap = bootstrap_difference(
            *(each.half[usable].numpy() for each in maps.shares),
            groups=None if groups is None else groups.numpy(),
            seed=seed,
            most=1.0,
        )
        alike = (mean(overlap.spearman, usable, ""), mean(overlap.top, usable), mean(overlap.shared, usable))
        agreement = (rows.AgreementRow(run.aliases[0], run.aliases[1], *alike, gap),)
    return {"methods": tuple(known), "on_object": tuple(on_object), "agreement": agreement}
