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
from vitlens.commands.run.load import load_models, load_split, require_data
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
    """Train the presets, evaluate all models and analyse the ViTs; or train the points of one
    --kind, or adapt a model.

    Returns the report's path. Raises UnsupportedError where none of the models can be analysed.
    """
    if options.resume is not None or options.kind not in (None, WHOLE):
        if options.images or options.predicted:
            option = f"--kind {options.kind}" if options.kind else "--resume"
            raise InputError(
                f"expected --data with {option}, which trains its models on labels, found "
                f"{'--images' if options.images else '--predicted'}; leave it out"
            )
        for name in ("portfolio", "dictionary"):
            if getattr(options, name):
                raise InputError(
                    f"expected a whole study with --{name}, found --kind or --resume; leave it out"
                )
        return measure_kind(options)
    if options.seeds is not None:
        raise InputError(
            f"expected --kind with --seeds {options.seeds}, found a whole study; try --kind "
            "architecture"
        )
    return _measure_whole(options)


def _measure_whole(options: StudyOptions) -> Path:
    """Run all chapters, each a run folder of its own; returns the report's path."""
    names = options.models or SHORTCUT_PAIR
    run = options.run
    require_rule(names)
    model_names = parse_models(names)
    require_data(options.data, options.images, labels=run.labels)
    data = None if options.images else options.data or "digits"
    images = ChapterImages(data, options.images, options.predicted, run.data_dir)
    presets = [model.name for model in model_names if trained_first(model, options.model_options)]
    checked = _check_models(model_names, presets, images, options)
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
            lambda done: folder.keep_tables(StudyRecord(chapters=tuple(done))),
        )
        budgets = equal_budgets(
            presets, str(data), epochs=options.epochs, batch_size=run.batch_size
        )
        ready = [
            chapters.trained(model, budgets[model.name]) if model.name in budgets else model
            for model in model_names
        ]
        vits = [name for name, model in zip(ready, model_names) if model in checked.vits]
        chapters.of_dictionary = checked.of_dictionary
        models = chapters.analyse(ready, vits, labelled=checked.labelled)
        left_out = () if checked.labelled else tuple(map(LeftOutRow, NEED_LABELS))
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
        write_portfolio(folder.path, html=run.html is not False)
    return path


@dataclass(frozen=True)
class _Checked:
    """What the models and images of a study allow.

    vits: the models that are analysed, with which the others are compared.
    labelled: whether the images have labels.
    of_dictionary: alias of the model of --dictionary, "" without one.
    """

    vits: list[ModelName]
    labelled: bool
    of_dictionary: str


def _check_models(
    model_names: Sequence[ModelName],
    presets: Sequence[str],
    images: ChapterImages,
    options: StudyOptions,
) -> _Checked:
    """Return what the models and images allow.

    presets: those that are trained first. Raises, before anything is written, UnsupportedError
    where no model can be analysed or one cannot be compared, InputError for a preset that would
    have to be trained on images without labels and for a dictionary of another model, DataError for
    images without labels and without --predicted.
    """
    if not presets and not images.images and not images.predicted:
        require_label_source(images.data, (), doing="study")
    models = [
        untrained(model.name, classes=default_classes(2), alias=model.alias).eval()
        if trained_first(model, options.model_options)
        else load_models([model], model_options=options.model_options, options=options.run)[0]
        for model in model_names
    ]
    for model in models:
        require(model, *needs_of("compare"))
    reasons = [model.supports("study") for model in models]
    if all(reasons):
        raise UnsupportedError(str(reasons[0]))
    of_dictionary = ""
    if options.dictionary is not None:
        of_dictionary = _model_of_dictionary(options.dictionary, models)
    if presets and images.images:
        raise InputError(
            f"expected trained models with --images, found {' and '.join(presets)}, trained on "
            "labelled data; try vitlens study vit-digits --images ..., timm:NAME or a run folder"
        )
    labelled = bool(presets) or not (images.images or images.predicted)
    if not labelled:
        split = load_split(models[0], options=replace(options.run, quiet=True), **images.options)
        if not images.predicted:
            require_labelled(split, doing="study")
        labelled = split.labels is not None
    vits = [model for model, reason in zip(model_names, reasons) if reason is None]
    return _Checked(vits, labelled, of_dictionary)


def _model_of_dictionary(path: Path, models: Sequence[Model]) -> str:
    """Return the alias of the model of a dictionary. Raises InputError if it is none of these."""
    for model in models:
        try:
            return load_sae(model, path).model.alias
        except ModelError:  # no file, or one without a dictionary
            raise
        except InputError:
            continue
    raise InputError(
        f"expected a dictionary of {' or '.join(model.alias for model in models)} in {path}, found "
        "one of another model or of other weights; train one with vitlens sae"
    )
