"""The features of models, layer by layer: extracted once, then classified, mapped, compared and shown."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from vitlens.analysis.answers.evaluate import require_labels
from vitlens.analysis.features.extraction import extract
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.probe import held_out
from vitlens.analysis.features.reader import resolve_pool
from vitlens.commands.features.measure.classifiers import write_classifiers, write_head_differences, write_pairs
from vitlens.commands.features.measure.images import FeatureSets, load_sets
from vitlens.commands.features.measure.language import require_language, write_language
from vitlens.commands.features.measure.patches import draw_patches, write_patch_neighbours
from vitlens.commands.features.measure.shown import ShownImages, write_shown
from vitlens.commands.features.measure.space import require_enough_images, write_similarity, write_space
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.features.record import DATA, FEATURES, PRETRAINING
from vitlens.commands.features.record.pretraining_rows import PretrainingRow
from vitlens.commands.features.record.rows import FeatureDataRow, FeaturesRow
from vitlens.commands.run.describe import settings
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.load import load_models
from vitlens.commands.run.processes import join_run
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.run.publish import publish
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.lens.stages import embedding_stage, stages
from vitlens.models.model import Model
from vitlens.models.pretraining.reading import pretraining_of, told_objectives
from vitlens.names import Objective
from vitlens.processes import Processes, share_of


def measure(options: FeaturesOptions) -> Path | None:
    """Run k-NN, probes, maps, similarity and retrieval for one model or several; returns the report's path.

    Images without labels, or without a training part, are mapped and compared but not classified. Of several processes
    each reads its share of the images; the first does the rest, the others return None. Raises InputError (or one of
    its kind) before anything is written.
    """
    requested = options
    processes, run = join_run(options.run)
    options = replace(options, run=run)
    with processes.main_process_first():
        models = load_models(options.models, command="features", model_options=options.model_options, options=run)
        sets = load_sets(models, options)
    _require(models, sets, options, processes)
    if not processes.is_first:
        for model, own in zip(models, sets):
            _read(model, own, options, processes)
        return None
    aliases, split = [model.alias for model in models], sets[0].test
    with RunFolder.create(
        "features",
        name_parts=(*aliases, split.name),
        title=f"The features of {' and '.join(aliases)}, layer by layer, on {split.title or split.name}",
        out=run.out,
        overwrite=run.overwrite,
        config=settings(requested, run, models=models, split=split),
        formats=run.formats,
    ) as folder:
        folder.write(DATA, [_data_row(sets[0])])
        _write_all(
            folder, models, sets, [_read(model, own, options, processes) for model, own in zip(models, sets)], options
        )
        return publish(folder)


def _write_all(
    folder: RunFolder,
    models: Sequence[Model],
    sets: Sequence[FeatureSets],
    features: Sequence["ModelFeatures"],
    options: FeaturesOptions,
) -> None:
    """Write everything that is computed from the features."""
    seed = options.run.seed
    tests = [of_model.test for of_model in features if of_model.test is not None]  # the first process has them all
    folder.write(FEATURES, [_features_row(model, test) for model, test in zip(models, tests)])
    told = told_objectives(options.objective, [model.alias for model in models])
    folder.write(
        PRETRAINING, [_pretraining_row(model, test, told.get(model.alias)) for model, test in zip(models, tests)]
    )
    last_layers = write_classifiers(folder, models, sets, tests, [of_model.bank for of_model in features], options)
    write_pairs(folder, last_layers, sets[0].test, seed=seed)
    write_head_differences(folder, last_layers, sets[0].test, seed=seed)
    drawn = draw_patches(models, sets, options)
    write_space(folder, models, sets, tests, last_layers, drawn, options)
    write_patch_neighbours(folder, models, drawn, seed=seed)
    write_similarity(folder, tests, seed=seed)
    write_shown(folder, models, [_shown_images(own, of_model) for own, of_model in zip(sets, features)], seed=seed)
    write_language(folder, models, sets, tests, options)


def _features_row(model: Model, features: Features) -> FeaturesRow:
    last = features.layers[-1]
    return FeaturesRow(
        model=model.alias,
        family=model.anatomy.family,
        pool=features.pool,
        layers=len(features.layers) - features.embedded,
        kind="stage" if last.kind == "stage" else "block",
        dim=last.dim,
        norm=last.norm,
        images=len(features),
        embedding=_embedding_word(features),
    )


def _pretraining_row(model: Model, features: Features, told: Objective | None) -> PretrainingRow:
    read = pretraining_of(model, told=told)
    return PretrainingRow(
        model=model.alias, **asdict(read), parameters=model.parameter_count(), dim=features.layers[-1].dim
    )


def _embedding_word(features: Features) -> Literal["embedding", "stem"] | None:
    if not features.embedded:
        return None
    return "stem" if features.layers[0].kind == "stem" else "embedding"


def _data_row(own: FeatureSets) -> FeatureDataRow:
    labels = own.test.labels
    chance = 0.0 if labels is None else float(torch.bincount(labels.cpu().long()).max()) / len(labels)
    bank = None if own.bank is None else len(own.bank)
    return FeatureDataRow(len(own.test), bank, own.no_bank, chance, own.test.masks is not None)


def _require(
    models: Sequence[Model], sets: Sequence[FeatureSets], options: FeaturesOptions, processes: Processes
) -> None:
    """Refuse what cannot be done before a folder is made."""
    for model, own in zip(models, sets):
        stages(model)
        resolve_pool(model, options.pool)
        for split in (own.test, own.bank):
            if split is not None:
                share_of(split, processes)
        if own.bank is not None and max(options.ks) > len(own.bank):
            raise InputError(
                f"expected --k of at most the {len(own.bank)} training images, found {max(options.ks)}; give fewer, or "
                "a greater --bank"
            )
    bank = sets[0].bank
    if bank is not None and options.probe:
        held_out(require_labels(bank).cpu(), groups=bank.groups, seed=0)  # refuses what cannot be probed
    require_enough_images(len(sets[0].test), options)
    told_objectives(options.objective, [model.alias for model in models])
    require_language(models, options)


class ModelFeatures(NamedTuple):
    """The features of one model's images; None for images that there are none of, and in all processes but the
    first."""

    test: Features | None
    bank: Features | None
    query: Features | None
    shown: Features | None


def _shown_images(own: FeatureSets, read: ModelFeatures) -> ShownImages:
    """The images that figures show: test images and their neighbours in the bank, or only the requested images."""
    if own.shown is not None and read.shown is not None:
        return ShownImages(own.shown, read.shown, None, None, own.query, read.query, requested=True)
    assert read.test is not None  # of the first process
    return ShownImages(own.test, read.test, own.bank, read.bank, own.query, read.query)


def _read(model: Model, own: FeatureSets, options: FeaturesOptions, processes: Processes) -> ModelFeatures:
    run = options.run
    parts = [split for split in (own.test, own.bank, own.query, own.shown) if split is not None]
    with progress(f"Reading {model.alias}", sum(map(len, parts)), quiet=run.quiet) as advance:

        def features_of(split: Split | None, *, cached: bool) -> Features | None:
            if split is None:
                return None
            return extract(
                model,
                split,
                pool=options.pool,
                norm=options.norm,
                embedding=cached and embedding_stage(model) is not None,
                batch_size=run.batch_size,
                precision=run.precision,
                cache=run.data_dir / "features" if cached and options.cache else None,
                processes=processes if cached else None,  # a query may be fewer images than there are processes
                advance=advance,
            )

        return ModelFeatures(
            test=features_of(own.test, cached=True),
            bank=features_of(own.bank, cached=True),
            query=features_of(own.query, cached=False),
            shown=features_of(own.shown, cached=False),
        )
