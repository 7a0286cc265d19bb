"""Two models on the same labelled images: predictions, maps, failures, disturbed images, shape bias."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from vitlens.analysis.answers.classes import require_shared
from vitlens.analysis.answers.evaluate import Evaluation, require_labels
from vitlens.analysis.answers.separation import Separation, corrected, separations
from vitlens.analysis.failures.compare import evaluations
from vitlens.analysis.failures.errors import Comparison, compare_answers
from vitlens.analysis.failures.image_traits import image_traits
from vitlens.commands.compare.measure.answers import TRAITS, write_answers, write_numbers
from vitlens.commands.compare.measure.failures import write_diagnoses
from vitlens.commands.compare.measure.harder import cue_conflicts, write_harder, write_shape_bias
from vitlens.commands.compare.measure.maps import (
    MapProperties,
    Maps,
    attention_numbers,
    examples,
    map_properties,
    maps_of_both,
    sample,
)
from vitlens.commands.compare.measure.methods import best_method, candidates, checked_methods
from vitlens.commands.compare.measure.properties import write_map_numbers
from vitlens.commands.compare.measure.shown import sheets_of, write_images
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.record import MAP_CHECKS, METHODS, PANELS, SEPARATIONS, MapMethodRow, SeparationRow
from vitlens.commands.compare.report.maps import drawn_sheet, methods_words, sheet_images
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import load_models, load_splits, read_as
from vitlens.commands.run.options import RunOptions
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.publish import publish, read
from vitlens.commands.run.targets import chosen_targets
from vitlens.commands.shared.trainings import write_trainings
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.files import write_atomically
from vitlens.models.model import Model
from vitlens.records import Record
from vitlens.safe_paths import inside

__all__ = ["measure"]

ATTENTION_IMAGES: Final = 2000  # images whose attention is measured, at most
_DOTS_PER_INCH: Final = 120  # of a panel
_MAP_QUANTITIES: Final = {  # quantities of maps that are tested, with their titles
    "half": "area of half the map",
    "spread": "spread of the map",
    "central": "map on the middle quarter",
    "inside": "map on the object",
}
Models = tuple[Model, Model]
Splits = tuple[Split, Split]
Kind = Literal["image", "attention", "map"]


def measure(options: CompareOptions) -> Path:
    """Compare two models on labelled images and write the report; returns its path.

    Raises InputError (or one of its kind) before anything is written.
    """
    if len(options.models) != 2:
        raise InputError(
            f"expected two models to compare, found {len(options.models)}; e.g. vitlens compare vit-digits cnn-digits"
        )
    if options.panels > options.maps:
        raise InputError(f"expected --maps of at least --panels ({options.panels}), found {options.maps}")
    run = options.run
    first, second = load_models(options.models, command="compare", model_options=options.model_options, options=run)
    models = (first, second)
    first_split, second_split = load_splits(models, options=run, data=options.data)
    for split in (first_split, second_split):
        require_labels(split)
    require_shared(first.classes, second.classes, first_split.classes)
    first_split, second_split = read_as(models, (first_split, second_split), run)
    splits = (first_split, second_split)
    named = candidates(options.method, models)
    for model, split in zip(models, splits):
        chosen_targets(options.target, model, split)
    conflicts = cue_conflicts(models, splits, options.cue_conflict, run)
    if conflicts:
        require_shared(first.classes, second.classes, conflicts[0].classes)
    with RunFolder.create(
        "compare",
        name_parts=(first.alias, second.alias, first_split.name),
        title=f"{first.alias} and {second.alias} side by side, on {first_split.title or first_split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=models, split=first_split),
        formats=run.formats,
    ) as folder:
        write_trainings(folder, models)
        _write_comparison(folder, models, splits, _write_methods(folder, models, splits, named, options), options)
        write_harder(folder, models, splits if options.harder else (), run, most=options.disturbed)
        write_shape_bias(folder, models, conflicts, run)
        _write_panels(read(folder.record()))
        return publish(folder)


def _write_methods(
    folder: RunFolder, models: Models, splits: Splits, named: Sequence[Sequence[str]], options: CompareOptions
) -> tuple[str, str]:
    """Check the methods that come into question, and write the checks and which method each model's maps are by."""
    run, target = options.run, options.target
    first, second = (
        checked_methods(model, split, names, most=options.checked, target=target, options=run)
        for model, split, names in zip(models, splits, named)
    )
    methods = best_method(first), best_method(second)
    folder.write(MAP_CHECKS, [*first, *second])
    folder.write(METHODS, [MapMethodRow(model.alias, name) for model, name in zip(models, methods)])
    return methods


def _evaluations(models: Models, splits: Splits, run: RunOptions) -> tuple[Evaluation, Evaluation]:
    with progress("predicting", len(splits[0]) + len(splits[1]), quiet=run.quiet) as advance:
        return evaluations(models, splits, batch_size=run.batch_size, precision=run.precision, advance=advance)


def _write_comparison(
    folder: RunFolder, models: Models, splits: Splits, methods: tuple[str, str], options: CompareOptions
) -> None:
    """Predictions, errors by class and image property, maps of a sample of the images, failures and successes."""
    run, split, seed = options.run, splits[0], options.run.seed
    evaluated = _evaluations(models, splits, run)
    comparison = compare_answers(*evaluated)
    traits = image_traits(split)
    write_answers(folder, comparison, evaluated, seed=seed)
    write_numbers(folder, comparison, traits, seed=seed)
    sampled = sample(split, options.maps, seed=seed)
    by_cell = examples(comparison)
    indices = torch.cat([sampled, *by_cell]).unique()
    maps = maps_of_both(
        models,
        splits,
        methods,
        indices=indices,
        sampled=torch.isin(indices, sampled),
        target=options.target,
        options=run,
    )
    properties = map_properties(maps, models, split)
    write_map_numbers(folder, maps, properties, split, comparison, seed=seed)
    chosen = sample(split, ATTENTION_IMAGES, seed=seed)
    attention = [
        (chosen, attention_numbers(model, own.pick(chosen), options=run)) for model, own in zip(models, splits)
    ]
    _write_separations(folder, comparison, traits, attention, maps, properties)
    sheets = dict(sheets_of(maps, properties, by_cell, panels=options.panels))
    write_images(folder, comparison, split, maps, properties, sheets)
    write_diagnoses(
        folder, models, splits, methods, evaluated, comparison, maps, target=options.target, options=options.run
    )


def _write_separations(
    folder: RunFolder,
    comparison: Comparison,
    traits: Mapping[str, Tensor],
    attention: Sequence[tuple[Tensor, Mapping[str, Tensor]]],
    maps: Maps,
    properties: MapProperties,
) -> None:
    """Test every quantity for each model; all tests are corrected together (Holm).

    attention: for each model the indices of the images measured, and their statistics.
    """
    tests: list[tuple[str, Kind, Separation]] = []
    models = (comparison.first, comparison.second)
    for model, (indices, statistics), own in zip(models, attention, (properties.first, properties.second)):
        usable = own.usable & maps.sampled
        of_maps = {
            title: getattr(own, name) for name, title in _MAP_QUANTITIES.items() if getattr(own, name) is not None
        }
        kinds: tuple[tuple[Kind, Tensor, Mapping[str, Tensor]], ...] = (
            ("image", torch.arange(len(model.correct)), {TRAITS[name]: values for name, values in traits.items()}),
            ("attention", indices, statistics),
            ("map", maps.indices[usable], {name: values[usable] for name, values in of_maps.items()}),
        )
        for kind, members, quantities in kinds:
            groups = None if comparison.groups is None else comparison.groups[members]
            tests += [
                (model.alias, kind, test) for test in separations(quantities, model.correct[members], groups=groups)
            ]
    adjusted = corrected([test for *_, test in tests])
    folder.write(SEPARATIONS, [_separation_row(alias, kind, test) for (alias, kind, _), test in zip(tests, adjusted)])


def _separation_row(model: str, kind: Kind, test: Separation) -> SeparationRow:
    return SeparationRow(
        model=model,
        kind=kind,
        number=test.name,
        area=test.area.value,
        low=test.area.low,
        high=test.area.high,
        failures=test.failures,
        successes=test.successes,
        median_failure=test.median_failure,
        median_success=test.median_success,
        p=test.p,
        p_holm=test.p_holm,
    )


def _write_panels(record: Record) -> None:
    """Each image of the panels with its maps as a single file, panels/001.png ..., for slides."""
    for index, image in enumerate(sheet_images(record).get(PANELS, ())):
        figure = drawn_sheet(record, [image], f"{image.file}: {methods_words(record)}")
        path = inside(record.folder, PANELS, f"{index + 1:03}.png")
        with write_atomically(path) as temporary:
            figure.savefig(temporary, dpi=_DOTS_PER_INCH)
