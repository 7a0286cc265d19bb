"""`vitlens study`: a ViT and a CNN trained or taken, evaluated, and the ViT looked into, in one report."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vitlens.commands.scaffold.budgets import keep_budgets
from vitlens.commands.scaffold.describe import described
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.scaffold.load import load_models, load_split
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.targets import require_labelled
from vitlens.errors import InputError, UnsupportedError
from vitlens.files import RunRecord
from vitlens.models.assembly import default_classes
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.naming import ModelName, parse_models, require_rule
from vitlens.models.support import require_supported
from vitlens.runs.report import Drawn, publish
from vitlens.runs.sections import Section
from vitlens.runs.study_chapters import Chapters, Ground, trained_first, typed
from vitlens.runs.study_points import study_points
from vitlens.runs.study_points_draw import draw_points, kind_of
from vitlens.runs.study_points_tell import tell_points
from vitlens.runs.study_whole import LEFT_OUT, draw_whole, gathered, left_out_words, tell_whole

DEFAULT_MODELS: Final = ("vit-micro", "resnet20")
WHOLE: Final = "whole"  # the kind that is all of this module


def study(
    models: Sequence[str],
    *,
    kind: str | None = None,
    data: str | None = None,
    images: Sequence[str] | None = None,
    predicted: bool = False,
    epochs: int | None = None,
    seeds: int | None = None,
    resume: Path | None = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> Path:
    """Train what is a preset, evaluate all models, look into the ViTs; each chapter is a run folder of its own.

    kind: one question instead, about small models trained with several seeds, which alone can be resumed (see
    study_points); data: digits where nothing is said; images: files and folders without labels, for trained models;
    predicted: ablation and attacks take the models' predictions for labels. What needs labels is left out without them,
    and said. Returns the report's path. Raises UnsupportedError where none of the models can be looked into.
    """
    if resume is not None or kind not in (None, WHOLE):
        if images or predicted:
            raise InputError(
                f"expected --data with {f'--kind {kind}' if kind else '--resume'}, which trains its models on labels, "
                f"found {'--images' if images else '--predicted'}; leave it out"
            )
        return study_points(
            kind, models=models, data=data, epochs=epochs, seeds=seeds, resume=resume, model_options=model_options,
            options=options,
        )  # fmt: skip
    if seeds is not None:
        raise InputError(f"expected --kind with --seeds {seeds}, found a whole study; try --kind architecture")
    require_rule(models or DEFAULT_MODELS)
    named = parse_models(models or DEFAULT_MODELS)
    if images and data:
        raise InputError("expected --images or --data, found both; leave one out")
    studied = _studied(named, model_options, options)
    ground = Ground("" if images else data or "digits", tuple(images or ()), predicted)
    labelled = not (images or predicted) or _are_labelled(named, ground, model_options, options)
    what = data or ("images" if images else "digits")
    asked = {
        "models": list(models or DEFAULT_MODELS), "data": ground.data or None, "images": list(images or ()),
        "predicted": predicted, "epochs": epochs,
    }  # fmt: skip
    folder = RunFolder.create(
        "study",
        name_parts=(*(model.alias for model in named), what),
        title=f"Study of {' and '.join(model.alias for model in named)} on {Path(what).name}",
        out=options.out,
        overwrite=options.overwrite,
        config=described(options, choices=asked),
        formats=options.formats,
    )
    with folder:
        chapters = Chapters(folder.path, ground, model_options, replace(options, overwrite=True))
        ready = [chapters.trained(model, epochs) for model in named]
        loaded = chapters.load(ready)
        keep_budgets(folder, loaded)
        chapters.look_ahead(loaded)
        _analyse(chapters, ready, [name for name, model in zip(ready, named) if model in studied], labelled)
        folder.table("left_out", [] if labelled else [{"chapter": word} for word in LEFT_OUT])
        if not labelled and not options.quiet:
            print(left_out_words(LEFT_OUT), file=sys.stderr)  # noqa: T201
        folder.table("chapters", [vars(chapter) for chapter in chapters.done])
        for name, estimate in gathered(folder.path, chapters.done).items():
            folder.metric(name, estimate)
        return publish(folder, draw, tell)


def _analyse(chapters: Chapters, ready: Sequence[str], vits: Sequence[str], labelled: bool) -> None:
    """All chapters of analysis: of each ViT, of a ViT beside another model, and of all models together."""
    if labelled:
        chapters.run("evaluate", "", ready)
    for name in vits:
        for word in ("attention", "rollout", "stats", "ablate"):
            chapters.run(word, parse_models([name])[0].alias, [name])
        chapters.explain(name)
    others = [name for name in ready if name not in vits] or [name for name in ready if name != vits[0]]
    if others and labelled:
        chapters.compare(vits[0], others[0])
    chapters.attack(ready)
    if labelled:
        chapters.features(ready)
    chapters.profile(ready)


def _studied(named: Sequence[ModelName], model_options: ModelOptions, options: RunOptions) -> list[ModelName]:
    """The models that are looked into; the others are set beside them.

    Raises UnsupportedError where there is none, and for a model that cannot be set beside another.
    """
    models = [_to_ask(model, model_options, options) for model in named]
    for loaded in models:
        require_supported(loaded, "compare")
    reasons = [loaded.supports("study") for loaded in models]
    if all(reasons):
        raise UnsupportedError(str(reasons[0]))
    return [model for model, reason in zip(named, reasons) if reason is None]


def _to_ask(model: ModelName, model_options: ModelOptions, options: RunOptions) -> Model:
    """The model, untrained where it is trained first, to ask what it supports."""
    if trained_first(model, model_options):
        return untrained(model.name, classes=default_classes(2), alias=model.alias).eval()
    return load_models([typed(model)], model_options=model_options, options=options)[0]


def _are_labelled(named: Sequence[ModelName], ground: Ground, model_options: ModelOptions, options: RunOptions) -> bool:
    """Whether the images have labels, looked at before anything is written.

    Raises InputError for a preset that would have to be trained on images without labels, DataError for such images
    without --predicted.
    """
    presets = [model.name for model in named if trained_first(model, model_options)]
    if presets:
        if not ground.images:
            return True  # trained on them, so labelled
        raise InputError(
            f"expected trained models with --images, found {' and '.join(presets)}, trained on labelled data; try "
            "vitlens study vit-digits --images ..., timm:NAME or a run folder"
        )
    (first,) = load_models([typed(named[0])], model_options=model_options, options=options)
    split = load_split(first, options=replace(options, quiet=True), **ground.asked)
    if not ground.predicted:
        require_labelled(split, doing="study")
    return split.labels is not None


def draw(record: RunRecord) -> Iterator[Drawn]:
    """The figures of a whole study or of one question."""
    return draw_whole(record) if kind_of(record) is None else draw_points(record)


def tell(record: RunRecord) -> list[Section]:
    """The report of a whole study or of one question."""
    return tell_whole(record) if kind_of(record) is None else tell_points(record)
