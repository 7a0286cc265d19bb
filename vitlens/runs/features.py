"""`vitlens features`: what the features of models know, layer by layer, and how alike those of two models are."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vitlens.analysis.answers.evaluate import require_labels
from vitlens.analysis.features.extraction import extract
from vitlens.analysis.features.features import Features
from vitlens.analysis.features.probe import held_out
from vitlens.analysis.features.reader import resolve_pool
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.expected import say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.processes import join_run
from vitlens.commands.scaffold.progress import progress
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.lens.stages import stages
from vitlens.models.model import Model
from vitlens.processes import Processes, share_of
from vitlens.runs.features_choices import FeatureChoices
from vitlens.runs.features_draw import draw
from vitlens.runs.features_keep import keep_knowledge
from vitlens.runs.features_keep_look import Looks, keep_looks
from vitlens.runs.features_keep_pairs import keep_pairs
from vitlens.runs.features_keep_similarity import keep_similarity
from vitlens.runs.features_keep_space import keep_space, require_enough
from vitlens.runs.features_language import keep_language, require_language
from vitlens.runs.features_load import Sets, load_sets
from vitlens.runs.features_tell import tell
from vitlens.runs.planned import features_parts
from vitlens.runs.report import publish

__all__ = ["draw", "features", "tell"]


def features(
    models: Sequence[str],
    *,
    data: str | None = None,
    images: Sequence[str] | None = None,
    choices: FeatureChoices | None = None,
    model_options: ModelOptions | None = None,
    options: RunOptions | None = None,
) -> Path | None:
    """k-NN, probes, maps of the space, similarity and retrieval, of one model or several; returns report.md's path.

    Images without labels, or without a training part, are mapped and compared but not classified. Of several processes
    each reads its share of the images; the first does the rest, the others return None. Raises InputError (or one of
    its kind) before anything is written.
    """
    choices = choices or FeatureChoices()
    processes, options = join_run(options or RunOptions())
    with processes.first_ahead():
        loaded = load_models(models, command="features", model_options=model_options or ModelOptions(), options=options)
        sets = load_sets(loaded, data=data, images=images, choices=choices, options=options)
    _require(loaded, sets, choices, processes)
    if not processes.is_first:
        for model, own in zip(loaded, sets):
            _read(model, own, choices, processes, options)
        return None
    aliases, split = [model.alias for model in loaded], sets[0].test
    works = [
        (model, own.test, features_parts(len(own.test), 0 if own.bank is None else len(own.bank)))
        for model, own in zip(loaded, sets)
    ]
    say_expected(works, options, processes=processes.count)
    asked = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(choices).items()}
    with RunFolder.create(
        "features",
        name_parts=(*aliases, split.name),
        title=f"What the features of {' and '.join(aliases)} know, on {split.title or split.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, models=loaded, split=split, choices=asked) | _shown(sets[0]),
        formats=options.formats,
    ) as folder:
        found = [_read(model, own, choices, processes, options) for model, own in zip(loaded, sets)]
        tests = [one.test for one in found if one.test is not None]  # the first process has them all
        banks = [one.bank for one in found]
        folder.table("features", [_read_how(one) for one in tests])
        known = keep_knowledge(folder, loaded, sets, tests, banks, choices, options)
        keep_pairs(folder, known, sets[0].test, seed=options.seed)
        keep_space(folder, loaded, sets, tests, known, choices, options)
        keep_similarity(folder, tests, seed=options.seed)
        keep_looks(folder, loaded, [_looked_at(own, one) for own, one in zip(sets, found)], options)
        keep_language(folder, loaded, sets, tests, choices, options)
        return publish(folder, draw, tell)


def _read_how(found: Features) -> dict[str, object]:
    return {
        "model": found.alias,
        "pool": found.pool,
        "layers": len(found.layers),
        "kind": found.layers[-1].kind,
        "dim": found.layers[-1].dim,
        "norm": found.layers[-1].norm,
        "images": len(found),
    }


def _shown(own: Sets) -> dict[str, object]:
    """What figures and words need to know of the images."""
    labels = own.test.labels
    chance = 0.0 if labels is None else float(torch.bincount(labels.cpu().long()).max()) / len(labels)
    return {
        "class_names": list(own.test.classes),
        "chance": chance,
        "masked": own.test.masks is not None,
        "bank": None if own.bank is None else len(own.bank),
        "reason": own.reason,
    }


def _require(models: Sequence[Model], sets: Sequence[Sets], choices: FeatureChoices, processes: Processes) -> None:
    """Refuse what cannot be done before a folder is made."""
    for model, own in zip(models, sets):
        stages(model)
        resolve_pool(model, choices.pool)
        for split in (own.test, own.bank):
            if split is not None:
                share_of(split, processes)
        if own.bank is not None and max(choices.ks) > len(own.bank):
            raise InputError(
                f"expected --k of at most the {len(own.bank)} training images, found {max(choices.ks)}; give fewer, or "
                "a greater --bank"
            )
    if sets[0].bank is not None and choices.probe:
        held_out(
            require_labels(sets[0].bank).cpu(), groups=sets[0].bank.groups, seed=0
        )  # refuses what cannot be probed
    require_enough(len(sets[0].test), choices)
    require_language(models, choices)


class Read(NamedTuple):
    """Features of one model's images; None where there are none of a kind, and in all processes but the first."""

    test: Features | None
    bank: Features | None
    query: Features | None
    shown: Features | None


def _looked_at(own: Sets, read: Read) -> Looks:
    """What figures draw: test images and their neighbours in the bank, or the images asked for among themselves."""
    if own.shown is not None and read.shown is not None:
        return Looks(own.shown, read.shown, None, None, own.query, read.query, asked=True)
    assert read.test is not None  # of the first process
    return Looks(own.test, read.test, own.bank, read.bank, own.query, read.query)


def _read(model: Model, own: Sets, choices: FeatureChoices, processes: Processes, options: RunOptions) -> Read:
    parts = [split for split in (own.test, own.bank, own.query, own.shown) if split is not None]
    with progress(f"Reading {model.alias}", sum(map(len, parts)), quiet=options.quiet) as advance:

        def one(split: Split | None, *, kept: bool) -> Features | None:
            if split is None:
                return None
            return extract(
                model,
                split,
                pool=choices.pool,
                norm=choices.norm,
                batch_size=options.batch_size,
                precision=options.precision,
                cache=options.data_dir / "features" if kept and choices.cache else None,
                processes=processes if kept else None,  # a query may be fewer images than there are processes
                advance=advance,
            )

        test, bank = one(own.test, kept=True), one(own.bank, kept=True)
        return Read(test, bank, one(own.query, kept=False), one(own.shown, kept=False))
