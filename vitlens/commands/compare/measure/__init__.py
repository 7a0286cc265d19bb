"""Two models on the same labelled images: answers, maps, attention on failures, harder images, shape or texture."""

from pathlib import Path
from typing import Final

import torch

from vitlens.analysis.answers.classes import require_shared
from vitlens.analysis.answers.evaluate import Evaluation, require_labels
from vitlens.analysis.failures.compare import evaluations
from vitlens.analysis.failures.disturbed import passes
from vitlens.analysis.failures.errors import compare_answers
from vitlens.analysis.failures.image_traits import image_traits
from vitlens.commands.compare.measure.answers import write_answers, write_numbers
from vitlens.commands.compare.measure.harder import HARDENED_IMAGES, conflicts, write_harder, write_shape_bias
from vitlens.commands.compare.measure.maps import (
    attention_numbers,
    chosen_methods,
    examples,
    map_properties,
    maps_of_both,
    sample,
)
from vitlens.commands.compare.measure.panels import write_panels
from vitlens.commands.compare.measure.properties import write_map_numbers
from vitlens.commands.compare.measure.separations import write_separations
from vitlens.commands.compare.measure.shown import sheets_of, write_images
from vitlens.commands.compare.options import CompareOptions
from vitlens.commands.compare.parts import compare_parts
from vitlens.commands.compare.record import METHODS, MapMethodRow
from vitlens.commands.scaffold.budgets import write_trainings
from vitlens.commands.scaffold.describe import settings
from vitlens.commands.scaffold.expected import Part, say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits, read_as
from vitlens.commands.scaffold.options import RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.commands.scaffold.publish import publish, read
from vitlens.commands.scaffold.targets import chosen_targets
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model

__all__ = ["measure"]

WATCHED: Final = 2000  # images whose attention is measured
Models = tuple[Model, Model]
Splits = tuple[Split, Split]


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
    one, two = load_splits(models, options=run, data=options.data)
    for split in (one, two):
        require_labels(split)
    require_shared(first.classes, second.classes, one.classes)
    one, two = read_as(models, (one, two), run)
    splits = (one, two)
    methods = chosen_methods(options.method, models)
    for model, split in zip(models, splits):
        chosen_targets(options.target, model, split)
    disputed = conflicts(models, splits, options.cue_conflict, run)
    if disputed:
        require_shared(first.classes, second.classes, disputed[0].classes)
    _say_expected(models, splits, methods, options)
    with RunFolder.create(
        "compare",
        name_parts=(first.alias, second.alias, one.name),
        title=f"{first.alias} and {second.alias} side by side, on {one.title or one.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(options, run, models=models, split=one),
        formats=run.formats,
    ) as folder:
        write_trainings(folder, models)
        folder.write(METHODS, [MapMethodRow(model.alias, name) for model, name in zip(models, methods)])
        _write_comparison(folder, models, splits, methods, options)
        write_harder(folder, models, splits if options.harder else (), run)
        write_shape_bias(folder, models, disputed, run)
        write_panels(read(folder.record()))
        return publish(folder)


def _say_expected(models: Models, splits: Splits, methods: tuple[str, str], options: CompareOptions) -> None:
    hardened = passes(splits[0].limit(HARDENED_IMAGES, seed=options.run.seed)) if options.harder else 0
    works: list[tuple[Model, Split, tuple[Part, ...]]] = []
    for model, split, method in zip(models, splits, methods):
        parts = compare_parts(
            method,
            len(split),
            mapped=min(options.maps, len(split)),
            watched=min(WATCHED, len(split)),
            hardened=hardened,
            attentive=model.anatomy.family in ("vit", "windowed"),
        )
        works.append((model, split, tuple(parts)))
    say_expected(works, options.run)


def _answers(models: Models, splits: Splits, run: RunOptions) -> tuple[Evaluation, Evaluation]:
    with progress("answering", len(splits[0]) + len(splits[1]), quiet=run.quiet) as advance:
        return evaluations(models, splits, batch_size=run.batch_size, precision=run.precision, advance=advance)


def _write_comparison(
    folder: RunFolder, models: Models, splits: Splits, methods: tuple[str, str], options: CompareOptions
) -> None:
    """Answers, errors by all that is known of the images, maps of a sample of them, and attention on failures."""
    run, split, seed = options.run, splits[0], options.run.seed
    evaluated = _answers(models, splits, run)
    comparison = compare_answers(*evaluated)
    traits = image_traits(split)
    write_answers(folder, comparison, evaluated, seed=seed)
    write_numbers(folder, comparison, traits, seed=seed)
    drawn = sample(split, options.maps, seed=seed)
    chosen = examples(comparison)
    indices = torch.cat([drawn, *chosen]).unique()
    maps = maps_of_both(
        models,
        splits,
        methods,
        indices=indices,
        sampled=torch.isin(indices, drawn),
        target=options.target,
        options=run,
    )
    properties = map_properties(maps, models, split)
    write_map_numbers(folder, maps, properties, split, comparison, seed=seed)
    watched = sample(split, WATCHED, seed=seed)
    attention = [
        (watched, attention_numbers(model, own.pick(watched), options=run)) for model, own in zip(models, splits)
    ]
    write_separations(folder, comparison, traits, attention, maps, properties)
    sheets = dict(sheets_of(maps, properties, chosen, panels=options.panels))
    write_images(folder, comparison, split, maps, properties, sheets)
