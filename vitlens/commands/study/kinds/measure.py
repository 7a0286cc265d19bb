"""`vitlens study --kind`: train every variant of a kind with several seeds, compare them, and look
into them.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, cast

from vitlens.commands.run.folder import RunFolder, settings
from vitlens.commands.run.load import print_data
from vitlens.commands.run.publish import publish
from vitlens.commands.run.resume import resumed
from vitlens.commands.run.unseen import keep_training_images
from vitlens.commands.study.kinds.catalogue import KINDS
from vitlens.commands.study.kinds.findings import FINDINGS
from vitlens.commands.study.kinds.kinds import (
    ADAPTING_EPOCHS,
    EPOCHS,
    OTHER_EPOCHS,
    SEEDS,
    Extra,
    Kind,
)
from vitlens.commands.study.kinds.pretraining.measure import measure_features
from vitlens.commands.study.kinds.record import CorrectArrays, DesignRow, KindRecord, VariantRow
from vitlens.commands.study.kinds.rows import (
    Comparisons,
    Trials,
    correct_predictions,
    finding_rows,
    image_groups,
    level_rows,
    recipe_rows,
    trial_rows,
    validation_rows,
    variant_row,
)
from vitlens.commands.study.kinds.setup import Setup, prepare
from vitlens.commands.study.kinds.transfer.measure import measure_transfer
from vitlens.commands.study.kinds.trials import run_trial
from vitlens.commands.study.kinds.variants.measure import (
    measure_cut,
    measure_fields,
    measure_positions,
    measure_sinks,
)
from vitlens.commands.study.options import StudyOptions
from vitlens.commands.study.record import record_class
from vitlens.errors import InputError

# What is measured in addition to accuracy, as fields of the record; "comparisons" are added to
# those of accuracy.
_EXTRAS: Final[Mapping[Extra, Callable[[Setup, Mapping[str, VariantRow]], dict[str, Any]]]] = {
    "fields": measure_fields,
    "cut": measure_cut,
    "positions": measure_positions,
    "sinks": measure_sinks,
    "inside": measure_transfer,
    "pretraining": measure_features,
}


def measure_kind(options: StudyOptions) -> Path:
    """Train and compare the variants of a kind of study; return the report's path.

    Raises InputError, and what training raises.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError(
            "expected one process for a study, found several; start vitlens study without a "
            "launcher"
        )
    if options.resume is None:
        options = _with_defaults(options)
    else:
        options = _resumed(options.resume, options)
    setup = prepare(options)
    print_data(setup.train, setup.run)
    with _folder(setup) as folder:
        setup = replace(setup, path=folder.path)
        keep_training_images(folder.path, setup.train, data=setup.data, start=setup.model)
        trials = {}
        for variant in setup.variants:
            trials[variant.label] = [run_trial(setup, variant, seed) for seed in setup.seeds]
        folder.keep(_record(setup, trials))
        return publish(folder)


def _with_defaults(options: StudyOptions) -> StudyOptions:
    """Return the options with their defaults filled in, as a resumed study reads them."""
    kind = KINDS[str(options.kind)]
    data = options.data
    if not data:
        data = "" if kind.adapts else kind.data
    epochs = options.epochs
    if epochs is None:
        epochs = _default_epochs(kind, data)
    return replace(options, data=data, epochs=epochs, seeds=options.seeds or SEEDS)


def _default_epochs(kind: Kind, data: str) -> int:
    if kind.epochs:
        return kind.epochs
    return ADAPTING_EPOCHS if kind.adapts else EPOCHS.get(data, OTHER_EPOCHS)


def _resumed(folder: Path, options: StudyOptions) -> StudyOptions:
    """Return the options that a study began with.

    Raises InputError for options of another study, and for the folder of a whole one.
    """
    first_options: StudyOptions = resumed(
        options, folder, "study", typed=("model_file", "cache", "full")
    )
    if first_options.kind not in KINDS:
        raise InputError(
            f"expected the folder of vitlens study --kind to resume, found another run in {folder}"
        )
    return first_options


def _folder(setup: Setup) -> RunFolder:
    """Return the study's folder: new, or that of --resume."""
    models = []
    title = setup.kind.title
    if setup.model is not None:
        models = [setup.model]
        title = f"{setup.model.alias}, adapted"
    # variants and recipes as they are in config.json, which a resumed run must repeat
    recipes = {}
    for variant in setup.variants:
        recipe = setup.recipe(variant)
        recipes[variant.label] = {**recipe.numbers(), "source": recipe.source}
    # tuples become lists, as in the file
    variants = json.loads(json.dumps([asdict(variant) for variant in setup.variants]))
    plan = {"points": variants, "recipes": recipes}  # "points": the record's name of the variants
    config = settings(
        setup.options,
        setup.run,
        models=models,
        split=setup.test,
        others=[setup.train],
        device=str(setup.device),
        **plan,
    )
    return RunFolder.opened(
        "study",
        setup.run,
        config,
        name_parts=(str(setup.options.kind), *(model.alias for model in models), setup.data),
        title=f"{title}, on {setup.test.title or setup.test.name}",
        resume=setup.options.resume,
        # config.json of a resumed study must have these; None stands for any value
        needs={"data": None, **plan},
    )


def _record(setup: Setup, trials: Trials) -> KindRecord:
    """Return accuracies over seeds, comparisons, sizes, costs and speeds, and what only this kind
    measures.
    """
    variants = {variant.label: variant_row(setup, variant, trials) for variant in setup.variants}
    correct = {}
    for label, variant_trials in trials.items():
        correct[label] = correct_predictions(variant_trials)
    comparisons = Comparisons(variants, correct, image_groups(setup))
    planned = comparisons.planned(setup.kind.pairs, setup.kind.steps)
    findings = finding_rows(FINDINGS.get(str(setup.options.kind), ()), planned)
    extra_fields: dict[str, Any] = {}
    if setup.kind.extra is not None:
        measure_extra = _EXTRAS[setup.kind.extra]
        extra_fields = measure_extra(setup, variants)
    extra_comparisons = extra_fields.pop("comparisons", ())
    record_type = cast(type[KindRecord], record_class(asdict(setup.options)))
    return record_type(
        design=(_design_row(setup),),
        points=tuple(variants.values()),
        trials=tuple(trial_rows(setup, trials)),
        comparisons=(*planned, *extra_comparisons),
        recipes=tuple(recipe_rows(setup)),
        validation=tuple(validation_rows(setup, trials)),
        levels=tuple(level_rows(setup, trials)),
        findings=tuple(findings),
        correct=CorrectArrays(dict(enumerate(correct.values()))),
        **extra_fields,
    )


def _design_row(setup: Setup) -> DesignRow:
    design = DesignRow(
        kind=str(setup.options.kind),
        epochs=setup.epochs,
        seeds=len(setup.seeds),
        train_images=len(setup.train),
        test_images=len(setup.test),
        classes=len(setup.test.classes),
        image_size=setup.test.size,
        validation_images=0 if setup.validation is None else len(setup.validation),
    )
    if setup.model is None:
        return design
    blocks = len(setup.model.anatomy.blocks)
    return replace(design, model=setup.model.alias, blocks=blocks, last=setup.last)
