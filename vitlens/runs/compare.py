"""`vitlens compare`: two models on the same images, side by side: maps, errors taken apart, and what they go by."""

from collections.abc import Sequence
from pathlib import Path

import torch

from vitlens.analysis.answers.classes import require_shared
from vitlens.analysis.answers.evaluate import Evaluation, require_labels
from vitlens.analysis.failures.compare import evaluations
from vitlens.analysis.failures.disturbed import passes
from vitlens.analysis.failures.errors import compare_answers
from vitlens.analysis.failures.image_traits import image_traits
from vitlens.commands.scaffold.budgets import keep_budgets
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.displayed import for_figures
from vitlens.commands.scaffold.expected import say_expected
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_splits, read_as
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.progress import progress
from vitlens.commands.scaffold.targets import PREDICTED, chosen_targets
from vitlens.data.split import Split
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.runs.compare_draw import draw
from vitlens.runs.compare_harder import HARDENED, conflicts, keep_robustness, keep_shape_bias
from vitlens.runs.compare_keep import keep_answers, keep_numbers, keep_separations
from vitlens.runs.compare_keep_maps import keep_images, keep_looks, sheets_of
from vitlens.runs.compare_maps import attention_numbers, chosen_methods, computed, examples, looks, sample
from vitlens.runs.compare_panels import write_panels
from vitlens.runs.compare_tell import tell
from vitlens.runs.planned import compare_parts
from vitlens.runs.report import publish

__all__ = ["compare", "draw", "tell"]

PANELS = 50  # images shown side by side
MAPPED = 500  # images whose maps are computed for the numbers
WATCHED = 2000  # images whose attention is measured


def compare(
    models: Sequence[str],
    *,
    data: str | None = None,
    method: Sequence[str] = (),
    target: str = PREDICTED,
    panels: int = PANELS,
    maps: int = MAPPED,
    harder: bool = True,
    cue_conflict: str | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Compare two models on labelled images and write the report; returns its path.

    method: of the maps, one for both models or one each (none: relevance for a ViT, GradCAM for a CNN); target: whose
    logit they ask about, "predicted", "true" or a class; panels: images shown; maps: images whose maps the numbers are
    made of, drawn with the seed; harder: also on filtered, shuffled and covered images; cue_conflict: images of
    conflicting shape and texture. Raises InputError (or one of its kind) before anything is written.
    """
    if len(models) != 2:
        raise InputError(
            f"expected two models to compare, found {len(models)}; e.g. vitlens compare vit-digits cnn-digits"
        )
    if panels > maps:
        raise InputError(f"expected --maps of at least --panels ({panels}), found {maps}")
    first, second = load_models(models, command="compare", model_options=model_options, options=options)
    loaded = (first, second)
    one, two = load_splits(loaded, options=options, data=data)
    for split in (one, two):
        require_labels(split)
    require_shared(first.classes, second.classes, one.classes)
    one, two = read_as(loaded, (one, two), options)
    methods = chosen_methods(method, loaded)
    for model, split in zip(loaded, (one, two)):
        chosen_targets(target, model, split)
    disputed = conflicts(loaded, (one, two), cue_conflict, options)
    if disputed:
        require_shared(first.classes, second.classes, disputed[0].classes)
    aliases = first.alias, second.alias
    hardened = passes(one.limit(HARDENED, seed=options.seed)) if harder else 0
    works = [
        (
            model,
            split,
            tuple(
                compare_parts(
                    name,
                    len(split),
                    mapped=min(maps, len(split)),
                    watched=min(WATCHED, len(split)),
                    hardened=hardened,
                    attentive=model.anatomy.family in ("vit", "windowed"),
                )
            ),
        )
        for model, split, name in zip(loaded, (one, two), methods)
    ]
    say_expected(works, options)
    choices = {
        "method": list(methods), "target": target, "panels": panels, "maps": maps, "harder": harder,
        "cue_conflict": cue_conflict,
    }  # fmt: skip
    with RunFolder.create(
        "compare",
        name_parts=(*aliases, one.name),
        title=f"{first.alias} and {second.alias} side by side, on {one.title or one.name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, models=loaded, split=one, choices=choices),
        formats=options.formats,
    ) as folder:
        keep_budgets(folder, loaded)
        found = _answered(loaded, (one, two), options)
        _keep(folder, loaded, (one, two), found, methods, target=target, panels=panels, mapped=maps, options=options)
        if harder:
            keep_robustness(folder, loaded, (one, two), options)
        keep_shape_bias(folder, loaded, disputed, options)
        write_panels(for_figures(folder.record()))
        return publish(folder, draw, tell)


def _answered(
    models: tuple[Model, Model], splits: tuple[Split, Split], options: RunOptions
) -> tuple[Evaluation, Evaluation]:
    with progress("answering", len(splits[0]) + len(splits[1]), quiet=options.quiet) as advance:
        return evaluations(models, splits, batch_size=options.batch_size, precision=options.precision, advance=advance)


def _keep(
    folder: RunFolder,
    models: tuple[Model, Model],
    splits: tuple[Split, Split],
    found: tuple[Evaluation, Evaluation],
    methods: tuple[str, str],
    *,
    target: str,
    panels: int,
    mapped: int,
    options: RunOptions,
) -> None:
    """Answers, errors by everything known of the images, maps of a sample of them, and attention on failures."""
    split, seed = splits[0], options.seed
    comparison = compare_answers(*found)
    traits = image_traits(split)
    keep_answers(folder, comparison, found, seed=seed)
    keep_numbers(folder, comparison, traits, seed=seed)
    drawn = sample(split, mapped, seed=seed)
    chosen = examples(comparison)
    indices = torch.cat([drawn, *chosen]).unique()
    maps = computed(
        models, splits, methods, indices=indices, sampled=torch.isin(indices, drawn), target=target, options=options
    )
    looking = looks(maps, models, split)
    keep_looks(folder, maps, looking, split, comparison, seed=seed)
    watched = sample(split, WATCHED, seed=seed)
    attention = [
        (watched, attention_numbers(model, own.pick(watched), options=options)) for model, own in zip(models, splits)
    ]
    keep_separations(folder, comparison, traits, attention, maps, looking)
    sheets = dict(sheets_of(maps, looking, chosen, panels=panels))
    keep_images(folder, comparison, split, maps, looking, sheets)
