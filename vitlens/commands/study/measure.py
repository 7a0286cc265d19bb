"""A whole study (presets are trained, all models evaluated and compared, the ViTs analysed), or a
controlled comparison.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from vitlens.analysis.dictionary.dictionary import load_sae
from vitlens.commands.needs import needs_of, require
from vitlens.commands.run.chapter_runs import ChapterImages
from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import load_models, load_split, require_data, require_image_paths
from vitlens.commands.run.publish import publish, write_portfolio
from vitlens.commands.run.targets import require_label_source, require_labelled
from vitlens.commands.shared.trainings import budget_of
from vitlens.commands.study.chapters import Chapters, trained_first
from vitlens.commands.study.kinds.measure import measure_kind
from vitlens.commands.study.options import WHOLE, StudyOptions
from vitlens.commands.study.record import LeftOutRow, StudyRecord
from vitlens.errors import InputError, ModelError, UnsupportedError
from vitlens.models.loading import untrained
from vitlens.models.model import Model
from vitlens.models.model_names import ModelName, parse_models, require_rule
from vitlens.models.rebuild import default_classes
from vitlens.names import SHORTCUT_PAIR
from vitlens.training.recipe import equal_budgets

__all__ = ["measure"]

# chapters that are left out without labels
NEED_LABELS: Final = ("evaluate", "compare", "features")


def measure(options: StudyOptions) -> Path:
    """Train the presets, evaluate all models and analyse the ViTs; or train the variants of one
    --kind, or adapt a model.

    Returns the report's path. Raises UnsupportedError where none of the models can be analysed.
    """
    # only a controlled comparison can be resumed
    if options.resume is not None or options.kind not in (None, WHOLE):
        _refuse_options_of_whole_study(options)
        return measure_kind(options)
    if options.seeds is not None:
        raise InputError(
            f"expected --kind with --seeds {options.seeds}, found a whole study; try --kind "
            "architecture"
        )
    return _measure_whole(options)


def _refuse_options_of_whole_study(options: StudyOptions) -> None:
    """Raise InputError for options that only a whole study has."""
    if options.images or options.predicted:
        option = f"--kind {options.kind}" if options.kind else "--resume"
        unexpected = "--images" if options.images else "--predicted"
        raise InputError(
            f"expected --data with {option}, which trains its models on labels, found "
            f"{unexpected}; leave it out"
        )
    for name in ("portfolio", "dictionary"):
        if getattr(options, name):
            raise InputError(
                f"expected a whole study with --{name}, found --kind or --resume; leave it out"
            )


def _measure_whole(options: StudyOptions) -> Path:
    """Run all chapters, each a run folder of its own; returns the report's path."""
    names = options.models or SHORTCUT_PAIR
    run = options.run
    require_rule(names)
    model_names = parse_models(names)
    require_data(options.data, options.images, labels=run.labels)
    require_image_paths(options.images)
    data = None
    if not options.images:
        data = options.data or "digits"
    images = ChapterImages(data, options.images, options.predicted, run.data_dir)
    presets = [name.name for name in model_names if trained_first(name, options.model_options)]
    allowed = _check_models(model_names, presets, images, options)
    aliases = [model.alias for model in model_names]
    data_name = data or "images"
    title = f"Study of {' and '.join(aliases)} on {Path(data_name).name}"
    with RunFolder.opened(
        "study", run, settings(options, run), name_parts=(*aliases, data_name), title=title
    ) as folder:
        chapters = Chapters(
            folder.path,
            images,
            options,
            # after each chapter, so that a study that is stopped has a record
            on_done=lambda done: folder.keep_tables(StudyRecord(chapters=tuple(done))),
        )
        budgets = equal_budgets(
            presets, str(data), epochs=options.epochs, batch_size=run.batch_size
        )
        # from here on, the name of a trained preset is its run folder
        studied_names = []
        vits = []
        for typed_name in model_names:
            studied_name = typed_name
            if trained_first(typed_name, options.model_options):
                studied_name = chapters.train_preset(typed_name, budgets[typed_name.name])
            studied_names.append(studied_name)
            if typed_name in allowed.vits:
                vits.append(studied_name)
        chapters.dictionary_alias = allowed.dictionary_alias
        models = chapters.analyse(studied_names, vits, labelled=allowed.labelled)
        left_out: tuple[LeftOutRow, ...] = ()
        if not allowed.labelled:
            left_out = tuple(map(LeftOutRow, NEED_LABELS))
        if left_out and not run.quiet:
            words = f"Left out, as they need labelled images: {', '.join(NEED_LABELS)}."
            print(words, file=sys.stderr)  # noqa: T201
        training = tuple(map(budget_of, models))
        folder.keep(
            StudyRecord(
                folder=folder.path,
                chapters=tuple(chapters.done),
                left_out=left_out,
                training=training,
            )
        )
        path = publish(folder)
    if options.portfolio:
        # None, neither --html nor --no-html, means a page: a study writes one by default
        write_portfolio(folder.path, html=run.html is not False)
    return path


@dataclass(frozen=True)
class _Allowed:
    """What the models and images of a study allow.

    vits: the models that are analysed, with which the others are compared.
    labelled: True if the images have labels.
    dictionary_alias: alias of the model of --dictionary, "" without one.
    """

    vits: list[ModelName]
    labelled: bool
    dictionary_alias: str


def _check_models(
    model_names: Sequence[ModelName],
    presets: Sequence[str],
    images: ChapterImages,
    options: StudyOptions,
) -> _Allowed:
    """Return what the models and images allow; called before anything is written.

    presets: those that are trained first.
    Raises UnsupportedError where no model can be analysed or one cannot be compared, InputError for
    a preset that would have to be trained on images without labels and for a dictionary of another
    model, DataError for images without labels and without --predicted.
    """
    needs_labels = not images.predicted and options.run.labels is None
    if needs_labels and not presets and not images.images:
        require_label_source(images.data, (), doing="study")
    models = []
    for name in model_names:
        if trained_first(name, options.model_options):
            # checked by its structure only, which the number of classes does not change
            model = untrained(name.name, classes=default_classes(2), alias=name.alias).eval()
        else:
            (model,) = load_models([name], model_options=options.model_options, options=options.run)
        models.append(model)
    for model in models:
        require(model, *needs_of("compare"))
    # why a model's attention cannot be analysed; None where it can
    reasons = [model.supports("study") for model in models]
    if all(reasons):
        raise UnsupportedError(str(reasons[0]))
    dictionary_alias = ""
    if options.dictionary is not None:
        dictionary_alias = _model_of_dictionary(options.dictionary, models)
    if presets and images.images:
        raise InputError(
            f"expected trained models with --images, found {' and '.join(presets)}, trained on "
            "labelled data; try vitlens study vit-digits --images ..., timm:NAME or a run folder"
        )
    labelled = True
    # else it is known: presets need labels, and --data without --predicted has labels
    must_read = not presets and bool(images.images or images.predicted)
    if must_read:
        split = load_split(models[0], options=replace(options.run, quiet=True), **images.options)
        if not images.predicted:
            require_labelled(split, doing="study")
        labelled = split.labels is not None
    vits = [name for name, reason in zip(model_names, reasons) if reason is None]
    return _Allowed(vits, labelled, dictionary_alias)


def _model_of_dictionary(path: Path, models: Sequence[Model]) -> str:
    """Return the alias of the model of a dictionary. Raises InputError if it is none of these."""
    for model in models:
        try:
            return load_sae(model, path).model.alias
        except ModelError:  # an InputError, too: no file, or one without a dictionary
            raise
        except InputError:  # the dictionary of another model
            continue
    raise InputError(
        f"expected a dictionary of {' or '.join(model.alias for model in models)} in {path}, found "
        "one of another model or of other weights; train one with vitlens sae"
    )
